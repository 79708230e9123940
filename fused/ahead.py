"""Kernels that other processes or threads compile while this thread is busy, or waits for one of them.

Numba's front end is Python behind a lock, which processes have one each of; in threads of one process, NVVM and the
assembler, a third to two thirds of the time, run beside it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from .cache import CompiledKernel
from .compile_processes import NoAnswer

MAX_THREADS = 8
"""That compile at a time; more than a model's first training step has kernels, layer by layer excepted."""


def nobody() -> None:
    """No process can be asked."""


class AheadOfCalls:
    """Compilations that have been started and whose kernels nobody has asked for yet."""

    def __init__(self):
        self._started: dict[str, Future[CompiledKernel]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def start(
        self,
        key: str,
        compile_it: Callable[[], CompiledKernel] | None,
        ask: Callable[[], Future[CompiledKernel] | None] = nobody,
    ) -> None:
        """Begin to compile a kernel, unless that has begun. What it raises, `take` raises.

        compile_it   what a thread does where no process can be asked; None: nothing
        """
        with self._lock:
            if key in self._started:
                return
            future = ask()
            if future is None and compile_it is not None:
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="numba-tcnn compile")
                future = self._threads.submit(compile_it)
            if future is not None:
                self._started[key] = future

    def take(self, key: str) -> CompiledKernel | None:
        """The kernel, waited for; None if none has been started, or its process is gone. Whoever wants it again finds
        it in the cache."""
        with self._lock:
            started = self._started.pop(key, None)
        if started is None:
            return None
        try:
            return started.result()
        except (NoAnswer, CancelledError):
            return None
        except KeyboardInterrupt:
            self._give_up(started)
            raise

    def _give_up(self, waited_for: Future[CompiledKernel]) -> None:
        """Nobody asks for what has been started; what a process or no thread yet is working on ends."""
        with self._lock:
            started, self._started = [waited_for, *self._started.values()], {}
        for future in reversed(started):  # or those that wait for a process would get one
            future.cancel()
