"""Level-split plans, down to packed launch arguments, on an emulated CUDA driver against the reference.

The table gradient is summed in fixed point, rounded to nearest. In these small batches steps are so fine that what is
left are flips of float16 (see test_fused_kernels.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated_driver import EmulatedDriver, installed
from golden_case import relative_error

import numba_tcnn as tcnn
from benchmarks.agreement.draws import OPTIMIZER
from numba_tcnn.config import parse_model
from numba_tcnn.fused import level_kernels, level_plan, level_split_programs
from numba_tcnn.fused.jobs import LevelSplitInferenceJob
from numba_tcnn.fused.plan import architecture
from numba_tcnn.fused.stage_io import InferenceOptions
from numba_tcnn.layout import grid_levels, n_network_params, n_params, parameter_blocks
from numba_tcnn.reference.model import Model
from numba_tcnn.specs import LossSpec

GRADIENT = 4e-4
OUTPUT = 2e-6
HOPPER = architecture((9, 0))

HASH = {"otype": "HashGrid", "n_levels": 5, "log2_hashmap_size": 6, "base_resolution": 3, "per_level_scale": 1.6}
MLP = {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1, "activation": "Sigmoid"}


@pytest.fixture(autouse=True)
def split(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every batch is split; blocks of 64 threads, so that small batches have several tiles."""
    monkeypatch.setattr(level_plan, "LEVEL_SPLIT_BATCH", 1)
    monkeypatch.setattr(level_plan, "THREADS", (64,))
    with installed(EmulatedDriver(), monkeypatch):
        yield


def make(encoding: dict, n_in: int, network: dict = MLP, n_out: int = 3) -> tcnn.Model:
    config = {"encoding": encoding, "network": network, "loss": {"otype": "RelativeL2"}, "optimizer": OPTIMIZER}
    model = tcnn.create_from_config(n_in, n_out, config, strict=True)
    rng = np.random.default_rng(7)
    params = rng.uniform(-0.5, 0.5, model.n_params).astype(np.float32)
    model.params = params
    return model


def check(encoding: dict, n_in: int, batch: int = 300, *, dtype: str = "float32", network: dict = MLP) -> tcnn.Model:
    """One training step's loss and gradients, and inference, in every sample and block of parameters."""
    model = make(encoding, n_in, network)
    rng = np.random.default_rng(batch)
    x, y = rng.random((batch, n_in)).astype(dtype), rng.uniform(0.1, 1, (batch, 3)).astype(np.float32)
    x[7::16] = 3 * x[7::16] - 1  # outside [0, 1) too
    spec = model.network.spec
    reference = Model(spec, model.params, "float16")
    outputs, expected = model.predict(x), reference.forward(x.astype(np.float32))
    assert np.quantile(np.abs(outputs - expected), 0.8) <= OUTPUT * np.abs(expected).max()
    np.testing.assert_allclose(outputs, expected, atol=1e-3 * np.abs(expected).max())
    value, gradients = reference.loss_and_gradients(x.astype(np.float32), y, LossSpec("RelativeL2"))
    loss = float(model.trainer.training_step(x, y))
    assert loss == pytest.approx(value, rel=1e-4)
    found = model.optimizer.state_dict()["first_moments"]
    for block in parameter_blocks(spec):
        part = slice(block.offset, block.offset + block.size)
        error = relative_error(found[part], gradients.params[part])
        assert error <= GRADIENT, f"dL/d({block.name}) differs by {error:.1e}"
    assert "encode_levels" in {kernel.name for kernel in model.explain().kernels}
    return model


@pytest.mark.parametrize("n_features", [1, 2, 4, 8])
def test_features_of_an_entry(n_features: int, no_reference: None) -> None:
    check(HASH | {"n_features_per_level": n_features}, 2)


@pytest.mark.parametrize(("n_in", "interpolation"), [(2, "Nearest"), (3, "Smoothstep"), (3, "Linear"), (4, "Linear")])
def test_dimensions_and_interpolations(n_in: int, interpolation: str, no_reference: None) -> None:
    check(HASH | {"interpolation": interpolation, "n_levels": 4}, n_in, 200)


@pytest.mark.parametrize("otype", ["DenseGrid", "TiledGrid"])
def test_kinds_of_tables(otype: str, no_reference: None) -> None:
    """Levels of a tiled grid of base 3 are no whole pieces of 16 bytes: their tables stay in global memory."""
    encoding = HASH | {"otype": otype, "per_level_scale": 1.4, "n_levels": 3}
    del encoding["log2_hashmap_size"]
    check(encoding, 2)


def test_networks_with_biases(no_reference: None) -> None:
    check(HASH, 2, network=MLP | {"bias": True})


@pytest.mark.parametrize("batch", [1, 31, 128, 129, 1000])
def test_ragged_batches(batch: int, no_reference: None) -> None:
    check(HASH, 2, batch, dtype="float16" if batch == 31 else "float32")


def test_levels_in_both_memories(monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """Small levels in shared memory, larger ones in global memory, where a chip has little of the former."""
    real = level_plan._by_memory

    def with_little(kind, grid, chip, threads, rows_a_level, bytes_of):
        sizes = sorted({bytes_of(level) for level in grid_levels(grid)})
        little = type(chip)(chip.cc, sizes[1], chip.shared_per_multiprocessor, chip.max_warps)
        return real(kind, grid, little, threads, rows_a_level, bytes_of)

    monkeypatch.setattr(level_plan, "_by_memory", with_little)
    model = check(HASH, 2)
    plans = {kernel.plan for kernel in model.explain().kernels}
    assert {"encode levels, 2 levels in shared memory", "encode levels, 3 levels in global memory"} <= plans
    assert {"level gradients, 2 levels in shared memory", "level gradients, 3 levels in global memory"} <= plans


def test_batches_in_chunks(monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """Planes of 64 samples: a batch of 300 goes in five chunks, each adding to the same table gradient."""
    monkeypatch.setattr(level_split_programs, "PLANES_BYTES", 64 * 5 * 4)
    check(HASH, 2)


def test_sums_are_drained(monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """After every 2^7 samples; the network's sizes are those of a batch in which a block has more."""
    monkeypatch.setattr(level_kernels, "LOG2_SAMPLES_A_DRAIN", 7)
    check(HASH | {"n_levels": 2}, 2, 3000)


def test_levels_of_small_gradients_have_steps_of_their_own(monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """With as few bits as a batch leaves that is 2^12 times as large: steps that suit the other levels would be half as
    large as what this level's samples add."""
    monkeypatch.setattr(level_kernels, "LOG2_SUM", 17)
    model, rng = make(HASH, 2), np.random.default_rng(4)
    spec, params = model.network.spec, model.params.copy()
    blocks = {block.name: slice(block.offset, block.offset + block.size) for block in parameter_blocks(spec)}
    params[blocks["layer0.weight"]].reshape(spec.layer_shapes[0])[:, 4:6] *= 2.0**-7  # of level 2's features
    model.params = params
    x, y = rng.random((300, 2), np.float32), rng.uniform(0.1, 1, (300, 3)).astype(np.float32)
    _, expected = Model(spec, model.params, "float16").loss_and_gradients(x, y, LossSpec("RelativeL2"))
    model.trainer.training_step(x, y)
    found = model.optimizer.state_dict()["first_moments"]
    for level in range(5):
        part = blocks[f"grid.level{level}"]
        assert relative_error(found[part], expected.params[part]) <= 5e-3, f"level {level}"


@pytest.mark.parametrize("size", [2.0**-20, 1.0, 2.0**9])
def test_no_sum_overflows(size: float, no_reference: None) -> None:
    """All samples in one point of one sign, with gradients as large as float16 has them: 2^12 of them add up to the
    sum of their float16 gradients, whatever their size."""
    encoding = {"otype": "DenseGrid", "n_levels": 1, "n_features_per_level": 2, "base_resolution": 2}
    network = {"otype": "CutlassMLP", "n_neurons": 16, "n_hidden_layers": 0, "activation": "None"}
    config = {"encoding": encoding, "network": network, "loss": {"otype": "L2"}, "optimizer": OPTIMIZER}
    model = tcnn.create_from_config(2, 1, config, strict=True)
    params = np.zeros(model.n_params, np.float32)
    params[:2] = size  # dL/dfeature = 2 (0 - y) size
    model.params = params
    x, y = np.full((4096, 2), 0.3, np.float32), np.full((4096, 1), 60.0, np.float32)
    model.trainer.training_step(x, y)
    assert model.trainer.skipped_steps == 0
    n_network = n_network_params(model.network.spec)
    table = model.optimizer.state_dict()["first_moments"][n_network:].reshape(-1, 2)
    np.testing.assert_allclose(table.sum(axis=0), -120.0 * size, rtol=1e-3)


def test_a_gradient_that_is_not_finite_skips_the_step(no_reference: None) -> None:
    model = make(HASH, 2)
    before = model.params
    x, y = np.random.default_rng(0).random((200, 2), np.float32), np.ones((200, 3), np.float32)
    y[150, 1] = np.inf
    model.trainer.training_step(x, y)
    assert model.trainer.skipped_steps == 1
    np.testing.assert_array_equal(model.params, before)
    y[150, 1] = 1
    model.trainer.training_step(x, y)
    assert model.trainer.skipped_steps == 1 and np.isfinite(model.params).all()
    assert not np.array_equal(model.params, before)


def test_kernels_that_gather_through_l1_do_not_overlap() -> None:
    """They would find it as small as a kernel with much shared memory has left it."""
    spec = parse_model(3, 1, {"otype": "HashGrid", "log2_hashmap_size": 19}, MLP)
    job = LevelSplitInferenceJob(spec, InferenceOptions())
    sources = job.sources(job.plans(HOPPER)[0])
    overlaps = {source.plan_in_words: source.overlaps for source in sources}
    assert sum(not overlap for overlap in overlaps.values()) == 1
    (alone,) = (words for words, overlap in overlaps.items() if not overlap)
    assert alone.startswith("encode levels") and alone.endswith("in global memory")


@pytest.mark.parametrize(("encoding", "network", "expected"), [
    (HASH, MLP, True),
    ({"otype": "Identity"}, MLP, False),
    (HASH, MLP | {"otype": "CutlassMLP", "n_neurons": 256, "n_hidden_layers": 4}, False),
])  # fmt: skip
def test_what_can_be_split(encoding: dict, network: dict, expected: bool) -> None:
    spec = parse_model(2, 3, encoding, network)
    assert level_plan.can_split(spec, HOPPER) is expected
    assert n_params(spec) > 0


@pytest.mark.parametrize(("log2_size", "times"), [(15, 1), (19, 4)])
def test_tables_that_do_not_fit_shared_memory_need_larger_batches(log2_size: int, times: int) -> None:
    encoding = {"otype": "HashGrid", "n_levels": 16, "log2_hashmap_size": log2_size}
    spec = parse_model(3, 16, encoding, MLP)
    assert level_plan.split_batch(spec, HOPPER) == times * level_plan.LEVEL_SPLIT_BATCH
    assert level_plan.split_batch(spec, HOPPER, "bfloat16") is None
