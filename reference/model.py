"""A model as pure functions of its parameters: y = network(encoding(x)), its loss, and all gradients.

This is the whole computation; `engine.py` only adds the optimizer and the engine contract around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from numba_tcnn.layout import n_network_params, n_params, parameter_blocks
from numba_tcnn.specs import LossSpec, ModelSpec

from .encoding_contract import WHOLE_BATCH, Samples
from .encodings import encode_padded, make_encoding
from .losses import loss_function, mean_factor
from .mlp import MLP, Trace
from .mlp_second_order import SecondOrder
from .precision import Precision

FORWARD_ROWS = 1 << 12
GRADIENT_ROWS = 1 << 14
"""Batches are computed in pieces of this many rows, which bounds the memory that corners and activations take. A
forward pass is fastest in the cache; a backward pass has a cost per piece, proportional to the size of the tables."""


@dataclass(frozen=True)
class Gradients:
    """dL/dparams, flat [n_params], and dL/dx [batch, n_input_dims]; None where they were not asked for."""

    spec: ModelSpec
    params: np.ndarray | None
    input: np.ndarray | None

    def blocks(self) -> dict[str, np.ndarray]:
        """dL/dparams by the names of `layout.parameter_blocks`, as views, padding included."""
        return {block.name: block.stored(self.params) for block in parameter_blocks(self.spec)}


@dataclass(frozen=True)
class SecondOrderGradients:
    """Gradients of S = Σ ⟨v, dL/dx⟩ with respect to dL/dy [batch, n_output_dims], the parameters, and x."""

    dL_doutput: np.ndarray
    params: np.ndarray
    input: np.ndarray


class Model:
    """dtype "float64" and "float32" are exact; "float16" rounds where fused kernels store (`precision.py`).

    `params` is kept, not copied, where it already is in the compute format: whoever changes it calls `refresh`.
    `max_level` is the fraction of all grid levels in use, or an array of one fraction for each row of every batch.
    """

    def __init__(self, spec: ModelSpec, params: np.ndarray, dtype: str = "float32"):
        self.spec = spec
        self.precision = Precision(dtype)
        self.encoding = make_encoding(spec.encoding, self.precision)
        self.network = None if spec.network is None else MLP(spec, self.precision)
        self.n_network_params = n_network_params(spec)
        if params.shape != (n_params(spec),):
            raise ValueError(f"parameters have shape {params.shape}, the model has ({n_params(spec)},)")
        self.params = params
        self.max_level: float | np.ndarray | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take over changed parameters."""
        stored = self.precision.store(self.precision.array(self.params))
        self.network_params = stored[: self.n_network_params]
        self.encoding_params = stored[self.n_network_params :]

    def forward(self, x: np.ndarray) -> np.ndarray:
        """y [batch, n_output_dims] of x [batch, n_input_dims], in the compute format."""
        x = self.precision.array(x)
        y = np.empty((len(x), self.spec.n_output_dims), x.dtype)
        with np.errstate(all="ignore"):
            for rows, samples in self._pieces(len(x), FORWARD_ROWS):
                y[rows] = self._forward(x[rows], samples)[0]
        return y

    def loss_and_gradients(
        self,
        x: np.ndarray,
        y: np.ndarray,
        loss: LossSpec,
        data_pdf: np.ndarray | None = None,
        *,
        input: bool = True,
        out: np.ndarray | None = None,
    ) -> tuple[float, Gradients]:
        """The mean loss over batch and outputs, and its gradients. `out` receives dL/dparams if given."""
        evaluate = loss_function(loss, self.spec.n_output_dims)
        y = self.precision.array(y)
        data_pdf = None if data_pdf is None else self.precision.array(data_pdf)
        # ConstantGradient's may have any magnitude, as a given dL/dy
        scale = self.precision.gradient_scale(self.precision.array(loss.gradient)) if loss.gradient else 1.0
        total = 0.0

        def dL_dy(rows: slice, prediction: np.ndarray) -> np.ndarray:
            nonlocal total
            pdf = 1.0 if data_pdf is None else data_pdf[rows]
            values, gradients = evaluate(prediction, y[rows], pdf)
            total += float(values.sum(dtype=np.float64))
            return gradients * gradients.dtype.type(scale)

        normalisation = mean_factor(loss, y.size)
        gradients = self._gradients(x, dL_dy, normalisation / scale, params=True, input=input, out=out)
        return total * normalisation, gradients

    def backward(
        self,
        x: np.ndarray,
        dL_dy: np.ndarray,
        *,
        params: bool = True,
        input: bool = True,
        out: np.ndarray | None = None,
    ) -> Gradients:
        """Gradients for a given dL/dy [batch, n_output_dims] of any magnitude. `out` receives dL/dparams if given."""
        dL_dy = self.precision.array(dL_dy)
        scale = self.precision.gradient_scale(dL_dy)
        return self._gradients(x, lambda rows, y: dL_dy[rows] * scale, 1.0 / scale, params=params, input=input, out=out)

    def backward_backward_input(self, x: np.ndarray, v: np.ndarray, dL_dy: np.ndarray) -> SecondOrderGradients:
        """How the input gradient depends on everything: gradients of S = Σ ⟨v, dL/dx⟩ for weights v [batch, n_input].

        With features φ = E(x) and u = dL/dφ, dL/dx = E'(x)ᵀ u depends on x through E' and through u; the encoding
        differentiates the first with u held fixed, the network says how u depends on φ, and φ on x is the encoding's
        ordinary backward pass. Sums over samples are in the compute format.
        """
        x, v, dL_dy = (self.precision.array(a) for a in (x, v, dL_dy))
        result = SecondOrderGradients(
            np.empty_like(dL_dy), np.zeros(n_params(self.spec), self.precision.compute), np.empty_like(x)
        )
        with np.errstate(all="ignore"):
            for rows, samples in self._pieces(len(x), GRADIENT_ROWS):
                self._second_order(x[rows], v[rows], dL_dy[rows], rows, samples, result)
        return result

    def _second_order(
        self,
        x: np.ndarray,
        v: np.ndarray,
        dL_dy: np.ndarray,
        rows: slice,
        samples: Samples,
        result: SecondOrderGradients,
    ) -> None:
        """Writes the rows of dS/d(dL/dy) and dS/dx, adds to dS/dparams."""
        network_gradient = result.params[: self.n_network_params]
        encoding_gradient = result.params[self.n_network_params :]
        n_own = self.encoding.spec.n_output_dims
        if self.network is None:
            tangent, dS_dparams, dS_dx = self.encoding.backward_backward_input(
                x, dL_dy[:, :n_own], v, self.encoding_params, samples
            )
            result.dL_doutput[rows] = padded(tangent, self.spec.n_output_dims)
        else:
            features, context = self._encode(x, samples)
            second = SecondOrder(self.network, self.precision.store(features), self.network_params, dL_dy)
            tangent, dS_dparams, dS_dx = self.encoding.backward_backward_input(
                x, second.dL_dfeatures[:, :n_own], v, self.encoding_params, samples
            )
            tangent = padded(tangent, self.spec.encoding_width)
            result.dL_doutput[rows], dS_dfeatures = second.backward(tangent, network_gradient)
            own = dS_dfeatures[:, :n_own]
            self.encoding.backward(
                context, self.encoding_params, own, encoding_gradient if len(encoding_gradient) else None, dS_dx
            )
        encoding_gradient += dS_dparams
        result.input[rows] = dS_dx

    def _gradients(self, x, dL_dy, factor, *, params, input, out) -> Gradients:
        """Sums gradients over the pieces of the batch; `factor` multiplies them at the end."""
        x = self.precision.array(x)
        if params:
            flat = np.empty(n_params(self.spec), self.precision.compute) if out is None else out
            flat[:] = 0
        else:
            flat = None
        dL_dx = np.zeros((len(x), self.spec.n_input_dims), self.precision.compute) if input else None
        with np.errstate(all="ignore"):
            for rows, samples in self._pieces(len(x), GRADIENT_ROWS):
                y, trace, context = self._forward(x[rows], samples)
                self._backward(trace, context, dL_dy(rows, y), flat, None if dL_dx is None else dL_dx[rows])
            if flat is not None:
                flat *= self.precision.compute.type(factor)
            if dL_dx is not None:
                dL_dx *= self.precision.compute.type(factor)
        return Gradients(self.spec, flat, dL_dx)

    def _pieces(self, batch: int, n_rows: int) -> Iterator[tuple[slice, Samples]]:
        """The pieces of a batch, as rows and as what encodings are told of them."""
        if np.ndim(self.max_level) and len(self.max_level) != batch:
            raise ValueError(f"max_level has {len(self.max_level)} rows, the batch has {batch}")
        whole = Samples(0, batch, self.max_level)
        return ((rows, whole.part(rows)) for rows in pieces(batch, n_rows))

    def _encode(self, x: np.ndarray, samples: Samples) -> tuple[np.ndarray, Any]:
        return encode_padded(self.encoding, x, self.encoding_params, self.spec.encoding_width, samples)

    def _forward(self, x: np.ndarray, samples: Samples = WHOLE_BATCH) -> tuple[np.ndarray, Trace | None, Any]:
        features, context = self._encode(x, samples)
        features = self.precision.store(features)
        if self.network is None:
            return features[:, : self.spec.n_output_dims], None, context
        y, trace = self.network.forward(features, self.network_params)
        return y, trace, context

    def _backward(
        self,
        trace: Trace | None,
        context: Any,
        dL_dy: np.ndarray,
        dL_dparams: np.ndarray | None,
        dL_dx: np.ndarray | None,
    ) -> None:
        network_gradient = encoding_gradient = None
        if dL_dparams is not None:
            network_gradient = dL_dparams[: self.n_network_params]
            encoding_gradient = dL_dparams[self.n_network_params :] if len(self.encoding_params) else None
        needs_features = encoding_gradient is not None or dL_dx is not None
        if self.network is None:
            dL_dfeatures = self.precision.store(dL_dy)
        else:
            dL_dfeatures = self.network.backward(trace, self.network_params, dL_dy, network_gradient, needs_features)
        if needs_features:
            own = dL_dfeatures[:, : self.encoding.spec.n_output_dims]
            self.encoding.backward(context, self.encoding_params, own, encoding_gradient, dL_dx)


def padded(columns: np.ndarray, width: int) -> np.ndarray:
    """[batch, n] with zeros in further columns, up to `width`: derivatives of what an encoding is padded with."""
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])))


def pieces(batch: int, n_rows: int) -> Iterator[slice]:
    return (slice(start, min(start + n_rows, batch)) for start in range(0, batch, n_rows))
