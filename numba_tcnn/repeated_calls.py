"""Which calls come again between the same two arrays, and are worth recording; see `fused/recorded_calls.py`.

A recording doubles what a call costs the host, so it is made where it will be used: at the second sight of two arrays
while nothing else has changed. A loop that brings new arrays each time, or sets `max_level` before each step, records
nothing, and one whose recordings come back incomplete gives up after `MAX_ATTEMPTS` of them.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

MAX_PAIRS = 16

MAX_ATTEMPTS = 2
"""More than one, as now and then a step does more than the next ones will: it clears what an exception left, or fetches
losses whose places it needs."""


def never_move(a: Any, b: Any) -> bool:
    """Whether both arrays stay where they are, with the shape they have, as long as they exist."""
    return getattr(type(a), "never_moves", False) and getattr(type(b), "never_moves", False)


@dataclass(slots=True)
class _Pair:
    """Two arrays, by weak reference, that came while the engine had this `configuration`.

    attempts  recordings that came back incomplete, one after the other
    has_come  whether they have come again since the pair was last in danger of having to go
    """

    a: weakref.ref
    b: weakref.ref
    configuration: object
    call: Any = None
    attempts: int = 0
    has_come: bool = False

    def is_of(self, a: Any, b: Any) -> bool:
        """Whether these are the arrays; others may have got their ids since."""
        return self.a() is a and self.b() is b


class RepeatedCalls:
    """The calls that were recorded between up to `MAX_PAIRS` pairs of arrays, none of which this keeps alive.

    Where there are more pairs, the oldest goes that has not come again lately.
    """

    def __init__(self):
        self._pairs: OrderedDict[tuple[int, int], _Pair] = OrderedDict()

    def find(self, a: Any, b: Any) -> Any:
        """The call that was recorded between these arrays, which may hold no longer; None without one."""
        pair = self._pairs.get((id(a), id(b)))
        if pair is None or pair.a() is not a or pair.b() is not b:
            return None
        pair.has_come = True
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
        self._pairs.pop(key, None)
        if len(self._pairs) >= MAX_PAIRS:
            self._drop_one()
        self._pairs[key] = _Pair(weakref.ref(a), weakref.ref(b), configuration)
        return False

    def _drop_one(self) -> None:
        while True:
            key, pair = self._pairs.popitem(last=False)
            if not pair.has_come:
                return
            pair.has_come = False
            self._pairs[key] = pair  # another chance, behind all others

    def keep(self, a: Any, b: Any, call: Any) -> None:
        """What recording gave, after `should_record` had said so; None: it was incomplete."""
        pair = self._pairs.get((id(a), id(b)))
        if pair is None:  # other threads' arrays took its place meanwhile
            return
        pair.call = call
        pair.attempts = pair.attempts + 1 if call is None else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RepeatedCalls:
        """A copy has arrays of its own."""
        return RepeatedCalls()
