"""A draw: a model, its parameters of order 1, and the arrays that go in and out, with targets for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from numba_tcnn.config import parse_loss, parse_model
from numba_tcnn.layout import n_network_params, n_params
from numba_tcnn.reference.activations import ACTIVATIONS
from numba_tcnn.reference.encodings import encode_padded
from numba_tcnn.reference.mlp import MLP
from numba_tcnn.reference.model import Model
from numba_tcnn.specs import LossSpec, ModelSpec

CONSTANT_GRADIENT = "ConstantGradient"
LOSSES_OF_POSITIVES = ("CrossEntropy", "Variance")

OPTIMIZER = {"otype": "Adam", "beta1": 0.0, "l2_reg": 0.0}
"""With these settings the first moments after one step are the gradient itself: how a fused step's is seen."""

LARGEST_PRE_ACTIVATION = 3.0

Config = dict[str, Any]


class NetworkOfExactSums(MLP):
    """Sums in float64, rounded once: a sample's values don't depend on the rows around it, by which BLAS chooses how it
    sums. Else the same sample could have another gate open when it is computed alone."""

    def product(self, rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        return (rows.astype(np.float64) @ matrix.astype(np.float64)).astype(rows.dtype)


@dataclass(frozen=True)
class Draw:
    """One model, how it is trained, and the arrays that go in and out.

    network         None: an encoding alone, of `n_output_dims` columns
    loss            its otype; the numbers of a ConstantGradient follow from `seed`
    input_dtype     of x; `output_dtype`: of y
    dtype           that the model computes in
    optimizer       beside those that every draw is trained with
    density_dtype   of sampling densities; None: there are none
    max_level       fraction of the grid levels in use; "rows": one for each sample; None: all
    layout          where arrays stand and how (`fused_model.LAYOUTS`)
    deterministic   whether the table's gradient is summed in fixed point
    """

    n_input_dims: int
    n_output_dims: int
    encoding: Config
    network: Config | None
    loss: str
    input_dtype: str = "float32"
    output_dtype: str = "float32"
    seed: int = 0
    dtype: str = "float16"
    optimizer: Config | None = None
    density_dtype: str | None = None
    max_level: float | str | None = None
    layout: str = "aligned"
    deterministic: bool = False

    @property
    def config(self) -> Config:
        """Of the model and the optimizer that shows gradients."""
        parts = {"encoding": self.encoding, "network": self.network}
        return {**parts, "loss": self.loss_config, "optimizer": OPTIMIZER}

    @cached_property
    def spec(self) -> ModelSpec:
        n_output_dims = None if self.network is None else self.n_output_dims
        return parse_model(self.n_input_dims, n_output_dims, self.encoding, self.network)

    @property
    def reference_dtype(self) -> str:
        """That of the reference which fused kernels are compared with: in float32 they have to be as good as exact."""
        return "float64" if self.dtype == "float32" else self.dtype

    @property
    def loss_config(self) -> Config:
        if self.loss != CONSTANT_GRADIENT:
            return {"otype": self.loss}
        numbers = np.random.default_rng([self.seed, 6]).standard_normal(self.n_output_dims)
        return {"otype": self.loss, "gradient": numbers.round(3).tolist()}

    @property
    def loss_spec(self) -> LossSpec:
        return parse_loss(self.loss_config)

    def __str__(self) -> str:
        def text(part: Config | None) -> str:
            return "no network" if part is None else " ".join(str(value) for value in part.values())

        dtypes = f"{self.input_dtype} -> {self.output_dtype}"
        return (
            f"{self.n_input_dims} -> {text(self.encoding)} -> {text(self.network)} -> {self.n_output_dims}, "
            f"{self.loss}, {dtypes}, in {self.dtype}"
        )

    def inputs(self, batch: int) -> np.ndarray:
        """x [batch, n_input_dims] in [0, 1), every 16th sample in [-1, 2): grids wrap there. (Harmonics don't: they
        are polynomials of the 7th degree, which leave float16 there.)"""
        rng = np.random.default_rng([self.seed, 1])
        x = rng.random((batch, self.n_input_dims), np.float32)
        if "SphericalHarmonics" not in str(self.encoding):
            x[7::16] = 3 * x[7::16] - 1
        return x.astype(self.input_dtype)

    def levels(self, batch: int) -> float | np.ndarray | None:
        """The fraction of the grid levels in use: a number or [batch] of them; None where all are."""
        if self.max_level != "rows":
            return self.max_level
        return np.random.default_rng([self.seed, 5]).random(batch, np.float32)

    def model(self, params: np.ndarray, dtype: str, batch: int) -> Model:
        """The reference, set for a batch of that size."""
        model = Model(self.spec, params, dtype)
        if self.spec.network is not None:
            model.network = NetworkOfExactSums(self.spec, model.precision)
        model.max_level = self.levels(batch)
        return model

    def params(self, x: np.ndarray) -> np.ndarray:
        """Tables and biases uniform in ±1/2; each weight matrix scaled so that its largest |W h| over `x` is 3.

        Everything is then of order 1: no activation saturates, nothing overflows float16, and no error can hide
        behind values that are tiny, as those of an untrained table are.
        """
        rng = np.random.default_rng([self.seed, 2])
        params = rng.uniform(-0.5, 0.5, n_params(self.spec)).astype(np.float32)
        if self.network is None:
            return params
        model = Model(self.spec, params, "float32")
        h, _ = encode_padded(model.encoding, x.astype(np.float32), model.encoding_params, self.spec.encoding_width)
        network_params = params[: n_network_params(self.spec)]
        weights_of, biases_of = model.network.matrices(network_params), model.network.biases(network_params)
        for l, weights in enumerate(weights_of):
            largest = np.max(np.abs(h @ weights.T))
            weights *= np.float32(LARGEST_PRE_ACTIVATION / max(largest, 1e-3))
            h = ACTIVATIONS[self.spec.network.activation].value(
                model.network.pre_activation(l, h, weights_of, biases_of)
            )
        return params

    def targets(self, prediction: np.ndarray) -> np.ndarray:
        """Targets between 0.1 and 1 away from what is predicted, so that the sign of an error is never in doubt;
        for losses of positive numbers, between 0.1 and 1."""
        rng = np.random.default_rng([self.seed, 3])
        size = rng.uniform(0.1, 1.0, prediction.shape).astype(np.float32)
        if self.loss in LOSSES_OF_POSITIVES:
            return size
        return prediction.astype(np.float32) + size * rng.choice(np.array([-1, 1], np.float32), prediction.shape)

    def densities(self, batch: int) -> np.ndarray | None:
        """Sampling densities [batch, n_output_dims] between 0.3 and 3, if there are any."""
        if self.density_dtype is None:
            return None
        rng = np.random.default_rng([self.seed, 7])
        return rng.uniform(0.3, 3.0, (batch, self.n_output_dims)).astype(self.density_dtype)

    def output_gradients(self, batch: int) -> np.ndarray:
        """dL/dy [batch, n_output_dims] of the magnitude of a mean loss's: far below 1."""
        rng = np.random.default_rng([self.seed, 4])
        return (rng.standard_normal((batch, self.n_output_dims)) / (batch * self.n_output_dims)).astype(np.float32)

    def directions(self, batch: int) -> np.ndarray:
        """v [batch, n_input_dims] of order 1, for second derivatives."""
        return np.random.default_rng([self.seed, 8]).standard_normal((batch, self.n_input_dims)).astype(np.float32)
