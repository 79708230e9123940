"""Reads off what an implementation stored for one sample, and checks every value by itself.

Asked for the gradient of a batch in which only one sample has dL/dy, an implementation shows that sample's

    dL/dW_l = D_l h_lᵀ          (h_l what layer l was given, D_l = dL/dz_l)

Both factors are stored in 16 bits, so that their products are exact in float32, and quotients give the factors back to
the bit: they have to be numbers of so few bits again, in every row and column. Then each step of the network can be
checked without those before it. From the h_l that was stored follows h_{l+1} = φ(W_l h_l + b_l), rounded to the nearest
number of the format, and the only doubt that is left is the last place of the float32 sum:

    n 2^-22 sum_i |w_i h_i|        (n = fan_in + 1: two float32 sums, as in `gate_flips.py`)

and likewise for D_{l-1} = (D_l W_l) φ'. A model that amplifies a rounding on its way through the layers (dL/dx that is
what is left of large sums, ten layers one behind the other) does not amplify it here. So this is a proof where the size
of a difference says nothing, and it does not guess: gates are open or closed as the stored h says. Where dL/dx is one
number, that alone fits many combinations of gates, and most of those that fit are not what was computed.

What cannot be seen, as all it is multiplied with is 0, changes no gradient; it is taken to be as it should be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from numba_tcnn.reference.encodings import encode_padded
from numba_tcnn.reference.model import Model

from .gate_flips import CLOSED, PRECISIONS, Explanation, GatedPass, relative_difference, samples_of, ulps

SIGNIFICANT_BITS = {"float16": 11, "bfloat16": 8}
"""Of a stored number, by dtype of the reference. float32 shows nothing: its products are rounded."""

FLOAT_SUM = 2.0**-22
APPROXIMATE = 2.0**-18
"""Relative error of activations and their derivatives, and the error of features relative to the largest one or 1."""

MAX_READ = 300
"""Samples of a batch. Each is a call of the implementation; beyond these, a sample is judged by dL/dx alone."""

Backward = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From dL/dy of a batch to its (dL/dparams, dL/dx)."""


class NotRight(Exception):
    """What was read off is nothing that a right implementation stores; says what."""


@dataclass(frozen=True)
class StoredValues:
    """Of one sample, float64: h_l and D_l of every layer; None where nothing of a layer can be seen."""

    inputs: list[np.ndarray | None]
    gradients: list[np.ndarray | None]


def settle(
    explanation: Explanation,
    model: Model,
    x: np.ndarray,
    dL_dy: np.ndarray,
    dx: np.ndarray,
    backward: Backward,
    typical: float,
) -> Explanation:
    """The same explanation, but with the gates that were read off in place of those that were guessed, and without the
    samples whose every stored value is right.

    dL_dy, dx   [batch, ...] of the whole batch, without a scale; `typical`: the size of a sample's dL/dx
    """
    guessed = guessed_rows(explanation)
    if model.precision.name not in SIGNIFICANT_BITS or not 0 < len(guessed) <= MAX_READ:
        return explanation
    wrong, settled = [], {}
    for row in guessed.tolist():
        alone = np.zeros_like(dL_dy)
        alone[row] = dL_dy[row]
        params, dx_alone = backward(alone)
        try:
            reader = Reader(model, x, row, dL_dy[row])
            check_equal(dx_alone[[row]], dx[[row]], typical, reader.precision.suspicious)
            settled[row] = reader.flips(params, dx_alone[row], typical)
        except NotRight:
            wrong.append(row)
    flipped = [row for row, flips in settled.items() if any(flip.any() for flip in flips)]
    layers = range(len(model.network.weight_blocks))
    shapes = [len(weights) for weights in model.network.matrices(model.network_params)]
    return replace(
        explanation,
        rows=np.array(flipped, np.intp),
        flips=[np.array([settled[row][l] for row in flipped]).reshape(len(flipped), shapes[l]) for l in layers],
        unexplained=np.array(wrong, np.intp),
    )


def guessed_rows(explanation: Explanation) -> np.ndarray:
    """The samples of which dL/dx alone says which gates are flipped, or that none explain it."""
    return np.union1d(explanation.rows, explanation.unexplained).astype(int)


def check_equal(values: np.ndarray, expected: np.ndarray, typical: float, tolerance: float) -> None:
    """Of rows."""
    if not relative_difference(values, expected, typical).max(initial=0) <= tolerance:
        raise NotRight("the gradient of the sample's input or table is not what its own dL/dz gives")


class Reader:
    """The reference for one sample of a batch, beside which the values of an implementation are put.

    dL_dy   [n_output_dims] of the sample, without a scale
    """

    def __init__(self, model: Model, x: np.ndarray, row: int, dL_dy: np.ndarray):
        self.model, self.precision = model, PRECISIONS[model.precision.name]
        self.scale = np.float32(model.precision.gradient_scale(dL_dy))
        self.dL_dy = (dL_dy * self.scale).astype(np.float64)
        rows = np.array([row])
        self.expected = GatedPass(model, x, rows)
        network = self.network = model.network
        self.weights = [weights.astype(np.float64) for weights in network.matrices(model.network_params)]
        biases = network.biases(model.network_params)
        self.biases = [b.astype(np.float64) for b in biases] if biases else [np.zeros(len(w)) for w in self.weights]
        self.features, _ = encode_padded(
            model.encoding,
            model.precision.array(x[rows]),
            model.encoding_params,
            model.spec.encoding_width,
            samples_of(model, len(x), rows),
        )

    def flips(self, params: np.ndarray, dx: np.ndarray, typical: float) -> list[np.ndarray]:
        """For every layer [fan_out], which gates differ from the reference's. Raises NotRight.

        params, dx   the implementation's gradients, of this sample alone
        """
        network_gradient, table_gradient = np.split(params * self.scale, [self.model.n_network_params])
        stored = self._read(network_gradient)
        inputs = self._check_forward(stored)
        gradients, z_out = self._check_backward(stored, inputs)
        self._check_encoding(gradients[0], table_gradient, dx * self.scale, typical * float(self.scale))
        trace = self.expected.trace
        found = [(own > 0) != (h[0] > 0) for own, h in zip(inputs[1:], trace.inputs[1:], strict=True)]
        found.append((z_out > 0) != (trace.z_out[0] > 0))
        return [
            flip if closed is not None else np.zeros_like(flip)
            for flip, closed in zip(found, self.expected.closed, strict=True)
        ]

    # ------------------------------------------------------------------------------------- reading
    def _read(self, network_gradient: np.ndarray) -> StoredValues:
        inputs, gradients = [], []
        for l, block in enumerate(self.network.weight_blocks):
            product = block.logical(network_gradient).astype(np.float64)
            bits = SIGNIFICANT_BITS[self.model.precision.name]
            if self.network.bias_blocks:
                D = self.network.bias_blocks[l].logical(network_gradient).astype(np.float64)
                h = other_factor(product, D, bits)
            else:
                D, h = factors(product, self._guess(l, inputs), bits)
            inputs.append(h)
            gradients.append(D)
        return StoredValues(inputs, gradients)

    def _guess(self, l: int, inputs: list[np.ndarray | None]) -> np.ndarray:
        """h_l, most of which is right."""
        if l == 0 or inputs[-1] is None:
            return self.expected.trace.inputs[l][0].astype(np.float64)
        return self._store(self._hidden(self._sum(l - 1, inputs[-1])[0]))

    def _store(self, values: np.ndarray) -> np.ndarray:
        return self.model.precision.store(values.astype(np.float32)).astype(np.float64)

    def _hidden(self, z: np.ndarray) -> np.ndarray:
        return self.network.hidden.value(z)

    def _sum(self, l: int, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """z_l, and how far from it a float32 sum may be."""
        w, b = self.weights[l], self.biases[l]
        return w @ h + b, FLOAT_SUM * (w.shape[1] + 1) * (np.abs(w) @ np.abs(h) + np.abs(b))

    # ------------------------------------------------------------------------------------ checking
    def _check_forward(self, stored: StoredValues) -> list[np.ndarray]:
        """h_l of every layer, also of those that can't be seen."""
        features = self.features[0].astype(np.float64)
        h = self._checked(stored.inputs[0], features, APPROXIMATE * max(1.0, np.abs(features).max()), "features")
        inputs = [h]
        for l in range(len(self.weights) - 1):
            z, doubt = self._sum(l, h)
            value = self._hidden(z)
            around = np.maximum(np.abs(self._hidden(z - doubt) - value), np.abs(self._hidden(z + doubt) - value))
            if self.model.spec.network.activation not in PIECEWISE_LINEAR:
                around += APPROXIMATE * np.maximum(1.0, np.abs(value))
            h = self._checked(stored.inputs[l + 1], value, around, f"outputs of layer {l}")
            inputs.append(h)
        return inputs

    def _check_backward(self, stored: StoredValues, inputs: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
        """D_l of every layer, and z of the output layer with the sign that its gates have."""
        last = len(self.weights) - 1
        D, z_out = self._check_output_gradient(stored.gradients[last], *self._sum(last, inputs[last]))
        gradients = [D]
        for l in range(last, 0, -1):
            value, doubt = D @ self.weights[l], FLOAT_SUM * (len(D) + 1) * (np.abs(D) @ np.abs(self.weights[l]))
            slope, slope_doubt = self._slope(l, inputs)
            around = doubt * np.abs(slope) + np.abs(value) * slope_doubt
            D = self._checked(stored.gradients[l - 1], value * slope, around, f"dL/dz of layer {l - 1}")
            gradients.insert(0, D)
        return gradients, z_out

    def _slope(self, l: int, inputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """φ' of the layer whose output is h_l, and how far it may be off."""
        hidden = self.network.hidden
        if hidden.derivative_from_output is not None:
            slope = hidden.derivative_from_output(inputs[l].astype(np.float32)).astype(np.float64)
            exact = self.model.spec.network.activation in PIECEWISE_LINEAR
            return slope, 0.0 if exact else APPROXIMATE * np.maximum(1.0, np.abs(slope))
        z, doubt = self._sum(l - 1, inputs[l - 1])  # the slope was stored, too, and can't be seen
        slope = hidden.derivative_from_input(z)
        around = [np.abs(hidden.derivative_from_input(z + sign * doubt) - slope) for sign in (-1, 1)]
        return slope, np.maximum(*around) + APPROXIMATE + ulps(slope, self.precision)

    def _check_output_gradient(
        self, found: np.ndarray | None, z: np.ndarray, doubt: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(D, z) of the output layer: of a z in doubt, the one on the side of its gate that D is from."""
        derivative, dL_dy = self.network.output.derivative_from_input, self.dL_dy
        closed = self.expected.closed[-1]
        if closed is None:
            slope = derivative(z)
            around = [np.abs(derivative(z + sign * doubt) - slope) for sign in (-1, 1)]
            around = np.maximum(*around) + APPROXIMATE * np.maximum(1.0, np.abs(slope))
            return self._checked(found, dL_dy * slope, np.abs(dL_dy) * around, "dL/dz of the output layer"), z
        if found is not None:
            seems_open = np.abs(found - dL_dy) <= np.abs(found - closed * dL_dy)
            in_doubt = np.abs(z) <= doubt + self.precision.smallest
            z = np.where(in_doubt & (dL_dy != 0), np.where(seems_open, 1.0, -1.0), z)
        slope = np.where(z > 0, 1.0, closed)
        return self._checked(found, dL_dy * slope, APPROXIMATE * np.abs(dL_dy), "dL/dz of the output layer"), z

    def _checked(self, found: np.ndarray | None, exact: np.ndarray, doubt: np.ndarray | float, what: str) -> np.ndarray:
        """`found`, the nearest stored number to one no farther than `doubt` from `exact`; that of `exact` if None."""
        if found is None:
            return self._store(exact)
        half = ulps(np.maximum(np.abs(found), np.abs(exact) + doubt), self.precision) / 2
        if not (np.abs(found - exact) <= half + doubt).all():
            raise NotRight(what)
        return found

    def _check_encoding(self, D: np.ndarray, table_gradient: np.ndarray, dx: np.ndarray, typical: float) -> None:
        """dL/dx and the table's gradient, as far as they follow from D_0: to what a sample may differ by."""
        model, tolerance = self.model, self.precision.unexplained
        features = self._store(D @ self.weights[0])[None, : model.encoding.spec.n_output_dims]
        features = features.astype(model.precision.compute)
        expected_dx = np.zeros((1, model.spec.n_input_dims), model.precision.compute)
        expected = np.zeros(len(table_gradient), model.precision.compute) if len(table_gradient) else None
        model.encoding.backward(self.expected.context, model.encoding_params, features, expected, expected_dx)
        check_equal(dx[None], expected_dx, typical, tolerance)
        if expected is not None:
            check_equal(table_gradient[None], expected[None], 0.0, tolerance)


PIECEWISE_LINEAR = ("None", *CLOSED)
"""Activations that are computed without an error of their own."""


def factors(product: np.ndarray, guess: np.ndarray, bits: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """D [M] and h [N] of so many significant bits with D hᵀ = product, where some element of h, unknown which, is that
    of `guess`. (None, None) for a product that is 0. Raises NotRight where there are no such factors.
    """
    if not product.any():
        return None, None
    for column in np.argsort(-np.abs(guess) * np.abs(product).max(axis=0)):
        if guess[column] != 0 and product[:, column].any():
            D = product[:, column] / guess[column]
            with contextlib.suppress(NotRight):
                return D, other_factor(product, D, bits)
    raise NotRight("a weight gradient that is no product of two vectors of stored numbers")


def other_factor(product: np.ndarray, D: np.ndarray, bits: int) -> np.ndarray | None:
    """h of so many significant bits with D hᵀ = product, where D has no more. None if D is 0. Raises NotRight."""
    row = np.argmax(np.abs(D))
    h = product[row] / D[row] if D[row] else np.zeros(product.shape[1])
    if not (has_bits(D, bits) and has_bits(h, bits) and np.array_equal(np.outer(D, h), product)):
        raise NotRight("a weight gradient that is no product of dL/dz and a vector of stored numbers")
    return h if D[row] else None


def has_bits(values: np.ndarray, bits: int) -> bool:
    """Whether all values are finite, and have no more significant bits."""
    mantissas, _ = np.frexp(values)
    scaled = np.ldexp(mantissas, bits)
    return bool(np.isfinite(values).all() and (scaled == np.rint(scaled)).all())
