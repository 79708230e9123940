"""Defects of tiny-cuda-nn in networks and their gradients that are fixed here, one test each.

They are numbered through all such tests. What 1, 2 and 3 do to tiny-cuda-nn's recorded results is in
`test_golden_networks.py`.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from fake_engine import FakeFusedEngine
from golden_case import relative_error

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
def test_defect_01_gradients_of_smooth_hidden_activations(activation, rng):
    """Upstream's fused gradients take φ' at φ(z) instead of z."""
    check_gradients(network(activation, "None"), rng)


@pytest.mark.parametrize("output_activation", ["SiLU", "Sine"])
def test_defect_02_silu_and_sine_as_output_activations(output_activation, rng):
    """Upstream's unfused gradient passes through these two as if they were the identity."""
    check_gradients(network("Tanh", output_activation), rng, scale=3.0)


def test_defect_03_relative_l1_of_negative_predictions():
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


@pytest.mark.slow
def test_defect_15_kernels_of_another_mode_or_loss(gpu, no_reference, rng):
    """Upstream compiles a kernel once for each object and uses it whatever is asked for later. Ours are found by all
    that they depend on: asked for in any order, gradients and losses are those of a new model that is asked but once.

    The emulated device computes equal calls equally.
    """
    grid = {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 6, "base_resolution": 4}
    config = {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1}
    x, y, dL_dy = rng.random((20, 2), np.float32), rng.random((20, 3), np.float32), rng.standard_normal((20, 3))
    density = rng.uniform(0.5, 2, (20, 3)).astype(np.float32)

    def make() -> tcnn.NetworkWithInputEncoding:
        return tcnn.NetworkWithInputEncoding(2, 3, grid, config, engine="fused")

    def gradients(module: tcnn.NetworkWithInputEncoding, parameters: str, input: bool) -> list[np.ndarray | None]:
        result = module.backward(module.forward(x)[1], dL_dy.astype(np.float32), parameters=parameters, input=input)
        return [result.params, result.input]

    def losses(module: tcnn.NetworkWithInputEncoding, loss: str) -> list[float]:
        trainer = tcnn.Trainer(module, "Adam", loss, keep_parameters=True)
        options = [{}, {"data_pdf": density}, {"external_gradient": dL_dy.astype(np.float32)}]
        return [float(trainer.training_step(x, y, run_optimizer=False, **own)) for own in options]

    module = make()
    for parameters, input in (("ignore", True), ("overwrite", False), ("overwrite", True), ("ignore", False)):
        for ours, expected in zip(
            gradients(module, parameters, input), gradients(make(), parameters, input), strict=True
        ):
            assert (ours is None) == (expected is None)
            if ours is not None:
                assert np.any(ours != 0)
                np.testing.assert_array_equal(ours, expected)
    of_l2 = losses(module, "L2")
    assert of_l2 == losses(make(), "L2") and len(set(of_l2)) == 3
    of_l1 = losses(module, "L1")
    assert of_l1 == losses(make(), "L1") and of_l1[:2] != of_l2[:2]
    assert losses(module, "L2") == of_l2


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


def test_defect_17_snapshots_hold_the_masters(tmp_path, rng):
    """Upstream's snapshots hold the parameters of inference alone, in half precision: training goes on from averages.
    Ours hold the float32 masters, and so do those that we write in its format."""
    config = {
        "encoding": {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 6, "base_resolution": 4},
        "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
        "optimizer": {"otype": "EMA", "nested": {"otype": "Adam", "learning_rate": 1e-2}},
    }
    model, other = (tcnn.create_from_config(2, 3, config, engine="reference") for _ in range(2))
    for _ in range(5):
        model.trainer.training_step(rng.random((16, 2)), rng.random((16, 3)))
    masters, averages = model.params, model.optimizer.inference_params
    assert np.any(masters != masters.astype(np.float16)) and relative_error(averages, masters) > 1e-3
    model.save(tmp_path / "own")
    loaded = tcnn.load(tmp_path / "own", engine="reference")
    np.testing.assert_array_equal(loaded.params, masters)
    np.testing.assert_array_equal(loaded.optimizer.inference_params, averages)
    for format in ("json", "msgpack"):
        model.save_tcnn(tmp_path / format, format)
        other.load_tcnn(tmp_path / format)
        np.testing.assert_array_equal(other.params, masters)


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
