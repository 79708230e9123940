"""Fused models on the emulated driver and the same models in the reference: made, stepped and compared.

Both round to float16 at the same points (see test_fused_kernels.py for what is left), and Adam moves a weight by at
most the learning rate a step: after some steps the distance of the two is below 1e-3 of the way that the parameters
went. A wrong argument of a kernel would leave it of order 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from golden_case import relative_error

import numba_tcnn as tcnn
from numba_tcnn.arrays import view
from numba_tcnn.config import parse_loss, parse_optimizer
from numba_tcnn.reference.engine import ReferenceRuntime

CONFIG = {
    "encoding": {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 3},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
}
IDENTITY = CONFIG | {"encoding": {"otype": "Identity"}}
TRAINED = 1e-3  # distance to the reference over the way that training went
GRADIENT = 2e-4


def make(config: dict = CONFIG, n_in: int = 2, n_out: int = 3, **options: Any) -> tcnn.Model:
    model = tcnn.create_from_config(n_in, n_out, config, **({"engine": "fused"} | options))
    assert model.explain().engine == "fused"
    return model


def reference_of(model: tcnn.Model, config: dict = CONFIG) -> ReferenceRuntime:
    """The same model, parameters and training in the reference."""
    twin = ReferenceRuntime(model.network.spec, model.params, "float16")
    twin.configure_training(parse_optimizer(config["optimizer"]), parse_loss(config["loss"]))
    return twin


def batch(size: int, seed: int = 1, n_in: int = 2, n_out: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.random((size, n_in), np.float32), 0.1 + rng.random((size, n_out), np.float32)


def step(twin: ReferenceRuntime, x: np.ndarray, y: np.ndarray | None, **arrays: Any) -> float:
    views = {name: view(a) if isinstance(a, np.ndarray) else a for name, a in arrays.items()}
    return float(twin.training_step(view(x), None if y is None else view(y), **views))


def predict(twin: ReferenceRuntime, x: np.ndarray) -> np.ndarray:
    out = np.empty((len(x), twin.spec.n_output_dims), np.float32)
    twin.inference(view(x), view(out))
    return out


def assert_same_training(model: tcnn.Model, twin: ReferenceRuntime, start: np.ndarray) -> None:
    way = np.linalg.norm(twin.params - start)
    distance = np.linalg.norm(model.params - twin.params)
    assert way > 0 and distance <= TRAINED * way, f"{distance / way:.1e} of the way from the reference"
    assert model.trainer.step == twin.step and model.trainer.skipped_steps == twin.skipped_steps


def assert_same_backward(model: tcnn.Model, twin: ReferenceRuntime, x: np.ndarray, dL_dy: np.ndarray) -> None:
    _, context = model.network.forward(x)
    given, expected = model.network.backward(context, dL_dy), twin.model.backward(x, dL_dy)
    assert relative_error(given.params, expected.params) <= GRADIENT
    assert relative_error(given.input, expected.input) <= GRADIENT
