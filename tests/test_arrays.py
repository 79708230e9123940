"""Arrays of every kind, described, converted and made: with NumPy itself, and with fakes of the other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_arrays import DEVICE, FAKES, STREAM, FusedArray, JaxArray, JaxCpuArray, TorchTensor, install

from numba_tcnn.arrays import HALF_AND_SINGLE, HALF_TO_DOUBLE, batch, empty_like, view

KINDS = sorted(FAKES)
HOST = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
def test_device_arrays_are_recognised_and_described(kind):
    array = FAKES[kind](HOST.copy())
    v = view(array)
    assert (v.kind, v.shape, v.dtype, v.strides) == (kind, (4, 3), np.float32, None)
    assert v.on_device and v.pointer == array.memory.ctypes.data
    assert v.device == (None if kind == "cuda" else DEVICE)  # the bare interface doesn't say
    assert v.stream == STREAM
    assert v.result() is array
    np.testing.assert_array_equal(v.numpy(), HOST)


def test_strides_of_c_order_may_be_spelled_out():
    """As the CUDA array interface allows; those of an axis of length 1 can be anything."""

    class Spelled(FAKES["cuda"]):
        strides = (12, 4)

        @property
        def __cuda_array_interface__(self):
            return super().__cuda_array_interface__ | {"strides": self.strides}

    assert view(Spelled(HOST.copy())).strides is None
    row, transposed = Spelled(HOST[:1].copy()), Spelled(np.asfortranarray(HOST[:3]))
    row.strides, transposed.strides = (4, 4), (4, 12)
    assert view(row).strides is None
    assert view(transposed).strides == (4, 12)


def test_subclasses_count_as_their_library():
    class Parameter(TorchTensor):
        pass

    assert view(Parameter(HOST.copy())).kind == "torch"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jax"])
def test_write_reaches_device_memory(kind):
    array = FAKES[kind](np.zeros((4, 3), np.float32))
    view(array).write(HOST.astype(np.float64))
    np.testing.assert_array_equal(array.memory, HOST)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["int64", "float64", "uint8"])
def test_other_real_dtypes_become_float32_of_the_same_kind(kind, dtype):
    v = batch(FAKES[kind](HOST.astype(dtype)), "x", 3)
    assert v.dtype == np.float32 and v.on_device and v.strides is None
    np.testing.assert_array_equal(v.numpy(), HOST)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_float16_and_float32_pass_as_they_are(kind, dtype):
    array = FAKES[kind](HOST.astype(dtype))
    assert batch(array, "x", 3).pointer == array.memory.ctypes.data


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jax"])
def test_strided_device_arrays_become_contiguous(kind):
    array = FAKES[kind](np.asfortranarray(HOST))
    assert view(array).strides == array.memory.strides
    v = batch(array, "x", 3)
    assert v.strides is None
    np.testing.assert_array_equal(v.numpy(), HOST)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jax"])
@pytest.mark.parametrize("part", [
    np.s_[:, 1:3], np.s_[::2, 1:3], np.s_[1:, :2], np.s_[::3, 2:3],
], ids=str)  # fmt: skip
def test_device_rows_apart_are_read_where_they_are(kind: str, part: tuple) -> None:
    memory = np.arange(40, dtype=np.float32).reshape(10, 4)[part]
    v = batch(FAKES[kind](memory), "x", memory.shape[1])
    assert v.pointer == memory.ctypes.data and v.row_stride == memory.strides[0]
    np.testing.assert_array_equal(v.numpy(), memory)
    rows = v.rows(1, 3)
    assert rows.pointer == memory[1:3].ctypes.data and rows.row_stride == v.row_stride
    np.testing.assert_array_equal(rows.numpy(), memory[1:3])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("jax", "torch", "numba", "cuda")])
@pytest.mark.parametrize("part", [np.s_[::-1], np.s_[:, ::-1], np.s_[:, ::2], np.s_[::-2, 3:1:-1]], ids=str)
def test_device_arrays_that_run_otherwise_are_copied(kind: str, part: Any) -> None:
    memory = np.arange(40, dtype=np.float32).reshape(10, 4)[part]
    v = batch(FAKES[kind](memory), "x", memory.shape[1])
    assert v.strides is None
    np.testing.assert_array_equal(v.numpy(), memory)


def test_strided_and_big_endian_host_arrays_become_contiguous_native():
    for array in (HOST[::2], np.asfortranarray(HOST), HOST.astype(">f4"), HOST[:, ::-1]):
        v = batch(array, "x", 3)
        assert v.strides is None and v.dtype == np.dtype("float32")
        np.testing.assert_array_equal(v.numpy(), array)


@pytest.mark.parametrize(("dtype", "exact"), [("float16", HALF_AND_SINGLE), ("float64", HALF_TO_DOUBLE)])
def test_a_copy_keeps_a_dtype_that_is_computed_in(dtype, exact):
    """A third has more digits in float64 than float32 holds."""
    values = (np.arange(12).reshape(4, 3) / 3).astype(dtype)
    for array in (np.asfortranarray(values), values.astype(values.dtype.newbyteorder())):
        v = batch(array, "x", 3, exact=exact)
        assert v.strides is None and v.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(v.numpy(), values)


@pytest.mark.parametrize("array", [[[0.5, 1.0]], ((1, 2), (3, 4)), TorchTensor(np.ones((2, 2), np.float32), None)])
def test_lists_and_torch_cpu_tensors_are_host_data(array):
    v = batch(array, "x", 2)
    assert not v.on_device and v.dtype == np.float32


@pytest.mark.parametrize("dtype", [bool, complex, object, "U3", "datetime64[s]"])
def test_what_is_not_real_is_refused(dtype):
    with pytest.raises(TypeError, match="x has dtype .*give real numbers"):
        batch(np.ones((2, 2)).astype(dtype), "x", 2)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((5,), r"x must be \[batch, 2\], not one-dimensional of length 5; x\[:, None\] makes it a column"),
        ((), r"x must be \[batch, 2\], not \[\]"),
        ((4, 2, 1), r"x must be \[batch, 2\], not \[4, 2, 1\]"),
        ((4, 3), r"x must have 2 columns, not 3"),
    ],
)
def test_wrong_shapes_name_what_was_given(shape, message):
    with pytest.raises(ValueError, match=message):
        batch(np.ones(shape), "x", 2)


def test_ragged_lists_are_refused():
    with pytest.raises(ValueError, match="x is not an array of numbers"):
        batch([[1.0, 2.0], [3.0]], "x", 2)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_share_memory(kind):
    array = FAKES[kind](HOST.copy())
    part = view(array).rows(1, 3)
    assert part.shape == (2, 3) and part.pointer == array.memory.ctypes.data + 12
    assert part.on_device


@pytest.mark.parametrize("kind", KINDS)
def test_take_gathers_rows_in_the_same_kind(kind):
    taken = view(FAKES[kind](HOST.copy())).take(np.array([3, 0, 3]))
    assert taken.on_device and taken.kind == kind
    np.testing.assert_array_equal(taken.numpy(), HOST[[3, 0, 3]])


@pytest.mark.parametrize("kind", ["cupy", "torch", "numba"])
def test_empty_like_makes_the_same_kind_on_the_same_device(kind):
    new = empty_like(view(FAKES[kind](HOST)), (2, 5), "float16")
    assert isinstance(new.result(), FAKES[kind]) and new.shape == (2, 5) and new.dtype == np.float16
    assert new.on_device and new.device == DEVICE


def test_an_unknown_kind_gets_memory_of_the_fused_engine():
    assert isinstance(empty_like(view(FAKES["cuda"](HOST)), (2, 5), "float32").result(), FusedArray)


@pytest.mark.parametrize("on_host", [False, True])
def test_jax_results_are_copies_of_memory_that_can_be_written(on_host):
    new = empty_like(view(JaxArray(HOST)), HOST.shape, "float32", on_host=on_host)
    assert new.on_device != on_host
    new.write(HOST)
    result = new.result()
    assert isinstance(result, JaxArray) and result.platform == "gpu"
    np.testing.assert_array_equal(result.memory, HOST)


def test_jax_on_the_cpu_gives_jax_on_the_cpu():
    v = batch(JaxCpuArray(HOST), "x", 3)
    assert not v.on_device
    new = empty_like(v, HOST.shape, "float32")
    new.write(HOST)
    assert isinstance(new.result(), JaxCpuArray)


def test_traced_jax_values_are_refused():
    tracer = type("DynamicJaxprTracer", (), {"shape": (4, 3)})
    tracer.__module__ = "jax._src.interpreters.partial_eval"
    with pytest.raises(TypeError, match="outside of jit"):
        view(tracer(), "x")
