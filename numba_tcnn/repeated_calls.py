"""Which pairs of arrays a call has been recorded for; see `fused/recorded_calls.py`."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

MAX_PAIRS = 16


def never_moves(*arrays: Any) -> bool:
    """Whether these arrays stay where they are, with the shape they have, as long as they exist."""
    return all(getattr(type(array), "never_moves", False) for array in arrays)


class RepeatedCalls:
    """The last `MAX_PAIRS` recorded calls, by the two arrays that they are between, which this keeps none alive of."""

    def __init__(self):
        self._calls: OrderedDict[tuple[int, int], tuple[weakref.ref, weakref.ref, Callable]] = OrderedDict()

    def find(self, a: Any, b: Any) -> Callable | None:
        found = self._calls.get((id(a), id(b)))
        if found is None or found[0]() is not a or found[1]() is not b:
            return None
        return found[2]

    def keep(self, a: Any, b: Any, call: Callable | None) -> None:
        if call is None:
            return
        self._calls[id(a), id(b)] = weakref.ref(a), weakref.ref(b), call
        self._calls.move_to_end((id(a), id(b)))
        if len(self._calls) > MAX_PAIRS:
            self._calls.popitem(last=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> RepeatedCalls:
        """A copy has arrays of its own."""
        return RepeatedCalls()
