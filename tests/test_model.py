"""Modules and models on the reference engine: parameters, inference, forward and backward, copies."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
from fake_arrays import FAKES, install

import numba_tcnn as tcnn

CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
    "encoding": {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 4},
    "network": {"otype": "CutlassMLP", "n_neurons": 20, "n_hidden_layers": 2, "activation": "Sigmoid"},
}
GRID = CONFIG["encoding"]
MLP = CONFIG["network"]


def make(dtype: str = "float32", **options) -> tcnn.Model:
    return tcnn.create_from_config(2, 3, CONFIG, engine="reference", dtype=dtype, **options)


def far_from_zero(model: tcnn.Model, rng: np.random.Generator) -> None:
    """Tables start at 1e-4, where every gradient through them is tiny; spread them out."""
    model.params = model.params + 0.3 * rng.standard_normal(model.n_params)


# ------------------------------------------------------------------------------------------- what it is


def test_create_from_config_has_all_parts():
    model = make()
    assert isinstance(model.network, tcnn.NetworkWithInputEncoding)
    assert model.trainer.network is model.network
    assert model.loss.spec.otype == "L2" and model.optimizer.spec.learning_rate == 1e-2
    assert (model.n_input_dims, model.n_output_dims) == (2, 3)
    assert model.layer_sizes == ((32, 16), (32, 32), (16, 32))  # 20 neurons and 3 outputs, padded to 16s
    assert model.config == CONFIG


def test_config_may_be_json_text_or_a_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("// comment\n" + json.dumps(CONFIG))
    for source in (path, str(path), json.dumps(CONFIG)):
        model = tcnn.create_from_config(2, 3, source, engine="reference")
        assert model.n_params == make().n_params


def test_trainer_and_bindings_draw_different_parameters_from_one_seed():
    """As tiny-cuda-nn: its Trainer passes the seed through std::seed_seq, its PyTorch bindings don't."""
    bindings = tcnn.NetworkWithInputEncoding(2, 3, GRID, MLP, engine="reference")
    trained = make()
    assert not np.array_equal(bindings.params, trained.params)
    tcnn.Trainer(bindings, CONFIG["optimizer"], "L2")
    np.testing.assert_array_equal(bindings.params, trained.params)


def test_keep_parameters():
    network = tcnn.NetworkWithInputEncoding(2, 3, GRID, MLP, seed=5, engine="reference")
    before = network.params
    tcnn.Trainer(network, "Adam", "L2", keep_parameters=True)
    np.testing.assert_array_equal(network.params, before)


def test_seeds_choose_parameters():
    assert np.array_equal(make(seed=3).params, make(seed=3).params)
    assert not np.array_equal(make(seed=3).params, make(seed=4).params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "cuda"}, "engine: 'cuda' is none of auto, fused, reference"),
        ({"dtype": "half"}, "dtype: 'half' is none of float16, bfloat16, float32, float64"),
        ({"device": -1}, "device: -1 must be a whole number"),
        ({"seed": 1.5}, "seed: 1.5 must be a whole number"),
    ],
)
def test_bad_options_are_config_errors(options, message):
    with pytest.raises(tcnn.ConfigError, match=message):
        tcnn.create_from_config(2, 3, CONFIG, **options)


def test_a_network_alone_pads_its_input_with_ones():
    config = {**MLP, "n_neurons": 16}
    network = tcnn.Network(3, 2, config, engine="reference", dtype="float64")
    x = np.random.default_rng(0).random((5, 3))
    weights = [block.astype(np.float64) for block in network.blocks().values()]
    assert [w.shape for w in weights] == [(16, 16), (16, 16), (2, 16)]
    hidden = np.concatenate([x, np.ones((5, 13))], axis=1)
    for w in weights[:-1]:
        hidden = 1 / (1 + np.exp(-hidden @ w.T))
    # float64 end to end from the same matrices: only the order of summation differs
    np.testing.assert_allclose(network.inference(x, dtype="float64"), hidden @ weights[-1].T, rtol=1e-12)


def test_an_encoding_alone_has_its_natural_or_padded_width():
    encoding = tcnn.Encoding(2, GRID, engine="reference")
    assert encoding.n_output_dims == 6 and encoding.inference(np.zeros((4, 2))).shape == (4, 6)
    aligned = tcnn.Encoding(2, GRID, alignment=16, engine="reference")
    assert aligned.n_output_dims == 16 and aligned.inference(np.zeros((4, 2))).shape == (4, 16)


# ------------------------------------------------------------------------------------------- parameters


def test_params_are_a_read_only_copy_and_set_as_a_whole():
    model = make()
    params = model.params
    assert params.dtype == np.float32 and not params.flags.writeable
    model.params = np.arange(model.n_params, dtype=np.float64)
    np.testing.assert_array_equal(model.params, np.arange(model.n_params, dtype=np.float32))
    with pytest.raises(ValueError, match=r"params must have shape \(\d+,\), not \(3,\)"):
        model.params = np.zeros(3)
    with pytest.raises(TypeError, match="float dtype"):
        model.params = np.zeros(model.n_params, np.int32)


def test_blocks_hold_the_logical_weights():
    model = make()
    blocks = model.blocks()
    shapes = {name: block.shape for name, block in blocks.items()}
    assert shapes == {
        "layer0.weight": (20, 16),
        "layer1.weight": (20, 20),
        "layer2.weight": (3, 20),
        "grid.level0": (16, 2),  # 4 x 4 vertices, then 8 x 8, then 16 x 16 hashed into 2^6 entries
        "grid.level1": (64, 2),
        "grid.level2": (64, 2),
    }
    np.testing.assert_array_equal(blocks["layer0.weight"], model.params[: 32 * 16].reshape(32, 16)[:20])


def test_set_block_changes_that_block_only():
    model = make()
    before = model.params
    model.set_block("layer1.weight", np.full((20, 20), 7.0))
    changed = np.flatnonzero(model.params != before)
    assert len(changed) == 400
    np.testing.assert_array_equal(model.blocks()["layer1.weight"], 7)
    with pytest.raises(KeyError, match="did you mean layer1.weight"):
        model.set_block("layer1.weights", np.zeros((20, 20)))
    with pytest.raises(ValueError, match=r"layer1.weight must be real of shape \(20, 20\)"):
        model.set_block("layer1.weight", np.zeros((20, 19)))


# -------------------------------------------------------------------------------------------- inference


def test_inference_of_any_batch_size_is_row_by_row_the_same(rng):
    model = make()
    x = rng.random((300, 2))
    whole = model.network.inference(x)
    assert whole.dtype == np.float32
    for n in (0, 1, 31, 257):
        y = model.network.inference(x[:n])
        assert y.shape == (n, 3)
        # BLAS sums in an order that depends on the number of rows: a few float32 roundings
        np.testing.assert_allclose(y, whole[:n], rtol=1e-5, atol=1e-7)


def test_inference_into_out_and_in_other_dtypes(rng):
    model = make()
    x = rng.random((10, 2))
    y = model.network.inference(x)
    out = np.empty((10, 3), np.float16)
    assert model.network.inference(x, out=out) is out
    np.testing.assert_array_equal(out, y.astype(np.float16))
    for dtype in ("float16", np.float16):
        np.testing.assert_array_equal(model.network.inference(x, dtype=dtype), out)
    for other in ("float64", "floaty"):
        with pytest.raises(ValueError, match=f"dtype: {other} is not float16 or float32"):
            model.network.inference(x, dtype=other)


@pytest.mark.parametrize(
    "out", [np.empty((10, 4), np.float32), np.empty((10, 3), np.float64), np.empty((3, 10), np.float32).T]
)
def test_an_out_that_does_not_fit_is_refused(out):
    with pytest.raises(ValueError, match=r"out must be C-contiguous \[10, 3\] of float16 or float32, not"):
        make().network.inference(np.zeros((10, 2)), out=out)


def test_an_out_that_is_no_array_is_refused():
    with pytest.raises(TypeError, match="out must be an array that can be written, not list"):
        make().network.inference(np.zeros((1, 2)), out=[[0.0, 0.0, 0.0]])


def test_prepared_inference_reads_what_the_buffer_holds(rng):
    model = make()
    x, out = rng.random((8, 2), np.float32), np.empty((8, 3), np.float32)
    prepared = model.network.prepare(x, out)
    for _ in range(2):
        x[:] = rng.random((8, 2))
        assert prepared() is out
        np.testing.assert_array_equal(out, model.network.inference(x))
    with pytest.raises(ValueError, match="a copy would go stale"):
        model.network.prepare(x.astype(np.float64), out)


@pytest.mark.parametrize("kind", sorted(FAKES))
def test_results_have_the_kind_of_the_input(kind, rng, monkeypatch):
    install(monkeypatch)
    model = make()
    x = rng.random((6, 2), np.float32)
    given = FAKES[kind](x)
    y = model.network.inference(given)
    if kind != "cuda":  # objects of no known library get the fused engine's
        assert isinstance(y, FAKES[kind])
    np.testing.assert_array_equal(y.memory, model.network.inference(x))
    y, context = model.network.forward(given)
    gradients = model.network.backward(context, FAKES[kind](np.ones((6, 3), np.float32)))
    host_y, host_context = model.network.forward(x)
    expected = model.network.backward(host_context, np.ones((6, 3)))
    np.testing.assert_array_equal(gradients.input.memory, expected.input)
    np.testing.assert_array_equal(gradients.params.memory, expected.params)


def test_wrong_inputs_are_named():
    network = make().network
    with pytest.raises(ValueError, match=r"x\[:, None\]"):
        network.inference(np.zeros(2))
    with pytest.raises(ValueError, match="x must have 2 columns, not 3"):
        network.inference(np.zeros((4, 3)))
    with pytest.raises(TypeError, match="x has dtype complex"):
        network.inference(np.zeros((4, 2), complex))


# --------------------------------------------------------------------------------- forward and backward


def central_difference(f, value: np.ndarray, index: tuple[int, ...], step: float = 1e-6) -> float:
    high, low = value.copy(), value.copy()
    high[index] += step
    low[index] -= step
    return (f(high) - f(low)) / (2 * step)


def test_backward_is_the_derivative_of_forward(rng):
    """Against central differences in float64. Parameters are stored in float32, so their steps are representable."""
    model = make("float64")
    far_from_zero(model, rng)
    network, x, dL_dy = model.network, rng.random((7, 2)), rng.standard_normal((7, 3))
    y, context = network.forward(x)
    assert y.dtype == np.float64
    gradients = network.backward(context, dL_dy)

    def loss_of_x(value):
        return float(np.sum(network.inference(value, dtype="float64") * dL_dy))

    for index in ((0, 0), (3, 1), (6, 0)):
        # the error of central differences is about step² and rounding / step, both near 1e-10
        assert gradients.input[index] == pytest.approx(central_difference(loss_of_x, x, index), rel=1e-6, abs=1e-8)

    params = network.params
    nonzero = np.flatnonzero(gradients.params)
    step = 2.0**-10  # exact in float32 next to parameters below 4; the truncation error is about 1e-6 of φ'''
    for index in rng.choice(nonzero, 20, replace=False):
        losses = []
        for sign in (1, -1):
            changed = params.copy()
            changed[index] = np.float32(changed[index] + sign * step)
            network.params = changed
            losses.append((loss_of_x(x), float(changed[index])))
        slope = (losses[0][0] - losses[1][0]) / (losses[0][1] - losses[1][1])
        assert gradients.params[index] == pytest.approx(slope, rel=1e-4, abs=1e-6)


def test_contexts_wait_in_any_order(rng):
    network = make().network
    xs = [rng.random((4, 2)) for _ in range(3)]
    alone = []
    for x in xs:
        _, context = network.forward(x)
        alone.append(network.backward(context, np.ones((4, 3))))
    contexts = [network.forward(x)[1] for x in xs]
    for i in (2, 0, 1):
        gradients = network.backward(contexts[i], np.ones((4, 3)))
        np.testing.assert_array_equal(gradients.input, alone[i].input)
        np.testing.assert_array_equal(gradients.params, alone[i].params)


def test_accumulate_adds_and_ignore_leaves_out(rng):
    network = make().network
    contexts = [network.forward(rng.random((4, 2)))[1] for _ in range(2)]
    first, second = (network.backward(context, np.ones((4, 3))).params for context in contexts)
    total = network.backward(contexts[0], np.ones((4, 3)), parameters="accumulate")
    assert total.params is second
    network.backward(contexts[0], np.ones((4, 3)), parameters="overwrite")
    summed = network.backward(contexts[1], np.ones((4, 3)), parameters="accumulate", input=False)
    assert summed.input is None
    # two float32 additions in another order
    np.testing.assert_allclose(summed.params, total.params, rtol=1e-6, atol=1e-9)
    nothing = network.backward(contexts[0], np.ones((4, 3)), parameters="ignore")
    assert nothing.params is None and nothing.input.shape == (4, 2)
    with pytest.raises(ValueError, match="parameters: 'add' is none of overwrite, accumulate, ignore"):
        network.backward(contexts[0], np.ones((4, 3)), parameters="add")
    assert first.shape == (network.n_params,)


def test_an_empty_batch_has_empty_gradients():
    network = make().network
    y, context = network.forward(np.zeros((0, 2)))
    assert y.shape == (0, 3)
    gradients = network.backward(context, np.zeros((0, 3)))
    assert gradients.input.shape == (0, 2)
    np.testing.assert_array_equal(gradients.params, np.zeros(network.n_params))


def test_a_stale_or_foreign_context_is_refused(rng):
    model = make()
    x, y = rng.random((4, 2)), rng.random((4, 3))
    _, context = model.network.forward(x)
    with pytest.raises(ValueError, match="dL_dy has 3 rows, the context's x has 4"):
        model.network.backward(context, np.ones((3, 3)))
    with pytest.raises(TypeError, match=r"what forward\(\) returned second, not ndarray"):
        model.network.backward(*model.network.forward(x))
    with pytest.raises(ValueError, match="another module"):
        make().network.backward(context, np.ones((4, 3)))
    model.trainer.training_step(x, y, run_optimizer=False)
    model.network.backward(context, np.ones((4, 3)))  # nothing has changed
    model.trainer.training_step(x, y)
    with pytest.raises(RuntimeError, match="parameters have changed"):
        model.network.backward(context, np.ones((4, 3)))
    _, context = model.network.forward(x)
    model.params = model.params
    with pytest.raises(RuntimeError, match="parameters have changed"):
        model.network.backward(context, np.ones((4, 3)))


# ------------------------------------------------------------------------------------------------ copies


def test_a_deep_copy_trains_on_by_itself(rng):
    model = make()
    x, y = rng.random((64, 2)), rng.random((64, 3))
    model.fit(x, y, steps=5)
    twin = copy.deepcopy(model)
    assert twin.trainer.network is twin.network and twin.trainer.step == 5
    np.testing.assert_array_equal(twin.params, model.params)
    model.fit(x, y, steps=5)
    assert not np.array_equal(twin.params, model.params)
    twin.fit(x, y, steps=5)
    np.testing.assert_array_equal(twin.params, model.params)  # the optimizer's moments came along


def test_a_deep_copy_accumulates_gradients_of_its_own(rng):
    network = make().network
    x, dL_dy = rng.random((8, 2)), rng.random((8, 3))
    first = network.backward(network.forward(x)[1], dL_dy).params.copy()
    twin = copy.deepcopy(network)
    alone = twin.backward(twin.forward(x)[1], dL_dy, parameters="accumulate").params
    np.testing.assert_array_equal(alone, first)  # from nothing
    both = network.backward(network.forward(x)[1], dL_dy, parameters="accumulate").params
    np.testing.assert_array_equal(both, first + alone)


@pytest.mark.parametrize("part", ["model", "network", "trainer"])
def test_pickling_says_what_to_do_instead(part):
    model = make()
    target = model if part == "model" else getattr(model, part)
    with pytest.raises(TypeError, match=r"Model\.save\(path\) stores a model"):
        pickle.dumps(target)


def test_pickling_an_optimizer_that_trains_says_what_to_do_instead():
    """It would take the runtime with it, and on a GPU the addresses of its memory."""
    model = make()
    with pytest.raises(TypeError, match=r"its state_dict\(\) is plain arrays"):
        pickle.dumps(model.optimizer)
    pickle.loads(pickle.dumps(model.optimizer.state_dict()))


def test_explain_says_which_engine_and_why():
    model = make()
    text = str(model.explain())
    assert text.startswith("engine: reference (engine='reference' was asked for)")
    assert not model.jit_fusion
    assert "2 -> 3" in repr(model)
