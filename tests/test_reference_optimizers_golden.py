"""The reference's optimizers against 12 steps that tiny-cuda-nn computed on a GPU (tests/golden/opt_*).

Tolerances are relative L2 errors. Masters are float32 in both: 1e-4 of the distance moved leaves room for its fast-math
powers of β, which put 1 - β₂^k off by about 1e-4 for β₂ = 0.999 and small k, and for its rounding of Batched's mean
gradient to half precision. Parameters for inference are kept in half precision by its half-precision builds: 1e-3, two
roundings of 2^-11, and 1e-6 for float32 builds. Its Novograd accumulates norms over layers and steps, starting from
what the memory held, so there is nothing to compare with but that layers alone move.
"""

from __future__ import annotations

import numpy as np
import pytest
from golden_case import GoldenCase, names, relative_error

from numba_tcnn.reference import make_optimizer

MASTER_TOLERANCE = 1e-4
N_SAMPLES = 4  # of the Average cases


def expected_inference_params(case: GoldenCase, n_steps: int) -> np.ndarray | None:
    """Those of tiny-cuda-nn; its Average counts samples that are still missing as 0, ours leaves them out."""
    kept = case.arrays.get(f"custom_weights_after_{n_steps}")
    if kept is not None and case.meta["config"]["otype"] == "Average":
        return kept * (N_SAMPLES / min(n_steps, N_SAMPLES))
    return kept


@pytest.mark.parametrize("name", [name for name in names("opt_*") if "novograd" not in name])
def test_optimizers(name: str) -> None:
    case = GoldenCase(name)
    meta, start = case.meta, case["weights_initial"]
    half = meta["weight_type"] == "float16"
    optimizer = make_optimizer(case.optimizer_spec(), meta["n_weights"], meta["layer_sizes"])
    params, n_compared = start.copy(), 0
    for i, gradient in enumerate(case["gradients"], start=1):
        optimizer.step(params, gradient, meta["loss_scale"])
        if (key := f"weights_full_precision_after_{i}") not in case.arrays:
            continue
        n_compared += 1
        assert relative_error(params - start, case[key] - start) <= MASTER_TOLERANCE
        untouched = case[key] == start
        assert np.array_equal(params[untouched], start[untouched])
        assert optimizer.learning_rate == pytest.approx(meta["learning_rate_after"][str(i)], rel=1e-6)  # float32
        assert optimizer.current_step == meta["step_after"][str(i)]
        kept = expected_inference_params(case, i)
        assert (kept is not None) == meta["has_custom_weights"] == (optimizer.inference_params is not None)
        if kept is not None:
            assert relative_error(optimizer.inference_params, kept) <= (1e-3 if half else 1e-6)
    assert n_compared == 4


@pytest.mark.parametrize("name", names("opt_novograd_*"))
def test_novograd_of_tcnn_leaves_encodings_alone(name: str) -> None:
    """The defect is in the data: parameters behind the matrices never move. Ours do."""
    case = GoldenCase(name)
    encoding = slice(case.meta["n_matrix_weights"], None)
    assert np.array_equal(case["weights_full_precision_after_12"][encoding], case["weights_initial"][encoding])
    optimizer = make_optimizer(case.optimizer_spec(), case.meta["n_weights"], case.meta["layer_sizes"])
    params = case["weights_initial"].copy()
    for gradient in case["gradients"]:
        optimizer.step(params, gradient, case.meta["loss_scale"])
    assert np.mean(params[encoding] != case["weights_initial"][encoding]) > 0.9
