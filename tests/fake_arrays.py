"""Stand-ins for array libraries that are not installed where the fast tests run.

Their "device memory" is a NumPy array that only the library's own methods hand out; `__array__` raises, so code that
takes such an array for host data fails. `install(monkeypatch)` puts the modules in `sys.modules`, as if imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from typing import Any

import numpy as np
import pytest

DEVICE = 0
STREAM = 77


class DeviceData:
    """What every fake array is: memory, a device number, and the CUDA array interface."""

    def __init__(self, memory: np.ndarray, device: int = DEVICE):
        self.memory = np.asarray(memory)
        self.device_number = device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, key: Any) -> Any:
        key = key.memory if isinstance(key, DeviceData) else key
        return type(self)(self.memory[key], self.device_number)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("implicit copy from the device")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "shape": memory.shape,
            "typestr": memory.dtype.str,
            "data": (memory.ctypes.data, False),
            "strides": None if memory.flags.c_contiguous else memory.strides,
            "stream": STREAM,
            "version": 3,
        }


class CupyArray(DeviceData):
    @property
    def dtype(self) -> np.dtype:
        return self.memory.dtype

    @property
    def device(self) -> Any:
        return types.SimpleNamespace(id=self.device_number)

    def get(self) -> np.ndarray:
        return self.memory.copy()

    def set(self, values: np.ndarray) -> None:
        assert values.dtype == self.memory.dtype and values.shape == self.memory.shape
        self.memory[...] = values

    def astype(self, dtype: str, order: str, copy: bool) -> CupyArray:
        return CupyArray(self.memory.astype(dtype, order=order, copy=copy), self.device_number)


CupyArray.__module__ = "cupy._core.core"


class TorchTensor(DeviceData):
    """A tensor on `device_number`, or on the CPU where that is None."""

    @property
    def dtype(self) -> str:
        return f"torch.{self.memory.dtype.name}"

    @property
    def is_cuda(self) -> bool:
        return self.device_number is not None

    @property
    def device(self) -> Any:
        return types.SimpleNamespace(index=self.device_number)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.memory.itemsize for step in self.memory.strides)

    def is_contiguous(self) -> bool:
        return self.memory.flags.c_contiguous

    def contiguous(self) -> TorchTensor:
        return TorchTensor(np.ascontiguousarray(self.memory), self.device_number)

    def data_ptr(self) -> int:
        return self.memory.ctypes.data

    def detach(self) -> TorchTensor:
        return self

    def cpu(self) -> TorchTensor:
        return TorchTensor(self.memory.copy() if self.is_cuda else self.memory, None)

    def numpy(self) -> np.ndarray:
        assert not self.is_cuda
        return self.memory

    def to(self, target: Any) -> TorchTensor:
        if isinstance(target, str):  # the fake torch.float32 is the string "float32"
            return TorchTensor(self.memory.astype(target), self.device_number)
        return TorchTensor(self.memory, target.index)

    def copy_(self, source: TorchTensor) -> None:
        self.memory[...] = source.memory


TorchTensor.__module__ = "torch"


class NumbaArray(DeviceData):
    @property
    def dtype(self) -> np.dtype:
        return self.memory.dtype

    @property
    def flags(self) -> dict[str, bool]:
        return {"C_CONTIGUOUS": self.memory.flags.c_contiguous}

    @property
    def gpu_data(self) -> Any:
        return types.SimpleNamespace(context=types.SimpleNamespace(device=types.SimpleNamespace(id=self.device_number)))

    def copy_to_host(self) -> np.ndarray:
        return self.memory.copy()

    def copy_to_device(self, values: np.ndarray) -> None:
        assert values.dtype == self.memory.dtype and values.shape == self.memory.shape
        self.memory[...] = values


NumbaArray.__module__ = "numba.cuda.cudadrv.devicearray"


class JaxArray(DeviceData):
    """Can't be written, as JAX's."""

    platform = "gpu"

    @property
    def dtype(self) -> np.dtype:
        return self.memory.dtype

    def devices(self) -> set[Any]:
        return {JaxDevice(self.platform, self.device_number)}

    def block_until_ready(self) -> JaxArray:
        return self

    def astype(self, dtype: str) -> JaxArray:
        return type(self)(self.memory.astype(dtype), self.device_number)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        copy = self.memory.copy()
        copy.flags.writeable = False
        return copy


class JaxCpuArray(JaxArray):
    platform = "cpu"


JaxArray.__module__ = JaxCpuArray.__module__ = "jaxlib._jax"


class JaxDevice:
    def __init__(self, platform: str, number: int):
        self.platform, self.local_hardware_id = platform, number

    def __hash__(self) -> int:
        return hash(self.platform)


class OtherArray(DeviceData):
    """An object of no known library; its copies go through Numba."""


class FusedArray(OtherArray):
    """What the fused engine's `to_device` gives."""

    def numpy(self) -> np.ndarray:
        return self.memory.copy()

    def synchronize(self, stream: int) -> None:
        self.synchronized = stream


FAKES = {"cupy": CupyArray, "torch": TorchTensor, "jax": JaxArray, "numba": NumbaArray, "cuda": OtherArray}


def memory_of(x: Any) -> np.ndarray:
    """The memory that an object's CUDA array interface points to."""
    interface = x.__cuda_array_interface__
    shape, strides, dtype = interface["shape"], interface["strides"], np.dtype(interface["typestr"])
    n_bytes = dtype.itemsize * int(np.prod(shape))
    if strides is not None and 0 not in shape:
        n_bytes = dtype.itemsize + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    buffer = (ctypes.c_char * n_bytes).from_address(interface["data"][0])
    return np.ndarray(shape, dtype, buffer, strides=strides)


def jax_array(x: Any) -> JaxArray:
    """jax.numpy.array: a copy. Reading device memory that was not waited for would be a race."""
    if isinstance(x, DeviceData):
        assert hasattr(x, "synchronized")
        x = x.memory
    return JaxArray(np.array(x))


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake modules cupy, torch, jax and numba.cuda, and the fused engine's `to_device`."""
    import numba_tcnn.fused

    device_context = contextlib.nullcontext
    modules = {
        "cupy": types.SimpleNamespace(
            cuda=types.SimpleNamespace(Device=device_context),
            empty=lambda shape, dtype: CupyArray(np.empty(shape, dtype)),
            asarray=lambda values: CupyArray(values),
        ),
        "torch": types.SimpleNamespace(
            cuda=types.SimpleNamespace(current_stream=lambda device: types.SimpleNamespace(cuda_stream=STREAM)),
            no_grad=contextlib.nullcontext,
            from_numpy=lambda values: TorchTensor(values, None),
            empty=lambda shape, dtype, device: TorchTensor(np.empty(shape, dtype), device.index),
            **{name: name for name in ("float16", "float32", "float64", "int64")},
        ),
        "jax": types.SimpleNamespace(
            numpy=types.SimpleNamespace(array=jax_array),
            device_put=lambda x, device: (JaxCpuArray if device.platform == "cpu" else JaxArray)(x.memory),
        ),
        "numba.cuda": types.SimpleNamespace(
            to_device=lambda values: NumbaArray(values.copy()),
            device_array=lambda shape, dtype: NumbaArray(np.empty(shape, dtype)),
            as_cuda_array=lambda x: NumbaArray(memory_of(x)),
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(numba_tcnn.fused, "to_device", lambda values, device=0: FusedArray(values.copy(), device))
    monkeypatch.setattr(numba_tcnn.fused, "DeviceArray", FusedArray)
