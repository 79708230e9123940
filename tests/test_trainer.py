"""The training step, its loss, the fit and predict loops, and losses and optimizers on their own."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from fake_arrays import FAKES, install

import numba_tcnn as tcnn
from numba_tcnn import fit as fit_module
from numba_tcnn.trainer import LossValue

CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
    "encoding": {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 8, "base_resolution": 4},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
}


def make(dtype: str = "float32", **changes) -> tcnn.Model:
    return tcnn.create_from_config(2, 3, {**CONFIG, **changes}, engine="reference", dtype=dtype)


@pytest.fixture
def data(rng):
    x = rng.random((500, 2), np.float32)
    return x, np.stack([x[:, 0], x[:, 1], np.sin(6 * x[:, 0])], axis=1)


# ------------------------------------------------------------------------------------------- the step


def test_the_loss_is_the_mean_over_samples_and_outputs(data):
    x, y = data
    model = make("float64")
    expected = np.mean((model.network.inference(x, dtype="float64") - y) ** 2)
    # float64 sums in another order
    assert float(model.trainer.training_step(x, y)) == pytest.approx(expected, rel=1e-12)


def test_a_step_is_forward_loss_backward_optimizer(data):
    """The same step put together from the public parts: module, loss, optimizer."""
    x, y = data
    model, parts = make(), make()
    optimizer = tcnn.create_optimizer(CONFIG["optimizer"])
    optimizer.allocate(parts.n_params, parts.layer_sizes)
    for _ in range(3):
        model.trainer.training_step(x, y)
        prediction, context = parts.network.forward(x)
        _, dL_dy = parts.loss.evaluate(prediction, y)
        gradients = parts.network.backward(context, dL_dy, input=False)
        params = np.array(parts.params)
        optimizer.step(params, gradients.params)
        parts.params = params
    # Adam divides by √v: where a gradient is itself only rounding, its update may differ by up to the learning rate;
    # everywhere else a few float32 roundings are left
    difference = np.abs(model.params - parts.params)
    assert np.quantile(difference, 0.99) < 1e-5 and difference.max() < 3e-2


def test_external_gradients_replace_the_loss(data):
    x, y = data
    with_loss, external = make(), make()
    prediction = external.network.inference(x)
    _, dL_dy = external.loss.evaluate(prediction, y)
    with_loss.trainer.training_step(x, y)
    external.trainer.training_step(x, None, external_gradient=dL_dy)
    # one Adam step is lr·sign of each gradient beyond rounding
    agree = np.abs(with_loss.params - external.params) < 1e-5
    assert agree.mean() > 0.99
    with pytest.raises(TypeError, match="y may be None only where external_gradient is given"):
        external.trainer.training_step(x, None)


def test_run_optimizer_false_only_measures(data):
    x, y = data
    model = make()
    before = model.params
    losses = [float(model.trainer.training_step(x, y, run_optimizer=False)) for _ in range(2)]
    assert losses[0] == losses[1] and model.trainer.step == 0
    np.testing.assert_array_equal(model.params, before)


def test_data_pdf_divides_the_loss(data):
    x, y = data
    model = make()
    plain = float(model.trainer.training_step(x, y, run_optimizer=False))
    halved = float(model.trainer.training_step(x, y, data_pdf=np.full(y.shape, 2.0), run_optimizer=False))
    assert halved == pytest.approx(plain / 2, rel=1e-6)  # float32


def test_an_empty_batch_changes_nothing(data):
    model = make()
    before = model.params
    loss = model.trainer.training_step(np.zeros((0, 2)), np.zeros((0, 3)))
    assert float(loss) == 0.0 and model.trainer.step == 0
    np.testing.assert_array_equal(model.params, before)


@pytest.mark.parametrize("n", [1, 31, 257])
def test_any_batch_size_trains(data, n):
    model = make()
    x, y = (array[:n] for array in data)
    first = float(model.trainer.training_step(x, y))
    for _ in range(30):
        last = float(model.trainer.training_step(x, y))
    assert last < 0.5 * first


def test_mismatched_arrays_are_named(data):
    x, y = data
    trainer = make().trainer
    with pytest.raises(ValueError, match="y has 499 rows, x has 500"):
        trainer.training_step(x, y[:-1])
    with pytest.raises(ValueError, match="y must have 3 columns, not 2"):
        trainer.training_step(x, y[:, :2])
    with pytest.raises(ValueError, match="data_pdf has 1 rows, x has 500"):
        trainer.training_step(x, y, data_pdf=np.ones((1, 3)))
    with pytest.raises(TypeError, match="external_gradient has dtype bool"):
        trainer.training_step(x, y, external_gradient=np.ones((500, 3), bool))


def test_a_gradient_that_is_not_finite_skips_the_step(data):
    x, y = data
    model = make()
    before = model.params
    bad = y.copy()
    bad[3, 1] = np.nan
    model.trainer.training_step(x, bad)
    assert (model.trainer.step, model.trainer.skipped_steps) == (1, 1)
    np.testing.assert_array_equal(model.params, before)
    model.trainer.training_step(x, y)
    assert model.trainer.skipped_steps == 1 and not np.array_equal(model.params, before)


def test_learning_rate(data):
    x, y = data
    model = make()
    assert model.trainer.learning_rate == model.optimizer.learning_rate == 1e-2
    model.trainer.learning_rate = 0.0
    before = model.params
    model.trainer.training_step(x, y)
    np.testing.assert_array_equal(model.params, before)
    model.optimizer.learning_rate = 0.25
    assert model.trainer.learning_rate == 0.25
    for bad in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="learning_rate: .* must be a finite number, 0 or larger"):
            model.trainer.learning_rate = bad
    with pytest.raises(ValueError, match="learning_rate: 1e\\+40 must be at most 1e\\+06"):
        model.trainer.learning_rate = 1e40
    assert model.trainer.learning_rate == 0.25


# ------------------------------------------------------------------------------------------- its loss


def test_a_loss_is_a_number_in_many_ways():
    loss = LossValue(0.12345)
    assert float(loss) == 0.12345
    assert f"{loss:.3f}" == "0.123" and str(loss) == "0.12345" and repr(loss) == "LossValue(0.12345)"
    assert np.asarray(loss) == 0.12345 and np.asarray([loss, loss], np.float32).dtype == np.float32
    assert float(copy.deepcopy(loss)) == float(pickle.loads(pickle.dumps(loss))) == 0.12345


def test_a_loss_keeps_the_value_of_its_step(data):
    model = make()
    losses = [model.trainer.training_step(*data) for _ in range(10)]
    values = [float(loss) for loss in losses]
    assert len(set(values)) == 10 and values[-1] < values[0]


# --------------------------------------------------------------------------------------- fit and predict


def test_fit_learns_and_reports_every_step(data):
    model = make()
    history = model.fit(*data, steps=200, batch_size=100)
    assert history.loss.shape == (200,) and model.trainer.step == 200
    assert history.loss[-20:].mean() < 0.1 * history.loss[:5].mean()
    assert history.seconds > 0 and "200 steps" in repr(history)


def test_fit_without_shuffling_takes_rows_in_order_and_wraps(data):
    x, y = data
    fitted, by_hand = make(), make()
    fitted.fit(x, y, steps=4, batch_size=200, shuffle=False)
    for rows in (range(200), range(200, 400), [*range(400, 500), *range(100)], range(100, 300)):
        by_hand.trainer.training_step(x[list(rows)], y[list(rows)])
    np.testing.assert_array_equal(fitted.params, by_hand.params)


def test_every_pass_sees_every_row_once():
    next_rows = fit_module.row_order(7, shuffle=True, seed=3)
    order = np.concatenate([next_rows(5), next_rows(2), next_rows(10), next_rows(4)])
    passes = order.reshape(3, 7)
    for one in passes:
        assert sorted(one) == list(range(7))
    assert len({tuple(one) for one in passes}) > 1


def test_fit_is_repeatable_and_depends_on_its_seed(data):
    runs = [make() for _ in range(3)]
    for model, seed in zip(runs, (0, 0, 1), strict=True):
        model.fit(*data, steps=3, batch_size=50, seed=seed)
    np.testing.assert_array_equal(runs[0].params, runs[1].params)
    assert not np.array_equal(runs[0].params, runs[2].params)


def test_fit_gathers_in_pieces_as_it_does_at_once(data, monkeypatch):
    once, pieces = make(), make()
    once.fit(*data, steps=7, batch_size=64)
    monkeypatch.setattr(fit_module, "ROWS_GATHERED_AT_ONCE", 130)
    pieces.fit(*data, steps=7, batch_size=64)
    np.testing.assert_array_equal(once.params, pieces.params)


def test_fit_calls_back_and_stops_when_told(data):
    seen = []

    def stop_at_third(step, loss):
        seen.append((step, float(loss)))
        return step == 2

    history = make().fit(*data, steps=10, callback=stop_at_third)
    assert [step for step, _ in seen] == [0, 1, 2]
    np.testing.assert_array_equal(history.loss, [loss for _, loss in seen])


def test_fit_shows_progress_on_request(data, capsys):
    make().fit(*data, steps=3)
    assert capsys.readouterr().err == ""
    make().fit(*data, steps=3, progress=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown and "loss" in shown


@pytest.mark.parametrize("kind", sorted(FAKES))
def test_fit_takes_arrays_of_every_kind(data, kind, monkeypatch):
    install(monkeypatch)
    x, y = data
    plain, other = make(), make()
    plain.fit(x, y, steps=3, batch_size=100)
    other.fit(FAKES[kind](x), FAKES[kind](y), steps=3, batch_size=100)
    np.testing.assert_array_equal(plain.params, other.params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": -1}, "steps: -1 must be a whole number, 0 or larger"),
        ({"steps": 2.5}, "steps: 2.5 must be a whole number"),
        ({"seed": -1}, "seed: -1 must be a whole number, 0 or larger"),
        ({"callback": 3}, "callback: 3 is no function"),
        ({"batch_size": 0}, "batch_size: 0 must be a whole number, 1 or larger"),
    ],
)
def test_fit_refuses_bad_numbers(data, arguments, message):
    with pytest.raises(ValueError, match=message):
        make().fit(*data, **arguments)


def test_fit_refuses_no_data():
    with pytest.raises(ValueError, match="x has no rows"):
        make().fit(np.zeros((0, 2)), np.zeros((0, 3)))
    assert make().fit(np.zeros((1, 2)), np.zeros((1, 3)), steps=0).loss.shape == (0,)


@pytest.mark.parametrize("batch_size", [1, 64, 499, 500, 10**6, None])
def test_predict_in_pieces_is_inference(data, batch_size):
    model = make()
    # BLAS sums in an order that depends on the number of rows: a few float32 roundings
    np.testing.assert_allclose(
        model.predict(data[0], batch_size=batch_size), model.network.inference(data[0]), rtol=1e-5, atol=1e-7
    )
    assert model.predict(np.zeros((0, 2))).shape == (0, 3)


# ------------------------------------------------------------------------------- losses and optimizers


def test_a_loss_alone():
    loss = tcnn.create_loss("l2")
    p, t = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[0.0, 2.0], [1.0, 1.0]])
    values, gradients = loss.evaluate(p, t, loss_scale=8)
    np.testing.assert_allclose(values, np.array([[1, 0], [4, 9]]) / 4)
    np.testing.assert_allclose(gradients, 8 * 2 * (p - t) / 4)
    assert values.dtype == np.float64
    assert loss.evaluate(p.astype(np.float16), t)[0].dtype == np.float32
    with pytest.raises(ValueError, match="target must have 2 columns, not 1"):
        loss.evaluate(p, t[:, :1])
    with pytest.raises(tcnn.ConfigError, match="did you mean RelativeL2"):
        tcnn.create_loss("RelativL2")


def test_an_optimizer_alone_and_its_state():
    """Two steps of Adam against the formulas of Kingma and Ba, ε added to the biased √v as tiny-cuda-nn does."""
    config = {"otype": "Adam", "learning_rate": 0.1, "l2_reg": 0.0, "epsilon": 1e-8}
    optimizer = tcnn.create_optimizer(config)
    with pytest.raises(RuntimeError, match="allocate"):
        optimizer.step(np.zeros(3, np.float32), np.zeros(3, np.float32))
    optimizer.allocate(3, [(1, 2)])
    w, gradient = np.array([1.0, -2.0, 3.0], np.float32), np.array([0.5, -0.25, 4.0], np.float32)
    expected, m, v = w.astype(np.float64), 0.0, 0.0
    for k in (1, 2):
        optimizer.step(w, 16 * gradient, loss_scale=16)
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient.astype(np.float64) ** 2
        expected -= 0.1 * np.sqrt(1 - 0.999**k) / (1 - 0.9**k) * m / (np.sqrt(v) + 1e-8)
    np.testing.assert_allclose(w, expected, rtol=1e-5)  # float32 arithmetic
    assert optimizer.inference_params is None

    twin = tcnn.create_optimizer(config)
    twin.allocate(3, [(1, 2)])
    twin.load_state_dict(optimizer.state_dict())
    other = w.copy()
    optimizer.step(w, gradient)
    twin.step(other, gradient)
    np.testing.assert_array_equal(w, other)
    with pytest.raises(ValueError, match=r"params must be a float32 NumPy array of shape \(3,\)"):
        optimizer.step(np.zeros(4, np.float32), np.zeros(4, np.float32))


def test_an_optimizer_belongs_to_one_trainer(data):
    model = make()
    with pytest.raises(RuntimeError, match="training_step"):
        model.optimizer.step(np.zeros(1, np.float32), np.zeros(1, np.float32))
    with pytest.raises(RuntimeError, match="belongs to a Trainer"):
        model.optimizer.allocate(10)
    with pytest.raises(ValueError, match="create one for each Trainer"):
        tcnn.Trainer(make().network, model.optimizer, "L2")


def test_a_trainers_optimizer_state_goes_on_in_another_model(data):
    first, second = make(), make()
    first.fit(*data, steps=5)
    second.params = first.params
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    for model in (first, second):
        model.trainer.training_step(*data)
    np.testing.assert_array_equal(first.params, second.params)


def test_losses_compare_with_numbers_and_with_each_other():
    first, second = LossValue(0.25), LossValue(0.5)
    assert first < second and second > 0.3 and first <= 0.25 and first == 0.25 and first != second
    assert min([second, first]) is first and round(LossValue(0.12345), 2) == 0.12
    assert first < np.float32(0.3) and (first == "0.25") is False
    with pytest.raises(TypeError):
        first < "0.3"  # noqa: B015
