"""Rounding to storage formats, and where the reference rounds."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.reference import Model
from numba_tcnn.reference.precision import Precision, round_to_bfloat16, round_to_half
from numba_tcnn.specs import ACTIVATIONS, IdentitySpec, LossSpec, ModelSpec, NetworkSpec


def awkward_floats() -> np.ndarray:
    """Every float16, the midpoints between neighbours, and the float32 just beside those; both signs."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    midpoints = (halves[:-1] + halves[1:]) / 2  # exact in float32
    beside = [np.nextafter(midpoints, np.float32(np.inf)), np.nextafter(midpoints, np.float32(-np.inf))]
    positive = np.concatenate([halves, midpoints, *beside, np.float32([1e-45, 1e-30, 6e-8, 65519.996])])
    return np.concatenate([positive, -positive])


def test_half_rounding_is_exact() -> None:
    values = awkward_floats()
    assert np.array_equal(round_to_half(values), values.astype(np.float16).astype(np.float32))


def test_half_rounding_overflows_and_keeps_nan() -> None:
    values = np.array([65520, -65520, 1e30, np.inf, -np.inf, np.nan, 1.0004], np.float32)
    expected = np.array([np.inf, -np.inf, np.inf, np.inf, -np.inf, np.nan, 1.0], np.float32)
    np.testing.assert_array_equal(round_to_half(values), expected)


def test_bfloat16_rounding() -> None:
    """Against the definition: the nearest multiple of 2^(exponent - 7), ties to even."""
    random = np.random.default_rng(0)
    values = (random.standard_normal(20000) * 2.0 ** random.integers(-100, 100, 20000)).astype(np.float32)
    mantissa, exponent = np.frexp(values.astype(np.float64))
    expected = np.ldexp(np.rint(mantissa * 256) / 256, exponent)
    assert np.array_equal(round_to_bfloat16(values), expected.astype(np.float32))
    special = np.array([np.inf, -np.inf, np.nan, 0.0, 1.00390625, 1.01171875], np.float32)  # the last two are ties
    np.testing.assert_array_equal(round_to_bfloat16(special), np.float32([np.inf, -np.inf, np.nan, 0, 1, 1.015625]))


@pytest.mark.parametrize("largest", [1e-40, 1e-12, 0.3, 1.0, 7.99, 8.0, 4e5, 3e38])
def test_gradient_scale(largest: float) -> None:
    values = np.array([[largest, -largest / 3]], np.float32)
    scale = Precision("float16").gradient_scale(values)
    assert np.frexp(scale)[0] == 0.5, "not a power of two"
    assert 8 <= float(np.float32(largest)) * scale < 16 or (largest < 1e-37 and scale == 2.0**126)


@pytest.mark.parametrize("values", [[0.0], [np.inf], [np.nan, 1.0], []])
def test_gradient_scale_of_nothing(values: list[float]) -> None:
    assert Precision("float16").gradient_scale(np.array(values, np.float32)) == 1.0


def test_unknown_dtype() -> None:
    with pytest.raises(EngineUnavailable, match="float8"):
        Precision("float8")


def half(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("output_activation", ["None", "Sigmoid"])
def test_network_rounds_where_kernels_store(activation: str, output_activation: str) -> None:
    """The rounding rules of precision.py, written out for two hidden layers and an L2 loss.

    float32 sums in another order may fall on the other side of a rounding boundary, so values agree to a float16
    spacing here and there (1e-3) and to much less as a whole (1e-4).
    """
    from numba_tcnn.reference.activations import ACTIVATIONS as FUNCTIONS

    spec = ModelSpec(16, 3, IdentitySpec(16), NetworkSpec("CutlassMLP", 16, 2, activation, output_activation), 16)
    random = np.random.default_rng(3)
    params = random.uniform(-0.5, 0.5, 3 * 256).astype(np.float32)
    x = random.random((64, 16), dtype=np.float32)
    target = random.random((64, 3), dtype=np.float32)
    hidden, output = FUNCTIONS[activation], FUNCTIONS[output_activation]

    W = half(params).reshape(3, 16, 16)
    h0 = half(x)
    z0 = h0 @ W[0].T
    h1 = half(hidden.value(z0))
    z1 = h1 @ W[1].T
    h2 = half(hidden.value(z1))
    z2 = h2 @ W[2, :3].T
    y = output.value(z2)

    def derivative(z: np.ndarray, h: np.ndarray) -> np.ndarray:
        if activation in ("SiLU", "Sine"):
            return half(hidden.derivative_from_input(z))
        return hidden.derivative_from_output(h)

    D2 = half(2 * (y - target) * output.derivative_from_input(z2))
    D1 = half((D2 @ W[2, :3]) * derivative(z1, h2))
    D0 = half((D1 @ W[1]) * derivative(z0, h1))
    dL_dx = half(D0 @ W[0])
    n = np.float32(1 / target.size)

    model = Model(spec, params, "float16")
    assert np.abs(model.forward(x) - y).max() <= 1e-3
    value, gradients = model.loss_and_gradients(x, target, LossSpec("L2"))
    assert value == pytest.approx(float(np.square(y - target).mean()), rel=1e-4)
    blocks = gradients.blocks()
    for name, expected in (("layer2.weight", D2.T @ h2), ("layer1.weight", D1.T @ h1), ("layer0.weight", D0.T @ h0)):
        actual = blocks[name][: len(expected)]
        assert np.linalg.norm(actual - expected * n) <= 1e-4 * np.linalg.norm(expected * n)
    assert np.linalg.norm(gradients.input - dL_dx * n) <= 1e-4 * np.linalg.norm(dL_dx * n)


def test_encodings_alone_round_their_output_gradients() -> None:
    """Scaled to [8, 16) and rounded to float16 like those that come from a network; Identity passes them on."""
    random = np.random.default_rng(5)
    x, dL_dy = random.random((32, 3), np.float32), random.standard_normal((32, 3)).astype(np.float32)
    dL_dy[0] = 3e-8, -1e-5, 0.75  # subnormal, or 0, even when scaled
    scale = np.float32(2.0 ** (4 - np.frexp(np.abs(dL_dy).max())[1]))
    model = Model(ModelSpec(3, 3, IdentitySpec(3), None, 3), np.zeros(0, np.float32), "float16")
    np.testing.assert_array_equal(model.backward(x, dL_dy).input, half(dL_dy * scale) / scale)


def test_tiny_and_huge_external_gradients_survive() -> None:
    """Results scale with dL/dy exactly, far outside float16's range: the power of two moves no rounding."""
    spec = ModelSpec(16, 3, IdentitySpec(16), NetworkSpec("CutlassMLP", 16, 2, "Tanh"), 16)
    random = np.random.default_rng(4)
    model = Model(spec, random.uniform(-0.5, 0.5, 768).astype(np.float32), "float16")
    x, dL_dy = random.random((32, 16)), random.standard_normal((32, 3)).astype(np.float32)
    plain = model.backward(x, dL_dy)
    for factor in (2.0**-60, 2.0**70):
        scaled = model.backward(x, dL_dy * np.float32(factor))
        assert np.array_equal(scaled.params, plain.params * np.float32(factor))
        assert np.array_equal(scaled.input, plain.input * np.float32(factor))
