"""A process that compiles kernels for another one: `python -m numba_tcnn.fused.compile_server PROCESSES`.

It imports Numba and compiles one small kernel, so that all that happens once has happened, and then forks a child for
each kernel that it is asked for: Numba's front end is Python behind a lock, which each of them has for itself. It may
fork, as it has one thread and no CUDA context. Its standard input is a socket for requests and answers, with
`compile_client.py` at the other end. It ends when that is closed, or when nobody has asked for anything for a while.

A request is a number and a pickled (place, key, capability, cache folder), or None where nobody waits for that kernel
any more. An answer is its number and the pickled kernel, or error and the text of its cause, or None where the child
failed otherwise. The first, when all is ready, is (None, None).
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import traceback
from collections import deque
from multiprocessing.connection import Connection, Pipe, wait

from . import cache
from .compiler import CompileError, assemble, compile_kernel, key_of
from .element_wise_jobs import GradientScaleJob
from .plan import architecture
from .target import cuda_target

IDLE_SECONDS = 20.0
"""Without a request, after which the server ends."""


def warm_up() -> None:
    """Import Numba, and compile the smallest kernel for nobody. The garbage collector never runs, here and in children:
    it would find nothing, take an eighth of the time, and write to memory that all share."""
    gc.disable()
    from . import numba_bridge

    _, source = GradientScaleJob("float32").sources(None)
    body, capability = source.make_body(cuda_target(75)), (7, 5)
    text, _ = numba_bridge.kernel_to_ptx(
        body.name, body.function, body.parameters, len(body.own), capability,
        threads=source.threads, min_blocks=source.min_blocks,
    )  # fmt: skip
    assemble(text, capability)


def answer_to(request: bytes) -> bytes | None:
    """In a child."""
    place, key, capability, folder = pickle.loads(request)
    os.environ.pop(cache.VARIABLE, None)
    if folder is not None:
        os.environ[cache.VARIABLE] = folder
    source = place.find(architecture(capability))
    bounds = {"threads": source.threads, "min_blocks": source.min_blocks}
    if key_of(source.description, capability, **bounds) != key:
        return None  # a file of the package has changed since the other process read it
    try:
        return pickle.dumps(compile_kernel(source.make_body, source.description, capability, **bounds))
    except CompileError as error:
        return pickle.dumps((error, "".join(traceback.format_exception(error.__cause__))))


class Server:
    """One socket to the process that asks, and one pipe from each child."""

    def __init__(self, socket: Connection, processes: int):
        self._socket, self._processes = socket, processes
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._children: dict[Connection, tuple[int, int]] = {}  # their pipes: (number of the request, process)

    def run(self) -> None:
        """Until the other end is closed, or nothing is asked for."""
        self._socket.send((None, None))
        while ready := wait([self._socket, *self._children], None if self._children else IDLE_SECONDS):
            for connection in ready:
                if connection is self._socket:
                    self._hear(*connection.recv())
                elif connection in self._children:
                    self._answer(connection)
            while self._waiting and len(self._children) < self._processes:
                self._fork(*self._waiting.popleft())

    def _hear(self, number: int, request: bytes | None) -> None:
        if request is not None:
            self._waiting.append((number, request))
            return
        self._waiting = deque(entry for entry in self._waiting if entry[0] != number)
        for pipe, (working_on, process) in list(self._children.items()):
            if working_on == number:
                os.kill(process, signal.SIGKILL)
                self._answer(pipe)

    def _answer(self, pipe: Connection) -> None:
        number, process = self._children.pop(pipe)
        try:
            answer = pipe.recv_bytes()
        except (EOFError, OSError):  # before, or amid its answer
            answer = b""
        pipe.close()
        os.waitpid(process, 0)
        self._socket.send((number, answer or None))

    def _fork(self, number: int, request: bytes) -> None:
        here, there = Pipe(duplex=False)
        process = os.fork()
        if process == 0:
            try:
                os.close(self._socket.fileno())  # the other end shall see when the server is gone
                there.send_bytes(answer_to(request) or b"")
            finally:
                os._exit(0)
        there.close()
        self._children[here] = number, process

    def end_children(self) -> None:
        for _, process in self._children.values():
            os.kill(process, signal.SIGKILL)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the other process
    socket = Connection(os.dup(0))
    os.dup2(1, 0)
    warm_up()
    server = Server(socket, int(sys.argv[1]))
    try:
        server.run()
    except (EOFError, OSError):  # the other process has ended
        server.end_children()


if __name__ == "__main__":
    main()
