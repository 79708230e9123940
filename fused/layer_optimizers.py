"""What optimizers have in common that need a whole layer's gradient at once: Novograd and Shampoo.

In place of a link of a chain they have kernels of their own, launched one after the other between the chain's `before`
and `after`. They find the gradients of their slice in `handed`, and in the word `is_ready` whether to have a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..parameter_sizes import ParameterSizes
from .driver import Device
from .fragments import Target
from .optimizer_contract import Leaf, Slice
from .optimizer_state import StateBlock, StateVector
from .stage_io import KernelBody

THREADS = 256
WARPS = THREADS // 32
SHARED_BYTES = 128  # a float64 a warp, for sums over a block of up to 16 warps


@dataclass(frozen=True)
class LayerKernel:
    """One launch: its body, and a grid that is a function of the parameters' sizes."""

    make_body: Callable[[Target], KernelBody]
    n_blocks: int
    n_rows: int = 1
    threads: int = THREADS


class LayerLeaf(Leaf):
    """`n_updates` counts the steps that had gradients; only the device knows it. One kernel, of one block, writes it.

    `scratch` are arrays that hold nothing from one step to the next.
    """

    fields = ()

    def __init__(self, spec: Any, where: Slice):
        super().__init__(spec, where)
        self.n_updates = StateBlock(np.zeros(1, np.uint32))
        self.scratch: dict[str, StateVector | StateBlock] = {
            "handed": StateVector(np.float32, where.start, where.sizes.n_params),
            "is_ready": StateBlock(np.zeros(1, np.uint32)),
        }

    def allocate(self, owner: Device, stream: int) -> None:
        super().allocate(owner, stream)
        for piece in (self.n_updates, *self.scratch.values()):
            piece.allocate(owner, stream)

    def constants(self, start: int) -> dict[str, int | float]:
        scratch = {name: array.address(start) for name, array in self.scratch.items()}
        return super().constants(start) | scratch | {"n_updates": self.n_updates.address()}

    @staticmethod
    def layer_kernels(spec: Any, sizes: ParameterSizes) -> list[LayerKernel]:
        """In launch order."""
        raise NotImplementedError

    def state(self, stream: int) -> dict[str, Any]:
        return super().state(stream) | {"n_updates": int(self.n_updates.download(stream)[0])}

    def _loads(self, state, path: str, stream: int):
        if isinstance(state, dict) and "n_updates" in state:
            count = np.array([int(state["n_updates"])], np.uint32)
            yield lambda: self.n_updates.upload(count, stream)
            state = {name: value for name, value in state.items() if name != "n_updates"}
        yield from super()._loads(state, path, stream)

    def free(self) -> None:
        super().free()
        for piece in (self.n_updates, *self.scratch.values()):
            piece.free()


@functools.cache
def make_decayed(target: Target):
    """A part of scalar functions: (w, relative, absolute) -> (1 - relative) w - copysign(absolute, w)."""

    def decayed(w, relative, absolute):
        return (np.float32(1) - relative) * w - (absolute if w >= np.float32(0) else -absolute)

    return target.scalar_part(decayed)


@functools.cache
def make_add_square(target: Target):
    """(total, a) -> total + a^2, the sum in float64."""

    @target.intrinsic(["f64", ("f32", 1)], "f64")
    def add_square(e, total, a):
        wide = e.widen(a[0])
        return e.fma(wide, wide, total)

    return add_square


@functools.cache
def make_zero(target: Target):
    """zero() -> a float64."""

    @target.intrinsic([], "f64")
    def zero(e):
        return e.f64(0.0)

    return zero
