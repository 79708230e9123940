"""Defects of tiny-cuda-nn in networks and their gradients that are fixed here, one test each.

The numbers are those of our list of such defects. Numbers 1, 2 and 3 are also compared with tiny-cuda-nn's recorded
results in `test_golden_networks.py`.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from fake_engine import FakeFusedEngine

import numba_tcnn as tcnn
import numba_tcnn.fused
from numba_tcnn.specs import ACTIVATIONS

H = 1e-6


def check_gradients(module: tcnn.modules.Module, rng: np.random.Generator, scale: float = 1.0) -> None:
    """dL/dx against central differences in float64: h = 1e-6 and values of order one leave about 1e-9."""
    x = scale * rng.uniform(-1, 1, (6, module.n_input_dims))
    dL_dy = rng.standard_normal((6, module.n_output_dims))
    gradient = module.backward(module.forward(x)[1], dL_dy).input
    for d in range(x.shape[1]):
        step = np.zeros_like(x)
        step[:, d] = H
        moved = [module.inference(x + sign * step, dtype="float64") for sign in (1, -1)]
        numeric = np.sum(dL_dy * (moved[0] - moved[1]), axis=1) / (2 * H)
        np.testing.assert_allclose(gradient[:, d], numeric, rtol=1e-6, atol=1e-8)


def network(activation: str, output_activation: str, n_hidden_layers: int = 2) -> tcnn.Network:
    config = {
        "otype": "CutlassMLP",
        "n_neurons": 16,
        "n_hidden_layers": n_hidden_layers,
        "activation": activation,
        "output_activation": output_activation,
    }
    return tcnn.Network(3, 2, config, dtype="float64", engine="reference")


@pytest.mark.parametrize("activation", sorted(set(ACTIVATIONS) - {"None", "ReLU", "LeakyReLU"}))
def test_defect_1_gradients_of_smooth_hidden_activations(activation, rng):
    """Upstream's fused gradients take φ' at φ(z) instead of z."""
    check_gradients(network(activation, "None"), rng)


@pytest.mark.parametrize("output_activation", ["SiLU", "Sine"])
def test_defect_2_silu_and_sine_as_output_activations(output_activation, rng):
    """Upstream's unfused gradient passes through these two as if they were the identity."""
    check_gradients(network("Tanh", output_activation), rng, scale=3.0)


def test_defect_3_relative_l1_of_negative_predictions():
    """Upstream's fused denominator is p + 0.01, which is 0 at p = -0.01 and negative below; ours is |p| + 0.01."""
    p = np.array([[-0.01, -0.5, -2.0, 0.5]])
    values, gradients = tcnn.create_loss("RelativeL1").evaluate(p, np.zeros_like(p))
    weight = 1 / (np.abs(p) + 0.01) / p.size
    np.testing.assert_allclose(values, np.abs(p) * weight, rtol=1e-12)  # float64 roundings
    np.testing.assert_allclose(gradients, np.sign(p) * weight, rtol=1e-12)


def test_defect_10_gradients_of_grids_with_one_feature(rng):
    """Upstream overwrites where it should accumulate (half precision), and its fused kernels leave the gradient out."""
    grid = {"otype": "HashGrid", "n_levels": 3, "n_features_per_level": 1, "log2_hashmap_size": 6, "base_resolution": 4}
    module = tcnn.Encoding(2, grid, dtype="float16", engine="reference")
    contexts = [module.forward(rng.random((50, 2)))[1] for _ in range(2)]
    dL_dy = rng.standard_normal((50, 3))
    first, second = (module.backward(context, dL_dy).params.copy() for context in contexts)
    assert first.any() and second.any()
    assert first.sum() == pytest.approx(dL_dy.astype(np.float32).sum(), rel=1e-2)  # corners' weights sum to 1
    total = module.backward(contexts[0], dL_dy).params
    assert module.backward(contexts[1], dL_dy, parameters="accumulate").params is total
    np.testing.assert_allclose(total, first + second, rtol=1e-6, atol=1e-7)  # one float32 addition
    assert module.backward(contexts[0], dL_dy, parameters="ignore").params is None
    np.testing.assert_array_equal(module.backward(contexts[0], dL_dy, parameters="overwrite").params, first)


def test_defect_14_a_fused_forward_with_a_fallback_backward(monkeypatch, rng):
    """Upstream's context of a fused forward pass is of another type than its fallback reads. Ours is the inputs and a
    version of the parameters, which any engine can use."""
    fused = FakeFusedEngine("backward")
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", fused.create_runtime)
    config = {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1}
    module, expected = tcnn.Network(3, 2, config), tcnn.Network(3, 2, config, engine="reference")
    x, dL_dy = rng.random((9, 3)), rng.random((9, 2))
    _, context = module.forward(x)
    assert module.jit_fusion
    with pytest.warns(tcnn.JitFusionWarning, match="ptxas said no"):
        gradients = module.backward(context, dL_dy)
    assert not module.jit_fusion
    reference = expected.backward(expected.forward(x)[1], dL_dy)
    np.testing.assert_array_equal(gradients.params, reference.params)
    np.testing.assert_array_equal(gradients.input, reference.input)
    with warnings.catch_warnings():  # the context survives the move, without another warning
        warnings.simplefilter("error")
        np.testing.assert_array_equal(module.backward(context, dL_dy).input, reference.input)


def test_defect_16_second_order_with_respect_to_the_input(rng):
    """Upstream's bindings return zeros for the input's second derivatives, and its networks have none at all."""
    grid = {"otype": "HashGrid", "n_levels": 2, "base_resolution": 4, "interpolation": "Smoothstep"}
    config = {"otype": "CutlassMLP", "n_neurons": 16, "n_hidden_layers": 1, "activation": "Softplus"}
    module = tcnn.NetworkWithInputEncoding(2, 1, grid, config, dtype="float64", engine="reference")
    module.params = rng.uniform(-0.5, 0.5, module.n_params)
    x, v, dL_dy = rng.random((8, 2)), rng.standard_normal((8, 2)), np.ones((8, 1))
    second = module.backward_backward_input(module.forward(x)[1], v, dL_dy).input
    moved = [module.backward(module.forward(x + sign * H * v)[1], dL_dy).input for sign in (1, -1)]
    curvature = np.sum(v * (moved[0] - moved[1]), axis=1) / (2 * H)
    assert np.all(np.abs(curvature) > 1e-3)
    np.testing.assert_allclose(np.sum(second * v, axis=1), curvature, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("where", ["activation", "output_activation"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_defect_18_softplus_of_large_numbers(where, dtype):
    """Upstream's e^(10 z) overflows for z > 8.87: values become infinite, gradients NaN. Ours is z there, slope 1."""
    config = {"otype": "CutlassMLP", "hidden": [16] if where == "activation" else [], where: "Softplus"}
    module = tcnn.Network(16, 1, config, dtype=dtype, engine="reference")
    for name in module.blocks():
        module.set_block(name, np.eye(*module.blocks()[name].shape))
    x = np.zeros((4, 16))
    x[:, 0] = [9, 100, 1000, 6e4]
    y, context = module.forward(x)
    np.testing.assert_allclose(y[:, 0], x[:, 0], rtol=1e-3)  # float16 keeps 11 bits
    gradient = module.backward(context, np.ones((4, 1))).input
    np.testing.assert_allclose(gradient[:, 0], 1, rtol=1e-3)
