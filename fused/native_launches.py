"""Launches one behind the other by one native function, for calls that come again and again.

cuda.bindings looks at eleven arguments of each launch and makes objects of some, 0.8 us beyond what the driver takes;
so long, too, takes ctypes to convert those of cuLaunchKernel, called by its address. Here the driver's functions are
called by `ASSEMBLY`, which finds everything in memory that is written once, and Python makes one call with nothing to
convert, 0.15 us, however many launches there are. LLVM compiles the function when it is first needed, in some 25 ms
behind 40 ms for importing llvmlite, which Numba brings.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from . import driver
from .driver import Device, RecordedLaunch, check
from .target import TURNS_SINCE

SIGNATURES_OF = 12000
"""The CUDA version whose cuCtxSetCurrent and cuLaunchKernelEx are called, as cuGetProcAddress counts: 12.0, which every
driver has that we use."""

PER_THREAD_STREAMS = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
"""Where the environment sets this, stream 0 of some versions of cuda.bindings is the thread's own. It would not be that
of a function found by its address."""


class Attribute(ctypes.Structure):
    """The driver's CUlaunchAttribute, for a value that is a number."""

    _fields_ = [
        ("id", ctypes.c_uint32),
        ("padding", ctypes.c_uint32),
        ("value", ctypes.c_uint32),
        ("rest", ctypes.c_uint8 * 60),
    ]


OVERLAP = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: blocks may start while the stream's kernel before still runs,
and wait for it themselves (`intrinsics.make_take_turn`). What lies between two kernels, some 1 to 2 us, mostly goes."""


class Config(ctypes.Structure):
    """The driver's CUlaunchConfig: grid and block by axis, bytes of shared memory, a stream, attributes."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint32),
    ]


class Launch(ctypes.Structure):
    """What `ASSEMBLY` knows as %Launch: what cuLaunchKernelEx is given."""

    _fields_ = [("config", Config), ("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p)]


class Batch(ctypes.Structure):
    """What `ASSEMBLY` knows as %Batch: two functions of the driver, the context to launch in, and the launches."""

    _fields_ = [
        ("set_context", ctypes.c_void_p),
        ("launch_kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
        ("launches", ctypes.c_void_p),
        ("n_launches", ctypes.c_uint64),
    ]


ASSEMBLY = """
%Config = type { i32, i32, i32, i32, i32, i32, i32, ptr, ptr, i32 }
%Launch = type { %Config, ptr, ptr }
%Batch = type { ptr, ptr, ptr, ptr, i64 }

define i64 @launch_all(ptr %address) {
begin:
  %batch = load %Batch, ptr %address
  %set_context = extractvalue %Batch %batch, 0
  %launch_kernel = extractvalue %Batch %batch, 1
  %context = extractvalue %Batch %batch, 2
  %launches = extractvalue %Batch %batch, 3
  %n_launches = extractvalue %Batch %batch, 4
  %context_status = call i32 %set_context(ptr %context)
  %has_context = icmp eq i32 %context_status, 0
  br i1 %has_context, label %next, label %end

next:
  %n_done = phi i64 [ 0, %begin ], [ %number, %launch ]
  %is_done = icmp eq i64 %n_done, %n_launches
  br i1 %is_done, label %end, label %launch

launch:
  %config = getelementptr %Launch, ptr %launches, i64 %n_done
  %at_function = getelementptr %Launch, ptr %config, i64 0, i32 1
  %at_arguments = getelementptr %Launch, ptr %config, i64 0, i32 2
  %function = load ptr, ptr %at_function
  %arguments = load ptr, ptr %at_arguments
  %status = call i32 %launch_kernel(ptr %config, ptr %function, ptr %arguments, ptr null)
  %number = add i64 %n_done, 1
  %is_launched = icmp eq i32 %status, 0
  br i1 %is_launched, label %next, label %end

end:
  %last_status = phi i32 [ %context_status, %begin ], [ 0, %next ], [ %status, %launch ]
  %last_number = phi i64 [ 0, %begin ], [ 0, %next ], [ %number, %launch ]
  %high = shl i64 %last_number, 32
  %low = zext i32 %last_status to i64
  %result = or i64 %high, %low
  ret i64 %result
}
"""
"""launch_all(batch) makes its context current and launches until one fails. 0, or the status of what failed in the low
32 bits and which launch that was, counted from 1, in the high; 0 there is the context."""


@functools.cache
def machine_code(assembly: str) -> Any:
    """LLVM's compiled form of a module, kept for good; `get_function_address(name)` gives its functions."""
    import llvmlite.binding as llvm  # only models whose calls are repeated need it

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(assembly)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
    engine.finalize_object()
    return engine


@functools.cache
def _launch_all() -> Callable[[Any], int]:
    """Without argument types: ctypes then passes on what `byref` made without a look. Other Python threads run on."""
    return ctypes.CFUNCTYPE(ctypes.c_int64)(machine_code(ASSEMBLY).get_function_address("launch_all"))


def entry_points(bindings: ModuleType) -> tuple[int, int] | None:
    """Addresses of the driver's cuCtxSetCurrent and cuLaunchKernelEx; None where they can't be had or stand for others
    than those of cuda.bindings."""
    find = getattr(bindings, "cuGetProcAddress", None)
    if find is None or os.environ.get(PER_THREAD_STREAMS, "0") != "0":
        return None
    addresses = []
    for name in (b"cuCtxSetCurrent", b"cuLaunchKernelEx"):
        status, address, *_ = find(name, SIGNATURES_OF, 0)
        if status != 0 or not address:
            return None
        addresses.append(int(address))
    return addresses[0], addresses[1]


def launch_through_bindings(device: Device, launches: Sequence[RecordedLaunch]) -> int:
    """What `ASSEMBLY` does, with its result."""
    (status,) = driver.bindings().cuCtxSetCurrent(device.context)
    if status != 0:
        return int(status)
    for number, launch in enumerate(launches, 1):
        status = launch()
        if status != 0:
            return number << 32 | int(status)
    return 0


def record_of(launch: RecordedLaunch, attributes: dict[str, int]) -> Launch:
    n_blocks, n_rows, threads, shared_bytes, stream = launch.grid
    attributes = attributes if launch.kernel.overlaps else {}
    config = Config(n_blocks, n_rows, 1, threads, 1, 1, shared_bytes, stream, **attributes)
    return Launch(config, launch.function, launch.arguments)


class LaunchList:
    """Launches on one device, in order.

    run                makes them; 0, or what `fail` tells in words. Those before the one that failed have been made
    through_bindings   the same by way of cuda.bindings
    """

    def __init__(self, device: Device, launches: Sequence[RecordedLaunch]):
        self.launches = tuple(launches)
        self.through_bindings = functools.partial(launch_through_bindings, device, self.launches)
        entries = entry_points(driver.bindings())
        self.run = self.through_bindings if entries is None else self._native(device, *entries)

    def _native(self, device: Device, set_context: int, launch_kernel: int) -> Callable[[], int]:
        take_turns = device.properties.capability >= TURNS_SINCE
        attribute = Attribute(id=OVERLAP, value=1)
        attributes = {"attributes": ctypes.addressof(attribute), "n_attributes": 1} if take_turns else {}
        records = (Launch * len(self.launches))(*(record_of(launch, attributes) for launch in self.launches))
        batch = Batch(set_context, launch_kernel, int(device.context), ctypes.addressof(records), len(records))
        self._kept = attribute, records  # byref keeps the batch alive, but not what that points to
        return functools.partial(_launch_all(), ctypes.byref(batch))

    def fail(self, result: int) -> None:
        """Raise what `driver.check` raises, for a result of `run` other than 0."""
        number, status = result >> 32, driver.bindings().CUresult(result & 0xFFFFFFFF)
        doing = "switching the context" if number == 0 else f"launching kernel {self.launches[number - 1].kernel.name}"
        check((status,), doing)
