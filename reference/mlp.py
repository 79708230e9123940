"""Multi-layer perceptron: z_l = W_l h_l (+ b_l, with biases), h_{l+1} = φ(z_l), y = φ_out(z_last).

Weights are [fan_out, fan_in], biases [fan_out], batches [batch, width]. Backward, with D_l = dL/dz_l [batch, fan_out]:

    D_last = dL/dy · φ_out'(z_last)
    dL/dW_l = D_lᵀ h_l,   dL/db_l = Σ_batch D_l,   D_{l-1} = (D_l W_l) · φ'(z_{l-1}),   dL/dh_0 = D_0 W_0

Padding of widths takes no part: nothing depends on it, it is not multiplied and has no gradient. Where values are
rounded is told in `precision.py`. Second derivatives are in `mlp_second_order.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_tcnn.layout import bias_blocks, weight_blocks
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
    """`params` is always the network's part of the flat parameter vector, or of a vector of the same layout."""

    def __init__(self, spec: ModelSpec, precision: Precision):
        self.weight_blocks = weight_blocks(spec)
        self.bias_blocks = bias_blocks(spec)
        self.hidden = ACTIVATIONS[spec.network.activation]
        self.output = ACTIVATIONS[spec.network.output_activation]
        self.precision = precision

    def matrices(self, params: np.ndarray) -> list[np.ndarray]:
        """Views of the weight matrices without their padding."""
        return [block.logical(params) for block in self.weight_blocks]

    def biases(self, params: np.ndarray) -> list[np.ndarray]:
        """Views of the biases without their padding; [] for a network that has none."""
        return [block.logical(params) for block in self.bias_blocks]

    def product(self, rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        """rows [batch, K] @ matrix [K, N]."""
        return rows_times_matrix(rows, matrix)

    def pre_activation(self, l: int, h: np.ndarray, weights: list[np.ndarray], biases: list[np.ndarray]) -> np.ndarray:
        """z_l [batch, fan_out] of h_l [batch, fan_in]."""
        z = self.product(h, weights[l].T)
        if biases:
            z += biases[l]
        return z

    def forward(self, features: np.ndarray, params: np.ndarray) -> tuple[np.ndarray, Trace]:
        """y [batch, n_output_dims] and the trace that `backward` needs."""
        store = self.precision.store
        weights, biases = self.matrices(params), self.biases(params)
        last = len(weights) - 1
        h, inputs, gates = features, [features], []
        for l in range(last):
            z = self.pre_activation(l, h, weights, biases)
            gated = self.hidden.derivative_from_output is None
            gates.append(store(self.hidden.derivative_from_input(z)) if gated else None)
            h = store(self.hidden.value(z))
            inputs.append(h)
        z_out = self.pre_activation(last, h, weights, biases)
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
        D = store(dL_dy * self.output.derivative_from_input(trace.z_out))
        for l in reversed(range(len(weights))):
            if dL_dparams is not None:
                self.add_gradient(dL_dparams, l, D, trace.inputs[l])
                self.add_bias_gradient(dL_dparams, l, D)
            if l > 0:
                D = store(self.product(D, weights[l]) * self.hidden_derivative(trace, l - 1))
        return store(self.product(D, weights[0])) if features else None

    def add_gradient(self, dL_dparams: np.ndarray, l: int, D: np.ndarray, h: np.ndarray) -> None:
        """dL/dW_l += Dᵀ h."""
        gradient = self.weight_blocks[l].logical(dL_dparams)
        gradient += sum_of_outer_products(D, h)

    def add_bias_gradient(self, dL_dparams: np.ndarray, l: int, D: np.ndarray) -> None:
        """dL/db_l += Σ_batch D, where there are biases."""
        if self.bias_blocks:
            gradient = self.bias_blocks[l].logical(dL_dparams)
            gradient += D.sum(axis=0)

    def hidden_derivative(self, trace: Trace, l: int) -> np.ndarray:
        """φ'(z_l) of hidden layer l."""
        if trace.gates[l] is not None:
            return trace.gates[l]
        return self.hidden.derivative_from_output(trace.inputs[l + 1])
