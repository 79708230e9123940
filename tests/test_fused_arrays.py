"""Arrays of any layout and size in the fused engine, streams that are gone, 64-bit addresses; and what a training step
does with the losses and levels of detail that are not everyday's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated_driver import CUresult, EmulatedDriver
from emulated_models import CONFIG, GRADIENT, assert_same_training, batch, make, predict, reference_of, step
from emulation import emulator_target, run_kernel
from golden_case import relative_error

import numba_tcnn as tcnn
from numba_tcnn.config import parse_loss, parse_optimizer
from numba_tcnn.fused import (
    gradient_programs,
    gradient_scale_kernels,
    level_plan,
    network_plans,
    strided_to_host,
    to_device,
)
from numba_tcnn.fused.driver import CudaError
from numba_tcnn.fused.emulated_memory import ADDRESS_BITS, FIRST_BYTE, GlobalMemory
from numba_tcnn.fused.fragments import FragmentShape, make_load_matrix, make_store_matrix
from numba_tcnn.fused.keepers import make_saved_keeper
from numba_tcnn.fused.stage_io import IO, KernelBody
from numba_tcnn.reference.engine import ReferenceRuntime


class Part:
    """A part of device memory, by the CUDA array interface alone."""

    def __init__(self, values: np.ndarray, part: Any, stream: int | None = None):
        self.storage = to_device(values)
        wanted = values[part]
        offset = wanted.ctypes.data - values.ctypes.data
        self.values = wanted
        self.__cuda_array_interface__ = self.storage.__cuda_array_interface__ | {
            "shape": wanted.shape,
            "data": (self.storage.__cuda_array_interface__["data"][0] + offset, False),
            "strides": wanted.strides,
            "stream": stream,
        }


PARTS = {
    "columns": np.s_[:, 1:3],
    "every other row": np.s_[::2, :2],
    "an offset": np.s_[3:, 2:],
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", PARTS)
def test_rows_apart(name: str, dtype: str, gpu: EmulatedDriver, no_reference: None) -> None:
    """Inputs, targets and densities are read where they are: no array library is there that could copy them."""
    model = make(n_out=2)
    twin, start = reference_of(model), model.params
    rng = np.random.default_rng(3)
    x, y, pdf = (Part((0.1 + rng.random((90, 4))).astype(dtype), PARTS[name]) for _ in range(3))
    np.testing.assert_allclose(model.network.inference(x).numpy(), predict(twin, x.values), atol=1e-3)
    _, context = model.network.forward(x)
    given, expected = model.network.backward(context, y), twin.model.backward(x.values, y.values)
    assert relative_error(given.params.numpy(), expected.params) <= GRADIENT
    assert relative_error(given.input.numpy(), expected.input) <= GRADIENT
    for _ in range(2):
        loss = float(model.trainer.training_step(x, y, data_pdf=pdf))
        assert loss == pytest.approx(step(twin, x.values, y.values, data_pdf=pdf.values), rel=1e-4)
    assert_same_training(model, twin, start)


@pytest.mark.parametrize(
    "part", [np.s_[::-1], np.s_[:, ::-1], np.s_[::-3, 3:0:-2], np.s_[2:7:2, ::2], np.s_[:0]], ids=str
)
@pytest.mark.parametrize("dtype", ["float64", "int16", "float32"])
def test_copies_of_any_strides(part: Any, dtype: str, gpu: EmulatedDriver) -> None:
    array = Part(np.arange(36).reshape(9, 4).astype(dtype), part)
    place = array.__cuda_array_interface__
    copy = strided_to_host(place["data"][0], place["shape"], place["strides"], np.dtype(dtype), None)
    np.testing.assert_array_equal(copy, array.values)


def test_backward_rows_of_an_unknown_library(gpu: EmulatedDriver, no_reference: None) -> None:
    """They go through the host."""
    model = make()
    x = Part(np.random.default_rng(1).random((50, 2), np.float32), np.s_[::-1])
    expected = model.network.inference(np.ascontiguousarray(x.values))
    np.testing.assert_array_equal(model.network.inference(x).numpy(), expected)


# ----------------------------------------------------------------------------------------- devices, streams


def test_arrays_on_another_device_are_refused(gpu: EmulatedDriver, no_reference: None) -> None:
    gpu.n_devices = 2
    model = make()
    x, y = batch(20)
    given = Part(x, np.s_[:])
    model.network.inference(given)
    gpu.device_of = lambda address: 1
    with pytest.raises(ValueError, match="an array is not on CUDA device 0, where the model is"):
        model.network.inference(given)
    with pytest.raises(ValueError, match="not on CUDA device 0"):
        model.trainer.training_step(x, Part(y, np.s_[:]))


def test_a_stream_may_be_destroyed_after_a_call(gpu: EmulatedDriver, no_reference: None) -> None:
    """What comes next still waits for its work, and nothing names it."""
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    losses = []
    for stream in (5, 6, 0, 7, 8):
        losses.append(model.trainer.training_step(to_device(x), to_device(y), stream=stream))
        gpu.cuStreamDestroy(stream) if stream else None
        step(twin, x, y)
    assert float(losses[1]) > float(losses[-1]) > 0
    assert_same_training(model, twin, start)
    model.network.inference(to_device(x), stream=9)
    gpu.cuStreamDestroy(9)
    model.params = start
    np.testing.assert_array_equal(model.params, start)
    assert model.trainer.skipped_steps == 0
    assert model.optimizer.state_dict()["step"] == 5
    with pytest.raises(CudaError, match=CUresult.CUDA_ERROR_INVALID_HANDLE.name):
        model.network.inference(to_device(x), stream=9)


def test_a_call_on_a_stream_that_is_gone_leaves_the_order_as_it_was(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    gpu.cuStreamDestroy(6)
    for stream in (5, 7):
        model.trainer.training_step(to_device(x), to_device(y), stream=stream)
        step(twin, x, y)
        gpu.cuStreamDestroy(stream)
        with pytest.raises(CudaError, match=CUresult.CUDA_ERROR_INVALID_HANDLE.name):
            model.network.inference(to_device(x), stream=6)
    assert_same_training(model, twin, start)


def test_a_stream_of_the_same_handle_is_another_stream(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    for _ in range(2):
        model.trainer.training_step(to_device(x), to_device(y), stream=5)
        step(twin, x, y)
        earlier, gpu._queues[5] = gpu._queues[5], type(gpu._queues[5])()
        gpu._queues[0].extend(earlier)  # the old stream's work, still to come
    assert_same_training(model, twin, start)


# --------------------------------------------------------------------------------------- 64-bit addresses


class FarMemory(GlobalMemory):
    """Arrays that are mere stretches of far larger ones."""

    def place_part(self, array: np.ndarray, first_byte: int) -> int:
        """The address of the whole array of which `array` is the stretch from `first_byte` on."""
        self.first_byte = first_byte
        return self.place(array)

    def locate(self, addresses, n_bytes, active, use):
        whole = (addresses & np.uint64((1 << ADDRESS_BITS) - 1)).astype(np.int64) - FIRST_BYTE
        assert (whole[active] >= self.first_byte).all(), "below the stretch: an address has lost its upper bits"
        return super().locate(np.where(active, addresses - np.uint64(self.first_byte), addresses), n_bytes, active, use)


def run_in_warp(memory: GlobalMemory, function: Any) -> None:
    body = KernelBody("far", function, (("unused", "u32"),))
    run_kernel(emulator_target(), memory, body, [0], threads=32, shared_bytes=16, n_blocks=1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_matrices_of_more_than_4_gibibytes(dtype: str, rng: np.random.Generator) -> None:
    """Rows around 2^24 of 512 columns: 32 GiB before them."""
    shape, first_row, n_rows = FragmentShape(16, 32), (1 << 24) - 16, (1 << 24) - 3
    stride = 512 * np.dtype(dtype).itemsize
    rows = rng.normal(size=(16, 512)).astype(dtype)
    memory, target = FarMemory(), emulator_target()
    matrix = memory.place_part(rows, first_row * stride)
    load, store = make_load_matrix(target, shape, dtype), make_store_matrix(target, shape, dtype)

    place, values = (matrix, np.uint32(stride), np.uint32(first_row), np.uint32(n_rows), np.uint32(32)), []

    def read(unused):
        values.extend(load(*place))

    def write(unused):
        store(*place, tuple(2 * v for v in values))

    expected = rows.copy()
    expected[:13, :32] *= 2
    run_in_warp(memory, read)
    run_in_warp(memory, write)
    np.testing.assert_array_equal(rows, expected)


def test_saved_fragments_beyond_4_gibibytes() -> None:
    """Slot 2^24 / 32 of fragments of 512 columns, behind others of 4096."""
    n_packed, units, slot, n_slots = FragmentShape(32, 512).n_packed, 2048, (1 << 19) - 1, 1 << 19
    first_byte = 128 * (units * n_slots + n_packed * slot)
    assert first_byte > 1 << 36
    memory, target = FarMemory(), emulator_target()
    stretch = np.zeros(32 * n_packed, np.uint32)
    io = dict.fromkeys(IO, np.uint32(0)) | {"saved": np.uint64(memory.place_part(stretch, first_byte))}
    io["n_slots"] = np.uint32(n_slots)
    keeper, values = make_saved_keeper(target, units, n_packed), []
    packed = tuple(np.arange(32, dtype=np.uint32) + 100 * i for i in range(n_packed))

    def body(unused):
        keeper.keep(0, tuple(io.values()), np.uint32(slot), packed)
        poisoned = tuple(np.full_like(word, 0xFFFF) for word in packed)
        values.extend(keeper.recall(0, tuple(io.values()), np.uint32(slot), poisoned))

    run_in_warp(memory, body)
    np.testing.assert_array_equal(values, packed)


def test_output_gradients_of_more_than_2_to_the_32_elements(gpu: EmulatedDriver, monkeypatch, no_reference) -> None:
    """The largest is sought in parts, each of elements that 32 bits can count; here of 90."""
    monkeypatch.setattr(gradient_scale_kernels, "MAX_ELEMENTS", 90)
    model = make()
    twin = reference_of(model)
    x, dL_dy = batch(100)
    for row in (0, 50, 99):
        gradients = dL_dy.copy()
        gradients[row, 2] = 1e30
        _, context = model.network.forward(x)
        given = model.network.backward(context, gradients)
        assert relative_error(given.params, twin.model.backward(x, gradients).params) <= GRADIENT
    assert sum(name == "largest_gradient" for name, _, _ in gpu.launches) == 3 * 4


# -------------------------------------------------------------------------------------- losses, levels of detail


@pytest.mark.parametrize("size", [1, 31, 257])
@pytest.mark.parametrize("density", [False, True])
@pytest.mark.parametrize("magnitude", [1.0, 1e-6, 1e5])
def test_a_constant_gradient(size: int, density: bool, magnitude: float, gpu: EmulatedDriver, no_reference) -> None:
    """Not divided by the batch, of any magnitude; its loss is 0."""
    gradient = [0.5 * magnitude, -2.0 * magnitude, 0.25 * magnitude]
    config = CONFIG | {"loss": {"otype": "ConstantGradient", "gradient": gradient}}
    model = make(config | {"optimizer": {"otype": "Adam", "beta1": 0.0, "l2_reg": 0.0}})
    twin = reference_of(model, config)
    x, y = batch(size)
    pdf = {"data_pdf": 0.5 + np.random.default_rng(2).random(y.shape, np.float32)} if density else {}
    assert float(model.trainer.training_step(x, y, **pdf)) == 0.0
    _, expected = twin.model.loss_and_gradients(x, y, twin.loss, *pdf.values())
    assert relative_error(model.optimizer.state_dict()["first_moments"], expected.params) <= GRADIENT


@pytest.mark.parametrize("n_out", [3, 5, 6, 8, 9, 17])
def test_luminance_of_any_row(n_out: int, gpu: EmulatedDriver, no_reference: None) -> None:
    """Six outputs and more count twice three colours; what is no colour counts for nothing."""
    config = CONFIG | {"loss": {"otype": "RelativeL2Luminance"}}
    model = make(config, n_out=n_out)
    twin, start = reference_of(model, config), model.params
    for size in (1, 45, 130):
        x, y = batch(size, n_out=n_out)
        pdf = 0.5 + np.random.default_rng(2).random(y.shape, np.float32)
        assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
        loss = model.trainer.training_step(x, y, data_pdf=pdf)
        assert float(loss) == pytest.approx(step(twin, x, y, data_pdf=pdf), rel=1e-4)
    assert_same_training(model, twin, start)


@pytest.mark.parametrize("loss", ["L2", "RelativeL2Luminance", "Smape", "ConstantGradient"])
def test_a_loss_of_features(loss: str, gpu: EmulatedDriver, no_reference: None) -> None:
    """An encoding without a network, trained to give targets."""
    config = {"otype": loss} | ({"gradient": [0.1, -0.2, 0.3, 1, 2, 3]} if loss == "ConstantGradient" else {})
    encoding = tcnn.Encoding(2, CONFIG["encoding"], engine="fused")
    trainer = tcnn.Trainer(encoding, CONFIG["optimizer"], config)
    encoding.params = start = np.random.default_rng(0).uniform(-1, 1, encoding.n_params).astype(np.float32)
    twin = ReferenceRuntime(encoding.spec, start, "float16")
    twin.configure_training(parse_optimizer(CONFIG["optimizer"]), parse_loss(config))
    for size in (1, 70, 300):
        x, y = batch(size, n_out=6)
        assert float(trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
    way = np.linalg.norm(twin.params - start)
    assert way > 0 and np.linalg.norm(encoding.params - twin.params) <= 1e-3 * way


@pytest.mark.parametrize("max_level", [0.4, 0.0, "array"])
def test_levels_in_use(max_level: Any, gpu: EmulatedDriver, no_reference: None) -> None:
    """Set, changed and given back between calls of all kinds."""
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    for fractions in (
        None,
        np.random.default_rng(1).random(70, np.float32) if max_level == "array" else max_level,
        None,
    ):
        model.network.max_level = 1.0 if fractions is None else fractions
        twin.set_max_level(fractions)
        np.testing.assert_allclose(model.network.inference(x), predict(twin, x), atol=1e-3)
        _, context = model.network.forward(x)
        given, expected = model.network.backward(context, y), twin.model.backward(x, y)
        assert relative_error(given.params, expected.params) <= GRADIENT
        assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert_same_training(model, twin, start)
    model.network.max_level = np.ones(71, np.float32)
    with pytest.raises(ValueError, match="max_level has 71 rows, the batch has 70"):
        model.trainer.training_step(x, y)


def test_grid_options_in_several_kernels(
    gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch, no_reference: None
) -> None:
    """In chunks, whose samples draw the random numbers of the whole batch and use their own levels."""
    monkeypatch.setattr(network_plans, "single_plans", lambda *arguments, **options: [])
    monkeypatch.setattr(gradient_programs, "SAVED_BYTES", 1)
    options = {"stochastic_interpolation": True, "fixed_point_pos": True}
    config = CONFIG | {"encoding": CONFIG["encoding"] | options}
    model = make(config, deterministic=True)
    twin, start = reference_of(model, config), model.params
    fractions = np.random.default_rng(1).random(600, np.float32)
    model.network.max_level = fractions
    twin.set_max_level(fractions)
    for seed in range(2):
        x, y = batch(600, seed)
        assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert_same_training(model, twin, start)
    assert sum(name == "propagate" for name, _, _ in gpu.launches) >= 4


@pytest.mark.parametrize("loss", ["RelativeL2Luminance", "ConstantGradient"])
def test_losses_of_grids_level_by_level(loss: str, gpu: EmulatedDriver, monkeypatch, no_reference: None) -> None:
    monkeypatch.setattr(level_plan, "LEVEL_SPLIT_BATCH", 1)
    config = CONFIG | {"loss": {"otype": loss} | ({"gradient": [1, -2, 3]} if loss == "ConstantGradient" else {})}
    model = make(config)
    twin, start = reference_of(model, config), model.params
    x, y = batch(300)
    for _ in range(2):
        assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert_same_training(model, twin, start)
    assert any(name.startswith("encode") for name, _, _ in gpu.launches)


@pytest.mark.parametrize("how", ["max_level", "deterministic", "fixed_point_pos"])
def test_what_is_not_done_level_by_level(how: str, gpu: EmulatedDriver, monkeypatch, no_reference: None) -> None:
    """However large the batch."""
    monkeypatch.setattr(level_plan, "LEVEL_SPLIT_BATCH", 1)
    options = {"fixed_point_pos": True} if how == "fixed_point_pos" else {}
    config = CONFIG | {"encoding": CONFIG["encoding"] | options}
    model = make(config, deterministic=how == "deterministic")
    twin, start = reference_of(model, config), model.params
    if how == "max_level":
        model.network.max_level = 0.5
        twin.set_max_level(0.5)
    x, y = batch(300)
    assert float(model.trainer.training_step(x, y)) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert_same_training(model, twin, start)
    assert not any("level" in name for name, _, _ in gpu.launches)
