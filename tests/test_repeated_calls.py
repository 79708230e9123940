"""Calls that are repeated between the same device arrays, on the emulated driver: the first is as any other, the second
is recorded, the rest are only launched."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from emulated_driver import CUresult, EmulatedDriver

import numba_tcnn as tcnn
from numba_tcnn.fused import engine, level_plan, pending_losses, to_device
from numba_tcnn.fused.driver import CudaError
from numba_tcnn.fused.recorded_calls import RecordedInference, RecordedStep
from numba_tcnn.repeated_calls import MAX_ATTEMPTS, MAX_PAIRS, RepeatedCalls

pytestmark = pytest.mark.usefixtures("gpu")

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
    "Composite": {
        "otype": "Composite",
        "nested": [
            {"otype": "Shampoo", "n_params_to_optimize": 512},
            {"otype": "Average", "n_samples": 2, "n_params_to_optimize": 240, "nested": BATCHED},
        ],
    },
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which calls were recorded and which were repeated from their recording, in order: "repeat step" and the like."""
    made: list[str] = []
    for owner, method, name in (
        (engine.FusedRuntime, "record_step", "record step"),
        (engine.FusedRuntime, "record_inference", "record inference"),
        (RecordedStep, "repeat", "repeat step"),
        (RecordedInference, "repeat", "repeat inference"),
    ):
        real = getattr(owner, method)

        def call(self, *arguments, real=real, name=name):
            result = real(self, *arguments)
            if result is not None and result is not False:  # else a recording that holds no longer
                made.append(name)
            return result

        monkeypatch.setattr(owner, method, call)
    return made


def make(**changes: Any) -> tcnn.Model:
    return tcnn.create_from_config(2, 3, CONFIG | changes, strict=True)


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


SHORT = (("Adam", False), ("Adam", True), ("Batched", False))


def marks(name: str, split: bool) -> list[pytest.MarkDecorator]:
    return [] if (name, split) in SHORT else [pytest.mark.exhaustive]


@pytest.mark.parametrize(
    ("name", "split"),
    [pytest.param(name, split, marks=marks(name, split)) for split in (False, True) for name in OPTIMIZERS],
)
def test_steps_go_as_without_recording(name: str, split: bool, calls, monkeypatch, no_reference: None) -> None:
    """Bit for bit: losses, parameters, state; with a learning rate that changes and a step that is skipped."""
    monkeypatch.setattr(level_plan, "LEVEL_SPLIT_BATCH", 1 if split else 1 << 30)
    fast, plain = make(optimizer=OPTIMIZERS[name]), make(optimizer=OPTIMIZERS[name])
    on_host = batches(2)
    on_device = [(to_device(x), to_device(y)) for x, y in on_host]
    for i in range(8):
        if i == 4:
            fast.trainer.learning_rate = plain.trainer.learning_rate = 3e-3
        losses = fast.trainer.training_step(*on_device[i % 2]), plain.trainer.training_step(*on_host[i % 2])
        assert float(losses[0]) == float(losses[1])
    assert calls == ["record step"] * 2 + ["repeat step"] * 4
    np.testing.assert_array_equal(fast.params, plain.params)
    assert fast.trainer.step == plain.trainer.step == 8
    assert_same(fast.optimizer.state_dict(), plain.optimizer.state_dict())
    x, _ = on_host[0]
    out = to_device(np.full((40, 3), np.nan, np.float32))
    for _ in range(3):
        fast.network.inference(on_device[0][0], out=out)
        np.testing.assert_array_equal(out.numpy(), plain.network.inference(x))
    assert calls[6:] == ["record inference", "repeat inference"]


def test_a_step_that_is_skipped(calls, no_reference: None) -> None:
    model, ((x, y),) = make(), batches(1)
    y[3, 1] = np.inf
    x, y = to_device(x), to_device(y)
    before = model.params
    for _ in range(4):
        model.trainer.training_step(x, y)
    assert calls == ["record step", *["repeat step"] * 2] and model.trainer.skipped_steps == 4
    np.testing.assert_array_equal(model.params, before)


def test_what_moves_is_recorded_again(calls, no_reference: None) -> None:
    """A larger batch moves the workspace: recorded anew at once. max_level changes kernels: arrays count as new."""
    model, ((x, y),), ((large, targets),) = make(), batches(1), batches(1, 3000)
    x, y, large, targets = (to_device(a) for a in (x, y, large, targets))
    twin = make()

    def step() -> None:
        assert float(model.trainer.training_step(x, y)) == float(twin.trainer.training_step(x.numpy(), y.numpy()))

    for _ in range(3):
        step()
    assert calls == ["record step", "repeat step"]
    calls.clear()
    model.trainer.training_step(large, targets), twin.trainer.training_step(large.numpy(), targets.numpy())
    step()
    step()
    assert calls == ["record step", "repeat step"]
    calls.clear()
    model.network.max_level = twin.network.max_level = 0.5
    for _ in range(3):
        step()
    assert calls == ["record step", "repeat step"]


def test_a_configuration_of_its_own_for_each_step_records_nothing(calls, no_reference: None) -> None:
    model, ((x, y),) = make(), batches(1)
    x, y = to_device(x), to_device(y)
    for level in (0.3, 0.4, 0.5, 0.6):
        model.network.max_level = level
        model.trainer.training_step(x, y)
    assert calls == []


def test_new_arrays_record_nothing(calls, no_reference: None) -> None:
    """Nor are they mistaken for gone ones, whose ids they may have got."""
    model = make()
    out = to_device(np.zeros((40, 3), np.float32))
    for x, y in batches(5):
        given = to_device(x), to_device(y)
        model.trainer.training_step(*given)
        model.network.inference(given[0], out=out)
        del given
        gc.collect()
    assert calls == []


def test_incomplete_recordings_are_given_up(calls, no_reference: None) -> None:
    """ConstantGradient clears a word in each step. Another configuration gets its chance."""
    model = make(loss={"otype": "ConstantGradient", "gradient": [1.0, -2.0, 0.5]})
    ((x, y),) = batches(1)
    x, y = to_device(x), to_device(y)
    for _ in range(MAX_ATTEMPTS + 3):
        model.trainer.training_step(x, y)
    assert calls == ["record step"] * MAX_ATTEMPTS
    model.network.max_level = 0.5
    for _ in range(MAX_ATTEMPTS + 3):
        model.trainer.training_step(x, y)
    assert calls == ["record step"] * 2 * MAX_ATTEMPTS


def test_one_incomplete_recording_is_no_reason_to_give_up(calls, monkeypatch, no_reference: None) -> None:
    """The second step needs the place of the first one's loss, and fetches it."""
    monkeypatch.setattr(pending_losses, "PAGE_SLOTS", 1)
    monkeypatch.setattr(pending_losses, "N_PAGES", 1)
    model, ((x, y),) = make(), batches(1)
    x, y = to_device(x), to_device(y)
    waiting = model.trainer.training_step(x, y)
    for _ in range(3):
        model.trainer.training_step(x, y)
    assert calls == ["record step", "record step", "repeat step"]
    twin = make()
    assert float(waiting) == float(twin.trainer.training_step(x.numpy(), y.numpy()))


def test_a_copy_records_for_itself(calls, no_reference: None) -> None:
    model, ((x, y),) = make(), batches(1)
    x, y = to_device(x), to_device(y)
    for _ in range(2):
        model.trainer.training_step(x, y)
    twin = copy.deepcopy(model)
    before = model.params
    twin.trainer.training_step(x, y)
    assert calls == ["record step"]
    np.testing.assert_array_equal(model.params, before)
    model.trainer.training_step(x, y)
    assert calls == ["record step", "repeat step"]
    np.testing.assert_array_equal(model.params, twin.params)


def test_a_move_to_the_reference_ends_it(calls) -> None:
    model, ((x, y),) = tcnn.create_from_config(2, 3, CONFIG), batches(1)
    x, y = to_device(x), to_device(y)
    out = to_device(np.zeros((40, 3), np.float32))
    for _ in range(3):
        model.trainer.training_step(x, y)
        model.network.inference(x, out=out)
    made = ["record step", "record inference", "repeat step", "repeat inference"]
    assert calls == made
    step, inference = model.trainer._repeated.find(x, y), model.network._repeated.find(x, out)
    model.jit_fusion = False
    assert model.network.engine.repeat_step(step) is None and not model.network.engine.repeat_inference(inference)
    assert calls == made and model.trainer.step == 3
    assert model.network.engine.configuration is None


def test_contexts_see_that_parameters_have_changed(calls, no_reference: None) -> None:
    model, ((x, y),) = make(), batches(1)
    on_device = to_device(x), to_device(y)
    for _ in range(2):
        model.trainer.training_step(*on_device)
    _, context = model.network.forward(x)
    model.trainer.training_step(*on_device)
    assert calls == ["record step", "repeat step"]
    with pytest.raises(RuntimeError, match="parameters"):
        model.network.backward(context, y)


def test_a_repeated_step_is_one_native_call(gpu: EmulatedDriver, no_reference: None) -> None:
    """And makes the context current, in whatever thread it is."""
    model, ((x, y),) = make(), batches(1)
    x, y = to_device(x), to_device(y)
    losses = [model.trainer.training_step(x, y) for _ in range(2)]
    assert gpu.native_calls == []
    thread = threading.Thread(target=lambda: losses.append(model.trainer.training_step(x, y)))
    thread.start()
    thread.join()
    assert gpu.native_calls == ["cuCtxSetCurrent", "cuLaunchKernelEx", "cuLaunchKernelEx"]
    assert [name for name, _, _ in gpu.launches] == ["gradient", "adam"] * 3
    assert float(losses[2]) < float(losses[0])


def test_without_addresses_of_the_driver_launches_go_through_its_bindings(
    gpu: EmulatedDriver, calls, monkeypatch, no_reference: None
) -> None:
    monkeypatch.delattr(EmulatedDriver, "cuGetProcAddress")
    model, twin, ((x, y),) = make(), make(), batches(1)
    given = to_device(x), to_device(y)
    for _ in range(4):
        assert float(model.trainer.training_step(*given)) == float(twin.trainer.training_step(x, y))
    assert calls == ["record step", "repeat step", "repeat step"] and gpu.native_calls == []


@pytest.mark.parametrize("name", ["Adam", "Batched"])
def test_a_repeated_step_of_which_a_launch_fails(
    name: str, gpu: EmulatedDriver, calls, monkeypatch, no_reference: None
):
    """The gradient's kernel has run, the optimizer's has not: as without recording, what the first added to the table's
    gradient is cleared, the step counts, and the next ones are right."""
    fast, plain, ((x, y),) = make(optimizer=OPTIMIZERS[name]), make(optimizer=OPTIMIZERS[name]), batches(1)
    given, launch, failing = (to_device(x), to_device(y)), gpu.cuLaunchKernel, False

    def failing_launch(function: Any, *arguments: Any) -> tuple:
        if failing and function.body is not None and function.body.name != "gradient":
            return (CUresult.CUDA_ERROR_LAUNCH_FAILED,)
        return launch(function, *arguments)

    monkeypatch.setattr(gpu, "cuLaunchKernel", failing_launch)
    for i in range(6):
        failing = i == 3
        if failing:
            for model, arrays in ((fast, given), (plain, (x, y))):
                with pytest.raises(CudaError, match=r"launching kernel \w+: CUDA_ERROR_LAUNCH_FAILED"):
                    model.trainer.training_step(*arrays)
        else:
            assert float(fast.trainer.training_step(*given)) == float(plain.trainer.training_step(x, y))
    assert calls[:2] == ["record step", "repeat step"] and calls[-2:] == ["repeat step"] * 2
    assert fast.trainer.step == plain.trainer.step
    np.testing.assert_array_equal(fast.params, plain.params)
    assert_same(fast.optimizer.state_dict(), plain.optimizer.state_dict())


def test_repeated_calls_wait_for_streams_of_the_users(gpu: EmulatedDriver, calls, no_reference: None) -> None:
    """Which stand still here until somebody waits for them."""
    model, twin, data = make(), make(), batches(2)
    (x, y), (other_x, other_y) = ((to_device(a), to_device(b)) for a, b in data)
    out = to_device(np.full((40, 3), np.nan, np.float32))
    for _ in range(2):
        model.trainer.training_step(x, y)
        model.network.inference(x, out=out)
        twin.trainer.training_step(*data[0])
    for _ in range(2):
        model.trainer.training_step(other_x, other_y, stream=5)
        twin.trainer.training_step(*data[1])
        assert float(model.trainer.training_step(x, y)) == float(twin.trainer.training_step(*data[0]))
        model.trainer.training_step(other_x, other_y, stream=6)
        twin.trainer.training_step(*data[1])
        model.network.inference(x, out=out)
        np.testing.assert_array_equal(out.numpy(), twin.network.inference(data[0][0]))
    assert calls[2:] == ["repeat step", "repeat inference"] * 2
    np.testing.assert_array_equal(model.params, twin.params)


def test_inference_follows_the_parameters_that_are_kept_for_it(calls, no_reference: None) -> None:
    """Setting parameters ends averages until the next step; nothing else tells a recording of it."""
    model, ((x, y),) = make(optimizer=OPTIMIZERS["EMA"]), batches(1)
    on_device, out = (to_device(x), to_device(y)), to_device(np.full((40, 3), np.nan, np.float32))

    def check() -> None:
        model.network.inference(on_device[0], out=out)
        np.testing.assert_array_equal(out.numpy(), model.network.inference(x))

    for _ in range(3):
        model.trainer.training_step(*on_device)
        check()
    assert calls[-1] == "repeat inference"
    calls.clear()
    model.params = model.params * 2
    check()
    assert calls == ["record inference"]
    model.trainer.training_step(*on_device)
    check()
    assert calls == ["record inference", "repeat step", "record inference"]


class Array:
    pass


def test_only_the_pairs_that_came_last_are_kept() -> None:
    arrays, calls = [Array() for _ in range(MAX_PAIRS + 2)], RepeatedCalls()
    for a in arrays:
        assert [calls.should_record(a, a, 7), calls.should_record(a, a, 7)] == [False, True]
        calls.keep(a, a, print)
        assert calls.find(arrays[0], arrays[0]) is print  # it comes again and again
    kept = [arrays[0], *arrays[3:]]
    assert [a for a in arrays if calls.find(a, a) is print] == kept
    assert copy.deepcopy(calls).find(arrays[0], arrays[0]) is None


def test_pairs_that_came_again_long_ago_make_room() -> None:
    arrays, calls = [Array() for _ in range(3 * MAX_PAIRS)], RepeatedCalls()
    for a in arrays:
        calls.should_record(a, a, 7)
        calls.keep(a, a, print)
        assert calls.find(a, a) is print
    assert [a for a in arrays if calls.find(a, a) is print] == arrays[-MAX_PAIRS:]


def test_who_goes_round_more_pairs_than_are_kept_records_nothing() -> None:
    arrays, calls = [Array() for _ in range(MAX_PAIRS + 1)], RepeatedCalls()
    assert not any(calls.should_record(a, a, 7) for _ in range(3) for a in arrays)


def test_nothing_is_recorded_without_a_configuration() -> None:
    a, calls = Array(), RepeatedCalls()
    assert not any(calls.should_record(a, a, None) for _ in range(3))


def test_arrays_are_not_kept_alive() -> None:
    a, calls = Array(), RepeatedCalls()
    for _ in range(2):
        calls.should_record(a, a, 7)
    calls.keep(a, a, print)
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None
