"""This process's end of the compile server: starts one, asks it for kernels, and ends it.

Answers come to a thread of the server's own, in any order. When the server has ended, be it that it was idle, that
it was killed or that it never answered, whoever still waits gets `NoAnswer`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from multiprocessing.connection import Pipe

from .cache import CompiledKernel
from .compile_processes import VARIABLE, NoAnswer

LONGEST_SILENCE = 180.0
"""Seconds without an answer to any request, after which a server is given up."""

ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What keeps libraries from starting threads in the server, which forks."""


class CauseElsewhere(Exception):
    """The cause of a compile error in another process, as the text of its traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _environment() -> dict[str, str]:
    """One in which the server finds the same modules, starts no threads, and sees no device."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path if isinstance(path, str))
    own = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", VARIABLE: "0"}
    return {**os.environ, **dict.fromkeys(ONE_THREAD, "1"), **own}


class CompileServer:
    """A running one, or one that has ended. Raises OSError where none can be started.

    was_ready   whether it has ever been able to compile
    """

    def __init__(self, processes: int):
        self._socket, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "numba_tcnn.fused.compile_server", str(processes)],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_environment(),
                start_new_session=True,  # Ctrl-C is not for it, and `stop` reaches its children
            )  # fmt: skip
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[CompiledKernel]] = {}
        self._last_heard = time.monotonic()
        self.was_ready = self.has_ended = False
        self._reader = threading.Thread(target=self._read, name="numba-tcnn compile server", daemon=True)
        self._reader.start()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def ask(self, request: bytes) -> Future[CompiledKernel] | None:
        """The kernel to come; None where the server has ended."""
        future: Future[CompiledKernel] = Future()
        with self._lock:
            if self.has_ended:
                return None
            number = next(self._numbers)
            self._asked[number] = future
            self._last_heard = time.monotonic()
            with contextlib.suppress(OSError):  # it is ending, and the reader will tell
                self._socket.send((number, request))
        future.add_done_callback(lambda done: self._forget(number) if done.cancelled() else None)
        return future

    def _forget(self, number: int) -> None:
        """Nobody waits for this kernel any more."""
        with self._lock, contextlib.suppress(OSError):
            if self._asked.pop(number, None) is not None and not self.has_ended:
                self._socket.send((number, None))

    def _read(self) -> None:
        try:
            while not self._is_late():
                if self._socket.poll(LONGEST_SILENCE):
                    self._hear(*self._socket.recv())
        except (EOFError, OSError):
            return
        finally:
            self._end()

    def _is_late(self) -> bool:
        with self._lock:
            return bool(self._asked) and time.monotonic() - self._last_heard >= LONGEST_SILENCE

    def _hear(self, number: int | None, answer: bytes | None) -> None:
        with self._lock:
            self.was_ready, self._last_heard = True, time.monotonic()
            future = self._asked.pop(number, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        made = NoAnswer() if answer is None else pickle.loads(answer)
        if isinstance(made, tuple):
            made, cause = made
            made.__cause__ = CauseElsewhere(cause)
        if isinstance(made, Exception):
            future.set_exception(made)
        else:
            future.set_result(made)

    def _end(self) -> None:
        self.stop()
        with self._lock:
            self._process.wait()
            self.has_ended = True
            self._socket.close()
            asked = list(self._asked.values())
            self._asked.clear()
        for future in asked:
            if future.set_running_or_notify_cancel():
                future.set_exception(NoAnswer())

    def stop(self) -> None:
        """Kill it and its children; whoever waits hears of it."""
        with self._lock:
            if not self.has_ended:
                with contextlib.suppress(OSError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def stop_and_wait(self, seconds: float) -> None:
        self.stop()
        self._reader.join(seconds)

    def leave_to_parent(self) -> None:
        """In a process that has been forked from the server's own."""
        self._process.returncode = 0  # no child of this process
        self._socket.close()
