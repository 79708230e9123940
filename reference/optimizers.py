"""All optimizers: which class a spec stands for, and the optimizer that it describes, nested ones included.

Each file tells its formulas: `adam.py`, `sgd.py`, `novograd.py`, `shampoo.py` move parameters; `scheduling.py`
(ExponentialDecay, Batched), `averaging.py` (Average, EMA, Lookahead) and `composite_optimizer.py` wrap others.
To add one: a spec, a class, and a line here.
"""

from __future__ import annotations

from collections.abc import Sequence

from numba_tcnn.parameter_sizes import ParameterSizes
from numba_tcnn.specs import (
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
from .optimizer_contract import Leaf, Optimizer, Wrapper
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


def make_optimizer(spec: OptimizerSpec, n_params: int, layer_sizes: Sequence[tuple[int, int]] = ()) -> Optimizer:
    """An optimizer in its first state, for `n_params` parameters that begin with matrices (rows, columns) each.

    Raises ValueError where `layer_sizes` or the slices of a Composite don't fit `n_params`.
    """
    return _make(spec, ParameterSizes(n_params, tuple((int(rows), int(columns)) for rows, columns in layer_sizes)))


def _make(spec: OptimizerSpec, sizes: ParameterSizes) -> Optimizer:
    if isinstance(spec, CompositeOptimizerSpec):
        slices = slices_of(spec, sizes)
        nested = [_make(own, sizes.part(s.start, s.stop)) for own, s in zip(spec.nested, slices, strict=True)]
        return CompositeOptimizer(spec, nested, sizes)
    if type(spec) in WRAPPERS:
        return WRAPPERS[type(spec)](spec, _make(spec.nested, sizes), sizes)
    return LEAVES[type(spec)](spec, sizes)
