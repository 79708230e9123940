"""Random models of the family that runs fused: configs, parameters of order 1, inputs and targets for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import encoding_draws
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from numba_tcnn.config import parse_model
from numba_tcnn.config_encodings import parse_encoding
from numba_tcnn.layout import n_network_params, n_params
from numba_tcnn.reference.activations import ACTIVATIONS
from numba_tcnn.reference.encodings import encode_padded
from numba_tcnn.reference.model import Model
from numba_tcnn.specs import LossSpec, ModelSpec

LOSSES = ("L1", "L2", "RelativeL1", "RelativeL2", "Mape", "Smape", "CrossEntropy", "Variance")
LOSSES_OF_POSITIVES = ("CrossEntropy", "Variance")
POSITIVE = ("Exponential", "Sigmoid", "Squareplus")
"""Output activations whose values stay far enough above 0 for 1/p and 1/p^2 to fit float16 (Softplus's do not)."""

OPTIMIZER = {"otype": "Adam", "beta1": 0.0, "l2_reg": 0.0}
"""With these settings the first moments after one step are the gradient itself: how a test sees a fused step's."""

LARGEST_PRE_ACTIVATION = 3.0

MAX_ENCODING_WIDTH = 128


@dataclass(frozen=True)
class Draw:
    """One model, the dtypes of the arrays that go in and out, and that which it computes in."""

    n_input_dims: int
    n_output_dims: int
    encoding: dict[str, Any]
    network: dict[str, Any]
    loss: str
    input_dtype: str = "float32"
    output_dtype: str = "float32"
    seed: int = 0
    dtype: str = "float16"

    @property
    def config(self) -> dict[str, Any]:
        parts = {"encoding": self.encoding, "network": self.network}
        return {**parts, "loss": {"otype": self.loss}, "optimizer": OPTIMIZER}

    @cached_property
    def spec(self) -> ModelSpec:
        return parse_model(self.n_input_dims, self.n_output_dims, self.encoding, self.network)

    @property
    def reference_dtype(self) -> str:
        """That of the reference which fused kernels are compared with: in float32 they have to be as good as exact."""
        return "float64" if self.dtype == "float32" else self.dtype

    @property
    def loss_spec(self) -> LossSpec:
        return LossSpec(self.loss)

    def __str__(self) -> str:
        def text(part: dict[str, Any]) -> str:
            return " ".join(str(value) for value in part.values())

        dtypes = f"{self.input_dtype} -> {self.output_dtype}"
        return (
            f"{self.n_input_dims} -> {text(self.encoding)} -> {text(self.network)} -> {self.n_output_dims}, "
            f"{self.loss}, {dtypes}, in {self.dtype}"
        )

    def inputs(self, batch: int) -> np.ndarray:
        """x [batch, n_input_dims] in [0, 1), every 16th sample in [-1, 2): grids wrap there."""
        rng = np.random.default_rng([self.seed, 1])
        x = rng.random((batch, self.n_input_dims), np.float32)
        x[7::16] = 3 * x[7::16] - 1
        return x.astype(self.input_dtype)

    def params(self, x: np.ndarray) -> np.ndarray:
        """Tables and biases uniform in ±1/2; each weight matrix scaled so that its largest |W h| over `x` is 3.

        Everything is then of order 1: no activation saturates, nothing overflows float16, and no error can hide
        behind values that are tiny, as those of an untrained table are.
        """
        rng = np.random.default_rng([self.seed, 2])
        params = rng.uniform(-0.5, 0.5, n_params(self.spec)).astype(np.float32)
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

    def output_gradients(self, batch: int) -> np.ndarray:
        """dL/dy [batch, n_output_dims] of the magnitude of a mean loss's: far below 1."""
        rng = np.random.default_rng([self.seed, 4])
        return (rng.standard_normal((batch, self.n_output_dims)) / (batch * self.n_output_dims)).astype(np.float32)


@st.composite
def grids(draw: st.DrawFn, n_input_dims: int) -> dict[str, Any]:
    """Grids whose finest level has at most 64 vertices along an axis (24 in 3-D, 12 in 4-D where tables are dense)."""
    otype = draw(st.sampled_from(["HashGrid", "DenseGrid", "TiledGrid"]))
    n_features = draw(st.sampled_from([1, 2, 4, 8]))
    n_levels = draw(st.integers(1, 64 // n_features if n_features > 2 else 16))
    base = draw(st.integers(2, 8))
    finest = {2: 64, 3: 24, 4: 12}[n_input_dims] * (1 if otype == "DenseGrid" else 4)
    largest_scale = (finest / base) ** (1 / max(n_levels - 1, 1))
    config = {
        "otype": otype,
        "n_levels": n_levels,
        "n_features_per_level": n_features,
        "base_resolution": base,
        "per_level_scale": round(draw(st.floats(1.0, largest_scale)), 3),
        "interpolation": draw(st.sampled_from(["Linear", "Smoothstep", "Nearest"])),
    }
    if otype == "HashGrid":
        config["log2_hashmap_size"] = draw(st.integers(4, 14))
    return config


@st.composite
def identities(draw: st.DrawFn) -> dict[str, Any]:
    scale, offset = (round(draw(st.floats(-2, 2)), 3) for _ in range(2))
    return {"otype": "Identity", "scale": scale or 1.0, "offset": offset}


MANY_LAYERS = ("None", "Softplus", "Squareplus")
"""Activations of deep networks: the others' gradients vanish on the way back, or their gates are in doubt too often."""


@st.composite
def networks(draw: st.DrawFn) -> dict[str, Any]:
    """One in three is of an unusual shape: each layer of its own width, up to 512 wide, or up to 20 layers deep."""
    shape = draw(st.sampled_from(["fully fused", "fully fused", "any", "any", "own widths", draw(UNUSUAL)]))
    activations = MANY_LAYERS if shape == "deep" else tuple(ACTIVATIONS)
    network: dict[str, Any] = {"otype": "FullyFusedMLP" if shape == "fully fused" else "CutlassMLP"}
    if shape == "own widths":
        network["hidden"] = draw(st.lists(st.integers(1, 160), max_size=4))
    else:
        widths, depths = WIDTHS_AND_DEPTHS[shape]
        network |= {"n_neurons": draw(widths), "n_hidden_layers": draw(depths)}
    return network | {
        "activation": draw(st.sampled_from(activations)),
        "output_activation": draw(st.sampled_from(list(ACTIVATIONS))),
        "bias": draw(st.booleans()),
    }


UNUSUAL = st.sampled_from(["wide", "deep"])
WIDTHS_AND_DEPTHS = {
    "fully fused": (st.sampled_from([16, 32, 64, 128]), st.integers(1, 4)),
    "any": (st.integers(1, 128), st.integers(0, 4)),
    "wide": (st.integers(129, 512), st.integers(1, 2)),
    "deep": (st.integers(8, 64), st.integers(5, 20)),  # rounding adds up: at 32, two right ones differ by 3e-3
}


@st.composite
def other_encodings(draw: st.DrawFn, n_input_dims: int) -> dict[str, Any]:
    """Any encoding, composites among them, but for Nearest grids: behind those dL/dx doesn't show a flipped gate."""
    encoding = draw(st.one_of(encoding_draws.leaves(n_input_dims), encoding_draws.composites(n_input_dims)))
    width = parse_encoding(encoding, n_input_dims).n_output_dims
    assume(0 < width <= MAX_ENCODING_WIDTH and "Nearest" not in str(encoding))
    return encoding


@st.composite
def draws(draw: st.DrawFn, dtype: str = "float16") -> Draw:
    kind = draw(st.sampled_from(["grid", "grid", "other", "other", "Identity"]))
    if kind == "grid":
        n_input_dims = draw(st.integers(2, 4))
        encoding = draw(grids(n_input_dims))
    elif kind == "other":
        n_input_dims = draw(st.integers(1, 7))
        encoding = draw(other_encodings(n_input_dims))
    else:
        n_input_dims = draw(st.integers(1, 48))
        encoding = draw(identities())
    network = draw(networks())
    losses = LOSSES if network["output_activation"] in POSITIVE else LOSSES[:-2]
    array_dtypes = st.sampled_from(["float32", "float16"])
    return Draw(
        n_input_dims,
        draw(st.one_of(st.integers(1, 20), st.integers(1, 20), st.integers(21, 300))),
        encoding,
        network,
        draw(st.sampled_from(losses)),
        draw(array_dtypes),
        draw(array_dtypes),
        draw(st.integers(0, 2**32 - 1)),
        dtype,
    )


def covering(dtype: str = "float16") -> list[Draw]:
    """Twelve models in which every choice of the family appears at least once."""
    names = list(ACTIVATIONS)
    outputs = ("None", "ReLU", "LeakyReLU", "SiLU", "Sine", "Tanh", "Sigmoid", "Exponential")
    outputs += ("Softplus", "Squareplus", "None", "ReLU")
    grids_of = ("HashGrid", "DenseGrid", "TiledGrid")
    interpolations = ("Linear", "Smoothstep", "Nearest")
    result = []
    for i in range(12):
        n_features = (1, 2, 4, 8)[i % 4]
        encoding = {
            "otype": grids_of[i % 3],
            "n_levels": 16 // n_features if i % 2 else 3,
            "n_features_per_level": n_features,
            "base_resolution": 4,
            "per_level_scale": 1.3,
            "interpolation": interpolations[i // 4],
        }
        if i % 3 == 0:
            encoding["log2_hashmap_size"] = 7 + i // 3
        n_input_dims = 2 + (i + i // 3) % 3
        if i >= 10:
            n_input_dims, encoding = (16, 21)[i - 10], {"otype": "Identity", "scale": 1.5, "offset": -0.75}
        network = {
            "otype": ("FullyFusedMLP", "CutlassMLP")[i % 2],
            "n_neurons": ((16, 32, 64, 128)[i // 2 % 4], (24, 100, 5, 128)[i // 2 % 4])[i % 2],
            "n_hidden_layers": i % 5 if i % 2 else i // 2 % 4 + 1,
            "activation": names[i % 10],
            "output_activation": outputs[i],
        }
        dtypes = (("float32", "float16")[i % 2], ("float32", "float16")[i // 2 % 2])
        result.append(Draw(n_input_dims, 1 + 5 * i % 20, encoding, network, LOSSES[i % 8], *dtypes, i, dtype))
    return result
