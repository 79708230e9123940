"""A CUDA driver in Python: `cuda.bindings.driver` as far as the fused engine calls it, its kernels run in the emulator.

Device memory is the emulator's global memory, full of NaN where nothing was written. Streams are lazy: work queued on
one happens when somebody waits for it, and not before, so that a missing wait gives a wrong result instead of a lucky
one. (The driver's own default stream would wait for others; this one does not.) Native code finds two of its functions
by their addresses, and gets back here. Kernels come from `EmulatedCompiler`,
which gives bodies names in place of machine code.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import struct
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import pytest
from emulation import emulator_target, run_kernel

from numba_tcnn.fused import device_status, driver, programs
from numba_tcnn.fused.cache import CompiledKernel
from numba_tcnn.fused.compiler import CompileError
from numba_tcnn.fused.emulated_memory import ADDRESS_BITS, FIRST_BYTE, GlobalMemory, address_of
from numba_tcnn.fused.plan import architecture
from numba_tcnn.fused.programs import OUTLINE
from numba_tcnn.fused.stage_io import KernelBody

CTYPES = {"u32": ctypes.c_uint32, "u64": ctypes.c_uint64, "f32": ctypes.c_float}


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_FOUND = 500
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803
    CUDA_ERROR_UNKNOWN = 999


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97


class CUevent_flags(IntEnum):
    CU_EVENT_DISABLE_TIMING = 2


class CUpointer_attribute(IntEnum):
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9


class CUfunction_attribute(IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


SUCCESS = CUresult.CUDA_SUCCESS

FIRST_CONTEXT = 100
"""The handle of device 0's context; those of the others follow."""

SET_CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
LAUNCH_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
"""The driver's functions as native code calls them."""

LAUNCH_CONFIG = struct.Struct("@7I P P I")
"""CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes and their number."""

LAUNCH_ATTRIBUTE = struct.Struct("@I 4x I 60x")
"""CUlaunchAttribute: which, and a number."""


class DeviceMemory(GlobalMemory):
    """Arrays that come and go; an address is never given twice, in the whole process."""

    keys = itertools.count(1)

    def allocate(self, n_bytes: int) -> int:
        key = next(self.keys)
        self._arrays[key] = np.full(n_bytes, 0xFF, np.uint8)
        return address_of(key)

    def free(self, address: int) -> bool:
        """Whether there was such memory."""
        return self._arrays.pop(address >> ADDRESS_BITS, None) is not None

    def bytes_at(self, address: int, n_bytes: int) -> np.ndarray:
        array = self._arrays[address >> ADDRESS_BITS]
        start = (address & ((1 << ADDRESS_BITS) - 1)) - FIRST_BYTE
        if start + n_bytes > array.size:
            raise IndexError(f"{n_bytes} bytes from {start} on in {array.size} bytes of device memory")
        return array[start : start + n_bytes]

    @property
    def n_allocations(self) -> int:
        return len(self._arrays)

    @property
    def allocated(self) -> int:
        return sum(array.size for array in self._arrays.values())


@dataclass
class Record:
    """Where a stream stood when an event was recorded there."""

    stream: int = 0
    done: bool = True


@dataclass
class Event:
    last: Record = field(default_factory=Record)


@dataclass
class Function:
    """`int(function)` is its handle, as that of cuda.bindings' CUfunction."""

    number: int
    make_body: Callable
    threads: int
    max_shared_bytes: int = 0
    body: KernelBody | None = None

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        return self.make_body(OUTLINE).parameters

    def __int__(self) -> int:
        return self.number


@dataclass
class EmulatedCompiler:
    """Stands for `compile_kernel`: machine code is a number under which the body is found.

    fails    raises CompileError where one of these is a part of a kernel's description
    spills   bytes that a kernel spills, by its description
    """

    fails: tuple[str, ...] = ()
    spills: Callable[[str], int] = lambda description: 0
    made: list[tuple[Callable, int]] = field(default_factory=list)
    descriptions: list[str] = field(default_factory=list)

    def __call__(self, make_body, description: str, capability, *, threads: int, min_blocks: int) -> CompiledKernel:
        if any(part in description for part in self.fails):
            raise CompileError("a kernel did not compile (NvvmError: not today)")
        self.made.append((make_body, threads))
        self.descriptions.append(description)
        return CompiledKernel(
            cubin=str(len(self.made) - 1).encode(), entry="emulated", registers=64,
            spill_bytes=self.spills(description), compile_seconds=0.5, local_bytes=0, mma_instructions=0,
            vector_loads=0, reductions=0,
        )  # fmt: skip


class EmulatedDriver:
    """The module `cuda.bindings.driver`. Every call returns a tuple that starts with its status."""

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUevent_flags = CUevent_flags
    CUpointer_attribute = CUpointer_attribute
    CUfunction_attribute = CUfunction_attribute

    def __init__(self, capability: tuple[int, int] = (9, 0), version: int = 13000, n_multiprocessors: int = 2):
        self.capability, self.version, self.n_multiprocessors = capability, version, n_multiprocessors
        self.memory, self.compiler = DeviceMemory(), EmulatedCompiler()
        self.memory_limit = 1 << 34
        self.failing: dict[str, CUresult] = {}  # status that a call gives instead of working
        self.launches: list[tuple[str, int, int]] = []  # (kernel, blocks, stream)
        self._queues: dict[int, deque[Callable[[], None]]] = {}
        self._destroyed: set[int] = set()
        self.n_devices = 1
        self.shuffle: np.random.Generator | None = None  # the order of a launch's blocks
        self.device_of: Callable[[int], int] = lambda address: 0  # which device holds an address
        self._current = threading.local()
        self._functions: list[Function] = []
        self._native = {
            b"cuCtxSetCurrent": SET_CONTEXT(self._set_context),
            b"cuLaunchKernelEx": LAUNCH_KERNEL(self._launch),
        }
        self.native_calls: list[str] = []
        self._target = emulator_target(10 * capability[0] + capability[1])

    # ------------------------------------------------------------------------------------- streams
    def _queue(self, stream: int, work: Callable[[], None]) -> tuple:
        if int(stream) in self._destroyed:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        self._queues.setdefault(int(stream), deque()).append(work)
        return (SUCCESS,)

    def _run(self, stream: int, until: Callable[[], bool] = lambda: False) -> None:
        queue = self._queues.get(int(stream), ())
        while queue and not until():
            queue.popleft()()

    def run_everything(self) -> None:
        for stream in list(self._queues):
            self._run(stream)

    def _status(self, name: str) -> CUresult:
        if not getattr(self._current, "context", None):
            return CUresult.CUDA_ERROR_INVALID_CONTEXT
        return self.failing.get(name, SUCCESS)

    def cuStreamSynchronize(self, stream):
        if status := self._status("cuStreamSynchronize"):
            return (status,)
        if int(stream) in self._destroyed:
            return (CUresult.CUDA_ERROR_INVALID_HANDLE,)
        self._run(stream)
        return (SUCCESS,)

    def cuEventCreate(self, flags):
        assert flags == CUevent_flags.CU_EVENT_DISABLE_TIMING
        return (self._status("cuEventCreate"), Event())

    def cuEventRecord(self, event, stream):
        record = Record(int(stream), False)
        event.last = record

        def finish() -> None:
            record.done = True

        return self._queue(stream, finish)

    def cuStreamWaitEvent(self, stream, event, flags):
        record = event.last  # a later record is of no concern
        return self._queue(stream, lambda: self._run(record.stream, until=lambda: record.done))

    def cuStreamDestroy(self, stream):
        """Its work goes on, but nobody may name it any more."""
        self._destroyed.add(int(stream))
        return (SUCCESS,)

    def cuEventDestroy(self, event):
        return (SUCCESS,)

    # -------------------------------------------------------------------------------------- devices
    def cuInit(self, flags):
        return (self.failing.get("cuInit", SUCCESS),)

    def cuGetErrorName(self, status):
        return (SUCCESS, CUresult(status).name.encode())

    def cuGetErrorString(self, status):
        return (SUCCESS, CUresult(status).name.removeprefix("CUDA_ERROR_").replace("_", " ").lower().encode())

    def cuDriverGetVersion(self):
        return (SUCCESS, self.version)

    def cuDeviceGetCount(self):
        return (SUCCESS, self.n_devices)

    def cuDeviceGet(self, index):
        return (SUCCESS, index)

    def cuDevicePrimaryCtxRetain(self, device):
        return (self.failing.get("cuDevicePrimaryCtxRetain", SUCCESS), device + FIRST_CONTEXT)

    def cuDeviceGetAttribute(self, attribute, device):
        values = {
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: self.n_multiprocessors,
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.capability[0],
            CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.capability[1],
        }
        if attribute in values:
            return (SUCCESS, values[attribute])
        return (SUCCESS, self._shared_per_block())

    def _shared_per_block(self) -> int:
        """Of a chip too old to be planned for: Volta's."""
        return architecture(self.capability).shared_per_block if self.capability >= (7, 5) else 96 * 1024

    def cuDeviceGetName(self, size, device):
        return (SUCCESS, b"Emulated GPU".ljust(size, b"\0"))

    def cuDeviceTotalMem(self, device):
        return (SUCCESS, self.memory_limit)

    def cuCtxSetCurrent(self, context):
        self._current.context = context
        return (SUCCESS,)

    def cuCtxGetDevice(self):
        if status := self._status("cuCtxGetDevice"):
            return (status, None)
        return (SUCCESS, self._current.context - FIRST_CONTEXT)

    # --------------------------------------------------------------------------------------- memory
    def cuPointerGetAttribute(self, attribute, pointer):
        if attribute == CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED:
            return (SUCCESS, False)
        return (SUCCESS, self.device_of(pointer))

    def cuMemAlloc(self, n_bytes):
        if status := self._status("cuMemAlloc"):
            return (status, None)
        if self.memory.allocated + n_bytes > self.memory_limit:
            return (CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
        return (SUCCESS, self.memory.allocate(n_bytes))

    def cuMemFree(self, address):
        if status := self._status("cuMemFree"):
            return (status,)
        self.run_everything()  # as the driver's: nothing on its way may use the memory any more
        return (SUCCESS if self.memory.free(address) else CUresult.CUDA_ERROR_INVALID_VALUE,)

    def cuMemsetD8Async(self, address, value, n_bytes, stream):
        def work() -> None:
            self.memory.bytes_at(address, n_bytes)[:] = value

        return (status,) if (status := self._status("cuMemsetD8Async")) else self._queue(stream, work)

    def cuMemcpyHtoDAsync(self, address, source, n_bytes, stream):
        def work() -> None:
            self.memory.bytes_at(address, n_bytes)[:] = host_bytes(source, n_bytes)

        return (status,) if (status := self._status("cuMemcpyHtoDAsync")) else self._queue(stream, work)

    def cuMemcpyDtoHAsync(self, target, address, n_bytes, stream):
        def work() -> None:
            host_bytes(target, n_bytes)[:] = self.memory.bytes_at(address, n_bytes)

        return (status,) if (status := self._status("cuMemcpyDtoHAsync")) else self._queue(stream, work)

    # -------------------------------------------------------------------------------------- kernels
    def cuModuleLoadData(self, cubin):
        if status := self._status("cuModuleLoadData"):
            return (status, None)
        return (SUCCESS, int(cubin))

    def cuModuleGetFunction(self, module, name):
        if name != b"emulated":
            return (CUresult.CUDA_ERROR_NOT_FOUND, None)
        self._functions.append(Function(len(self._functions) + 1, *self.compiler.made[module]))
        return (SUCCESS, self._functions[-1])

    def cuModuleUnload(self, module):
        return (SUCCESS,)

    def cuFuncSetAttribute(self, function, attribute, value):
        if value > self._shared_per_block():
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        function.max_shared_bytes = value
        return (SUCCESS,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared_bytes):
        assert threads == function.threads
        return (SUCCESS, 1)

    def cuLaunchKernel(self, function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream,
                       arguments, extra):  # fmt: skip
        if status := self._status("cuLaunchKernel"):
            return (status,)
        sizes = (grid_x, grid_y, grid_z, block_x, block_y, block_z)
        if min(sizes) < 1 or (grid_z, block_y, block_z) != (1, 1, 1) or shared_bytes > function.max_shared_bytes:
            return (CUresult.CUDA_ERROR_INVALID_VALUE,)
        assert block_x == function.threads
        if function.body is None:
            function.body = function.make_body(self._target)
        body = function.body
        pointers = (ctypes.c_uint64 * len(body.parameters)).from_address(int(arguments))
        values = [  # copied at the launch, as the driver does
            CTYPES[kind].from_address(pointer).value
            for pointer, (_, kind) in zip(pointers, body.parameters, strict=True)
        ]
        self.launches.append((body.name, grid_x, int(stream)))

        def work() -> None:
            run_kernel(
                self._target, self.memory, body, values, threads=block_x, shared_bytes=max(shared_bytes, 16),
                n_blocks=grid_x, n_rows=grid_y, shuffle=self.shuffle,
            )  # fmt: skip

        return self._queue(stream, work)

    # ------------------------------------------------------------------------------- native functions
    def cuGetProcAddress(self, name, version, flags):
        """Functions that native code may call: those of this object, whatever they are then."""
        if version > self.version:
            return (CUresult.CUDA_ERROR_INVALID_VALUE, None, 0)
        return (SUCCESS, ctypes.cast(self._native[name], ctypes.c_void_p).value, 0)

    def _set_context(self, context: int | None) -> int:
        self.native_calls.append("cuCtxSetCurrent")
        return self._status_of(lambda: self.cuCtxSetCurrent(context))

    def _launch(self, config: int, function: int, pointers: int, extra: int | None) -> int:
        self.native_calls.append("cuLaunchKernelEx")
        words = LAUNCH_CONFIG.unpack_from(host_bytes(config, LAUNCH_CONFIG.size))
        *sizes, stream, _, _ = words
        return self._status_of(
            lambda: self.cuLaunchKernel(self._functions[function - 1], *sizes, stream, pointers, extra or 0)
        )

    def _status_of(self, call: Callable[[], tuple]) -> int:
        """No exception can pass native code: that of a failed assertion is a status that fails the test."""
        try:
            return int(call()[0])
        except Exception:
            traceback.print_exc()
            return int(CUresult.CUDA_ERROR_UNKNOWN)


def host_bytes(address: int, n_bytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * n_bytes).from_address(int(address)), np.uint8)


@contextmanager
def installed(emulated: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDriver]:
    """Let the fused engine find this driver and compiler instead of the machine's own."""
    forget = (driver.device.cache_clear, device_status.cache_clear)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "bindings", lambda: emulated)
        patch.setattr(programs, "compile_kernel", emulated.compiler)
        for f in forget:
            f()
        yield emulated
        gc.collect()  # buffers of this driver are freed while it is there
    for f in forget:
        f()
