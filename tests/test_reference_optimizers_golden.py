"""Optimizers, through the public API, against 12 steps that tiny-cuda-nn computed on a GPU (tests/golden/opt_*).

Tolerances are relative L2 errors. Masters are float32 in both: 1e-4 of the distance moved leaves room for its fast-math
powers of β, which put 1 - β₂^k off by about 1e-4 for β₂ = 0.999 and small k, and for its rounding of Batched's mean
gradient to half precision. Parameters for inference are kept in half precision by its half-precision builds: 1e-3, two
roundings of 2^-11, and 1e-6 for float32 builds. Lookahead sets the masters to a mean with those, which moves weights by
2^-12 of themselves, up to 3e-3 of the short distance moved: 1e-2. Its Novograd accumulates norms over layers and steps,
starting from what the memory held: only the direction of the first step of each layer is left to compare.
"""

from __future__ import annotations

import numpy as np
import pytest
from golden_case import GoldenCase, agree, names, relative_error

import numba_tcnn as tcnn

pytestmark = pytest.mark.golden


def master_tolerance(otype: str, half: bool) -> tuple[float, str]:
    if otype == "Lookahead" and half:
        return 1e-2, "slow parameters in half there"
    reasons = {"SGD": "float32 roundings", "Batched": "mean gradient in half there"}
    return 1e-4, reasons.get(otype, "fast-math powers of β there")


def optimizer_of(case: GoldenCase) -> tcnn.Optimizer:
    optimizer = tcnn.create_optimizer(case.meta["config"])
    optimizer.allocate(case.meta["n_weights"], case.meta["layer_sizes"])
    return optimizer


def expected_inference_params(case: GoldenCase, n_steps: int) -> np.ndarray | None:
    """Those of tiny-cuda-nn; its Average counts samples that are still missing as 0, ours leaves them out."""
    kept = case.arrays.get(f"custom_weights_after_{n_steps}")
    if kept is not None and case.meta["config"]["otype"] == "Average":
        n_samples = case.meta["config"]["n_samples"]
        return kept * (n_samples / min(n_steps, n_samples))
    return kept


@pytest.mark.parametrize("name", [name for name in names("opt_*") if "novograd" not in name])
def test_optimizers(name: str) -> None:
    case = GoldenCase(name)
    meta, start = case.meta, case["weights_initial"]
    half = meta["weight_type"] == "float16"
    tolerance, reason = master_tolerance(meta["config"]["otype"], half)
    optimizer = optimizer_of(case)
    params, n_compared = start.copy(), 0
    for i, gradient in enumerate(case["gradients"], start=1):
        optimizer.step(params, gradient, meta["loss_scale"])
        if (key := f"weights_full_precision_after_{i}") not in case.arrays:
            continue
        n_compared += 1
        error = relative_error(params - start, case[key] - start)
        agree(name, f"distance moved, step {i}", error, tolerance, reason)
        untouched = case[key] == start
        assert np.array_equal(params[untouched], start[untouched])
        assert optimizer.learning_rate == pytest.approx(meta["learning_rate_after"][str(i)], rel=1e-6)  # float32
        kept = expected_inference_params(case, i)
        assert (kept is not None) == meta["has_custom_weights"] == (optimizer.inference_params is not None)
        if kept is not None:
            error, allowed = relative_error(optimizer.inference_params, kept), 1e-3 if half else 1e-6
            agree(name, f"averaged, step {i}", error, allowed, "kept in half there" if half else "float32 in both")
    assert n_compared == 4


def layers_of(case: GoldenCase) -> list[slice]:
    ends = np.cumsum([rows * columns for rows, columns in case.meta["layer_sizes"]]).tolist()
    return [slice(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]


@pytest.mark.parametrize("name", names("opt_novograd_*"))
def test_first_step_of_novograd(name: str) -> None:
    """Its length is that of a norm which tiny-cuda-nn has wrong; from the decayed weights, it goes along the gradient
    in both."""
    case = GoldenCase(name)
    config, start = case.meta["config"], case["weights_initial"].astype(np.float64)
    eta = config["learning_rate"]
    decayed = (1 - config["relative_decay"] * eta) * start - np.copysign(config["absolute_decay"] * eta, start)
    params = case["weights_initial"].copy()
    optimizer_of(case).step(params, case["gradients"][0], case.meta["loss_scale"])
    for i, layer in enumerate(layers_of(case)):
        ours, theirs = (w[layer] - decayed[layer] for w in (params, case["weights_full_precision_after_1"]))
        error = relative_error(ours / np.linalg.norm(ours), theirs / np.linalg.norm(theirs))
        agree(name, f"direction of step 1, layer {i}", error, 1e-4, "float32 weights after a short step")


@pytest.mark.parametrize("name", names("opt_novograd_*"))
def test_novograd_of_tcnn_leaves_encodings_alone(name: str) -> None:
    """The defect is in the data: parameters behind the matrices never move. Ours do."""
    case = GoldenCase(name)
    encoding = slice(case.meta["n_matrix_weights"], None)
    assert np.array_equal(case["weights_full_precision_after_12"][encoding], case["weights_initial"][encoding])
    optimizer, params = optimizer_of(case), case["weights_initial"].copy()
    for gradient in case["gradients"]:
        optimizer.step(params, gradient, case.meta["loss_scale"])
    assert np.mean(params[encoding] != case["weights_initial"][encoding]) > 0.9
