"""Optimizers through the public modules: alone, in a trainer, and what inference computes with."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import numba_tcnn as tcnn

GRID = {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 8, "base_resolution": 4}
NETWORK = {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1}
SGD = {"otype": "SGD", "learning_rate": 0.1}
ADAM = {"otype": "Adam", "learning_rate": 1e-2}
N_NETWORK = 16 * 16 + 16 * 16
KEEPING = {
    "Average": {"otype": "Average", "n_samples": 8, "nested": ADAM},
    "EMA": {"otype": "EMA", "decay": 0.9, "nested": ADAM},
    "Lookahead": {"otype": "Lookahead", "n_steps": 5, "nested": ADAM},
}
OPTIMIZERS = {
    "Adam": ADAM,
    "AdaBound": {**ADAM, "adabound": True},
    "SGD": {"otype": "SGD", "learning_rate": 2.0},
    "Novograd": {"otype": "Novograd", "learning_rate": 0.02},
    "Shampoo": {"otype": "Shampoo", "learning_rate": 1e-2},
    "Batched": {"otype": "Batched", "batch_size_multiplier": 2, "nested": ADAM},
    "ExponentialDecay": {"otype": "ExponentialDecay", "decay_start": 60, "decay_interval": 20, "nested": ADAM},
    **KEEPING,
}


def composite(n_params: int) -> dict:
    sizes = {"matrices": N_NETWORK, "grid": n_params - N_NETWORK}
    nested = [
        {**ADAM, "n_params_to_optimize": sizes["matrices"]},
        {**KEEPING["EMA"], "n_params_to_optimize": sizes["grid"]},
    ]
    return {"otype": "Composite", "nested": nested}


def make(optimizer: dict, dtype: str = "float32") -> tcnn.Model:
    config = {"loss": {"otype": "L2"}, "optimizer": optimizer, "encoding": GRID, "network": NETWORK}
    return tcnn.create_from_config(2, 3, config, engine="reference", dtype=dtype)


N_PARAMS = make(ADAM).n_params
ALL_OPTIMIZERS = OPTIMIZERS | {"Composite": composite(N_PARAMS)}


@pytest.fixture
def data(rng):
    x = rng.random((400, 2), np.float32)
    return x, np.stack([x[:, 0], x[:, 1], np.sin(4 * x[:, 0])], axis=1)


# ------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_every_optimizer_trains(data, name, dtype):
    """150 steps bring the loss of the trained and of the inference parameters below half of the first."""
    model = make(ALL_OPTIMIZERS[name], dtype)
    losses = [float(model.trainer.training_step(*data)) for _ in range(150)]
    assert model.trainer.step == 150 and model.trainer.skipped_steps == 0
    assert losses[-1] < 0.5 * losses[0]
    assert np.mean((model.network.inference(data[0]) - data[1]) ** 2) < 0.5 * losses[0]


@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_encodings_are_trained(data, name):
    model = make(ALL_OPTIMIZERS[name])
    before = model.blocks()["grid.level1"]
    for _ in range(3):
        model.trainer.training_step(*data)
    assert np.mean(model.blocks()["grid.level1"] != before) > 0.5


@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_resumed_training_is_the_same(data, name):
    """Parameters and state in another model, in mid-course: bit-equal from there on."""
    first, second = make(ALL_OPTIMIZERS[name]), make(ALL_OPTIMIZERS[name])
    for _ in range(7):
        first.trainer.training_step(*data)
    first.trainer.learning_rate *= 0.5
    second.params = first.params
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    twin = copy.deepcopy(first)
    for _ in range(5):
        losses = {float(model.trainer.training_step(*data)) for model in (first, second, twin)}
        assert len(losses) == 1
    for other in (second, twin):
        np.testing.assert_array_equal(other.params, first.params)
        np.testing.assert_array_equal(other.network.inference(data[0]), first.network.inference(data[0]))
        assert other.trainer.step == 12 and other.trainer.learning_rate == first.trainer.learning_rate


@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_a_gradient_that_is_not_finite_moves_no_parameter(data, name):
    x, y = data
    model = make(ALL_OPTIMIZERS[name])
    model.trainer.training_step(x, y)
    before = model.params
    model.trainer.training_step(x, np.full_like(y, np.nan))
    assert (model.trainer.step, model.trainer.skipped_steps) == (2, 1)
    if name != "Batched":  # whose step with the one finite gradient of two this is
        np.testing.assert_array_equal(model.params, before)
    for _ in range(3):
        model.trainer.training_step(x, y)
    assert np.isfinite(model.params).all() and np.isfinite(model.network.inference(x)).all()


# ------------------------------------------------------------------------ parameters for inference


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", [*KEEPING, "Composite"])
def test_inference_uses_what_the_optimizer_keeps(data, name, dtype):
    """Bit-equal to a plain model that has these parameters; forward and backward use the trained ones."""
    x, y = data
    model, plain = make(ALL_OPTIMIZERS[name], dtype), make(ADAM, dtype)
    assert model.optimizer.inference_params is None
    np.testing.assert_array_equal(model.network.inference(x), plain.network.inference(x))
    for _ in range(8):
        model.trainer.training_step(x, y)
        kept = model.optimizer.inference_params
        assert kept.dtype == np.float32 and kept.shape == (N_PARAMS,)
        plain.params = kept
        np.testing.assert_array_equal(model.network.inference(x), plain.network.inference(x))
    assert not np.array_equal(kept, model.params)

    plain.params = model.params
    for module in (model.network, plain.network):
        prediction, context = module.forward(x)
        gradient = module.backward(context, prediction - y)
        if module is model.network:
            expected = prediction, gradient
    np.testing.assert_array_equal(prediction, expected[0])
    np.testing.assert_array_equal(gradient.params, expected[1].params)
    assert not np.array_equal(prediction, model.network.inference(x))


def test_inference_parameters_are_a_copy(data):
    model = make(KEEPING["EMA"])
    model.trainer.training_step(*data)
    before = model.network.inference(data[0])
    model.optimizer.inference_params[:] = 0
    np.testing.assert_array_equal(model.network.inference(data[0]), before)


@pytest.mark.parametrize("name", [*KEEPING, "Composite"])
def test_setting_parameters_sets_those_of_inference(data, name):
    """Averages start again from them, as training does."""
    x, y = data
    model, fresh = make(ALL_OPTIMIZERS[name]), make(ALL_OPTIMIZERS[name])
    initial = model.params
    for _ in range(6):
        model.trainer.training_step(x, y)
    model.network.inference(x)
    model.params = initial
    assert model.optimizer.inference_params is None
    np.testing.assert_array_equal(model.network.inference(x), fresh.network.inference(x))
    model.trainer.training_step(x, y)
    kept = model.optimizer.inference_params
    trained = model.params if name != "Lookahead" else kept
    np.testing.assert_allclose(kept, trained, rtol=1e-6, atol=1e-9)  # an average of one


def test_max_level_reaches_the_kept_parameters(data):
    model = make(KEEPING["EMA"])
    model.trainer.training_step(*data)
    whole = model.network.inference(data[0])
    model.network.max_level = 0.25
    part = model.network.inference(data[0])
    assert not np.array_equal(whole, part)
    model.network.max_level = 1.0
    np.testing.assert_array_equal(model.network.inference(data[0]), whole)


def test_run_optimizer_false_leaves_averages_alone(data):
    model = make(KEEPING["EMA"])
    model.trainer.training_step(*data)
    before = model.optimizer.inference_params
    model.trainer.training_step(*data, run_optimizer=False)
    np.testing.assert_array_equal(model.optimizer.inference_params, before)
    assert model.trainer.step == 1


def test_external_gradients_drive_every_kind_of_step(data):
    """Batched takes two of them for one step: the mean of their gradients. float32: 1e-6."""
    x, y = data
    model, by_hand = make({"otype": "Batched", "batch_size_multiplier": 2, "nested": SGD}), make(SGD)
    gradients = []
    for scale in (1e-3, 3e-3):
        dL_dy = (scale * y).astype(np.float32)
        _, context = by_hand.network.forward(x)
        gradients.append(by_hand.network.backward(context, dL_dy, input=False).params)
        assert float(model.trainer.training_step(x, None, external_gradient=dL_dy)) == 0
    expected = by_hand.params - 0.1 * (np.mean(gradients, axis=0) + 1e-8 * by_hand.params)
    np.testing.assert_allclose(model.params, expected, rtol=0, atol=1e-6)


# -------------------------------------------------------------------------------------- learning rate


def test_learning_rate_through_wrappers(data):
    nested = {"otype": "ExponentialDecay", "decay_base": 0.5, "decay_start": 2, "decay_interval": 100, "nested": ADAM}
    model = make({"otype": "EMA", "nested": nested})
    rates = []
    for _ in range(4):
        model.trainer.training_step(*data)
        rates.append(model.trainer.learning_rate)
    assert rates == [1e-2, 1e-2, 5e-3, 5e-3]
    model.optimizer.learning_rate = 0.25
    assert model.trainer.learning_rate == 0.25
    model.trainer.learning_rate = 0.0
    before = model.params
    model.trainer.training_step(*data)
    np.testing.assert_array_equal(model.params, before)


# ---------------------------------------------------------------------------------------------- alone


@pytest.mark.parametrize("name", ALL_OPTIMIZERS)
def test_alone_as_in_a_trainer(data, name):
    """The same steps from gradients of the module: equal but for Adam's division of roundings by roundings."""
    x, y = data
    model, parts = make(ALL_OPTIMIZERS[name]), make(ADAM)
    optimizer = tcnn.create_optimizer(ALL_OPTIMIZERS[name])
    optimizer.allocate(parts.n_params, parts.layer_sizes)
    assert optimizer.inference_params is None
    for _ in range(4):
        model.trainer.training_step(x, y)
        prediction, context = parts.network.forward(x)
        _, dL_dy = parts.loss.evaluate(prediction, y)
        params = np.array(parts.params)
        optimizer.step(params, parts.network.backward(context, dL_dy, input=False).params)
        parts.params = params
    pairs = [(model.params, params)]
    if optimizer.inference_params is not None:
        pairs.append((model.optimizer.inference_params, optimizer.inference_params))
    assert (len(pairs) == 2) == (name in (*KEEPING, "Composite"))
    for a, b in pairs:
        assert np.quantile(np.abs(a - b), 0.98) < 1e-5 and np.abs(a - b).max() < 5e-2


def test_pitfall_32_allocate_starts_afresh():
    """tiny-cuda-nn keeps old moments and step counters where the new size is no larger."""
    optimizer, w, gradient = tcnn.create_optimizer(ADAM), np.ones(4, np.float32), np.ones(4, np.float32)
    optimizer.allocate(4)
    for _ in range(3):
        optimizer.step(w, gradient)
    optimizer.learning_rate = 5.0
    optimizer.allocate(4)
    state = optimizer.state_dict()
    assert state["step"] == 0 and state["learning_rate"] == 1e-2 and not state["first_moments"].any()
    optimizer.allocate(3)
    assert optimizer.state_dict()["param_steps"].shape == (3,)


def test_allocate_that_fails_changes_nothing():
    optimizer = tcnn.create_optimizer(SGD)
    optimizer.allocate(6, [(2, 3)])
    with pytest.raises(ValueError, match="layer_sizes hold 6 parameters, more than n_params = 5"):
        optimizer.allocate(5, [(2, 3)])
    optimizer.step(np.ones(6, np.float32), np.ones(6, np.float32))


def test_sizes_are_checked_before_anything_is_made():
    average = tcnn.create_optimizer({"otype": "Average", "n_samples": 65536})
    with pytest.raises(tcnn.ConfigError, match="optimizer.n_samples: 65536 copies of 100,000 parameters"):
        average.allocate(100_000)
    halves = {"otype": "Composite", "nested": [{"n_params_to_optimize": 10}, {"n_params_to_optimize": 10}]}
    with pytest.raises(tcnn.ConfigError, match="n_params_to_optimize sum to 20, not to all 21"):
        tcnn.create_optimizer(halves).allocate(21)
    network = tcnn.NetworkWithInputEncoding(2, 3, GRID, NETWORK, engine="reference")
    before = network.params
    with pytest.raises(tcnn.ConfigError, match="n_params_to_optimize sum to 20"):
        tcnn.Trainer(network, halves, "L2")
    np.testing.assert_array_equal(network.params, before)


@pytest.mark.parametrize("in_trainer", [False, True])
def test_a_state_that_does_not_fit_changes_nothing(data, in_trainer):
    if in_trainer:
        optimizer = make(KEEPING["EMA"]).optimizer
    else:
        optimizer = tcnn.create_optimizer(KEEPING["EMA"])
        optimizer.allocate(N_PARAMS)
    state = optimizer.state_dict()
    wrong = {**state, "n_averaged": 5, "nested": {**state["nested"], "step": 7, "second_moments": np.zeros(2)}}
    with pytest.raises(ValueError, match=r"optimizer state.nested: second_moments has shape \(2,\)"):
        optimizer.load_state_dict(wrong)
    assert optimizer.state_dict()["n_averaged"] == 0 and optimizer.state_dict()["nested"]["step"] == 0
    with pytest.raises(ValueError, match="optimizer state holds step; Ema needs average, n_averaged, nested"):
        optimizer.load_state_dict({"step": 1})


@pytest.mark.parametrize("name", [*KEEPING, "Composite"])
def test_inference_follows_a_state_that_is_loaded(data, name):
    """What inference has made of the parameters that were kept before is out of date."""
    model, (x, y) = make(ALL_OPTIMIZERS[name]), data
    states, outputs = [], []
    for _ in range(2):
        for _ in range(7):
            model.trainer.training_step(x, y)
        states.append(model.optimizer.state_dict())
        outputs.append(model.predict(x))
    assert np.abs(outputs[1] - outputs[0]).max() > 1e-3
    for state, output in zip(states, outputs, strict=True):
        model.optimizer.load_state_dict(state)
        np.testing.assert_array_equal(model.predict(x), output)


def test_state_needs_allocation():
    optimizer = tcnn.create_optimizer("SGD")
    for use in (optimizer.state_dict, lambda: optimizer.load_state_dict({}), lambda: optimizer.inference_params):
        with pytest.raises(RuntimeError, match="no state yet"):
            use()
