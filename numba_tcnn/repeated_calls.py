"""Which calls come again between the same two arrays, and are worth recording; see `fused/recorded_calls.py`.

A recording doubles what a call costs the host, so it is made where it will be used: at the second sight of two arrays
while nothing else has changed. A loop that brings new arrays each time, or sets `max_level` before each step, records
nothing, and one whose recordings come back incomplete gives up after `MAX_ATTEMPTS` of them.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_PAIRS = 16

MAX_ATTEMPTS = 2
"""More than one, as now and then a step does more than the next ones will: it clears what an exception left, or fetches
losses whose places it needs."""


def never_move(a: Any, b: Any) -> bool:
    """Whether both arrays stay where they are, with the shape they have, as long as they exist."""
    return getattr(type(a), "never_moves", False) and getattr(type(b), "never_moves", False)


@dataclass
class _Pair:
    """Two arrays, by weak reference, that came while the engine had this `configuration`.

    attempts  recordings that came back incomplete, one after the other
    """

    a: weakref.ref
    b: weakref.ref
    configuration: object
    call: Callable | None = None
    attempts: int = 0

    def is_of(self, a: Any, b: Any) -> bool:
        """Whether these are the arrays; others may have got their ids since."""
        return self.a() is a and self.b() is b


class RepeatedCalls:
    """The `MAX_PAIRS` pairs of arrays that came last, none of which this keeps alive, with the calls recorded."""

    def __init__(self):
        self._pairs: OrderedDict[tuple[int, int], _Pair] = OrderedDict()

    def find(self, a: Any, b: Any) -> Callable | None:
        """The call that was recorded between these arrays, which may hold no longer."""
        key = id(a), id(b)
        pair = self._pairs.get(key)
        if pair is None or not pair.is_of(a, b):
            return None
        self._pairs.move_to_end(key)
        return pair.call

    def should_record(self, a: Any, b: Any, configuration: object) -> bool:
        """Whether to record this call, for which there is none that holds. Remembers that the arrays have come.

        configuration  what a recording depends on beyond the arrays, by equality; None: nothing can be recorded
        """
        if configuration is None:
            return False
        key = id(a), id(b)
        pair = self._pairs.get(key)
        if pair is not None and pair.is_of(a, b) and pair.configuration == configuration:
            return pair.attempts < MAX_ATTEMPTS
        self._pairs[key] = _Pair(weakref.ref(a), weakref.ref(b), configuration)
        self._pairs.move_to_end(key)
        if len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        return False

    def keep(self, a: Any, b: Any, call: Callable | None) -> None:
        """What recording gave, after `should_record` had said so; None: it was incomplete."""
        pair = self._pairs.get((id(a), id(b)))
        if pair is None:  # other threads' arrays took its place meanwhile
            return
        pair.call = call
        pair.attempts = pair.attempts + 1 if call is None else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RepeatedCalls:
        """A copy has arrays of its own."""
        return RepeatedCalls()
