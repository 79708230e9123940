"""Kernels that other threads compile while this one is busy, or waits for one of them.

Numba's front end is Python behind a lock, but NVVM and the assembler, a third to two thirds of the time, run beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from .cache import CompiledKernel

MAX_THREADS = 8
"""That compile at a time; more than a model's first training step has kernels, layer by layer excepted."""


class AheadOfCalls:
    """Compilations that have been started and whose kernels nobody has asked for yet."""

    def __init__(self):
        self._started: dict[str, Future[CompiledKernel]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def start(self, key: str, compile_it: Callable[[], CompiledKernel]) -> None:
        """Begin to compile a kernel, unless that has begun. What it raises, `take` raises."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="numba-tcnn compile")
            if key not in self._started:
                self._started[key] = self._threads.submit(compile_it)

    def take(self, key: str) -> CompiledKernel | None:
        """The kernel, waited for; None if none has been started. Whoever wants it again finds it in the cache."""
        with self._lock:
            started = self._started.pop(key, None)
        return None if started is None else started.result()
