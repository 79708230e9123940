"""Multi-layer perceptron without biases: z_l = W_l h_l, h_{l+1} = φ(z_l), y = φ_out(z_last).

Weights are [fan_out, fan_in], batches [batch, width]. Backward, with D_l = dL/dz_l [batch, fan_out]:

    D_last = dL/dy · φ_out'(z_last)
    dL/dW_l = D_lᵀ h_l,      D_{l-1} = (D_l W_l) · φ'(z_{l-1}),      dL/dh_0 = D_0 W_0

Rows of the last matrix past `n_output_dims` are padding: nothing depends on them, so they are neither multiplied nor
given a gradient. Where values are rounded is told in `precision.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_tcnn.specs import ModelSpec

from .activations import ACTIVATIONS
from .matmul import rows_times_matrix, sum_of_outer_products
from .precision import Precision


@dataclass(frozen=True)
class Trace:
    """One forward pass: the input h_l of every matrix, φ' of every hidden layer's output, and z of the output layer.

    `gates[l]` is φ'(z_l) where it can't be told from h_{l+1}, else None.
    """

    inputs: list[np.ndarray]
    gates: list[np.ndarray | None]
    z_out: np.ndarray


class MLP:
    def __init__(self, spec: ModelSpec, precision: Precision):
        self.shapes = spec.layer_shapes
        self.n_output_dims = spec.n_output_dims
        self.hidden = ACTIVATIONS[spec.network.activation]
        self.output = ACTIVATIONS[spec.network.output_activation]
        self.precision = precision

    def matrices(self, params: np.ndarray) -> list[np.ndarray]:
        """Views of the weight matrices, the last one without its padding rows, in the network's flat parameters."""
        views, offset = [], 0
        for fan_out, fan_in in self.shapes:
            views.append(params[offset : offset + fan_out * fan_in].reshape(fan_out, fan_in))
            offset += fan_out * fan_in
        views[-1] = views[-1][: self.n_output_dims]
        return views

    def forward(self, features: np.ndarray, params: np.ndarray) -> tuple[np.ndarray, Trace]:
        """y [batch, n_output_dims] and the trace that `backward` needs."""
        store = self.precision.store
        *hidden, last = self.matrices(params)
        h, inputs, gates = features, [features], []
        for weights in hidden:
            z = rows_times_matrix(h, weights.T)
            gated = self.hidden.derivative_from_output is None
            gates.append(store(self.hidden.derivative_from_input(z)) if gated else None)
            h = store(self.hidden.value(z))
            inputs.append(h)
        z_out = rows_times_matrix(h, last.T)
        return self.output.value(z_out), Trace(inputs, gates, z_out)

    def backward(
        self,
        trace: Trace,
        params: np.ndarray,
        dL_dy: np.ndarray,
        dL_dparams: np.ndarray | None,
        features: bool,
    ) -> np.ndarray | None:
        """Adds to dL/dparams where it is given; returns dL/dfeatures [batch, fan_in] if `features`."""
        store = self.precision.store
        weights = self.matrices(params)
        gradients = None if dL_dparams is None else self.matrices(dL_dparams)
        D = store(dL_dy * self.output.derivative_from_input(trace.z_out))
        for l in reversed(range(len(weights))):
            if gradients is not None:
                gradients[l] += sum_of_outer_products(D, trace.inputs[l])
            if l > 0:
                D = store(rows_times_matrix(D, weights[l]) * self.hidden_derivative(trace, l - 1))
        return store(rows_times_matrix(D, weights[0])) if features else None

    def hidden_derivative(self, trace: Trace, l: int) -> np.ndarray:
        """φ'(z_l) of hidden layer l."""
        if trace.gates[l] is not None:
            return trace.gates[l]
        return self.hidden.derivative_from_output(trace.inputs[l + 1])
