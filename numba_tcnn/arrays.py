"""Arrays in and out: NumPy, CuPy, PyTorch, JAX and Numba arrays as one small view, without importing any of them.

`view(x)` recognises an array by its type's module and describes it; `batch(x, ...)` also checks and converts it to
what an engine takes; `empty_like(v, shape, dtype)` makes a new one of the same kind, on the same device. A framework
that the user has not imported is never imported here. PyTorch and JAX arrays on the CPU, lists, and whatever else
NumPy understands are host data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .array_kinds import KINDS, JaxArrays, NumpyArrays, device_array, dtype_name, kind_of

HALF_AND_SINGLE = frozenset(map(np.dtype, ("float16", "float32")))
HALF_TO_DOUBLE = frozenset(map(np.dtype, ("float16", "float32", "float64")))

REAL_KINDS = "fiu"  # numpy's letters for float, signed and unsigned integers


@dataclass
class ArrayView:
    """A described array. `array` is the user's object and keeps the memory alive.

    strides are in bytes, None for C order; `pointer` is a device address where `on_device`, else a host address;
    `device` is None where the array doesn't say; `stream` is the CUDA stream on which the data becomes ready, None
    if it is ready. `finish` turns `array` into what the user gets, where that is another object (JAX).
    """

    array: Any
    kind: str  # numpy | cupy | torch | jax | numba | cuda
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...] | None
    pointer: int
    on_device: bool
    device: int | None = 0
    stream: int | None = None
    finish: Callable[[Any, int | None], Any] | None = field(default=None, repr=False)

    def numpy(self) -> np.ndarray:
        """The data as a NumPy array: the memory itself on the host, a copy from the device."""
        return KINDS[self.kind].to_host(self.array)

    def write(self, values: np.ndarray) -> None:
        """Copy host values of the same shape into the array, converting to its dtype."""
        KINDS[self.kind].write(self.array, np.asarray(values, self.dtype))

    @property
    def row_stride(self) -> int:
        """Bytes from one row of a matrix to the next."""
        if self.strides is not None:
            return self.strides[0]
        return self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    def rows(self, first: int, last: int) -> ArrayView:
        """Rows first ... last - 1, without a copy."""
        shape = (last - first, *self.shape[1:])
        if self.kind == "cuda":  # such an object need not know slicing
            pointer = self.pointer + first * self.row_stride
            part = DeviceRows(self.array, pointer, shape, self.dtype, self.strides, self.stream)
            return replace(self, array=part, shape=shape, pointer=pointer)
        return view(self.array[first:last])

    def take(self, indices: np.ndarray) -> ArrayView:
        """A new array of the same kind with the rows `indices`."""
        return view(KINDS[self.kind].take(self.array, indices))

    def on_host(self) -> ArrayView:
        """The same numbers as a view of host memory."""
        return self if self.kind == "numpy" else view(self.numpy())

    def result(self, stream: int | None = None) -> Any:
        """The object handed to the user; `stream` is the one on which it was written."""
        return self.array if self.finish is None else self.finish(self.array, stream)


@dataclass
class DeviceRows:
    """Some rows of a device array of an unknown kind; keeps `owner` alive."""

    owner: Any
    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...] | None
    stream: int | None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "strides": self.strides,
            "stream": self.stream,
            "version": 3,
        }


def view(x: Any, name: str = "the array") -> ArrayView:
    """Describe `x`, converting only what no view can say: lists and other host data, and bfloat16 (to float32)."""
    kind = kind_of(x)
    if kind == "numpy" and not isinstance(x, np.ndarray):
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise ValueError(f"{name} is not an array of numbers: {error}") from None
    if kind == "jax" and not hasattr(x, "devices"):
        raise TypeError(f"{name} is a value inside a JAX transformation; call this outside of jit, grad and vmap")
    if kind in ("torch", "jax") and dtype_name(x) == "bfloat16":
        x = KINDS[kind].convert(x, "float32")
    return ArrayView(x, kind, *KINDS[kind].describe(x))


def batch(x: Any, name: str, n_columns: int, *, exact: frozenset[np.dtype] = HALF_AND_SINGLE) -> ArrayView:
    """`x` as a [batch, n_columns] array of one of the dtypes `exact`; others become float32.

    It is C-contiguous, or on a device and has C-contiguous rows anywhere: columns of a wider array, every other row.

    Raises TypeError for anything but real numbers and ValueError for a wrong shape, each naming what was given.
    """
    try:
        seen = view(x, name)
    except TypeError as error:
        # torch.bool, complex32 and the like have no NumPy twin or no place here
        raise TypeError(f"{name} must be a real array, not {type(x).__name__}: {error}") from None
    if seen.dtype.kind not in REAL_KINDS:
        raise TypeError(f"{name} has dtype {seen.dtype}; give real numbers, for example float32")
    check_shape(seen.shape, name, n_columns)
    if seen.dtype in exact and (seen.strides is None or has_readable_rows(seen)):
        return seen
    native = seen.dtype.newbyteorder("=")
    return view(KINDS[seen.kind].convert(seen.array, native.name if native in exact else "float32"), name)


MAX_ROW_STRIDE = 2**31


def has_readable_rows(v: ArrayView) -> bool:
    """Whether kernels can read a strided matrix: on a device, elements of a row side by side, rows not backwards."""
    size, (row, column) = v.dtype.itemsize, v.strides
    side_by_side = column == size or v.shape[1] == 1
    return v.on_device and side_by_side and 0 <= row < MAX_ROW_STRIDE and row % size == 0 and v.pointer % size == 0


def check_shape(shape: tuple[int, ...], name: str, n_columns: int) -> None:
    """Raise ValueError unless `shape` is [batch, n_columns]."""
    if len(shape) == 1:
        raise ValueError(
            f"{name} must be [batch, {n_columns}], not one-dimensional of length {shape[0]}; "
            f"{name}[:, None] makes it a column, {name}[None, :] a single row"
        )
    if len(shape) != 2:
        raise ValueError(f"{name} must be [batch, {n_columns}], not {list(shape)}")
    if shape[1] != n_columns:
        raise ValueError(f"{name} must have {n_columns} column{'s' * (n_columns != 1)}, not {shape[1]}: {list(shape)}")


def empty_like(
    v: ArrayView, shape: tuple[int, ...], dtype: str | np.dtype, *, device: int = 0, on_host: bool = False
) -> ArrayView:
    """A new, uninitialised array of the kind of `v`.

    It is on the device of `v`, or on `device` where the kind has no allocator; `on_host`: the engine that writes it
    writes NumPy memory.
    """
    dtype = np.dtype(dtype).name
    if v.kind == "jax":
        storage = np.empty(shape, dtype)
        if v.on_device and not on_host:
            storage = device_array(storage, device)
        return replace(view(storage), finish=lambda filled, stream: JaxArrays.from_storage(v.array, filled, stream))
    if v.kind == "cuda":
        return view(device_array(np.empty(shape, dtype), device))
    return view(KINDS[v.kind].empty(v.array, shape, dtype))


def host_view(values: np.ndarray) -> ArrayView:
    """A NumPy array that is known to be C-contiguous and of a float dtype."""
    return ArrayView(values, "numpy", *NumpyArrays.describe(values))
