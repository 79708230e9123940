"""A driver that does nothing, for what a call costs the host before there is a device.

It stands in for `cuda.bindings.driver` as far as a model needs that: memory is the host's, launches and copies return
at once, and kernels are loaded from nothing, so nothing is compiled either. What it computes is whatever memory held.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from numba_tcnn.fused import compile_processes, device_status, driver, programs
from numba_tcnn.fused.cache import CompiledKernel
from numba_tcnn.fused.native_launches import machine_code

PROPERTIES = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
}
"""An H200's."""


def nothing() -> int:
    """The address of a function of any arguments that gives 0."""
    return machine_code("define i32 @nothing() { ret i32 0 }").get_function_address("nothing")


class _Names:
    """An enumeration whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class NullDriver:
    """Every call returns a tuple that starts with its status, 0."""

    CUdevice_attribute = CUfunction_attribute = _Names()

    def __init__(self):
        self._handles = itertools.count(1)
        self._memory: dict[int, np.ndarray] = {}

    def __getattr__(self, name: str) -> Callable[..., tuple]:
        """Calls that give nothing back."""
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: (0,)

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int, int]:
        return 0, nothing(), 0

    def cuLaunchKernel(self, *arguments: Any) -> tuple[int]:
        return (0,)

    def cuCtxSetCurrent(self, context: int) -> tuple[int]:
        return (0,)

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, 1

    def cuDeviceGet(self, index: int) -> tuple[int, int]:
        return 0, index

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, next(self._handles)

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[int, int]:
        return 0, PROPERTIES[name.removeprefix("CU_DEVICE_ATTRIBUTE_")]

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:
        return 0, b"no device"

    def cuDeviceTotalMem(self, device: int) -> tuple[int, int]:
        return 0, 1 << 37

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, 13000

    def cuMemAlloc(self, n_bytes: int) -> tuple[int, int]:
        memory = np.zeros(n_bytes, np.uint8)
        self._memory[memory.ctypes.data] = memory
        return 0, memory.ctypes.data

    def cuMemFree(self, address: int) -> tuple[int]:
        del self._memory[address]
        return (0,)

    def cuModuleLoadData(self, cubin: bytes) -> tuple[int, int]:
        return 0, next(self._handles)

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[int, int]:
        return 0, next(self._handles)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared_bytes: int):
        return 0, 1


def _nothing_compiled(make_body: Callable, description: str, capability: tuple[int, int], **options: int):
    return CompiledKernel(
        cubin=b"", entry="nothing", registers=0, spill_bytes=0, compile_seconds=0.0, local_bytes=0,
        mma_instructions=0, vector_loads=0, reductions=0,
    )  # fmt: skip


@contextmanager
def no_device() -> Iterator[NullDriver]:
    """Let the fused engine find this driver and no compiler, in place of the machine's own."""
    null = NullDriver()
    forget = (driver.device.cache_clear, device_status.cache_clear)
    with (
        mock.patch.object(driver, "bindings", lambda: null),
        mock.patch.object(programs, "compile_kernel", _nothing_compiled),
        mock.patch.dict(os.environ, {compile_processes.VARIABLE: "0"}),
    ):
        for f in forget:
            f()
        yield null
    for f in forget:
        f()
