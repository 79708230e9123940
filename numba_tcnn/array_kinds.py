"""What each array library calls the six things `arrays.py` needs: describe, to_host, write, convert, empty, take.

One class per kind, all with the same methods. A library is looked up in `sys.modules` - whoever holds one of its
arrays has imported it - and never imported from here. NumPy stands for everything that lives on the host.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from typing import Any, NamedTuple

import numpy as np


class Description(NamedTuple):
    """Where an array's numbers are; the fields of `arrays.ArrayView` but the array itself and its kind."""

    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...] | None
    pointer: int
    on_device: bool = False
    device: int | None = 0
    stream: int | None = None


LIBRARIES = {"cupy": "cupy", "torch": "torch", "jax": "jax", "jaxlib": "jax", "numba": "numba", "numba_cuda": "numba"}
"""Kind by the top-level module that an array's type comes from."""


def kind_of(x: Any) -> str:
    """The kind of an array, by the module that its type (or a base class of it) comes from."""
    kind = library_of(type(x))
    return kind or ("cuda" if hasattr(x, "__cuda_array_interface__") else "numpy")


@functools.lru_cache(maxsize=256)
def library_of(array_type: type) -> str | None:
    if issubclass(array_type, np.ndarray):
        return "numpy"
    for base in array_type.__mro__:
        root = base.__module__.partition(".")[0]
        if root in LIBRARIES:
            return LIBRARIES[root]
    return "cuda" if hasattr(array_type, "__cuda_array_interface__") else None


def dtype_name(x: Any) -> str:
    """float16, bfloat16, int64 ...: the element type's name, the same in every library."""
    return str(x.dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=64)
def numpy_dtype(torch_dtype: Any) -> np.dtype:
    return np.dtype(str(torch_dtype).removeprefix("torch."))


def describe_interface(x: Any, device: int | None) -> Description:
    """Description from `__cuda_array_interface__` (version 3: strides None means C order, stream None means ready)."""
    interface = x.__cuda_array_interface__
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    strides = None if interface.get("strides") is None else tuple(interface["strides"])
    if strides is not None and in_c_order(shape, strides, dtype.itemsize):
        strides = None
    return Description(
        shape=shape,
        dtype=dtype,
        strides=strides,
        pointer=interface["data"][0] or 0,
        on_device=True,
        device=device,
        stream=interface.get("stream"),
    )


def in_c_order(shape: tuple[int, ...], strides: tuple[int, ...], item_size: int) -> bool:
    """Whether these strides, in bytes, are those of a C-contiguous array; those of axes of length 1 don't matter."""
    steps = [item_size * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, strides, steps, strict=True))


class NumpyArrays:
    @staticmethod
    def describe(x: np.ndarray) -> Description:
        return Description(x.shape, x.dtype, None if x.flags.c_contiguous else x.strides, x.ctypes.data)

    @staticmethod
    def to_host(x: np.ndarray) -> np.ndarray:
        return x

    @staticmethod
    def write(x: np.ndarray, values: np.ndarray) -> np.ndarray:
        x[...] = values
        return x

    @staticmethod
    def convert(x: np.ndarray, dtype: str) -> np.ndarray:
        return np.ascontiguousarray(x, dtype)

    @staticmethod
    def empty(like: np.ndarray, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.empty(shape, dtype)

    @staticmethod
    def take(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        return np.take(x, indices, axis=0)


class CupyArrays:
    @staticmethod
    def describe(x: Any) -> Description:
        return describe_interface(x, x.device.id)

    @staticmethod
    def to_host(x: Any) -> np.ndarray:
        return x.get()

    @staticmethod
    def write(x: Any, values: np.ndarray) -> Any:
        x.set(np.ascontiguousarray(values, x.dtype))
        return x

    @staticmethod
    def convert(x: Any, dtype: str) -> Any:
        return x.astype(dtype, order="C", copy=False)

    @staticmethod
    def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(like.device.id):
            return cupy.empty(shape, dtype)

    @staticmethod
    def take(x: Any, indices: np.ndarray) -> Any:
        return x[sys.modules["cupy"].asarray(indices)]


class TorchArrays:
    @staticmethod
    def describe(x: Any) -> Description:
        dtype = numpy_dtype(x.dtype)
        strides = None if x.is_contiguous() else tuple(step * dtype.itemsize for step in x.stride())
        if not x.is_cuda:
            return Description(tuple(x.shape), dtype, strides, x.data_ptr())
        stream = sys.modules["torch"].cuda.current_stream(x.device).cuda_stream
        return Description(tuple(x.shape), dtype, strides, x.data_ptr(), True, x.device.index, stream)

    @staticmethod
    def to_host(x: Any) -> np.ndarray:
        return x.detach().cpu().numpy()

    @staticmethod
    def write(x: Any, values: np.ndarray) -> Any:
        torch = sys.modules["torch"]
        with torch.no_grad():
            x.copy_(torch.from_numpy(np.ascontiguousarray(values)))
        return x

    @staticmethod
    def convert(x: Any, dtype: str) -> Any:
        return x.detach().to(getattr(sys.modules["torch"], dtype)).contiguous()

    @staticmethod
    def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)

    @staticmethod
    def take(x: Any, indices: np.ndarray) -> Any:
        return x[sys.modules["torch"].from_numpy(indices).to(x.device)]


class NumbaArrays:
    """Numba's device arrays; they can't gather or cast, so that goes through the host."""

    @staticmethod
    def describe(x: Any) -> Description:
        description = describe_interface(x, x.gpu_data.context.device.id)
        return description._replace(strides=None) if x.flags["C_CONTIGUOUS"] else description

    @staticmethod
    def to_host(x: Any) -> np.ndarray:
        return copy_from_device(x) if runs_backwards(x) else x.copy_to_host()

    @staticmethod
    def write(x: Any, values: np.ndarray) -> Any:
        x.copy_to_device(np.ascontiguousarray(values, x.dtype))
        return x

    @staticmethod
    def convert(x: Any, dtype: str) -> Any:
        if x.dtype == dtype and x.flags["C_CONTIGUOUS"]:
            return x
        return sys.modules["numba.cuda"].to_device(np.ascontiguousarray(x.copy_to_host(), dtype))

    @staticmethod
    def empty(like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return sys.modules["numba.cuda"].device_array(shape, dtype)

    @staticmethod
    def take(x: Any, indices: np.ndarray) -> Any:
        return sys.modules["numba.cuda"].to_device(np.take(x.copy_to_host(), indices, axis=0))


class CudaArrays:
    """Any other object with `__cuda_array_interface__`; copies go through Numba, memory comes from the fused engine."""

    @staticmethod
    def numba_array(x: Any) -> Any:
        return importlib.import_module("numba.cuda").as_cuda_array(x)

    @staticmethod
    def describe(x: Any) -> Description:
        return describe_interface(x, None)  # the interface doesn't say which device

    @staticmethod
    def to_host(x: Any) -> np.ndarray:
        if is_fused(x):
            return x.numpy()
        return copy_from_device(x) if runs_backwards(x) else CudaArrays.numba_array(x).copy_to_host()

    @staticmethod
    def write(x: Any, values: np.ndarray) -> Any:
        CudaArrays.numba_array(x).copy_to_device(np.ascontiguousarray(values))
        return x

    @staticmethod
    def convert(x: Any, dtype: str) -> Any:
        description = CudaArrays.describe(x)
        if description.dtype == dtype and description.strides is None:
            return x
        return device_array(np.ascontiguousarray(CudaArrays.to_host(x), dtype))

    @staticmethod
    def take(x: Any, indices: np.ndarray) -> Any:
        return device_array(np.take(CudaArrays.to_host(x), indices, axis=0))


class JaxArrays:
    """JAX arrays can't be written: `arrays.empty_like` gives plain memory that `from_storage` turns into one."""

    @staticmethod
    def jax_device(x: Any) -> Any:
        devices = list(x.devices())
        if len(devices) != 1:
            raise TypeError(f"a JAX array on {len(devices)} devices can't be used; gather it on one device first")
        return devices[0]

    @staticmethod
    def describe(x: Any) -> Description:
        device = JaxArrays.jax_device(x)
        if device.platform == "cpu":
            return NumpyArrays.describe(np.asarray(x))
        x.block_until_ready()  # JAX has no public stream to wait for
        return describe_interface(x, device.local_hardware_id)

    @staticmethod
    def to_host(x: Any) -> np.ndarray:
        return np.asarray(x)

    @staticmethod
    def convert(x: Any, dtype: str) -> Any:
        return x.astype(dtype)  # JAX arrays are always in C order

    @staticmethod
    def take(x: Any, indices: np.ndarray) -> Any:
        return x[indices]

    @staticmethod
    def from_storage(like: Any, storage: Any, stream: int | None) -> Any:
        """A JAX array on `like`'s device with a copy of what `storage`, NumPy or written on `stream`, holds."""
        jax = sys.modules["jax"]
        if not isinstance(storage, np.ndarray):
            storage.synchronize(stream or 0)
        return jax.device_put(jax.numpy.array(storage), JaxArrays.jax_device(like)).block_until_ready()


def device_array(values: np.ndarray, device: int = 0) -> Any:
    """Device memory with a copy of `values`, owned by the fused engine, as an object with the CUDA array interface."""
    return importlib.import_module("numba_tcnn.fused").to_device(values, device)


def runs_backwards(x: Any) -> bool:
    """Whether a stride is negative, which Numba can't copy."""
    return min(x.__cuda_array_interface__.get("strides") or (), default=0) < 0


def copy_from_device(x: Any) -> np.ndarray:
    """A host copy of what has the CUDA array interface, with any strides."""
    description = describe_interface(x, None)
    copy = importlib.import_module("numba_tcnn.fused").strided_to_host
    return copy(description.pointer, description.shape, description.strides, description.dtype, description.stream)


def is_fused(x: Any) -> bool:
    """Whether `device_array` made it."""
    return isinstance(x, importlib.import_module("numba_tcnn.fused").DeviceArray)


KINDS = {
    "numpy": NumpyArrays,
    "cupy": CupyArrays,
    "torch": TorchArrays,
    "jax": JaxArrays,
    "numba": NumbaArrays,
    "cuda": CudaArrays,
}
