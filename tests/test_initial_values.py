"""Initial parameters: bit for bit those of tiny-cuda-nn (tests/golden) and of the published generators."""

from __future__ import annotations

import math

import numpy as np
import pytest
from golden_case import GoldenCase, agree, names

from numba_tcnn.initial_values import BLOCK, Pcg32, initial_params, seed_sequence
from numba_tcnn.layout import n_params
from numba_tcnn.specs import (
    CompositeSpec,
    GridSpec,
    IdentitySpec,
    ModelSpec,
    NestedEncoding,
    NetworkSpec,
)


@pytest.mark.parametrize(
    ("seed", "outputs"),
    [
        (1337, [0x25CFA0E2, 0x7895636F, 0x2C8A424D, 0x210DDDB6]),
        (0xDEADBEEF, [0xC05D8EE3, 0x211721BE, 0x3A5791A9, 0x29F0A1F7]),
    ],
)
def test_pcg32_outputs(seed: int, outputs: list[int]) -> None:
    assert Pcg32(seed).uint32(4).tolist() == outputs


@pytest.mark.parametrize(
    ("seed", "floats"),
    [
        (1337, [0.14769936, 0.47102940, 0.17398465, 0.12911773]),
        (2150097757, [0.11420953, 0.91135287, 0.56521595, 0.81681955]),
    ],
)
def test_pcg32_floats(seed: int, floats: list[float]) -> None:
    assert np.array_equal(Pcg32(seed).uniform(4), np.array(floats, np.float32))


def pcg32_one_by_one(seed: int, n: int) -> list[int]:
    """The generator as its paper writes it: one state, one step at a time."""
    mask, increment = 2**64 - 1, 3
    state = ((increment + seed) * 0x5851F42D4C957F2D + increment) & mask
    outputs = []
    for _ in range(n):
        shifted = (((state >> 18) ^ state) >> 27) & 0xFFFFFFFF
        rotation = state >> 59
        outputs.append((shifted >> rotation | shifted << (32 - rotation) % 32) & 0xFFFFFFFF)
        state = (state * 0x5851F42D4C957F2D + increment) & mask
    return outputs


@pytest.mark.parametrize("n", [0, 1, 5, 4096, BLOCK - 1, BLOCK, BLOCK + 3, 2 * BLOCK + 1])
def test_pcg32_vectors_equal_single_steps(n: int) -> None:
    random = Pcg32(42)
    expected = pcg32_one_by_one(42, n + 2)
    assert random.uint32(n).tolist() == expected[:n]
    assert random.uint32(2).tolist() == expected[n:], "the state has not advanced by n"


def test_pcg32_advance() -> None:
    jumped, stepped = Pcg32(7), Pcg32(7)
    jumped.advance(1_000_003)
    stepped.uint32(1_000_003)
    assert jumped.state == stepped.state


@pytest.mark.parametrize(("seed", "word"), [(0, 2061087650), (1, 1657803123), (42, 3788537066), (1337, 2150097757)])
def test_seed_sequence(seed: int, word: int) -> None:
    assert seed_sequence([seed], 2)[0] == word


def test_first_weights_of_the_bindings() -> None:
    spec = ModelSpec(2, 3, IdentitySpec(2), NetworkSpec("FullyFusedMLP", 64, 1), 16)
    first = initial_params(spec, 1337, seeding="bindings")[:4]
    assert np.array_equal(first, np.array([-0.19296302, -0.01586786, -0.17856598, -0.20314059], np.float32))


def test_first_weights_of_the_trainer() -> None:
    spec = ModelSpec(2, 3, GridSpec(2), NetworkSpec("FullyFusedMLP", 64, 2), 32)
    first = initial_params(spec, 1337)[:4]
    assert np.array_equal(first, np.array([-0.19289523, 0.20567644, 0.032607973, 0.15840977], np.float32))


def test_grid_draws_in_the_order_of_gpu_threads() -> None:
    spec = ModelSpec(2, 32, GridSpec(2, log2_hashmap_size=15, per_level_scale=1.5), None, 32)
    params = initial_params(spec, 1337, seeding="bindings")
    assert params.size == 708368
    expected = {
        0: -7.0460126e-05,
        1: -3.4031153e-05,
        2: 3.8013266e-05,
        177152: -5.7941197e-06,
        177153: 5.6604385e-06,
        354304: -6.520307e-05,
        708367: 1.973312e-05,
    }
    assert np.array_equal(params[list(expected)], np.array(list(expected.values()), np.float32))
    assert np.abs(params).max() <= np.float32(1e-4)


@pytest.mark.golden
@pytest.mark.parametrize(
    ("name", "array"),
    [*((name, "params_init") for name in names("init_*")), *((name, "params_initial") for name in names("train_*"))],
)
def test_parameters_of_tiny_cuda_nn(name: str, array: str) -> None:
    """Bit for bit; in a model with a grid, its draws begin where the network's end."""
    case = GoldenCase(name)
    ours = initial_params(case.model_spec(), 1337)
    assert ours.shape == case[array].shape
    agree(name, "initial parameters", float(np.abs(ours - case[array]).max()), 0.0, "it is 0")


def test_composite_draws_child_after_child() -> None:
    """Two grids in a composite: the second begins where the first one's own number of draws ends."""
    grid = GridSpec(2, n_levels=2, base_resolution=5)
    width = grid.n_output_dims
    children = (NestedEncoding(grid, 0, 0, width), NestedEncoding(grid, 2, width, width))
    composite = ModelSpec(4, 2 * width, CompositeSpec(4, children), None, 2 * width)
    params = initial_params(composite, 3, seeding="bindings")

    single = ModelSpec(2, width, grid, None, width)
    n = n_params(single)
    assert np.array_equal(params[:n], initial_params(single, 3, seeding="bindings"))
    second = Pcg32(3)
    second.advance(n)
    n_threads = 128 * math.ceil(n / 512)
    draws = second.uniform(4 * n_threads)
    element = np.arange(n)
    expected = draws[4 * (element % n_threads) + element // n_threads] * 2e-4 - 1e-4
    np.testing.assert_allclose(params[n:], expected, rtol=0, atol=1e-11)  # float32 rounding of values up to 1e-4


@pytest.mark.parametrize(
    ("activation", "bounds"), [("ReLU", (np.sqrt(6 / 48), np.sqrt(6 / 64))), ("Sine", (30 / 16, np.sqrt(6 / 32)))]
)
def test_weight_bounds(activation: str, bounds: tuple[float, float]) -> None:
    """Uniform draws of 512 and 1024 weights come within 2 % of their bound, never past it."""
    spec = ModelSpec(2, 3, IdentitySpec(2), NetworkSpec("CutlassMLP", 32, 2, activation), 16)
    params = initial_params(spec, 1)
    for weights, bound in zip((params[:512], params[512:1536]), bounds, strict=True):
        assert 0.98 * bound <= np.abs(weights).max() <= bound * (1 + 1e-6)


def test_unknown_seeding() -> None:
    spec = ModelSpec(2, 2, IdentitySpec(2), None, 2)
    with pytest.raises(ValueError, match="seeding"):
        initial_params(spec, 1, seeding="numpy")
