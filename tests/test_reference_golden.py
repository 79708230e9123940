"""The reference engine against what tiny-cuda-nn computed on a GPU (tests/golden).

Tolerances are relative L2 errors. tiny-cuda-nn accumulates in half precision (products of up to 128 terms, table
gradients by atomics), the reference in float32, so half-precision cases differ by a few roundings of 2^-11: 5e-3 for
outputs. A hidden ReLU unit whose input is near zero may be on in one and off in the other, which changes single rows of
dL/dx and, with 128 rows, the parameter gradient by per cents. float32 cases differ by fast-math arithmetic only.
Bare encodings are in `test_reference_encodings_golden.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from golden_case import GoldenCase, names, relative_error, row_errors

from numba_tcnn.arrays import view
from numba_tcnn.reference import Model, create_runtime, evaluate_loss
from numba_tcnn.specs import ModelSpec

SMOOTH_HIDDEN = ("SiLU", "Exponential", "Sine", "Sigmoid", "Squareplus", "Softplus", "Tanh")


def gradients_are_right(spec: ModelSpec, mode: str) -> bool:
    """Where tiny-cuda-nn's own gradients are."""
    if mode == "jit":
        return spec.network.activation not in SMOOTH_HIDDEN
    return spec.network.output_activation not in ("SiLU", "Sine")


def model_of(case: GoldenCase) -> Model:
    return Model(case.model_spec(), case["params"], "float16" if case.half else "float32")


@pytest.mark.parametrize("name", names("mlp_*") + names("nwie_*"))
def test_networks(name: str) -> None:
    case = GoldenCase(name)
    model = model_of(case)
    y = model.forward(case["input"])
    gradients = model.backward(case["input"], case["dL_doutput"])
    piecewise = model.spec.network.activation in ("ReLU", "LeakyReLU")
    assert case.modes
    for mode in case.modes:
        assert relative_error(y, case[f"output_{mode}"]) <= 5e-3
        if gradients_are_right(model.spec, mode):
            errors = row_errors(gradients.input, case[f"dL_dinput_{mode}"])
            assert np.mean(errors <= 1e-2) >= 0.9
            assert relative_error(gradients.params, case[f"dL_dparams_{mode}"]) <= (5e-2 if piecewise else 1.5e-2)


@pytest.mark.parametrize("name", names("loss_*"))
@pytest.mark.parametrize("density", ["nopdf", "pdf"])
def test_losses(name: str, density: str) -> None:
    case = GoldenCase(name)
    data_pdf = case["pdf"] if density == "pdf" else None
    values, gradients = evaluate_loss(
        case.loss_spec(), case["prediction"], case["target"], data_pdf, case.meta["loss_scale"]
    )
    half = case.meta["prediction_type"] == "float16"  # the type of predictions and gradients; values are float32
    for mode in case.modes:
        rows = slice(None)
        if case.loss_spec().otype == "RelativeL1" and mode == "jit":
            rows = case["prediction"] >= 0
        assert relative_error(values[rows], case[f"values_{density}_{mode}"][rows]) <= 1e-5
        assert relative_error(gradients[rows], case[f"gradients_{density}_{mode}"][rows]) <= (5e-4 if half else 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_training_run(dtype: str) -> None:
    """50 steps stay on tiny-cuda-nn's course: training amplifies roundings, and tiny-cuda-nn accumulates in half
    precision throughout, so single losses differ by up to 1 % and the outputs at the end by 3 %."""
    case = GoldenCase("train_hash")
    runtime = create_runtime(case.model_spec(), case["params_initial"], dtype=dtype, seed=1337)
    runtime.configure_training(case.optimizer_spec(), case.loss_spec())
    probe = np.empty((len(case["probe_input"]), 3), np.float32)
    runtime.inference(view(case["probe_input"]), view(probe))
    assert relative_error(probe, case["probe_output_initial"]) <= 5e-3

    losses = []
    for step in range(case.meta["n_steps"]):
        x, y = case["input"][step % 4], case["target"][step % 4]
        losses.append(runtime.training_step(view(x), view(y)).value())
    runtime.inference(view(case["probe_input"]), view(probe))
    assert runtime.skipped_steps == 0 and runtime.step == case.meta["n_steps"]
    assert case.modes
    for mode in case.modes:
        expected = case[f"loss_{mode}"]
        assert np.abs(losses / expected - 1).max() <= 2e-2
        assert relative_error(np.array(losses), expected) <= 2e-3
        assert relative_error(probe, case[f"probe_output_{mode}"]) <= 5e-2
