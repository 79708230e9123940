"""Work for processes that may come to harm."""

from __future__ import annotations

import faulthandler
import os
import time

from benchmarks.agreement.processes import Lost


def harm(number: int) -> int:
    """Numbers below 10 come back doubled, each other one has an end of its own."""
    match number:
        case 10:
            raise ValueError("not this one")
        case 11:
            sleep_below(60)
        case 12:
            os._exit(3)
        case 13:
            faulthandler._sigsegv()
        case 14:
            raise Lost("what was found before")
    return 2 * number


def sleep_below(n_calls: int) -> None:
    """Deep in a stack, as a compiler is."""
    if n_calls:
        return sleep_below(n_calls - 1)
    time.sleep(1000)


def slow(number: int) -> int:
    time.sleep(0.2 if number < 3 else 1000)
    return number
