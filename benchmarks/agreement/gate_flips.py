"""Explains, sample by sample, why two right implementations of a ReLU network can have different gradients.

A hidden unit passes its gradient where its pre-activation z is positive (LeakyReLU: passes all of it, else 1/100).
Where |z| is within rounding of 0, one implementation may find it positive and the other not: both are right, and the
gradient of that one sample differs by per cents. This module admits that explanation only where it holds. A sample
whose gradient differs must have units whose z, computed in float64 from the rounded inputs of the layer, lies within

    |z| <= n 2^-22 sum_i |w_i h_i|  +  sum_i |w_i| ulp(h_i)  +  2^-24        (n = fan_in + 1, the bias counting as one)

and the reference's gradient with some of exactly these gates flipped must agree with the observed one. The terms are:
two float32 sums of n products, each addition off by at most 2^-23 of sum |w_i h_i| (tensor cores truncate; NumPy
rounds, which is half of that); inputs that the two implementations round to neighbouring numbers of the storage format;
and the smallest float16, below which a stored h = max(z, 0) vanishes. `PRECISIONS` has these numbers for each format.

That is a guess where dL/dx is of few numbers, and roundings of stored values are no gates. So what it finds, and what
it cannot explain, is then looked into sample by sample (`stored_values.py`).

What is compared in the end is everything: flipped samples count against the reference with the same gates flipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

import numpy as np

from numba_tcnn.reference.encoding_contract import Samples
from numba_tcnn.reference.encodings import encode_padded
from numba_tcnn.reference.mlp import Trace
from numba_tcnn.reference.model import Gradients, Model
from numba_tcnn.specs import CompositeSpec, EncodingSpec, GridSpec


@dataclass(frozen=True)
class GatePrecision:
    """What may differ between two right implementations whose values are stored in one format.

    suspicious   relative difference of one sample's gradient above which flipped gates are tried: half of the format's
                 precision. Below it, a flip is too small to matter for any sum
    unexplained  a sample that still differs by more, whatever the gates, is wrong
    ulp          distance of neighbouring stored numbers, relative to their power of two
    smallest     positive number that is stored
    """

    suspicious: float
    unexplained: float
    ulp: float
    smallest: float

    def limit(self, n_trials: int) -> float:
        """The difference above which so many combinations of gates are tried."""
        return self.suspicious if n_trials <= MAX_TRIALS else self.unexplained


PRECISIONS = {
    "float16": GatePrecision(5e-4, 5e-3, 2.0**-10, 2.0**-24),
    "bfloat16": GatePrecision(4e-3, 4e-2, 2.0**-7, 2.0**-133),
    "float64": GatePrecision(1e-5, 1e-4, 2.0**-20, 2.0**-126),
}
"""By dtype of the reference. float64 is what float32 is compared with: nothing is rounded to a format of storage, but h
is off by some float32 roundings, 8 units in the last place."""

CONVINCING = 1 / 3
"""A flip is believed where it removes at least two thirds of the difference."""

MAX_FLIPS = 3
MAX_TRIALS = 100
"""Combinations of gates tried for a sample that differs, but by less than `unexplained`."""
TRIALS_AT_ONCE = 1 << 14
MAX_WORK = 1 << 33
"""Trials times weights, for each number of flips: some seconds. Where more would have to be tried, most samples are
wrong, and stay unexplained."""

CLOSED = {"ReLU": 0.0, "LeakyReLU": 0.01}
"""Derivative of a closed gate, by activation; that of an open one is 1. Other activations have no gates."""

Place = tuple[int, int]
"""A gate of a sample: (layer, unit)."""


def ulps(values: np.ndarray, precision: GatePrecision) -> np.ndarray:
    """Distance to the next stored number of values that are stored numbers."""
    _, exponents = np.frexp(values.astype(np.float64))
    return np.maximum(np.ldexp(precision.ulp, exponents - 1), precision.smallest)


class GatedPass:
    """The reference's forward pass over some samples, and its backward passes with chosen gates flipped.

    x     of the whole batch
    rows  of the samples in it; None: all. Where a grid chooses corners by a sample's row, only one sample at a time, or
          all, has the gradient of its table
    """

    def __init__(self, model: Model, x: np.ndarray, rows: np.ndarray | None = None):
        self.model, self.network, self.precision = model, model.network, PRECISIONS[model.precision.name]
        samples = samples_of(model, len(x), rows)
        x = model.precision.array(x if rows is None else x[rows])
        width = model.spec.encoding_width
        features, self.context = encode_padded(model.encoding, x, model.encoding_params, width, samples)
        features = model.precision.store(features)
        self.y, self.trace = self.network.forward(features, model.network_params)
        names = (model.spec.network.activation, model.spec.network.output_activation)
        self.closed = [CLOSED.get(names[0])] * len(self.trace.gates) + [CLOSED.get(names[1])]

    def no_flips(self) -> list[np.ndarray]:
        shapes = [h.shape for h in self.trace.inputs[1:]] + [self.trace.z_out.shape]
        return [np.zeros(shape, bool) for shape in shapes]

    def ambiguous(self) -> list[np.ndarray]:
        """For every layer, which gates [batch, fan_out] may be found open or closed by a right implementation."""
        result = self.no_flips()
        weights = self.network.matrices(self.model.network_params)
        biases = self.network.biases(self.model.network_params) or [np.zeros(len(w)) for w in weights]
        for l, (h, w, bias) in enumerate(zip(self.trace.inputs, weights, biases, strict=True)):
            if self.closed[l] is None:
                continue
            exact, w, bias = h.astype(np.float64), w.astype(np.float64).T, bias.astype(np.float64)
            sums = np.abs(exact) @ np.abs(w) + np.abs(bias)
            inputs = ulps(h, self.precision) @ np.abs(w)
            bound = 2.0**-22 * (len(w) + 1) * sums + inputs + self.precision.smallest
            result[l] = np.abs(exact @ w + bias) <= bound
        return result

    def backward(self, dL_dy: np.ndarray, flips: list[np.ndarray], *, params: bool = False) -> Pass:
        """Gradients for dL/dy [batch, n_output_dims] as it is, without a scale of its own."""
        trace, model = self.trace, self.model
        gates = []
        for l, flip in enumerate(flips[:-1]):
            gate = self.network.hidden_derivative(trace, l)
            gates.append(gate if self.closed[l] is None else np.where(flip, 1 + self.closed[l] - gate, gate))
        z_out = np.where(flips[-1], np.where(trace.z_out > 0, -1, 1), trace.z_out).astype(trace.z_out.dtype)
        flat = np.zeros(len(model.params), model.precision.compute) if params else None
        network_gradient = table_gradient = None
        if params:
            network_gradient, table_gradient = np.split(flat, [model.n_network_params])
        changed = Trace(trace.inputs, gates, z_out)
        features = self.network.backward(changed, model.network_params, dL_dy, network_gradient, True)
        features = features[:, : model.encoding.spec.n_output_dims]
        dx = np.zeros((len(dL_dy), model.spec.n_input_dims), model.precision.compute)
        table_gradient = table_gradient if len(model.encoding_params) else None
        model.encoding.backward(self.context, model.encoding_params, features, table_gradient, dx)
        return Pass(flat, features, dx)


def samples_of(model: Model, batch: int, rows: np.ndarray | None) -> Samples:
    """What encodings are told of these rows of a batch."""
    levels = model.max_level
    if rows is None:
        return Samples(0, batch, levels)
    return Samples(int(rows[0]) if len(rows) == 1 else 0, batch, levels[rows] if np.ndim(levels) else levels)


def chooses_by_row(encoding: EncodingSpec) -> bool:
    """Whether a sample's gradient of a table depends on its row in the batch."""
    if isinstance(encoding, CompositeSpec):
        return any(chooses_by_row(child.encoding) for child in encoding.nested)
    return isinstance(encoding, GridSpec) and encoding.stochastic_interpolation


@dataclass(frozen=True)
class Pass:
    """dL/dparams, flat; dL/dfeatures [batch, encoding's own columns]; dL/dx [batch, n_input_dims]."""

    params: np.ndarray | None
    features: np.ndarray
    input: np.ndarray


@dataclass(frozen=True)
class Explanation:
    """What was found.

    rows          samples with flipped gates, and `flips`, which: for every layer [len(rows), fan_out]
    n_suspicious  samples that differed enough to look
    unexplained   samples that differ by more than the precision's `unexplained` whatever their ambiguous gates are
    """

    rows: np.ndarray
    flips: list[np.ndarray]
    n_suspicious: int
    unexplained: np.ndarray

    def apply(
        self, gradients: Gradients, model: Model, x: np.ndarray, dL_dy: np.ndarray, factor: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """(dL/dparams, dL/dx) of the reference with these gates flipped, from `gradients` without.

        dL_dy [batch, n_output_dims] is what the backward pass starts from, `factor` multiplies its result.
        """
        params, dx = gradients.params.copy(), gradients.input.copy()
        n_groups = len(self.rows) if chooses_by_row(model.spec.encoding) else min(len(self.rows), 1)
        for some in np.array_split(np.arange(len(self.rows)), n_groups) if n_groups else ():
            rows, flips = self.rows[some], [flip[some] for flip in self.flips]
            samples = GatedPass(model, x, rows)
            before = samples.backward(dL_dy[rows], samples.no_flips(), params=True)
            after = samples.backward(dL_dy[rows], flips, params=True)
            params += (after.params - before.params) * np.float32(factor)
            dx[rows] = after.input * np.float32(factor)
        return params, dx


NO_FLIPS = Explanation(np.zeros(0, np.intp), [], 0, np.zeros(0, np.intp))


def typical_size(values: np.ndarray) -> float:
    """Root mean square of the rows' lengths."""
    return float(np.sqrt(np.mean(np.sum(np.square(values, dtype=np.float64), axis=1))))


def relative_difference(a: np.ndarray, b: np.ndarray, typical: float) -> np.ndarray:
    """|a - b| of every row, relative to |b| or to `typical`, whichever is larger; infinite where both are 0."""
    difference = np.linalg.norm(a - b, axis=1)
    size = np.maximum(np.linalg.norm(b, axis=1), typical)
    return np.where(difference == 0, 0, np.divide(difference, size, out=np.full(len(a), np.inf), where=size > 0))


def explain_rows(
    model: Model, x: np.ndarray, dL_dy: np.ndarray, observed: np.ndarray, *, of: str = "input", typical: float = 0.0
) -> Explanation:
    """Find the gates that an implementation found different, from its gradients of every sample.

    dL_dy     [batch, n_output_dims] as the backward pass starts from it (scaled so that float16 can hold it)
    observed  the implementation's gradients, with the same scale: dL/dx, or dL/dfeatures with of="features"
    typical   size of a sample's gradient, where the batch is too small to tell
    """

    def gradients(rows: np.ndarray, flips: list[np.ndarray] | None = None) -> np.ndarray:
        samples = GatedPass(model, x, rows)
        return getattr(samples.backward(dL_dy[rows], flips or samples.no_flips()), of)

    if model.network is None:
        return NO_FLIPS
    batch = np.arange(len(x))
    expected = np.concatenate([gradients(batch[i : i + TRIALS_AT_ONCE]) for i in range(0, len(x), TRIALS_AT_ONCE)])
    observed, precision = observed.astype(np.float32), PRECISIONS[model.precision.name]
    typical = max(typical, typical_size(expected))
    first = relative_difference(observed, expected, typical)
    suspects = np.flatnonzero(~(first <= precision.suspicious))  # NaN too
    best_error, best = first.copy(), dict.fromkeys(suspects.tolist(), ())
    places = ambiguous_places(model, x, suspects)

    most_trials = MAX_WORK // max(model.n_network_params, 1)
    for n_flips in range(1, MAX_FLIPS + 1):
        trials = (
            (row, chosen)
            for row in best
            if not best_error[row] <= precision.limit(comb(len(places[row]), n_flips))
            for chosen in combinations(places[row], n_flips)
        )
        for some in in_groups(islice(trials, most_trials), TRIALS_AT_ONCE):
            rows = np.array([row for row, _ in some])
            flips = flip_arrays(model, [chosen for _, chosen in some])
            errors = relative_difference(observed[rows], gradients(rows, flips), typical)
            for (row, chosen), error in zip(some, errors, strict=True):
                if error < best_error[row]:
                    best_error[row], best[row] = error, chosen

    flipped = [row for row in best if best[row] and best_error[row] <= CONVINCING * first[row]]
    final = first.copy()
    final[flipped] = best_error[flipped]
    return Explanation(
        np.array(flipped, np.intp),
        flip_arrays(model, [best[row] for row in flipped]),
        len(suspects),
        np.flatnonzero(~(final <= precision.unexplained)),
    )


def ambiguous_places(model: Model, x: np.ndarray, rows: np.ndarray) -> dict[int, list[Place]]:
    """The ambiguous gates of each of these samples."""
    places: dict[int, list[Place]] = {int(row): [] for row in rows}
    for start in range(0, len(rows), TRIALS_AT_ONCE):
        some = rows[start : start + TRIALS_AT_ONCE]
        for l, marked in enumerate(GatedPass(model, x, some).ambiguous()):
            for i, unit in zip(*np.nonzero(marked), strict=True):
                places[int(some[i])].append((l, int(unit)))
    return places


def flip_arrays(model: Model, chosen: list[tuple[Place, ...]]) -> list[np.ndarray]:
    """For every layer [len(chosen), fan_out], True at the chosen gates of each sample."""
    widths = [len(weights) for weights in model.network.matrices(model.network_params)]
    flips = [np.zeros((len(chosen), width), bool) for width in widths]
    for i, places in enumerate(chosen):
        for l, unit in places:
            flips[l][i, unit] = True
    return flips


def in_groups(items: Iterator, size: int) -> Iterator[list]:
    group = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group
