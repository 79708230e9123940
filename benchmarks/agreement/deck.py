"""Choices of a random draw: some are dealt, so that every value comes equally often; the others are left to chance."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Deck:
    """The choices of draw number `number` of a seed; the same in every process and on every machine."""

    def __init__(self, seed: int, number: int):
        self.seed, self.number = seed, number
        self.random = Random(f"{seed} {number}")

    def deal(self, name: str, values: Sequence[T]) -> T:
        """Of any len(values) consecutive draws that begin at a multiple of it, each gets another of the values."""
        shuffled, (turn, place) = list(values), divmod(self.number, len(values))
        Random(f"{self.seed} {name} {turn}").shuffle(shuffled)
        return shuffled[place]


class Chance:
    """A deck that deals nothing: all is drawn from `random`, which may be hypothesis's."""

    def __init__(self, random: Random):
        self.random = random

    def deal(self, name: str, values: Sequence[T]) -> T:
        return self.random.choice(values)
