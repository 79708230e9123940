"""Calls that are repeated between the same device arrays, on the emulated driver: recorded once, then only launched."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest
from emulated_driver import EmulatedDriver, installed

import numba_tcnn as tcnn
from numba_tcnn.fused import engine, to_device
from numba_tcnn.repeated_calls import MAX_PAIRS, RepeatedCalls

CONFIG = {
    "encoding": {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 3},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
}
BATCHED = {"otype": "Batched", "batch_size_multiplier": 2, "nested": CONFIG["optimizer"]}
OPTIMIZERS = {
    "Adam": CONFIG["optimizer"],
    "EMA": {"otype": "EMA", "decay": 0.9, "nested": CONFIG["optimizer"]},
    "Lookahead": {"otype": "Lookahead", "n_steps": 3, "nested": CONFIG["optimizer"]},
    "Batched": BATCHED,
    "ExponentialDecay": {"otype": "ExponentialDecay", "decay_start": 2, "decay_interval": 1, "nested": BATCHED},
    "Novograd": {"otype": "Novograd", "learning_rate": 1e-2},
}


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    with installed(EmulatedDriver(), monkeypatch) as emulated:
        yield emulated


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """ "step" or "inference" for each call that was repeated from its recording."""
    made: list[str] = []
    for name in ("step", "inference"):
        real = getattr(engine.FusedRuntime, f"repeat_{name}")

        def repeat(self, recorded, real=real, name=name):
            made.append(name)
            return real(self, recorded)

        monkeypatch.setattr(engine.FusedRuntime, f"repeat_{name}", repeat)
    return made


def make(**changes: Any) -> tcnn.Model:
    """A model that has made a step: the first one clears memory, and is not recorded."""
    model = tcnn.create_from_config(2, 3, CONFIG | changes, strict=True)
    x, y = np.random.default_rng(8).random((2, 40, 3), np.float32)
    model.trainer.training_step(x[:, :2], y)
    return model


def batches(n: int, size: int = 40) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [(rng.random((size, 2), np.float32), rng.random((size, 3), np.float32)) for _ in range(n)]


def assert_same(state: dict[str, Any], other: dict[str, Any]) -> None:
    assert set(state) == set(other)
    for key, value in state.items():
        if isinstance(value, dict):
            assert_same(value, other[key])
        else:
            np.testing.assert_array_equal(value, other[key])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("split", [False, True], ids=["single", "split"])
def test_steps_go_as_without_recording(name: str, split: bool, calls, monkeypatch, no_reference: None) -> None:
    """Bit for bit: losses, parameters, state; with a learning rate that changes and a step that is skipped."""
    monkeypatch.setattr(engine, "LEVEL_SPLIT_BATCH", 1 if split else 1 << 30)
    fast, plain = make(optimizer=OPTIMIZERS[name]), make(optimizer=OPTIMIZERS[name])
    on_host = batches(2)
    on_device = [(to_device(x), to_device(y)) for x, y in on_host]
    for i in range(8):
        if i == 4:
            fast.trainer.learning_rate = plain.trainer.learning_rate = 3e-3
        losses = fast.trainer.training_step(*on_device[i % 2]), plain.trainer.training_step(*on_host[i % 2])
        assert float(losses[0]) == float(losses[1])
    assert calls == ["step"] * 6
    np.testing.assert_array_equal(fast.params, plain.params)
    assert fast.trainer.step == plain.trainer.step == 9
    assert_same(fast.optimizer.state_dict(), plain.optimizer.state_dict())
    x, _ = on_host[0]
    out = to_device(np.full((40, 3), np.nan, np.float32))
    for _ in range(2):
        fast.network.inference(on_device[0][0], out=out)
        np.testing.assert_array_equal(out.numpy(), plain.network.inference(x))
    assert calls[6:] == ["inference"]


def test_a_step_that_is_skipped(calls, no_reference: None) -> None:
    model, ((x, y),) = make(), batches(1)
    y[3, 1] = np.inf
    x, y = to_device(x), to_device(y)
    before = model.params
    for _ in range(3):
        model.trainer.training_step(x, y)
    assert calls == ["step"] * 2 and model.trainer.skipped_steps == 3
    np.testing.assert_array_equal(model.params, before)


def test_what_moves_is_recorded_again(calls, no_reference: None) -> None:
    """A larger batch moves the workspace; new training and max_level change kernels; parameters of inference move."""
    model, ((x, y),), ((large, targets),) = make(), batches(1), batches(1, 3000)
    x, y, large, targets = (to_device(a) for a in (x, y, large, targets))
    twin = make()

    def step() -> None:
        assert float(model.trainer.training_step(x, y)) == float(twin.trainer.training_step(x.numpy(), y.numpy()))

    step()
    step()
    assert calls == ["step"]
    model.trainer.training_step(large, targets), twin.trainer.training_step(large.numpy(), targets.numpy())
    step()
    assert calls == ["step"]
    step()
    assert calls == ["step"] * 2
    model.network.max_level = twin.network.max_level = 0.5
    step()
    assert calls == ["step"] * 2


def test_gone_arrays_are_not_mistaken_for_new_ones(calls, no_reference: None) -> None:
    model = make()
    for x, y in batches(5):
        given = to_device(x), to_device(y)
        model.trainer.training_step(*given)
        del given
        gc.collect()
    assert calls == []


def test_a_copy_records_for_itself(calls, no_reference: None) -> None:
    model, ((x, y),) = make(), batches(1)
    x, y = to_device(x), to_device(y)
    model.trainer.training_step(x, y)
    twin = copy.deepcopy(model)
    before = model.params
    twin.trainer.training_step(x, y)
    assert calls == []
    np.testing.assert_array_equal(model.params, before)
    model.trainer.training_step(x, y)
    assert calls == ["step"]
    np.testing.assert_array_equal(model.params, twin.params)


def test_a_move_to_the_reference_ends_it(calls) -> None:
    model, ((x, y),) = tcnn.create_from_config(2, 3, CONFIG), batches(1)
    model.trainer.training_step(x, y)
    x, y = to_device(x), to_device(y)
    out = to_device(np.zeros((40, 3), np.float32))
    for _ in range(2):
        model.trainer.training_step(x, y)
        model.network.inference(x, out=out)
    assert calls == ["step", "inference"]
    step, inference = model.trainer._repeated.find(x, y), model.network._repeated.find(x, out)
    model.jit_fusion = False
    for call in (step, inference):
        assert model.network.engine.repeat(call, is_step=False) == (False, None)
    assert calls == ["step", "inference"] and model.trainer.step == 3


def test_contexts_see_that_parameters_have_changed(calls, no_reference: None) -> None:
    model, ((x, y),) = make(), batches(1)
    on_device = to_device(x), to_device(y)
    model.trainer.training_step(*on_device)
    _, context = model.network.forward(x)
    model.trainer.training_step(*on_device)
    assert calls == ["step"]
    with pytest.raises(RuntimeError, match="parameters"):
        model.network.backward(context, y)


def test_only_the_last_pairs_are_kept() -> None:
    class Array:
        pass

    arrays, calls = [Array() for _ in range(MAX_PAIRS + 2)], RepeatedCalls()
    for a in arrays:
        calls.keep(a, a, print)
    assert [calls.find(a, a) for a in arrays] == [None, None] + [print] * MAX_PAIRS
    assert copy.deepcopy(calls).find(arrays[-1], arrays[-1]) is None
