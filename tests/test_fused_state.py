"""What a fused model keeps, on the emulated driver: parameters, optimizer state, memory; and how calls of several
threads and streams go together.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
from emulated_driver import CUresult, EmulatedDriver
from emulated_models import CONFIG, IDENTITY, assert_same_training, batch, make, predict, reference_of, step

from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused import to_device
from numba_tcnn.fused.driver import CudaError

# ---------------------------------------------------------------------------------------- state, memory


def test_parameters_can_be_set(gpu: EmulatedDriver, no_reference: None) -> None:
    """The float16 copy that kernels read follows the float32 master."""
    model = make()
    values = np.random.default_rng(0).normal(size=model.n_params).astype(np.float32)
    model.params = values
    np.testing.assert_array_equal(model.params, values)
    x, _ = batch(50)
    expected = predict(reference_of(model), x)
    assert np.abs(model.predict(x) - expected).max() <= 1e-3 * np.abs(expected).max()


def test_moving_to_the_reference_and_back(gpu: EmulatedDriver) -> None:
    """Parameters, moments, counts, step and learning rate go along, both ways, exactly."""
    model = make(engine="auto")
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    for fused in (True, False, True, False):
        before = model.params, model.network.engine.runtime.optimizer_state()
        model.jit_fusion = fused
        state = model.network.engine.runtime.optimizer_state()
        np.testing.assert_array_equal(model.params, before[0])
        assert state.keys() == before[1].keys()
        for name, value in before[1].items():
            np.testing.assert_array_equal(state[name], value)
        for _ in range(2):
            model.trainer.training_step(x, y)
            step(twin, x, y)
    assert_same_training(model, twin, start)


def test_optimizer_state_of_a_wrong_size_is_refused(gpu: EmulatedDriver) -> None:
    runtime = make().network.engine.runtime
    state = runtime.optimizer_state()
    with pytest.raises(ValueError, match=r"first_moments has shape \(3,\)"):
        runtime.load_optimizer_state(state | {"first_moments": np.zeros(3, np.float32)})


def test_deep_copies_go_their_own_way(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    x, y = batch(70)
    model.trainer.training_step(x, y)
    twin = copy.deepcopy(model)
    assert twin.explain().engine == "fused" and twin.trainer.step == 1
    before = model.params
    first = float(twin.trainer.training_step(x, y))
    np.testing.assert_array_equal(model.params, before)
    assert float(model.trainer.training_step(x, y)) == first
    np.testing.assert_array_equal(model.params, twin.params)


def test_everything_is_freed(gpu: EmulatedDriver) -> None:
    """close() gives all memory back, and a loss that somebody holds keeps its value."""
    model = make()
    x, y = batch(300)
    loss = model.trainer.training_step(x, y)
    model.trainer.training_step(x, y, external_gradient=y)
    _, context = model.network.forward(x)
    model.network.backward(context, y)
    assert gpu.memory.n_allocations > 8
    runtime = model.network.engine.runtime
    runtime.close()
    assert gpu.memory.n_allocations == 0
    assert float(loss) > 0


def test_a_state_that_does_not_fit_changes_nothing(gpu: EmulatedDriver, no_reference: None) -> None:
    """The first of its arrays would fit."""
    model = make(IDENTITY)
    model.trainer.training_step(*batch(20))
    state = model.optimizer.state_dict()
    other = {name: np.ones_like(value) for name, value in state.items()}
    for broken, message in (
        ({}, "optimizer state holds ; Adam needs first_moments, learning_rate, param_steps"),
        (other | {"averages": 1}, "holds .*, averages; Adam needs"),
        (other | {"param_steps": np.ones(3)}, r"param_steps has shape \(3,\), the model needs \(\d+,\)"),
        (other | {"step": "third"}, "invalid literal"),
    ):
        with pytest.raises(ValueError, match=message):
            model.optimizer.load_state_dict(broken)
        for name, value in model.optimizer.state_dict().items():
            np.testing.assert_array_equal(value, state[name])


def test_threads_share_a_model(gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, no_reference: None) -> None:
    """A second thread calls between the moment when a kernel's arguments are set and its launch."""
    second, launch = threading.Thread(), gpu.cuLaunchKernel
    interrupting = False

    def interrupted_launch(*arguments: Any) -> tuple:
        if interrupting and second.ident is None:
            second.start()
            second.join(timeout=0.5)  # it waits its turn
        return launch(*arguments)

    monkeypatch.setattr(gpu, "cuLaunchKernel", interrupted_launch)
    model = make()
    inputs = [batch(size, seed=size)[0] for size in (20, 30)]
    expected, given = [model.network.inference(x) for x in inputs], {}
    second = threading.Thread(target=lambda: given.update({1: model.network.inference(inputs[1])}))
    interrupting = True
    given[0] = model.network.inference(inputs[0])
    second.join(timeout=60)
    for i in range(2):
        np.testing.assert_array_equal(given[i], expected[i])


def test_out_of_memory_leaves_the_model_usable(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    gpu.memory_limit = gpu.memory.allocated + (1 << 20)
    large = batch(400_000)
    for attempt in range(2):
        with pytest.raises(MemoryError, match=r"allocating \d+\.\d MiB on device 0: CUDA_ERROR_OUT_OF_MEMORY"):
            model.trainer.training_step(*large)
        with pytest.raises(MemoryError, match="MiB"):
            model.network.inference(large[0])
        assert model.explain().engine == "fused"
        assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
        assert model.trainer.step == attempt + 1
    assert_same_training(model, twin, start)
    with pytest.raises(MemoryError, match="MiB"):
        make(CONFIG | {"encoding": {"otype": "HashGrid", "log2_hashmap_size": 16}})


def test_a_gradient_that_could_not_be_collected_is_forgotten(gpu: EmulatedDriver, no_reference: None) -> None:
    """Memory for dL/dparams is missing when the gradient kernel has already added to the table's gradient."""
    model = make(CONFIG | {"encoding": {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 10}})
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    _, context = model.network.forward(x)
    model.network.backward(context, y, parameters="ignore")  # the other buffers are there
    model.network.backward(context, y, input=False)  # and the kernel with a table gradient
    workspace = model.network.engine.runtime.model.workspace
    workspace._buffers.pop("output gradients").free()
    gpu.memory_limit = gpu.memory.allocated
    n_launches = len(gpu.launches)
    with pytest.raises(MemoryError, match="MiB"):
        model.network.backward(context, y, input=False)
    assert [name for name, _, _ in gpu.launches[n_launches:]][-1] == "gradient"
    model.trainer.training_step(x, y)
    step(twin, x, y)
    assert_same_training(model, twin, start)


def test_a_kernel_of_which_no_block_fits_is_refused(gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "cuOccupancyMaxActiveBlocksPerMultiprocessor", lambda *of: (CUresult.CUDA_SUCCESS, 0))
    with pytest.raises(EngineUnavailable, match="kernel inference does not fit a multiprocessor"):
        make().network.inference(batch(20)[0])


def test_a_failed_launch_names_the_kernel(gpu: EmulatedDriver) -> None:
    model = make()
    x, y = batch(20)
    gpu.failing["cuLaunchKernel"] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(CudaError, match="launching kernel gradient: CUDA_ERROR_LAUNCH_FAILED: launch failed"):
        model.trainer.training_step(x, y)


# ---------------------------------------------------------------------------------------------- streams


def test_streams(gpu: EmulatedDriver, no_reference: None) -> None:
    """Work on three streams in turn equals that on one: nothing is read before it is written, although here every
    stream stands still until somebody waits for it. (Whatever frees memory waits for all: nothing may be freed.)"""
    batches = [[to_device(a) for a in batch(70, seed)] for seed in range(6)]
    x = batches[0][0]
    results = []
    for streams in ((0,), (7, 9, 0)):
        model = make()
        outs = [to_device(np.empty((70, 3), np.float32)) for _ in batches]
        losses = []
        for i, given in enumerate(batches):
            losses.append(model.trainer.training_step(*given, stream=streams[i % len(streams)]))
            model.network.inference(x, out=outs[i], stream=streams[(i + 1) % len(streams)])
        assert gpu._queues[streams[0]], "somebody has waited"
        gpu.run_everything()
        results.append([*map(float, losses), *(out.numpy() for out in outs), model.params])
    assert {stream for _, _, stream in gpu.launches} == {0, 7, 9}
    for one, several in zip(*results, strict=True):
        np.testing.assert_array_equal(one, several)


def test_an_arrays_own_stream_is_waited_for(gpu: EmulatedDriver, no_reference: None) -> None:
    """The input is written on stream 5 by somebody else; the model works on stream 3."""
    model = make()
    x, _ = batch(70)
    expected = model.network.inference(x)
    memory = to_device(np.full_like(x, np.nan))
    gpu.cuMemcpyHtoDAsync(memory.__cuda_array_interface__["data"][0], x.ctypes.data, x.nbytes, 5)

    class OnStream:
        __cuda_array_interface__ = memory.__cuda_array_interface__ | {"stream": 5}

    out = np.empty_like(expected)
    model.network.inference(OnStream(), out=out, stream=3)
    np.testing.assert_array_equal(out, expected)
