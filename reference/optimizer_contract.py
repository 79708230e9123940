"""What every optimizer is: a rule on the flat float32 parameter vector, in place, and a state that can be saved.

The first parameters are weight matrices, the rest ("non-matrix") belongs to the encoding. γ is always the gradient
with the loss scale divided out. Optimizers nest: a `Wrapper` changes what another one does. Three rules hold for all:

- A step without gradients (None: they were not finite) moves no parameter and no moment, but counts: schedules and
  averages of parameters go on.
- Arrays are float32 whatever the model computes in; a model in float16 rounds parameters when it takes them over.
- What remembers gradients survives a change of the parameters from outside, what remembers parameters starts again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from numba_tcnn.parameter_sizes import ParameterSizes

State = dict[str, Any]
"""Names to arrays and numbers, and to the states of nested optimizers."""


class Optimizer:
    """The contract. `state_numbers` and `state_arrays` name the attributes that make up the state, by state key."""

    spec: Any
    learning_rate: float
    current_step: int  # calls of `step`, those without gradients included

    state_numbers: Mapping[str, str] = {}
    state_arrays: tuple[str, ...] = ()

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        """One update of float32 `params` from float32 `gradients` that hold `loss_scale`."""
        raise NotImplementedError

    @property
    def keeps_params(self) -> bool:
        """Whether inference uses parameters that this optimizer keeps."""
        return False

    @property
    def inference_params(self) -> np.ndarray | None:
        """These parameters, float32 [n_params], to be read only. None: those that are trained."""
        return None

    def forget_params(self) -> None:
        """Start averages and copies of parameters again: the parameters were set from outside."""

    def children(self) -> dict[str, Optimizer]:
        """Nested optimizers, by their name in the state."""
        return {}

    def state(self) -> State:
        """A copy of everything that `load_state` needs to go on from here, bit for bit."""
        state: State = {key: getattr(self, attribute) for key, attribute in self.state_numbers.items()}
        state |= {name: getattr(self, name).copy() for name in self.state_arrays}
        return state | {name: child.state() for name, child in self.children().items()}

    def load_state(self, state: Mapping[str, Any], path: str = "optimizer state") -> None:
        """Raises ValueError, naming the entry, for the state of another optimizer; that leaves this one half loaded."""
        children = self.children()
        needed = {*self.state_numbers, *self.state_arrays, *children}
        if not isinstance(state, Mapping) or set(state) != needed:
            held = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"{path} holds {held}; {type(self).__name__} needs {', '.join(sorted(needed))}")
        for name in self.state_arrays:
            own, given = getattr(self, name), np.asarray(state[name])
            if given.shape != own.shape:
                raise ValueError(f"{path}: {name} has shape {given.shape}, the model needs {own.shape}")
            own[...] = given
        for key, attribute in self.state_numbers.items():
            setattr(self, attribute, type(getattr(self, attribute))(state[key]))
        for name, child in children.items():
            child.load_state(state[name], f"{path}.{name}")


class Leaf(Optimizer):
    """An optimizer that itself moves parameters, at a learning rate that is its own."""

    state_numbers: Mapping[str, str] = {"step": "current_step", "learning_rate": "learning_rate"}

    def __init__(self, spec: Any, sizes: ParameterSizes):
        self.spec = spec
        self.sizes = sizes
        self.learning_rate = float(spec.learning_rate)
        self.current_step = 0


class Wrapper(Optimizer):
    """An optimizer around another one; whatever it doesn't change is the nested one's."""

    def __init__(self, spec: Any, nested: Optimizer, sizes: ParameterSizes):
        self.spec = spec
        self.nested = nested
        self.sizes = sizes

    @property
    def learning_rate(self) -> float:
        return self.nested.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.nested.learning_rate = value

    @property
    def current_step(self) -> int:
        return self.nested.current_step

    @property
    def keeps_params(self) -> bool:
        return self.nested.keeps_params

    @property
    def inference_params(self) -> np.ndarray | None:
        return self.nested.inference_params

    def forget_params(self) -> None:
        self.nested.forget_params()

    def children(self) -> dict[str, Optimizer]:
        return {"nested": self.nested}


def unscaled(gradients: np.ndarray, loss_scale: float) -> np.ndarray:
    """γ, float32; the same array where there is no loss scale."""
    return gradients if loss_scale == 1 else gradients / np.float32(loss_scale)


def decayed(w: np.ndarray, relative: np.ndarray | float, absolute: np.ndarray | float) -> np.ndarray:
    """Weights after decay: (1 - relative) w - copysign(absolute, w)."""
    kept = (np.float32(1) - np.asarray(relative, np.float32)) * w
    return kept - np.copysign(np.asarray(absolute, np.float32), w)


def blend(average: np.ndarray, value: np.ndarray, decay: float, n: int) -> None:
    """Takes the n-th value (from 1) into an exponential average without bias, in place.

    a_n = ((d - dⁿ) a_{n-1} + (1 - d) x_n) / (1 - dⁿ): the weights of all values sum to 1, those of older ones decline
    by d. The first value replaces whatever `average` held. (Adding a multiple of x_n - a_{n-1} instead would lose an
    x_n that is much smaller than a_{n-1}.)
    """
    power = decay**n
    average *= np.float32((decay - power) / (1 - power))
    average += np.float32((1 - decay) / (1 - power)) * value
