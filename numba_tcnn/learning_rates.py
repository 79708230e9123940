"""Learning rates that wrappers make of those of nested optimizers: the same rules, whatever engine computes.

Both engines' optimizers are made of a class here and one of their own contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DecayingRate:
    """Of ExponentialDecay: a base times a factor φ. `spec` and `nested` are the optimizer's."""

    spec: Any
    nested: Any
    state_numbers = {"base_learning_rate": "base_learning_rate", "learning_rate_factor": "factor"}

    def start_rate(self) -> None:
        """From the nested optimizer's rate on."""
        self.base_learning_rate = float(self.nested.learning_rate)
        self.factor = 1.0

    @property
    def learning_rate(self) -> float:
        return self.base_learning_rate * self.factor

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        if self.factor == 0:
            self.factor = 1.0
        self.base_learning_rate = float(value) / self.factor
        self.nested.learning_rate = float(value)

    def decay(self) -> None:
        """Before each step, with t the steps that the nested optimizer has counted until then:

        φ ← 1                  if t = 0
        φ ← φ · decay_base     if decay_start ≤ t ≤ decay_end and (t - decay_start) mod decay_interval = 0
        nested learning rate ← base · φ
        """
        spec, t = self.spec, self.nested.current_step
        if t == 0:
            self.factor = 1.0
        if spec.decay_start <= t <= spec.decay_end and (t - spec.decay_start) % spec.decay_interval == 0:
            self.factor *= spec.decay_base
        self.nested.learning_rate = self.learning_rate


class FactorOfRates:
    """Of a Composite: a factor, at first 1, of the rates that its optimizers began with. Steps are the first one's."""

    nested: Sequence[Any]

    def start_rate(self) -> None:
        self.base_learning_rates = [child.learning_rate for child in self.nested]
        self.factor = 1.0

    @property
    def learning_rate(self) -> float:
        return self.factor

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.factor = float(value)
        for child, base in zip(self.nested, self.base_learning_rates, strict=True):
            child.learning_rate = base * self.factor

    @property
    def current_step(self) -> int:
        return self.nested[0].current_step
