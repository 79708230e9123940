"""A second right implementation: the reference with all sums in float32, and features and sums off by some roundings.

How far it is from the reference says what of a difference is nobody's fault, and how far a run of many steps can carry
it. In float32, whose reference computes in float64, the factors of the second one's sums are float32 numbers, too.

Sums have a noise of their own, and it is relative to what is added up. A float32 sum of NumPy's is far closer to that
in float64 than a tensor core's, which cuts all products off below the last place of the largest one. Where a sum
cancels, that is what settles which of two stored numbers, or which side of a gate, it ends on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from numba_tcnn.reference.composite import Composite
from numba_tcnn.reference.encoding_contract import Encoding
from numba_tcnn.reference.grid import Grid
from numba_tcnn.reference.matmul import rows_times_matrix
from numba_tcnn.reference.mlp import MLP, Trace
from numba_tcnn.reference.model import Model, SecondOrderGradients
from numba_tcnn.reference.precision import Precision
from numba_tcnn.specs import ModelSpec

from .draws import Draw
from .gate_flips import Explanation, GatedPass

SOME_ROUNDINGS = 2.0**-21
"""What another order of a float32 sum leaves, relatively."""


LAST_PLACE = 2.0**-23
"""Of a sum, relative to the sum of what it adds up without signs: one place where one rounding may have been."""


class NetworkOfSingleSums(MLP):
    """Sums in float32, whatever the rest is computed in: each one place too low, too high, or as it comes."""

    def __init__(self, spec: ModelSpec, precision: Precision, seed: int):
        super().__init__(spec, precision)
        self.random = np.random.default_rng(seed)

    def product(self, rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        rows_32, matrix_32 = rows.astype(np.float32, copy=False), matrix.astype(np.float32, copy=False)
        sums = rows_times_matrix(rows_32, matrix_32)
        noise = rows_times_matrix(np.abs(rows_32), np.abs(matrix_32))
        noise *= np.float32(LAST_PLACE)
        noise *= self.random.integers(-1, 2, sums.shape, np.int8)
        return (sums + noise).astype(rows.dtype, copy=False)


N_SECONDS = 3
"""Second implementations that are asked about a call, each with other noise: one alone may be lucky."""

MOST_SECONDS = 16
"""Asked about a run, one after the other until an error is within what they are apart: one gate that a device found
different on the way may be all the error of a run, and few of the others find just this one different."""


def round_otherwise(model: Model, seed: int = 0, noise: float = SOME_ROUNDINGS) -> None:
    """Make a second implementation of a model: sums in float32, and features that are off by `noise`, relatively, so
    that some round to a neighbour."""
    if model.network is not None:
        model.network = NetworkOfSingleSums(model.spec, model.precision, seed)
    for grid in grids_of(model.encoding):
        grid.scatter = scatter_single
    forward, signs = model.encoding.forward, {}

    def rounded_otherwise(x: np.ndarray, table: np.ndarray, out: np.ndarray, *more: Any) -> Any:
        context = forward(x, table, out, *more)
        if out.shape not in signs:
            signs[out.shape] = np.random.default_rng(seed).choice(np.array([-1, 0, 1], np.int8), out.shape)
        out *= 1 + out.dtype.type(noise) * signs[out.shape]
        return context

    model.encoding.forward = rounded_otherwise


def grids_of(encoding: Encoding) -> Iterator[Grid]:
    """An encoding's grids, in composites too."""
    if isinstance(encoding, Grid):
        yield encoding
    for child in encoding.children if isinstance(encoding, Composite) else ():
        yield from grids_of(child.encoding)


def scatter_single(row: np.ndarray, weight: np.ndarray, u: np.ndarray, gradient: np.ndarray) -> None:
    """As `numba_tcnn.reference.grid.scatter`, summed in float32, one sample after the other: a table entry that
    thousands of samples pull to and fro keeps a thousandth of what it adds up."""
    for f in range(len(u)):
        sums = np.zeros(len(gradient), np.float32)
        np.add.at(sums, row.ravel(), (weight * u[f]).ravel().astype(np.float32, copy=False))
        gradient[:, f] += sums


def open_gates(trace: Trace) -> list[np.ndarray]:
    """For every layer [batch, fan_out], where a unit is positive."""
    return [h > 0 for h in trace.inputs[1:]] + [trace.z_out > 0]


OF_ANOTHER_CALL = 1000
"""Added to a seed: the kernels of two calls need not round alike either."""


class SecondReference:
    """As `comparison.Implementation`. Of its gates nobody needs to guess: `gates` of the last call of `backward` says
    for every layer [batch, fan_out] which were open."""

    def __init__(self, draw: Draw, params: np.ndarray, seed: int = 0, noise: float = SOME_ROUNDINGS):
        self.draw, self.params, self.seed, self.noise = draw, params, seed, noise
        self.gates: list[np.ndarray] = []

    def _model(self, batch: int, seed: int) -> Model:
        model = Model(self.draw.spec, self.params, self.draw.reference_dtype)
        model.max_level = self.draw.levels(batch)
        round_otherwise(model, seed, self.noise)
        return model

    def inference(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return self._model(len(x), self.seed).forward(x.astype(np.float32)).astype(dtype)

    def backward(self, x: np.ndarray, dL_dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        model, gates = self._model(len(x), self.seed), []
        if model.network is not None:
            forward = model.network.forward

            def watched(features: np.ndarray, params: np.ndarray) -> tuple[np.ndarray, Trace]:
                y, trace = forward(features, params)
                gates.append(open_gates(trace))
                return y, trace

            model.network.forward = watched
        gradients = model.backward(x.astype(np.float32), dL_dy)
        self.gates = [np.concatenate(layer) for layer in zip(*gates, strict=True)]
        return gradients.params, gradients.input

    def settle(self, explanation: Explanation, model: Model, x: np.ndarray) -> Explanation:
        """With the gates that it found, in the samples whose gates were guessed or beyond guessing."""
        rows = np.union1d(explanation.rows, explanation.unexplained).astype(int)
        if not len(rows):
            return explanation
        expected = GatedPass(model, x, rows)
        found = zip(open_gates(expected.trace), self.gates, expected.closed, strict=True)
        flips = [(a != b[rows]) & (closed is not None) for a, b, closed in found]
        some = np.logical_or.reduce([flip.any(axis=1) for flip in flips])
        return replace(
            explanation,
            rows=rows[some],
            flips=[flip[some] for flip in flips],
            unexplained=np.zeros(0, np.intp),
        )

    def training_step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        model, density = self._model(len(x), self.seed + OF_ANOTHER_CALL), self.draw.densities(len(x))
        loss, gradients = model.loss_and_gradients(x.astype(np.float32), y, self.draw.loss_spec, density)
        return loss, gradients.params

    def backward_backward_input(self, x: np.ndarray, v: np.ndarray, dL_dy: np.ndarray) -> SecondOrderGradients:
        return self._model(len(x), self.seed).backward_backward_input(x.astype(np.float32), v, dL_dy)
