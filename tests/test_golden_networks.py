"""tiny-cuda-nn's own networks, models and losses (tests/golden) through the public modules.

Half-precision results are compared as tests/golden/README.md says: outputs to 5e-3 in norm; rows of dL/dx one by one,
nine in ten within 1e-2, because a ReLU unit near zero may be open in one and closed in the other; dL/dparams to 5e-2
with such units and 1.5e-2 without. Where one of tiny-cuda-nn's two implementations is wrong, the other is the truth,
and the wrong one must lie outside the tolerance.
"""

from __future__ import annotations

import numpy as np
import pytest
from golden_case import GoldenCase, agree, names, relative_error, row_errors

import numba_tcnn as tcnn

pytestmark = pytest.mark.golden

PIECEWISE_LINEAR = ("None", "ReLU", "LeakyReLU")


def module_of(case: GoldenCase) -> tcnn.modules.Module:
    config, n_in, n_out = case.meta["config"], case.meta["n_in"], case.meta["n_out"]
    options = {"dtype": "float16" if case.half else "float32", "engine": "reference"}
    if "network" in config:
        module = tcnn.NetworkWithInputEncoding(n_in, n_out, config["encoding"], config["network"], **options)
    else:
        module = tcnn.Network(n_in, n_out, config, **options)
    module.params = case["params"]
    return module


def parameter_tolerance(network: dict) -> float:
    return 5e-2 if network["activation"] in ("ReLU", "LeakyReLU") else 1.5e-2


def is_right(network: dict, mode: str) -> bool:
    """JIT takes φ' of smooth hidden activations at φ(z); without JIT, SiLU and Sine as outputs pass gradients on."""
    if mode == "jit":
        return network["activation"] in PIECEWISE_LINEAR
    return network["output_activation"] not in ("SiLU", "Sine")


def computed(case: GoldenCase):
    """(outputs, gradients) of the case's inputs."""
    module = module_of(case)
    y, context = module.forward(case["input"])
    return y, module.backward(context, case["dL_doutput"])


@pytest.mark.parametrize("name", names("mlp_*") + names("nwie_*"))
def test_networks(name: str) -> None:
    case = GoldenCase(name)
    network = case.meta["config"].get("network", case.meta["config"])
    y, gradients = computed(case)
    assert case.modes
    for mode in case.modes:
        error = relative_error(y, case[f"output_{mode}"])
        agree(name, f"output, {mode}", error, 5e-3, "sums in half there, in float32 here")
        if is_right(network, mode):
            errors = row_errors(gradients.input, case[f"dL_dinput_{mode}"])
            agree(name, f"rows of dL_dinput > 1e-2, {mode}", np.mean(errors > 1e-2), 0.1, "units near 0 open or closed")
            error, reason = relative_error(gradients.params, case[f"dL_dparams_{mode}"]), "the same, and sums in half"
            agree(name, f"dL_dparams, {mode}", error, parameter_tolerance(network), reason)


@pytest.mark.parametrize("name", names("loss_*"))
@pytest.mark.parametrize("density", ["nopdf", "pdf"])
def test_losses(name: str, density: str) -> None:
    """Values are float32 in both: 1e-5. Gradients are rounded to half there in half-precision cases: 5e-4."""
    case = GoldenCase(name)
    loss = tcnn.create_loss(case.meta.get("loss") or case.meta["config"]["loss"])
    data_pdf = case["pdf"] if density == "pdf" else None
    prediction, target = case["prediction"], case["target"]
    values, gradients = loss.evaluate(prediction, target, data_pdf=data_pdf, loss_scale=case.meta["loss_scale"])
    tolerance = 5e-4 if case.meta["prediction_type"] == "float16" else 1e-5
    assert case.modes
    for mode in case.modes:
        # JIT's RelativeL1 forgets the absolute value of a negative prediction
        right = prediction >= 0 if loss.spec.otype == "RelativeL1" and mode == "jit" else np.ones(values.shape, bool)
        error = relative_error(values[right], case[f"values_{density}_{mode}"][right])
        agree(name, f"values, {density}, {mode}", error, 1e-5, "fast maths of float32 there")
        error = relative_error(gradients[right], case[f"gradients_{density}_{mode}"][right])
        reason = "fast maths of float32 there" if tolerance == 1e-5 else "rounded to half there"
        agree(name, f"gradients, {density}, {mode}", error, tolerance, reason)


# ----------------------------------------------------------------- upstream defects that are on record


@pytest.mark.parametrize("name", names("mlp_hidden_*"))
def test_defect_01_jit_gradients_of_smooth_hidden_activations(name: str) -> None:
    """tiny-cuda-nn's JIT gradients of the first matrix, behind two such activations, are far from ours or NaN; ours
    agree with its other implementation (test_networks)."""
    case = GoldenCase(name)
    network = case.meta["config"]
    if network["activation"] in PIECEWISE_LINEAR:
        assert is_right(network, "jit")
        return
    first = slice(16 * 16)
    _, gradients = computed(case)
    assert "jit" in case.modes
    error = relative_error(gradients.params[first], case["dL_dparams_jit"][first])
    assert not error <= 5 * parameter_tolerance(network)


def test_defect_02_sine_as_output_activation() -> None:
    """Without JIT the gradient passes through unchanged; ours is that of the JIT, times cos z."""
    case = GoldenCase("mlp_output_sine")
    network = case.meta["config"]
    _, gradients = computed(case)
    assert relative_error(gradients.params, case["dL_dparams_jit"]) <= parameter_tolerance(network)
    assert relative_error(gradients.params, case["dL_dparams_nojit"]) > 2 * parameter_tolerance(network)


def test_defect_03_relative_l1_of_negative_predictions() -> None:
    """Our values and gradients equal those without JIT for every sign (test_losses); JIT's negative ones differ."""
    case = GoldenCase("loss_relativel1_3d_float")
    negative = case["prediction"] < 0
    values, gradients = tcnn.create_loss("RelativeL1").evaluate(case["prediction"], case["target"])
    assert negative.any() and np.all(values >= 0)
    assert np.any(case["values_nopdf_jit"][negative] < 0)
    assert relative_error(values[negative], case["values_nopdf_nojit"][negative]) <= 1e-5
    assert relative_error(gradients[negative], case["gradients_nopdf_nojit"][negative]) <= 1e-5
    assert relative_error(gradients[negative], case["gradients_nopdf_jit"][negative]) > 1e-2
