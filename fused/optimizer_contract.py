"""What every fused optimizer is (mirror of reference/optimizer_contract.py): a part on the device, one on the host.

On the device an optimizer is a *link* of a chain, from the outermost wrapper to the leaf that moves parameters. A link
is a closure around the next one, and the whole chain is called with a thread's `count` parameters:

    step(index, g, w, ok, run, active, extra) -> (w, kept)

    index    of the first of them, in the chain's slice of the parameters
    g        their gradients, without loss scale
    w        their values, where the chain carries them (see `Link`)
    ok       1 where the nested optimizer moves them: gradients are finite and every Batched around has its turn
    run      1 where the nested optimizer has a step, with gradients or without
    active   1 where there are such parameters
    extra    the kernel's parameters
    kept     what inference uses: w unless `Step.keeps`

On the host it is an object with numbers that are the same whatever the device computes (steps, learning rates, phases
of schedules), which `step` brings forward and `numbers` gives to the next launch, and with arrays in device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..parameter_sizes import ParameterSizes
from .driver import Device
from .fragments import Target
from .memory_access import make_choose, make_load, make_store, make_store_copy
from .optimizer_state import Counter, StateBlock, StateVector

State = dict[str, Any]


@dataclass(frozen=True)
class Slice:
    """The parameters start ... start + sizes.n_params - 1 of a model, as one optimizer sees them."""

    start: int
    sizes: ParameterSizes

    @property
    def stop(self) -> int:
        return self.start + self.sizes.n_params

    def part(self, first: int, last: int) -> Slice:
        """Of those, numbers first ... last - 1."""
        return Slice(self.start + first, self.sizes.part(first, last))


# ------------------------------------------------------------------------------------------- on the device


@dataclass(frozen=True)
class Step:
    """A link's device functions: `step` as above, and finish(is_first, ok, run, extra), called once by one block."""

    step: Callable
    finish: Callable
    keeps: bool


@dataclass(frozen=True)
class Link:
    """What a link is made for.

    place           index in `extra` of one of the link's `fields`
    count           parameters a thread
    is_matrix       whether these are matrices
    before, after   which halves of a step the kernel does; both, unless an optimizer in between works layer by layer
    take, leave     take(w, index, touched, extra) -> w before the leaf's update, leave(new, old, index, touched, extra)
                    -> w after it. A chain in which a wrapper reads or writes w *carries* it: it is loaded and stored
                    for all parameters. Otherwise the leaf loads and stores those that it touches.
    """

    place: Callable[[str], int]
    count: int
    is_matrix: bool
    before: bool
    after: bool
    take: Callable
    leave: Callable


def make_weight_access(target: Target, place: Callable[[str], int], count: int, carried: bool):
    """(take, leave) of a `Link`."""
    weights, copy, map_values = place("weights"), place("copy"), target.map_fragment
    load, choose = make_load(target, "f32", count), make_choose(target)
    store, store_copy = make_store(target, "f32", count), make_store_copy(target, count)

    def take_carried(w, index, touched, extra):
        return w

    def leave_carried(new, old, index, touched, extra):
        return map_values(choose, new, old, touched)

    def take(w, index, touched, extra):
        return load(extra[weights], index, touched)

    def leave(new, old, index, touched, extra):
        store(extra[weights], index, new, touched)
        store_copy(extra[copy], index, new, touched)
        return new

    functions = (take_carried, leave_carried) if carried else (take, leave)
    return tuple(target.device(f) for f in functions)


def no_finish(target: Target) -> Callable:
    def finish(is_first, ok, run, extra):
        return

    return target.device(finish)


# --------------------------------------------------------------------------------------------- on the host


class Optimizer:
    """The contract. `state_numbers` names attributes by state key, `state_arrays` the dtype of one number a parameter.

    fields     (name, kind) of the kernel parameters of its link; None: the device does not know it
    make_step  make_step(target, spec, link, nested) -> Step
    """

    state_numbers: Mapping[str, str] = {}
    state_arrays: Mapping[str, type] = {}
    fields: tuple[tuple[str, str], ...] | None = None
    moves_before = False  # whether it moves parameters ahead of the nested optimizer
    averages = False  # whether it reads parameters behind the nested optimizer
    spec: Any
    learning_rate: float
    current_step: int

    def __init__(self, spec: Any, where: Slice):
        self.spec, self.where = spec, where
        n = where.sizes.n_params
        self.arrays: dict[str, StateVector | StateBlock] = {
            name: StateVector(dtype, where.start, n) for name, dtype in self.state_arrays.items()
        }
        self.counters: dict[str, Counter] = {}

    def allocate(self, owner: Device, stream: int) -> None:
        """Everything in device memory, in its first state; until then an optimizer only tells what it consists of."""
        for piece in (*self.arrays.values(), *self.counters.values(), *self.children().values()):
            piece.allocate(owner, stream)

    def step(self) -> None:
        """Bring the numbers forward by one step."""
        raise NotImplementedError

    def numbers(self, start: int) -> dict[str, int | float]:
        """Those kernel parameters that change, for the step at hand; `start`: the slice's first parameter."""
        return {}

    def constants(self, start: int) -> dict[str, int | float]:
        """Those that don't."""
        return {name: array.address(start) for name, array in self.arrays.items()}

    def turn(self) -> None:
        """All kernels of a step are launched."""
        for counter in self.all_counters():
            counter.turn()

    def all_counters(self) -> list[Counter]:
        """Its own and its children's."""
        return [*self.counters.values(), *(c for child in self.children().values() for c in child.all_counters())]

    @property
    def keeps(self) -> bool:
        """Whether it ever keeps parameters for inference."""
        return any(child.keeps for child in self.children().values())

    @property
    def keeps_now(self) -> bool:
        """Whether inference uses parameters that this optimizer keeps, at this moment."""
        return False

    def inference_params(self, params: np.ndarray, stream: int) -> np.ndarray:
        """Those that inference uses, from the trained ones of this slice."""
        return params

    def forget_params(self) -> None:
        """Start averages and copies of parameters again: the parameters were set from outside."""

    def children(self) -> dict[str, Optimizer]:
        return {}

    def chains(self) -> list[tuple[Slice, list[Optimizer]]]:
        """Slices that together are all of the parameters, and the optimizers of each, the outermost first."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------- state
    def state(self, stream: int) -> State:
        state: State = {key: getattr(self, attribute) for key, attribute in self.state_numbers.items()}
        state |= {name: counter.download(stream) for name, counter in self.counters.items()}
        state |= {name: array.download(stream) for name, array in self.arrays.items()}
        return state | {name: child.state(stream) for name, child in self.children().items()}

    def load_state(self, state: Mapping[str, Any], stream: int) -> None:
        """Raises ValueError, naming the entry, for the state of another optimizer; that leaves this one as it was."""
        for load in list(self._loads(state, "optimizer state", stream)):
            load()

    def _loads(self, state: Mapping[str, Any], path: str, stream: int) -> Iterator[Callable[[], None]]:
        children = self.children()
        needed = {*self.state_numbers, *self.counters, *self.arrays, *children}
        if not isinstance(state, Mapping) or set(state) != needed:
            held = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"{path} holds {held}; {type(self).__name__} needs {', '.join(sorted(needed))}")
        for name, array in self.arrays.items():
            values = np.array(state[name], array.dtype)
            if values.shape != array.shape:
                raise ValueError(f"{path}: {name} has shape {values.shape}, the model needs {array.shape}")
            yield lambda array=array, values=values: array.upload(values, stream)
        for name, counter in self.counters.items():
            yield lambda counter=counter, value=int(state[name]): counter.upload(value, stream)
        for key, attribute in self.state_numbers.items():
            value = type(getattr(self, attribute))(state[key])
            yield lambda attribute=attribute, value=value: setattr(self, attribute, value)
        for name, child in children.items():
            yield from child._loads(state[name], f"{path}.{name}", stream)

    def free(self) -> None:
        for piece in (*self.arrays.values(), *self.counters.values(), *self.children().values()):
            piece.free()


class Leaf(Optimizer):
    """An optimizer that itself moves parameters, at a learning rate that is its own."""

    state_numbers: Mapping[str, str] = {"step": "current_step", "learning_rate": "learning_rate"}

    def __init__(self, spec: Any, where: Slice):
        super().__init__(spec, where)
        self.learning_rate = float(spec.learning_rate)
        self.current_step = 0

    def step(self) -> None:
        self.current_step += 1

    def numbers(self, start: int) -> dict[str, int | float]:
        return {"learning_rate": self.learning_rate}

    def chains(self) -> list[tuple[Slice, list[Optimizer]]]:
        return [(self.where, [self])]


class Wrapper(Optimizer):
    """An optimizer around another one; whatever it doesn't change is the nested one's."""

    def __init__(self, spec: Any, nested: Optimizer, where: Slice):
        super().__init__(spec, where)
        self.nested = nested

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
    def keeps_now(self) -> bool:
        return self.nested.keeps_now

    def inference_params(self, params: np.ndarray, stream: int) -> np.ndarray:
        return self.nested.inference_params(params, stream)

    def forget_params(self) -> None:
        self.nested.forget_params()

    def children(self) -> dict[str, Optimizer]:
        return {"nested": self.nested}

    def chains(self) -> list[tuple[Slice, list[Optimizer]]]:
        return [(where, [self, *chain]) for where, chain in self.nested.chains()]
