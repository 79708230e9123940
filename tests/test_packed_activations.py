"""ReLU on pairs of float16 against its scalar functions; every float16 there is as an output."""

from __future__ import annotations

import numpy as np
import pytest
from emulation import emulator_target

from numba_tcnn.fused.emulator import Block, GlobalMemory
from numba_tcnn.fused.fragments import FragmentShape, make_pack, make_unpack
from numba_tcnn.fused.packed_activations import make_pack_gradient, make_pack_output

SHAPE = FragmentShape(16, 16)
SPECIAL = np.array(
    [0, -0.0, 1e-8, -1e-8, 3e-8, 6e-8, 1, -1, 65504, 65519, 65520, 1e30, -1e30, np.inf, -np.inf], np.float32
)


@pytest.fixture
def target():
    target = emulator_target()
    target.block = Block(GlobalMemory(), 32, 16)
    return target


def fragment(values: np.ndarray) -> list[np.ndarray]:
    return list(np.resize(values, (SHAPE.n_elements, 32)).astype(np.float32))


def bits(packed: list[np.ndarray]) -> np.ndarray:
    return np.array(packed).view(np.uint16)


def unchanged(values):
    return values


@pytest.mark.parametrize("name", ["ReLU", "LeakyReLU", "Sigmoid"])
def test_outputs(name: str, target, rng: np.random.Generator) -> None:
    """As rounding phi does, where ReLU is done on pairs."""
    z = fragment(np.concatenate([SPECIAL, rng.normal(size=225)]))
    with np.errstate(all="ignore"):
        packed = make_pack_output(target, name, SHAPE, unchanged)(z)
        expected = {"ReLU": lambda z: np.maximum(z, 0), "LeakyReLU": lambda z: np.where(z > 0, z, np.float32(0.01) * z),
                    "Sigmoid": lambda z: 1 / (1 + np.exp(-z))}[name](np.array(z)).astype(np.float16)  # fmt: skip
        stored = np.array(make_unpack(target, SHAPE)(packed))
    np.testing.assert_allclose(stored, expected.astype(np.float32), rtol=1e-3, atol=1e-7)
    if name == "ReLU":
        np.testing.assert_array_equal(stored, expected.astype(np.float32))


def test_nan_stays_nan(target) -> None:
    packed = make_pack_output(target, "ReLU", SHAPE, unchanged)(fragment(np.array([np.nan, 1], np.float32)))
    values = np.array(make_unpack(target, SHAPE)(packed))
    assert np.isnan(values[:, ::2]).all() and (values[:, 1::2] == 1).all()


def test_gates_open_above_zero(target, rng: np.random.Generator) -> None:
    """For every float16 from 0 to infinity, subnormal numbers too."""
    pack, back = make_pack(target, SHAPE), make_pack_gradient(target, "ReLU", SHAPE, unchanged)
    halves = np.arange(0, 0x7C01, dtype=np.uint16)
    for part in np.array_split(halves, 130):
        h = fragment(part.view(np.float16))
        g = fragment(rng.normal(size=256))
        with np.errstate(all="ignore"):
            d = np.array(make_unpack(target, SHAPE)(back(g, pack(h))))
        np.testing.assert_array_equal(d, np.where(np.array(h) > 0, np.array(g).astype(np.float16), 0))


def test_older_chips_use_the_scalar_functions(rng: np.random.Generator) -> None:
    """Compute capability 7.5 has no conversion that clamps; the numbers are the same."""
    old, new = emulator_target(75), emulator_target(90)
    z = fragment(rng.normal(size=256))
    packed = []
    for target in (old, new):
        target.block = Block(GlobalMemory(), 32, 16)
        packed.append(bits(make_pack_output(target, "ReLU", SHAPE, unchanged)(z)))
    np.testing.assert_array_equal(*packed)
