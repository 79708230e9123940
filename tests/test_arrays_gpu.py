"""Arrays of real libraries on a real device, in and out of fused kernels; each library is skipped where missing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import numba_tcnn as tcnn
import numba_tcnn.fused

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("no_reference")]

CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
    "encoding": {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 10, "base_resolution": 8},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 2},
}


@dataclass(frozen=True)
class Library:
    """How a user of the library makes a device array, reads it, and knows one."""

    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]
    array_type: type
    writable: bool = True


def cupy() -> Library:
    module = pytest.importorskip("cupy")
    return Library(module.asarray, module.asnumpy, module.ndarray)


def torch() -> Library:
    module = pytest.importorskip("torch")
    return Library(lambda values: module.from_numpy(values).cuda(), lambda x: x.cpu().numpy(), module.Tensor)


def jax() -> Library:
    module = pytest.importorskip("jax")
    if module.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    return Library(module.device_put, np.asarray, module.Array, writable=False)


def numba() -> Library:
    module = importlib.import_module("numba.cuda")
    return Library(
        module.to_device,
        lambda x: x.copy_to_host(),
        importlib.import_module("numba.cuda.cudadrv.devicearray").DeviceNDArray,
    )


def fused() -> Library:
    return Library(numba_tcnn.fused.to_device, lambda x: x.numpy(), numba_tcnn.fused.DeviceArray)


@pytest.fixture(params=[cupy, torch, jax, numba, fused], ids=lambda make: make.__name__)
def library(request: pytest.FixtureRequest) -> Library:
    return request.param()


@pytest.fixture
def model() -> tcnn.Model:
    model = tcnn.create_from_config(2, 3, CONFIG, strict=True)
    assert model.explain().engine == "fused"
    return model


@pytest.fixture
def data(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    return rng.random((1000, 2), np.float32), rng.random((1000, 3), np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_inference_gives_the_same_as_from_numpy(library, model, data, dtype):
    x, _ = data
    x = x.astype(dtype)
    y = model.network.inference(library.to_device(x))
    assert isinstance(y, library.array_type)
    # the same kernel on the same numbers, whoever owns the memory
    np.testing.assert_array_equal(library.to_host(y), model.network.inference(x))


@pytest.mark.parametrize("n", [0, 1, 31, 257])
def test_ragged_batches(library, model, data, n):
    x = data[0][:n]
    y = library.to_host(model.network.inference(library.to_device(x)))
    assert y.shape == (n, 3)
    np.testing.assert_array_equal(y, model.network.inference(x))


def test_out_is_written_in_place(library, model, data):
    x, _ = data
    out = library.to_device(np.zeros((1000, 3), np.float32))
    if not library.writable:
        with pytest.raises(TypeError, match="can't be written"):
            model.network.inference(library.to_device(x), out=out)
        return
    assert model.network.inference(library.to_device(x), out=out) is out
    np.testing.assert_array_equal(library.to_host(out), model.network.inference(x))


def test_gradients_stay_on_the_device(library, model, data):
    x, dL_dy = data
    _, context = model.network.forward(library.to_device(x))
    gradients = model.network.backward(context, library.to_device(dL_dy))
    _, host_context = model.network.forward(x)
    expected = model.network.backward(host_context, dL_dy)
    assert isinstance(gradients.input, library.array_type) and isinstance(gradients.params, library.array_type)
    np.testing.assert_array_equal(library.to_host(gradients.input), expected.input)
    # table gradients are summed by atomics, in any order: float32 rounding of sums of up to 1000 terms
    scale = np.abs(expected.params).max()
    np.testing.assert_allclose(library.to_host(gradients.params), expected.params, rtol=1e-4, atol=1e-5 * scale)


def test_training_learns_from_device_arrays(library, model, data):
    x, y = (library.to_device(array) for array in data)
    losses = [model.trainer.training_step(x, y) for _ in range(200)]
    assert float(losses[-1]) < 0.8 * float(losses[0])
    history = model.fit(x, y, steps=50, batch_size=300)
    assert np.isfinite(history.loss).all() and model.trainer.step == 250


def test_other_dtypes_are_converted_on_the_way(library, model, data):
    x, _ = data
    try:
        given = library.to_device(x.astype(np.float64))
    except TypeError:
        pytest.skip("this library has no float64 here")
    # JAX makes float32 of it by itself
    y = library.to_host(model.network.inference(given))
    np.testing.assert_array_equal(y, model.network.inference(x))


def test_strided_arrays_are_copied(model, data):
    x, _ = data
    wide = np.concatenate([x, x], axis=1)
    for make in (cupy, torch):
        try:
            library = make()
        except pytest.skip.Exception:
            continue
        y = model.network.inference(library.to_device(wide)[:, 1:3])
        np.testing.assert_array_equal(library.to_host(y), model.network.inference(wide[:, 1:3]))


def test_work_of_another_stream_is_waited_for(model, data):
    """x is filled on a side stream just before the call; the result must be that of the filled x."""
    torch_module = pytest.importorskip("torch")
    x, _ = data
    big = np.tile(x, (1000, 1))
    expected = model.network.inference(big)
    source = torch_module.from_numpy(big).cuda()
    torch_module.cuda.synchronize()
    side = torch_module.cuda.Stream()
    with torch_module.cuda.stream(side):
        busy = torch_module.randn(4000, 4000, device="cuda")
        for _ in range(20):
            busy = busy @ busy
        late = source.clone()
        y = model.network.inference(late)
        result = y.cpu().numpy()
    np.testing.assert_array_equal(result, expected)


def test_prepared_inference_follows_its_buffer(library, model, data):
    if not library.writable:
        pytest.skip("JAX arrays can't be written")
    x, _ = data
    inputs, out = library.to_device(x), library.to_device(np.zeros((1000, 3), np.float32))
    prepared = model.network.prepare(inputs, out)
    assert prepared() is out
    np.testing.assert_array_equal(library.to_host(out), model.network.inference(x))
