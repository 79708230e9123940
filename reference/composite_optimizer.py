"""Several optimizers, each on a slice of the parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numba_tcnn.learning_rates import FactorOfRates
from numba_tcnn.parameter_sizes import ParameterSizes
from numba_tcnn.specs import CompositeOptimizerSpec

from .optimizer_contract import Optimizer


class CompositeOptimizer(FactorOfRates, Optimizer):
    """Consecutive slices of `n_params_to_optimize` parameters, which together are all of them, one optimizer each.

    A slice may end anywhere. Whoever gets part of a matrix sees it as `ParameterSizes.part` tells: as the end of a
    row, whole rows and the beginning of a row, each a matrix of its own. (tiny-cuda-nn hands out wrong layers for any
    split but network and encoding.)

    If one of them keeps parameters for inference, inference uses those of each slice, or the trained ones where a
    slice has none. `learning_rate` is a factor, at first 1: setting it gives each nested optimizer the rate that it
    began with, times the factor. `current_step` is that of the first slice.
    """

    state_numbers = {"learning_rate_factor": "factor", "n_combined": "n_combined"}
    state_arrays = ("combined",)

    def __init__(self, spec: CompositeOptimizerSpec, nested: Sequence[Optimizer], sizes: ParameterSizes):
        self.spec = spec
        self.nested = list(nested)
        self.slices = slices_of(spec, sizes)
        self.start_rate()
        self.n_combined = 0  # steps since the parameters were last set from outside
        self.combined = np.zeros(sizes.n_params if self.keeps_params else 0, np.float32)

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        for child, where in zip(self.nested, self.slices, strict=True):
            child.step(params[where], None if gradients is None else gradients[where], loss_scale)
            if self.keeps_params:
                own = child.inference_params
                self.combined[where] = params[where] if own is None else own
        self.n_combined += 1

    @property
    def keeps_params(self) -> bool:
        return any(child.keeps_params for child in self.nested)

    @property
    def inference_params(self) -> np.ndarray | None:
        return self.combined if self.keeps_params and self.n_combined else None

    def forget_params(self) -> None:
        self.n_combined = 0
        for child in self.nested:
            child.forget_params()

    def children(self) -> dict[str, Optimizer]:
        return {f"nested{i}": child for i, child in enumerate(self.nested)}


def slices_of(spec: CompositeOptimizerSpec, sizes: ParameterSizes) -> list[slice]:
    """Where each nested optimizer's parameters stand; raises ValueError unless they are all of the parameters."""
    slices, start = [], 0
    for n in spec.n_params_to_optimize:
        slices.append(slice(start, start + n))
        start += n
    if start != sizes.n_params:
        raise ValueError(f"Composite: n_params_to_optimize sum to {start:,}, the parameters are {sizes.n_params:,}")
    return slices
