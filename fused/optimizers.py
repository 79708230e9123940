"""All optimizers (mirror of reference/optimizers.py): which class a spec stands for, and nested ones put together.

To add one: a spec, a class, and a line here.
"""

from __future__ import annotations

from ..specs import (
    AdamSpec,
    AverageSpec,
    BatchedSpec,
    CompositeOptimizerSpec,
    EmaSpec,
    ExponentialDecaySpec,
    LookaheadSpec,
    NovogradSpec,
    OptimizerSpec,
    SgdSpec,
    ShampooSpec,
)
from .adam import Adam
from .averaging import Average, Ema, Lookahead
from .composite_optimizer import CompositeOptimizer, slices_of
from .novograd import Novograd
from .optimizer_contract import Leaf, Optimizer, Slice, Wrapper
from .scheduling import Batched, ExponentialDecay
from .sgd import Sgd
from .shampoo import Shampoo

LEAVES: dict[type, type[Leaf]] = {AdamSpec: Adam, NovogradSpec: Novograd, SgdSpec: Sgd, ShampooSpec: Shampoo}

WRAPPERS: dict[type, type[Wrapper]] = {
    AverageSpec: Average,
    BatchedSpec: Batched,
    EmaSpec: Ema,
    ExponentialDecaySpec: ExponentialDecay,
    LookaheadSpec: Lookahead,
}

CLASSES: dict[type, type[Optimizer]] = LEAVES | WRAPPERS | {CompositeOptimizerSpec: CompositeOptimizer}


def make_optimizer(spec: OptimizerSpec, where: Slice) -> Optimizer:
    """An optimizer without memory. Raises ValueError where the slices of a Composite don't fit."""
    if isinstance(spec, CompositeOptimizerSpec):
        slices = [where.part(first, last) for first, last in slices_of(spec, where.sizes)]
        nested = [make_optimizer(own, part) for own, part in zip(spec.nested, slices, strict=True)]
        return CompositeOptimizer(spec, nested, where)
    if type(spec) in WRAPPERS:
        return WRAPPERS[type(spec)](spec, make_optimizer(spec.nested, where), where)
    return LEAVES[type(spec)](spec, where)
