"""Kernels that other processes compile: whether and how many, and the one server that starts them.

The compile server (`compile_server.py`) is started in the background once it is likely that something is to be
compiled, so that its import of Numba, which this process is spared, is over when kernels are asked for. Whatever goes
wrong with it, `begin` gives None or its future raises `NoAnswer`, and kernels are compiled in this process.

NUMBA_TCNN_COMPILE_PROCESSES is how many processes compile at a time (default: as many as there are usable cores, at
most 8, but none where there is one core only). With 0 everything is compiled in the process that needs it.
"""

from __future__ import annotations

import atexit
import os
import pickle
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from . import cache
from .cache import CompiledKernel

if TYPE_CHECKING:
    from .compile_client import CompileServer
    from .jobs import PlaceInJob

VARIABLE = "NUMBA_TCNN_COMPILE_PROCESSES"
MAX_PROCESSES = 8
"""Unless the user asks for more; a model's first training step has fewer kernels, layer by layer excepted."""

MIN_CORES = 2
"""With fewer, a server takes from this process the time that it saves it."""

EXIT_SECONDS = 2.0
"""To wait for the end of a server that has been killed."""


class NoAnswer(Exception):
    """The process that was to compile a kernel is gone; whoever needs the kernel compiles it."""


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def n_processes() -> int:
    """How many compile beside this one. Raises ValueError where the environment gives something else than a number."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen and not chosen.isdecimal():
        raise ValueError(f"{VARIABLE} is {chosen!r}; it must be a number of processes, 0 for none")
    interpreter = Path(sys.executable or "").name  # of a program that embeds Python, the program's name
    if not hasattr(os, "fork") or "python" not in interpreter:
        return 0
    cores = usable_cores()
    return int(chosen) if chosen else min(cores, MAX_PROCESSES) if cores >= MIN_CORES else 0


class CompileProcesses:
    """What a process knows of its server, which is started again where it has ended."""

    def __init__(self):
        self.server: CompileServer | None = None
        self._works = True
        self._lock = threading.Lock()

    def start(self) -> CompileServer | None:
        """The server, which may not be ready yet; None where there is to be none."""
        processes = n_processes()
        with self._lock:
            if self.server is not None and self.server.has_ended:
                self._works, self.server = self.server.was_ready, None
            if self.server is None and self._works and processes:
                from .compile_client import CompileServer  # 30 ms of imports

                try:
                    self.server = CompileServer(processes)
                except (OSError, RuntimeError):  # no more processes, memory or threads
                    self._works = False
            return self.server

    @property
    def may_start(self) -> bool:
        """Whether `start` would start a server now."""
        return n_processes() > 0 and self._works and (self.server is None or self.server.has_ended)

    def begin(self, place: PlaceInJob | None, key: str, capability: tuple[int, int]) -> Future[CompiledKernel] | None:
        """The kernel of this place and key, at once where the disk cache has it; None where no process compiles it."""
        if place is None or not n_processes():
            return None
        known = cache.load(key)
        if known is not None:
            future: Future[CompiledKernel] = Future()
            future.set_result(known)
            return future
        try:
            request = pickle.dumps((place, key, capability, os.environ.get(cache.VARIABLE)))
        except (pickle.PicklingError, AttributeError, TypeError):  # a job that isn't one of this package's
            return None
        server = self.start()
        return None if server is None else server.ask(request)


_own = CompileProcesses()


def compile_processes() -> CompileProcesses:
    """Those of this process."""
    return _own


def _after_fork() -> None:
    """The server goes on working for the parent, and for it alone."""
    global _own
    if _own.server is not None:
        _own.server.leave_to_parent()
    _own = CompileProcesses()


def _at_exit() -> None:
    if _own.server is not None:
        _own.server.stop_and_wait(EXIT_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
