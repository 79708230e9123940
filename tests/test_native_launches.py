"""The native function that makes a recorded call's launches, with functions of the driver that write down how they were
called."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from emulated_driver import LAUNCH_ATTRIBUTE, LAUNCH_CONFIG, LAUNCH_KERNEL, SET_CONTEXT, CUresult, host_bytes

from numba_tcnn.fused import driver
from numba_tcnn.fused.driver import CudaError
from numba_tcnn.fused.native_launches import PER_THREAD_STREAMS, LaunchList, entry_points

CONTEXT = 0x7F12_3456_789A_BCD0
"""Handles and addresses have 64 bits, and so have these."""


class WrittenLaunch(SimpleNamespace):
    """In place of `driver.RecordedLaunch`."""

    @property
    def all_arguments(self) -> tuple[int, ...]:
        """Of cuLaunchKernel."""
        n_blocks, n_rows, threads, shared_bytes, stream = self.grid
        return self.function, n_blocks, n_rows, 1, threads, 1, 1, shared_bytes, stream, self.arguments, 0

    def __call__(self) -> int:
        return driver.bindings().cuLaunchKernel(*self.all_arguments)[0]


LAUNCHES = [
    WrittenLaunch(
        function=0x7F00_0000_0001_0000 + 16 * i, arguments=0x7FFF_0000_0002_0000 + 16 * i,
        grid=(2**31 - 1 - i, 65535 - i, 384 - 32 * i, 232448 - 1024 * i, 0x7EEE_0000_0003_0000 * i),
        kernel=SimpleNamespace(name=name, overlaps=name != "second"),
    )
    for i, name in enumerate(("first", "second", "third"))
]  # fmt: skip

OVERLAP = 6
"""The driver's number for programmatic stream serialization."""


class WritingDriver:
    """Functions for native code and the same for Python, which write down what they are given and fail if told to."""

    CUresult = CUresult

    def __init__(self):
        self.calls: list[tuple] = []
        self.statuses: dict[int, CUresult] = {}  # of calls, counted from 0
        self.attributes: list[list[tuple[int, int]]] = []  # of native launches: which, and its value
        self._native = {
            b"cuCtxSetCurrent": SET_CONTEXT(self._write), b"cuLaunchKernelEx": LAUNCH_KERNEL(self._launch)
        }  # fmt: skip

    def _write(self, *arguments: int | None) -> int:
        self.calls.append(tuple(a or 0 for a in arguments))
        return int(self.statuses.get(len(self.calls) - 1, CUresult.CUDA_SUCCESS))

    def _launch(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        """Written down as cuLaunchKernel."""
        *sizes, stream, attributes, n = LAUNCH_CONFIG.unpack_from(host_bytes(config, LAUNCH_CONFIG.size))
        size = LAUNCH_ATTRIBUTE.size
        self.attributes.append(
            [LAUNCH_ATTRIBUTE.unpack_from(host_bytes(attributes + size * i, size)) for i in range(n)]
        )
        return self._write(function, *sizes, stream, arguments, extra)

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple:
        assert (version, flags) == (12000, 0)
        return (CUresult.CUDA_SUCCESS, ctypes.cast(self._native[name], ctypes.c_void_p).value, 0)

    def cuCtxSetCurrent(self, context: int) -> tuple:
        return (self._write(context),)

    def cuLaunchKernel(self, *arguments: int) -> tuple:
        return (self._write(*arguments),)

    def cuGetErrorName(self, status: CUresult) -> tuple:
        return (CUresult.CUDA_SUCCESS, status.name.encode())

    def cuGetErrorString(self, status: CUresult) -> tuple:
        return (CUresult.CUDA_SUCCESS, b"in words")


@pytest.fixture
def writing(monkeypatch: pytest.MonkeyPatch) -> WritingDriver:
    written = WritingDriver()
    monkeypatch.setattr(driver, "bindings", lambda: written)
    return written


def launch_list(capability: tuple[int, int] = (9, 0)) -> LaunchList:
    properties = SimpleNamespace(capability=capability)
    return LaunchList(SimpleNamespace(context=CONTEXT, properties=properties), LAUNCHES)


@pytest.fixture(params=["native", "through bindings"])
def launches(request: Any, writing: WritingDriver, monkeypatch: pytest.MonkeyPatch) -> LaunchList:
    if request.param == "through bindings":
        monkeypatch.delattr(WritingDriver, "cuGetProcAddress")
    made = launch_list()
    assert (made.run == made.through_bindings) == (request.param == "through bindings")
    return made


def test_the_driver_gets_all_launches_in_order(launches: LaunchList, writing: WritingDriver) -> None:
    for _ in range(2):
        writing.calls.clear()
        assert launches.run() == 0
        assert writing.calls == [(CONTEXT,), *(launch.all_arguments for launch in LAUNCHES)]


@pytest.mark.parametrize(
    ("capability", "attributes"), [((8, 9), []), ((9, 0), [(OVERLAP, 1)]), ((12, 0), [(OVERLAP, 1)])]
)
def test_launches_overlap_where_kernels_take_turns(capability, attributes, writing: WritingDriver) -> None:
    assert launch_list(capability).run() == 0
    assert writing.attributes == [attributes, [], attributes]  # the second is not to overlap


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_launch_that_fails_ends_it_and_is_named(number: int, launches: LaunchList, writing: WritingDriver) -> None:
    writing.statuses[number] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    result = launches.run()
    assert len(writing.calls) == 1 + number
    name = ("first", "second", "third")[number - 1]
    with pytest.raises(CudaError, match=f"^launching kernel {name}: CUDA_ERROR_LAUNCH_FAILED: in words$"):
        launches.fail(result)


def test_nothing_is_launched_without_a_context(launches: LaunchList, writing: WritingDriver) -> None:
    writing.statuses[0] = CUresult.CUDA_ERROR_INVALID_CONTEXT
    result = launches.run()
    assert len(writing.calls) == 1
    with pytest.raises(CudaError, match="^switching the context: CUDA_ERROR_INVALID_CONTEXT: in words$"):
        launches.fail(result)


def test_a_launch_without_memory_is_a_memory_error(launches: LaunchList, writing: WritingDriver) -> None:
    writing.statuses[1] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(MemoryError, match="launching kernel first"):
        launches.fail(launches.run())


def test_where_addresses_cannot_be_had(writing: WritingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(entry_points(writing)) == 2
    assert entry_points(SimpleNamespace()) is None
    assert entry_points(SimpleNamespace(cuGetProcAddress=lambda *of: (CUresult.CUDA_ERROR_NOT_FOUND, None, 1))) is None
    assert entry_points(SimpleNamespace(cuGetProcAddress=lambda *of: (CUresult.CUDA_SUCCESS, 0, 1))) is None
    monkeypatch.setenv(PER_THREAD_STREAMS, "1")
    assert entry_points(writing) is None
