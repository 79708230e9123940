"""The CUDA driver, as far as this package needs it: devices, memory, loaded kernels, launches. Through cuda.bindings.

Work goes into the device's primary context, which CuPy, PyTorch, JAX and Numba share, so their arrays can be used.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from ..engines import EngineUnavailable
from . import cache
from .compile_processes import compile_processes


class CudaError(RuntimeError):
    """A driver call failed; says which, and the driver's own words."""


@functools.cache
def bindings() -> ModuleType:
    """`cuda.bindings.driver`, initialised. Raises EngineUnavailable with the reason."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EngineUnavailable(
            f"the CUDA packages are not installed ({error}); pip install 'numba-tcnn[cuda13]' brings them",
            no_device=True,
        ) from error
    try:
        (status,) = driver.cuInit(0)
    except RuntimeError as error:  # the bindings could not find libcuda
        raise EngineUnavailable("there is no NVIDIA driver on this machine", no_device=True) from error
    if status == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise EngineUnavailable("there is no NVIDIA device on this machine", no_device=True)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EngineUnavailable(f"the NVIDIA driver could not be initialised: {_words(driver, status)}")
    return driver


def _words(driver: ModuleType, status) -> str:
    _, name = driver.cuGetErrorName(status)
    _, text = driver.cuGetErrorString(status)
    return f"{name.decode() if name else status}: {text.decode() if text else 'unknown error'}"


def check(returned: tuple, doing: str):
    """The values of a driver call; raises CudaError, or MemoryError where the device is out of memory."""
    status, *values = returned
    if status != 0:
        driver = bindings()
        message = f"{doing}: {_words(driver, status)}"
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(message)
        raise CudaError(message)
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


@dataclass(frozen=True)
class DeviceProperties:
    name: str
    capability: tuple[int, int]
    n_multiprocessors: int
    shared_per_block: int
    total_memory: int


class Device:
    """One device's primary context. Calls make it current in the calling thread."""

    def __init__(self, index: int):
        driver = bindings()
        count = check(driver.cuDeviceGetCount(), "counting devices")
        if index >= count:
            raise EngineUnavailable(f"there is no CUDA device {index}: this machine has {count}", no_device=count == 0)
        self.index, self.n_devices = index, count
        self.handle = check(driver.cuDeviceGet(index), f"opening device {index}")
        if cache.is_empty():  # the server starts while the context is made
            compile_processes().start()
        self.context = check(driver.cuDevicePrimaryCtxRetain(self.handle), f"making a context on device {index}")

    def attribute(self, name: str) -> int:
        driver = bindings()
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return check(driver.cuDeviceGetAttribute(attribute, self.handle), f"reading {name}")

    @functools.cached_property
    def properties(self) -> DeviceProperties:
        driver = bindings()
        name = check(driver.cuDeviceGetName(100, self.handle), "reading the device's name")
        return DeviceProperties(
            name=name.split(b"\0")[0].decode(),
            capability=(self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")),
            n_multiprocessors=self.attribute("MULTIPROCESSOR_COUNT"),
            shared_per_block=self.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            total_memory=check(driver.cuDeviceTotalMem(self.handle), "reading the device's memory"),
        )

    def use(self) -> None:
        """Make the context current in this thread."""
        check(bindings().cuCtxSetCurrent(self.context), "switching the context")

    def synchronize(self, stream: int = 0) -> None:
        check(bindings().cuStreamSynchronize(stream), "waiting for the device")

    def wait_for(self, other: int, stream: int) -> None:
        """Let `stream` wait for what `other` holds now."""
        event = Event(self)
        event.record(other)
        event.wait(stream)
        event.free()

    def holds(self, pointer: int) -> bool:
        """Whether an address is memory of this device, or of all (managed memory)."""
        driver = bindings()
        attributes = driver.CUpointer_attribute
        doing = "asking which device holds an array"
        if check(driver.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_IS_MANAGED, pointer), doing):
            return True
        ordinal = check(driver.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer), doing)
        return int(ordinal) == self.index


class Event:
    """A place in the work of a stream that others can wait for."""

    def __init__(self, owner: Device):
        driver = bindings()
        self.device = owner
        self._event = check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value), "making an event")

    def record(self, stream: int) -> None:
        """Stand behind what the stream holds now."""
        check(bindings().cuEventRecord(self._event, stream), "recording an event")

    def wait(self, stream: int) -> None:
        """Let `stream` wait for where the event stands now."""
        check(bindings().cuStreamWaitEvent(stream, self._event, 0), "waiting for an event")

    def free(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            check(bindings().cuEventDestroy(event), "releasing an event")

    def __del__(self):
        if getattr(self, "_event", None) is not None:
            try:
                self.device.use()
                self.free()
            except (CudaError, EngineUnavailable, AttributeError, TypeError):
                pass  # the context or the interpreter is already gone


@functools.cache
def device(index: int) -> Device:
    """Device number `index`. Raises EngineUnavailable where it can't be had."""
    try:
        return Device(index)
    except (CudaError, MemoryError) as error:
        raise EngineUnavailable(str(error)) from error


def current_device() -> int:
    """The number of the device whose context is current in this thread."""
    return int(check(bindings().cuCtxGetDevice(), "asking for the current device"))


class DeviceBuffer:
    """Device memory that is freed with the object. `size` in bytes."""

    def __init__(self, owner: Device, size: int):
        self.device, self.size = owner, size
        owner.use()
        doing = f"allocating {size / 2**20:.1f} MiB on device {owner.index}"
        self.address = int(check(bindings().cuMemAlloc(max(size, 16)), doing))

    def fill_zero(self, stream: int = 0) -> None:
        _note_other_work()
        check(bindings().cuMemsetD8Async(self.address, 0, self.size, stream), "clearing device memory")

    def upload(self, values: np.ndarray, stream: int = 0) -> None:
        """Copy host memory here; the host array may be changed afterwards."""
        _note_other_work()
        values = np.ascontiguousarray(values)
        check(
            bindings().cuMemcpyHtoDAsync(self.address, values.ctypes.data, values.nbytes, stream), "copying to device"
        )
        self.device.synchronize(stream)

    def download_into(self, values: np.ndarray, stream: int = 0, offset: int = 0) -> None:
        """Fill a C-contiguous host array from byte `offset` of this memory; waits for the stream."""
        copy_to_host(values, self.address + offset, stream)
        self.device.synchronize(stream)

    def download(self, shape, dtype, stream: int = 0) -> np.ndarray:
        values = np.empty(shape, dtype)
        self.download_into(values, stream)
        return values

    def free(self) -> None:
        if self.address:
            address, self.address = self.address, 0
            with contextlib.suppress(CudaError, EngineUnavailable):  # the context, or Python, may be gone at the end
                self.device.use()
                check(bindings().cuMemFree(address), "freeing device memory")

    def __del__(self):
        if getattr(self, "address", 0):
            try:
                self.free()
            except (EngineUnavailable, AttributeError, TypeError):
                pass  # the interpreter is shutting down and has taken the bindings apart


def copy_to_host(values: np.ndarray, address: int, stream: int) -> None:
    """Fill a C-contiguous host array with device memory, as a part of the stream's work."""
    _note_other_work()
    call = bindings().cuMemcpyDtoHAsync(values.ctypes.data, address, values.nbytes, stream)
    check(call, "copying from device")


class Arguments:
    """Arguments of launches, 8 bytes each: `values` as integers, `floats` as float32 (number 2 i of argument i).

    addresses   where each of them is, a uint64 array: what a launch is given
    """

    def __init__(self, storage: np.ndarray):
        self.addresses = storage.ctypes.data + 8 * np.arange(len(storage), dtype=np.uint64)
        self.list_address = self.addresses.ctypes.data
        self.values, self.floats = memoryview(storage), memoryview(storage.view(np.float32))

    def place(self, i: int, kind: str) -> tuple[memoryview, int]:
        """Where an argument is set: view[number] = value."""
        return (self.floats, 2 * i) if kind == "f32" else (self.values, i)


class LoadedKernel:
    """A kernel on a device, with its arguments packed once and changed in place.

    parameters   (name, kind) in launch order
    overlaps     whether it may start while the kernel before it still runs, where kernels take turns
    """

    def __init__(self, owner: Device, cubin: bytes, entry: str, parameters: Sequence[tuple[str, str]], *,
                 name: str, threads: int, shared_bytes: int, overlaps: bool = True):  # fmt: skip
        driver = bindings()
        owner.use()
        self.overlaps = overlaps
        self.device, self.name, self.threads, self.shared_bytes = owner, name, threads, shared_bytes
        self._module = check(driver.cuModuleLoadData(cubin), f"loading kernel {name}")
        self._function = check(driver.cuModuleGetFunction(self._module, entry.encode()), f"finding kernel {name}")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(
            driver.cuFuncSetAttribute(self._function, attribute, shared_bytes),
            f"giving kernel {name} {shared_bytes} bytes of shared memory",
        )
        self.blocks_per_multiprocessor = check(
            driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, shared_bytes),
            f"asking how many blocks of kernel {name} fit",
        )
        if self.blocks_per_multiprocessor == 0:
            raise EngineUnavailable(f"kernel {name} does not fit a multiprocessor")
        self._arguments = Arguments(np.zeros(len(parameters), np.uint64))
        self._values, self._floats = self._arguments.values, self._arguments.floats
        self._argument_list = self._arguments.list_address
        self.places = {name: (i, kind) for i, (name, kind) in enumerate(parameters)}
        self._launch = driver.cuLaunchKernel

    def set(self, **arguments: int | float) -> None:
        """Set those of these parameters that the kernel has; the others keep their values."""
        for name, value in arguments.items():
            place = self.places.get(name)
            if place is None:
                continue
            i, kind = place
            if kind == "f32":
                self._floats[2 * i] = value
            else:
                self._values[i] = value

    def setter(self, *names: str):
        """A function of the values of these integer parameters, for what changes at every launch."""
        values, places = self._values, [self.places[name][0] for name in names]

        def set_values(*given: int) -> None:
            for i, value in zip(places, given, strict=True):
                values[i] = value

        return set_values

    def launch(self, n_blocks: int, stream: int = 0, n_rows: int = 1) -> None:
        (status,) = self._launch(
            self._function, n_blocks, n_rows, 1, self.threads, 1, 1, self.shared_bytes, stream, self._argument_list, 0
        )
        if status != 0:
            check((status,), f"launching kernel {self.name}")
        if _recorders:
            _note_launch(self, n_blocks, stream, n_rows)

    def __del__(self):
        module = getattr(self, "_module", None)
        if module is not None:
            try:
                self.device.use()
                bindings().cuModuleUnload(module)
            except (CudaError, EngineUnavailable, AttributeError, TypeError):
                pass  # the context or the interpreter is already gone


# ------------------------------------------------------------------------------------------- recording calls

_recorders: dict[int, Recorder] = {}  # by the thread that they watch


class RecordedLaunch:
    """A launch that has been made, with arguments of its own; called, it is made again and gives its status."""

    def __init__(self, kernel: LoadedKernel, n_blocks: int, stream: int, n_rows: int):
        self.kernel = kernel
        self._n_blocks, self._n_rows, self._stream = n_blocks, n_rows, stream
        self._arguments = Arguments(np.array(kernel._values, np.uint64))

    def has(self, name: str) -> bool:
        return name in self.kernel.places

    def get(self, name: str) -> int | float | None:
        """An argument, if the kernel has it."""
        if not self.has(name):
            return None
        view, i = self._arguments.place(*self.kernel.places[name])
        return view[i]

    def kind(self, name: str) -> str:
        return self.kernel.places[name][1]

    def find_at(self, address: int, name: str) -> None:
        """From now on take an argument from this address, which others may share."""
        i, _ = self.kernel.places[name]
        self._arguments.addresses[i] = address

    @property
    def grid(self) -> tuple[int, int, int, int, int]:
        """Blocks, rows of blocks, threads, bytes of shared memory, stream."""
        return self._n_blocks, self._n_rows, self.kernel.threads, self.kernel.shared_bytes, self._stream

    @property
    def function(self) -> int:
        return int(self.kernel._function)

    @property
    def arguments(self) -> int:
        """Address of the list of arguments' addresses."""
        return self._arguments.list_address

    def __call__(self) -> int:
        kernel = self.kernel
        (status,) = kernel._launch(
            kernel._function, self._n_blocks, self._n_rows, 1, kernel.threads, 1, 1, kernel.shared_bytes, self._stream,
            self._arguments.list_address, 0,
        )  # fmt: skip
        return status


class Recorder:
    """While it is entered, keeps this thread's launches. `is_complete`: there were some, all on the default stream,
    and nothing else was done to device memory."""

    def __init__(self):
        self.launches: list[RecordedLaunch] = []
        self._did_more = False

    @property
    def is_complete(self) -> bool:
        return bool(self.launches) and not self._did_more

    def __enter__(self) -> Recorder:
        _recorders[threading.get_ident()] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _recorders[threading.get_ident()]

    def note_launch(self, kernel: LoadedKernel, n_blocks: int, stream: int, n_rows: int) -> None:
        self.launches.append(RecordedLaunch(kernel, n_blocks, stream, n_rows))
        self._did_more |= stream != 0

    def note_other_work(self) -> None:
        self._did_more = True


def _note_launch(kernel: LoadedKernel, n_blocks: int, stream: int, n_rows: int) -> None:
    recorder = _recorders.get(threading.get_ident())
    if recorder is not None:
        recorder.note_launch(kernel, n_blocks, stream, n_rows)


def _note_other_work() -> None:
    if _recorders:
        recorder = _recorders.get(threading.get_ident())
        if recorder is not None:
            recorder.note_other_work()


def driver_version() -> tuple[int, int]:
    """The newest CUDA version that the driver supports, e.g. (13, 0)."""
    version = check(bindings().cuDriverGetVersion(), "reading the driver's version")
    return version // 1000, version % 1000 // 10
