"""Numbered pieces of work in a pool of processes, whatever becomes of one of them.

A piece that raises, takes too long, or takes its process down has an outcome that says so, and the others go on: each
process is told one number at a time, and after such an outcome a new one takes its place. What a process writes to
stderr (warnings, the stack of a crash, where it was when its time was over) is kept apart and told with the outcome.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Work = Callable[[int], Any]
"""From a number to something that can be pickled. It is itself sent to the processes."""

GRACE = 15.0
"""Seconds that a process has to say where it was when its time was over."""

LAST_CHARACTERS = 2000
TIMEOUT = "Timeout ("
"""With this `faulthandler` begins to say where a process was when its time was over. Stacks of any length follow."""


class Lost(Exception):
    """Raised by work whose process is of no use any more; `result` is what it has found all the same."""

    def __init__(self, result: Any):
        super().__init__(result)
        self.result = result


@dataclass(frozen=True)
class Outcome:
    """result    what the work returned; None if `problem` says why it did not
    lost      whether its process is of no use any more
    """

    number: int
    result: Any = None
    problem: str = ""
    lost: bool = False


class Worker:
    """One process, and the number that it has in hand."""

    def __init__(self, work: Work, seconds_each: float, first: Callable[[], None] | None):
        context = multiprocessing.get_context("spawn")
        self.seconds_each = seconds_each
        self.connection, theirs = context.Pipe()
        with tempfile.NamedTemporaryFile(prefix="agreement-", suffix=".log", delete=False) as file:
            self.log = Path(file.name)
        arguments = (theirs, work, seconds_each, first, str(self.log))
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, number: int) -> None:
        self.number, self.deadline = number, time.monotonic() + self.seconds_each + GRACE
        with contextlib.suppress(OSError):  # that it is gone is told by its answer
            self.connection.send(number)

    def answer(self) -> Outcome:
        """What it has sent, or why it has not."""
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError):
            self.process.join(GRACE)
        return Outcome(self.number, problem=self._how_it_ended(), lost=True)

    def _how_it_ended(self) -> str:
        code, told = self.process.exitcode, self.log.read_text(errors="replace")
        if code is None:
            return f"took more than {self.seconds_each:g} s, and did not end when told to"
        _, timeout, stacks = told.rpartition(TIMEOUT)
        if timeout:
            return f"took more than {self.seconds_each:g} s\n{shortened(timeout + stacks)}"
        words = told[-LAST_CHARACTERS:].strip()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"its process died ({how})\n{words}"

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.log.unlink(missing_ok=True)


def shortened(stacks: str) -> str:
    """The innermost calls, which come first, and those that they were made for."""
    if len(stacks) <= LAST_CHARACTERS:
        return stacks.strip()
    half = LAST_CHARACTERS // 2
    return f"{stacks[:half]}\n  [...]\n{stacks[-half:]}".strip()


def serve(connection: Connection, work: Work, seconds: float, first: Callable[[], None] | None, log: str) -> None:
    """The life of a process: a number comes, an outcome goes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one who started all this
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    if first is not None:
        first()
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(seconds, exit=True)
        outcome = outcome_of(work, number)
        faulthandler.cancel_dump_traceback_later()
        connection.send(outcome)
        if outcome.lost:
            return


def outcome_of(work: Work, number: int) -> Outcome:
    try:
        return Outcome(number, work(number))
    except Lost as lost:
        return Outcome(number, lost.result, lost=True)
    except Exception as error:
        stack = "".join(traceback.format_exception(error))[-LAST_CHARACTERS:]
        return Outcome(number, problem=f"raised {type(error).__name__}: {error}\n{stack}", lost=True)


def outcomes(
    numbers: Sequence[int],
    work: Work,
    *,
    processes: int,
    seconds_each: float,
    until: float = float("inf"),
    first: Callable[[], None] | None = None,
) -> Iterator[Outcome]:
    """One for each number, as they come.

    processes     with 1, all is done in this process, where nobody ends what takes too long
    seconds_each  after which a number is given up; its outcome says where it was
    until         time.monotonic() after which none is begun, and those in hand are dropped without an outcome
    first         what a process does before anything else
    """
    if processes == 1:
        yield from outcomes_here(numbers, work, until, first)
        return
    waiting, workers = list(reversed(numbers)), []
    try:
        while True:
            while waiting and len(workers) < processes and time.monotonic() < until:
                workers.append(Worker(work, seconds_each, first))
                workers[-1].begin(waiting.pop())
            if not workers or time.monotonic() >= until:
                return
            for worker in first_ready(workers, until):
                outcome = worker.answer()
                if outcome.lost or not waiting or time.monotonic() >= until:
                    worker.stop()
                    workers.remove(worker)
                else:
                    worker.begin(waiting.pop())
                yield outcome
    finally:
        for worker in workers:
            worker.stop()


def first_ready(workers: Sequence[Worker], until: float) -> list[Worker]:
    """Those that have answered, are gone, or have no time left; waits until there are some, or it is `until`."""
    seconds = min(until, *(worker.deadline for worker in workers)) - time.monotonic()
    ready = wait([worker.connection for worker in workers], max(seconds, 0))
    return [w for w in workers if w.connection in ready or time.monotonic() >= w.deadline]


def outcomes_here(
    numbers: Sequence[int], work: Work, until: float, first: Callable[[], None] | None
) -> Iterator[Outcome]:
    """One after the other in this process, up to one that makes it useless."""
    if first is not None:
        first()
    for number in numbers:
        if time.monotonic() >= until:
            return
        outcome = outcome_of(work, number)
        yield outcome
        if outcome.lost and not outcome.problem:
            return
