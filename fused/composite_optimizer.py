"""Several optimizers, each on a slice of the parameters (mirror of reference/composite_optimizer.py).

Each slice has kernels of its own. The Composite itself is a link of them only where one of the nested optimizers keeps
parameters for inference: it then collects those of all slices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..learning_rates import FactorOfRates
from ..parameter_sizes import ParameterSizes
from ..specs import CompositeOptimizerSpec
from .memory_access import make_choose, make_load, make_store
from .optimizer_contract import Link, Optimizer, Slice, Step
from .optimizer_state import StateBlock, StateVector


class CompositeOptimizer(FactorOfRates, Optimizer):
    state_numbers = {"learning_rate_factor": "factor", "n_combined": "n_combined"}
    fields = (("combined", "u64"), ("keeps", "u32"))
    averages = True

    def __init__(self, spec: CompositeOptimizerSpec, nested: Sequence[Optimizer], where: Slice):
        super().__init__(spec, where)
        self.nested = list(nested)
        self.start_rate()
        self.n_combined = 0
        if self.keeps:
            self.arrays["combined"] = StateVector(np.float32, where.start, where.sizes.n_params)
        else:
            self.arrays["combined"] = StateBlock(np.zeros(0, np.float32))

    def step(self) -> None:
        for child in self.nested:
            child.step()
        self.n_combined += 1

    def numbers(self, start: int) -> dict[str, int | float]:
        holders = [child for child in self.nested if child.where.start <= start < child.where.stop]
        return {"keeps": int(any(child.keeps_now for child in holders))}

    @property
    def keeps_now(self) -> bool:
        return self.keeps and self.n_combined > 0

    def inference_params(self, params: np.ndarray, stream: int) -> np.ndarray:
        return self.arrays["combined"].download(stream)

    def forget_params(self) -> None:
        self.n_combined = 0
        for child in self.nested:
            child.forget_params()

    def children(self) -> dict[str, Optimizer]:
        return {f"nested{i}": child for i, child in enumerate(self.nested)}

    def chains(self) -> list[tuple[Slice, list[Optimizer]]]:
        own = [self] if self.keeps else []
        return [(where, [*own, *chain]) for child in self.nested for where, chain in child.chains()]

    @staticmethod
    def make_step(target, spec: CompositeOptimizerSpec, link: Link, nested: Step) -> Step:
        u32, map_values, nested_step = target.u32, target.map_fragment, nested.step
        load, store = make_load(target, "f32", link.count), make_store(target, "f32", link.count)
        combined, keeps_now, choose = link.place("combined"), link.place("keeps"), make_choose(target)
        does_after, nested_keeps = link.after, nested.keeps

        def step(index, g, w, ok, run, active, extra):
            w, kept = nested_step(index, g, w, ok, run, active, extra)
            if does_after:
                value = w
                if nested_keeps:
                    value = map_values(choose, kept, w, extra[keeps_now])
                old = load(extra[combined], index, u32(active * u32(u32(1) - run)))
                store(extra[combined], index, value, u32(active * run))
                kept = map_values(choose, value, old, run)
            return w, kept

        return Step(target.device(step), nested.finish, keeps=True)


def slices_of(spec: CompositeOptimizerSpec, sizes: ParameterSizes) -> list[tuple[int, int]]:
    """(first, last) of each nested optimizer's parameters; raises ValueError unless they are all of the parameters."""
    slices, start = [], 0
    for n in spec.n_params_to_optimize:
        slices.append((start, start + n))
        start += n
    if start != sizes.n_params:
        raise ValueError(f"Composite: n_params_to_optimize sum to {start:,}, the parameters are {sizes.n_params:,}")
    return slices
