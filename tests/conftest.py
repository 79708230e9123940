"""Fixtures, the rule for tests that need a GPU, and tables of errors against tiny-cuda-nn and differences."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from emulated_driver import EmulatedDriver, installed

import numba_tcnn.fused
import numba_tcnn.reference
from numba_tcnn.fused import compile_processes

os.environ[compile_processes.VARIABLE] = "0"  # tests put other compilers in this process

EMULATES = {"emulation", "emulated_driver", "device_optimizer"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-table", action="store_true", help="print the worst error of every case of tests/golden")
    parser.addoption("--gradient-table", action="store_true", help="print the worst errors against central differences")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for option, title, module in (
        ("--golden-table", "errors against tiny-cuda-nn", "golden_case"),
        ("--gradient-table", "errors against central differences", "gradient_checks"),
    ):
        if terminalreporter.config.getoption(option):
            terminalreporter.write_sep("=", title)
            for line in importlib.import_module(module).table():
                terminalreporter.write_line(line)


@functools.cache
def emulates(name: str) -> bool:
    """Whether a module of tests has something of the emulator's, be it by way of another module of tests."""
    imported = {getattr(value, "__module__", None) or "" for value in vars(sys.modules[name]).values()} - {name}
    return bool(EMULATES & imported) or any(emulates(other) for other in imported if other.startswith("test_"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that use the emulator; skip those marked `gpu` where there is no device, with its own reason."""
    for item in items:
        if emulates(item.module.__name__) or "gpu" in item.fixturenames:
            item.add_marker("emulated")
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    status = numba_tcnn.fused.device_status(0)
    if not status.usable:
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=f"no usable GPU: {status.reason}"))


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """While fused code is tested the reference engine raises: a fallback is a failure, not a slower success."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the reference engine was asked to compute in a test of fused code")

    monkeypatch.setattr(numba_tcnn.reference, "create_runtime", refuse)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDriver]:
    """An emulated one (the mark of this name asks for a real one): fused models run, their kernels in the emulator."""
    with installed(EmulatedDriver(), monkeypatch) as emulated:
        yield emulated


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20241130)
