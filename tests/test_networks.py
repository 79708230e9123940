"""Networks of any width and depth, per-layer widths and biases: what `blocks()` shows is the whole network."""

from __future__ import annotations

import numpy as np
import pytest

import numba_tcnn as tcnn
from numba_tcnn.config import parse_model
from numba_tcnn.initial_values import Pcg32, initial_params
from numba_tcnn.layout import n_bias_params, n_matrix_params, n_network_params, n_params, parameter_blocks
from numba_tcnn.reference.activations import ACTIVATIONS

SHAPES = [
    {"n_neurons": 1, "n_hidden_layers": 1},
    {"n_neurons": 20, "n_hidden_layers": 2},
    {"n_neurons": 100, "n_hidden_layers": 3},
    {"n_neurons": 48, "n_hidden_layers": 0},
    {"hidden": [64, 32, 16]},
    {"hidden": [5, 40, 16]},
    {"hidden": []},
]
GRID = {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 6, "base_resolution": 3}


def make(shape: dict, encoding: dict = GRID, **options) -> tcnn.NetworkWithInputEncoding:
    """Activations with φ(0) ≠ 0 would show whether padding takes part."""
    network = {"otype": "CutlassMLP", "activation": "Sigmoid", "output_activation": "Squareplus"} | shape
    return tcnn.NetworkWithInputEncoding(
        2, 3, encoding, network, **({"dtype": "float64", "engine": "reference"} | options)
    )


def randomise(module, rng: np.random.Generator) -> None:
    """Every parameter of order 1, padding too."""
    module.params = rng.uniform(-1, 1, module.n_params)


def expected_output(module, features: np.ndarray, blocks: dict[str, np.ndarray]) -> np.ndarray:
    """The network as its formula reads, from its blocks."""
    n_layers = len(module.layer_sizes)
    h = features
    for l in range(n_layers):
        z = h @ blocks[f"layer{l}.weight"].astype(np.float64).T + blocks.get(f"layer{l}.bias", 0)
        h = ACTIVATIONS["Sigmoid" if l < n_layers - 1 else "Squareplus"].value(z)
    return h


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_blocks_are_the_network(shape, bias, rng):
    """Identity puts x and a padding of ones into the 16 features; both sides are float64."""
    module = make(shape | {"bias": bias}, {"otype": "Identity"})
    randomise(module, rng)
    x = rng.random((9, 2)).astype(np.float32)
    features = np.concatenate([x, np.ones((9, 14))], axis=1)
    expected = expected_output(module, features, module.blocks())
    np.testing.assert_allclose(module.inference(x, dtype="float64"), expected, rtol=1e-12)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_padding_has_no_gradient_and_stays(shape, rng):
    """A step moves nothing but the blocks, whatever stands in the padding."""
    module = make(shape | {"bias": True})
    randomise(module, rng)
    x, dL_dy = rng.random((9, 2)), rng.standard_normal((9, 3))
    _, context = module.forward(x)
    gradients = module.backward(context, dL_dy).params
    second = module.backward_backward_input(context, np.ones((9, 2)), dL_dy).params
    for block in parameter_blocks(module.spec):
        inside = np.zeros(block.shape, bool)
        inside[tuple(slice(length) for length in block.logical_shape)] = True
        assert not block.stored(gradients)[~inside].any() and not block.stored(second)[~inside].any()
        assert block.name.startswith("grid") or block.logical(gradients).any()


def test_shapes_of_the_blocks(rng):
    module = make({"hidden": [20, 7], "bias": True}, {"otype": "Identity"})
    shapes = {name: block.shape for name, block in module.blocks().items()}
    assert shapes == {
        "layer0.weight": (20, 16),
        "layer1.weight": (7, 20),
        "layer2.weight": (3, 7),
        "layer0.bias": (20,),
        "layer1.bias": (7,),
        "layer2.bias": (3,),
    }
    assert module.layer_sizes == ((32, 16), (16, 32), (16, 16))
    bias = rng.random(7, np.float32)
    before = module.params
    module.set_block("layer1.bias", bias)
    np.testing.assert_array_equal(module.blocks()["layer1.bias"], bias)
    assert np.count_nonzero(module.params != before) == 7
    with pytest.raises(ValueError, match=r"layer1\.bias must be real of shape \(7,\)"):
        module.set_block("layer1.bias", np.zeros((7, 1)))


def test_biases_stand_between_weights_and_tables():
    plain, biased = (parse_model(2, 3, GRID, {"n_neurons": 20, "n_hidden_layers": 1, "bias": b}) for b in (False, True))
    assert n_bias_params(plain) == 0 and n_bias_params(biased) == 32 + 16
    assert n_matrix_params(biased) == n_matrix_params(plain) == n_network_params(plain)
    assert n_params(biased) == n_params(plain) + 48
    blocks = parameter_blocks(biased)
    assert [block.name for block in blocks] == [
        "layer0.weight", "layer1.weight", "layer0.bias", "layer1.bias", "grid.level0", "grid.level1",
    ]  # fmt: skip
    assert [block.offset for block in blocks] == list(np.cumsum([0] + [block.size for block in blocks[:-1]]))
    assert blocks[-1].offset + blocks[-1].size == n_params(biased)


# --------------------------------------------------------------------------------------- initial values


def test_biases_begin_at_zero_and_draw_nothing():
    config = {"n_neurons": 32, "n_hidden_layers": 2}
    plain, biased = (parse_model(2, 3, GRID, config | {"bias": bias}) for bias in (False, True))
    expected, params = initial_params(plain, 7), initial_params(biased, 7)
    n = n_matrix_params(plain)
    np.testing.assert_array_equal(params[:n], expected[:n])
    assert not params[n : n_network_params(biased)].any()
    np.testing.assert_array_equal(params[n_network_params(biased) :], expected[n:])


def test_equal_widths_are_the_same_network_either_way():
    listed = parse_model(2, 3, GRID, {"hidden": [32, 32]})
    counted = parse_model(2, 3, GRID, {"n_neurons": 32, "n_hidden_layers": 2})
    np.testing.assert_array_equal(initial_params(listed, 7), initial_params(counted, 7))


def test_widths_between_the_multiples_of_16_draw_what_tiny_cuda_nn_draws():
    """There, hidden widths are not padded: matrices of 20 x 16, 20 x 20 and 16 x 20 follow each other in the stream.
    Bounds are those of these shapes; the table's numbers come next."""
    spec = parse_model(2, 3, GRID, {"n_neurons": 20, "n_hidden_layers": 2})
    params, stream = initial_params(spec, 5, seeding="bindings"), Pcg32(5)
    for block, (fan_out, fan_in) in zip(parameter_blocks(spec), ((20, 16), (20, 20), (16, 20)), strict=False):
        stored = block.stored(params)
        expected = (2 * stream.uniform(fan_out * fan_in).astype(np.float64) - 1) * np.sqrt(6 / (fan_out + fan_in))
        # float32 arithmetic on numbers below 1
        np.testing.assert_allclose(stored[:fan_out, :fan_in].ravel(), expected, rtol=0, atol=2e-7)
        assert not stored[fan_out:].any() and not stored[:, fan_in:].any()
    alone = initial_params(parse_model(2, None, GRID, None), 5, seeding="bindings")
    assert not np.array_equal(params[n_network_params(spec) :], alone), "the table does not begin the stream"
    table = Pcg32(5)
    table.advance(20 * 16 + 20 * 20 + 16 * 20)
    first = np.float32(table.uniform(1)[0]) * 2e-4 - 1e-4
    assert params[n_network_params(spec)] == pytest.approx(first, abs=1e-11)


# --------------------------------------------------------------------------------- optimizers, engines


@pytest.mark.parametrize("optimized", ["optimize_matrix_params", "optimize_non_matrix_params"])
def test_biases_are_no_matrix_parameters(optimized, rng):
    off = {"optimize_matrix_params": False, "optimize_non_matrix_params": False, optimized: True}
    module = make({"n_neurons": 16, "n_hidden_layers": 1, "bias": True}, dtype="float32")
    trainer = tcnn.Trainer(module, {"otype": "Adam", "learning_rate": 1e-2, **off}, "L2")
    before = module.blocks()
    trainer.training_step(rng.random((32, 2)), rng.random((32, 3)))
    moved = {name for name, block in module.blocks().items() if not np.array_equal(block, before[name])}
    weights = {name for name in before if name.endswith("weight")}
    assert moved == (weights if optimized == "optimize_matrix_params" else set(before) - weights)


def test_a_bias_learns_a_constant():
    """Where all inputs are 0, only the bias can give the target."""
    module = tcnn.Network(
        16, 3, {"otype": "CutlassMLP", "hidden": [], "bias": True}, dtype="float32", engine="reference"
    )
    trainer = tcnn.Trainer(module, {"otype": "Adam", "learning_rate": 3e-2}, "L2")
    target = np.tile(np.float32([0.2, 0.5, 0.9]), (4, 1))
    for _ in range(200):
        loss = trainer.training_step(np.zeros((4, 16)), target)
    assert float(loss) < 1e-4
    np.testing.assert_allclose(module.blocks()["layer0.bias"], target[0], atol=0.02)


def test_aliases_and_defaults():
    for otype, name in (("MLP", "CutlassMLP"), ("MegakernelMLP", "FullyFusedMLP")):
        network = parse_model(2, 3, GRID, {"otype": otype}).network
        assert (network.otype, network.hidden_widths, network.bias) == (name, (128,) * 5, False)
