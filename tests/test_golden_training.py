"""Training, through the public API, against 50 steps that tiny-cuda-nn computed on a GPU (tests/golden/train_*).

Training amplifies roundings, and tiny-cuda-nn accumulates in half precision throughout: products, weight gradients, and
table gradients by atomics, so that its own runs differ.
"""

from __future__ import annotations

import numpy as np
import pytest
from golden_case import GoldenCase, agree, names, relative_error

import numba_tcnn as tcnn

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", names("train_*"))
def test_training_run(name: str, dtype: str) -> None:
    """It stays on tiny-cuda-nn's course: single losses differ by up to 1 %, and the outputs at the end by 3 %."""
    case = GoldenCase(name)
    meta, reason = case.meta, "training amplifies roundings to half"
    model = tcnn.create_from_config(meta["n_in"], meta["n_out"], meta["config"], engine="reference", dtype=dtype)
    assert np.array_equal(model.params, case["params_initial"])
    probe = model.predict(case["probe_input"])
    agree(name, "outputs at the start", relative_error(probe, case["probe_output_initial"]), 5e-3, "sums in half there")

    n_sets, n_steps = len(case["input"]), meta["n_steps"]
    losses = np.empty(n_steps)
    for step in range(n_steps):
        losses[step] = model.trainer.training_step(case["input"][step % n_sets], case["target"][step % n_sets])
    probe = model.predict(case["probe_input"])
    assert model.trainer.skipped_steps == 0 and model.trainer.step == n_steps
    assert case.modes
    for mode in case.modes:
        expected = case[f"loss_{mode}"]
        agree(name, f"largest loss error, {mode}", float(np.abs(losses / expected - 1).max()), 2e-2, reason)
        agree(name, f"losses, {mode}", relative_error(losses, expected), 2e-3, reason)
        agree(name, f"outputs at the end, {mode}", relative_error(probe, case[f"probe_output_{mode}"]), 5e-2, reason)
