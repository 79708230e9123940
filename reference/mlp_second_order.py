"""Second derivatives of a multi-layer perceptron: how the gradient of its input depends on everything.

Let u = dL/dy, g = dL/dh_0 (h_0 are the features) and S = Σ ⟨v, g⟩ for given directions v [batch, fan_in]. As g = Jᵀu
with the Jacobian J of y, S = Σ ⟨Jv, u⟩: S is what moving h_0 along v does to L. The *tangents* ẋ = dx along v go
forward, and S is differentiated backward through both them and the values (reverse over forward):

    ḣ_0 = v,   ż_l = W_l ḣ_l,   ḣ_{l+1} = φ'(z_l) · ż_l,   dS/du = ẏ = φ_out'(z_last) · ż_last

    D_l = dS/dż_l     the same as dL/dz_l of the first derivative (`mlp.py`)
    P_l = dS/dz_l     P_last = u · φ_out''(z_last) · ż_last
                      P_{l-1} = (P_l W_l) · φ'(z_{l-1}) + (D_l W_l) · φ''(z_{l-1}) · ż_{l-1}

    dS/dW_l = D_lᵀ ḣ_l + P_lᵀ h_l,   dS/db_l = Σ_batch P_l,   dS/dh_0 = P_0 W_0

Values are rounded as in the forward pass (parameters, features, hidden outputs); derivatives are all taken from
z in the compute format and none is rounded.
"""

from __future__ import annotations

import numpy as np

from .matmul import rows_times_matrix
from .mlp import MLP


class SecondOrder:
    """The second derivatives at one batch of features [batch, fan_in] for one u = `dL_dy` [batch, n_output_dims].

    `dL_dfeatures` is g, known before a direction v is.
    """

    def __init__(self, network: MLP, features: np.ndarray, params: np.ndarray, dL_dy: np.ndarray):
        self.network = network
        self.weights, biases = network.matrices(params), network.biases(params)
        self.dL_dy = dL_dy
        self.activations = [network.hidden] * (len(self.weights) - 1) + [network.output]
        self.inputs, self.z = [features], []
        for l in range(len(self.weights)):
            if l > 0:
                self.inputs.append(network.precision.store(network.hidden.value(self.z[l - 1])))
            self.z.append(network.pre_activation(l, self.inputs[l], self.weights, biases))
        self.slopes = [a.derivative_from_input(z) for a, z in zip(self.activations, self.z, strict=True)]
        self.into_layer = [dL_dy]  # dL/dh_{l+1} = D_{l+1} W_{l+1} for each layer l, the output's first
        for weights, slope in zip(reversed(self.weights), reversed(self.slopes), strict=True):
            self.into_layer.append(rows_times_matrix(self.into_layer[-1] * slope, weights))
        self.dL_dfeatures = self.into_layer.pop()
        self.into_layer.reverse()

    def backward(self, v: np.ndarray, dS_dparams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(dS/du [batch, n_output_dims], dS/dfeatures [batch, fan_in]); adds dS/dparams."""
        tangents, z_tangents = [v], []
        for weights, slope in zip(self.weights, self.slopes, strict=True):
            z_tangents.append(rows_times_matrix(tangents[-1], weights.T))
            tangents.append(slope * z_tangents[-1])
        P_times_W = np.zeros_like(self.dL_dy)
        for l in reversed(range(len(self.weights))):
            D = self.into_layer[l] * self.slopes[l]
            curvature = self.activations[l].second_derivative(self.z[l])
            P = P_times_W * self.slopes[l] + self.into_layer[l] * curvature * z_tangents[l]
            self.network.add_gradient(dS_dparams, l, D, tangents[l])
            self.network.add_gradient(dS_dparams, l, P, self.inputs[l])
            self.network.add_bias_gradient(dS_dparams, l, P)
            P_times_W = rows_times_matrix(P, self.weights[l])
        return tangents[-1], P_times_W
