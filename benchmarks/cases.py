"""The benchmark's configurations, and inputs and targets for them on the device."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import numba_tcnn as tcnn
from numba_tcnn.config import config_parts, parse_loss, parse_model, parse_optimizer
from numba_tcnn.fused import DeviceArray, to_device
from numba_tcnn.layout import n_params
from numba_tcnn.specs import LossSpec, ModelSpec, OptimizerSpec

CONFIGS = Path(__file__).with_name("configs.json")
BATCHES = (14, 16, 18, 20, 21)
"""Binary logarithms of the batch sizes."""

N_INPUT_SETS = 4
"""Input sets that calls rotate through, so that no call finds its inputs in a cache because the last one read them."""


@dataclass(frozen=True)
class Case:
    """One configuration. Without an encoding it is a bare network, whose inputs are float16."""

    name: str
    n_input_dims: int
    n_output_dims: int
    config: dict[str, Any]

    @property
    def bare(self) -> bool:
        return "encoding" not in self.config

    @property
    def input_dtype(self) -> str:
        return "float16" if self.bare else "float32"

    def specs(self) -> tuple[ModelSpec, LossSpec, OptimizerSpec]:
        """What the configuration says. A bare network's spec has the Identity encoding that pads its input."""
        parts = config_parts(self.config)
        encoding = {"otype": "Identity"} if self.bare else parts.encoding
        model = parse_model(self.n_input_dims, self.n_output_dims, encoding, parts.network)
        return model, parse_loss(parts.loss), parse_optimizer(parts.optimizer, n_params=n_params(model))

    def make_trainer(self) -> tcnn.Trainer:
        """Raises `EngineUnavailable` where a component has no fused kernel. Nothing is compiled yet."""
        if self.bare:
            network = tcnn.Network(self.n_input_dims, self.n_output_dims, self.config["network"], strict=True)
            return tcnn.Trainer(network, self.config["optimizer"], self.config["loss"])
        model = tcnn.create_from_config(self.n_input_dims, self.n_output_dims, self.config, strict=True)
        return model.trainer


def load_cases(names: Iterable[str] | None = None) -> list[Case]:
    """All cases, or those named, in the order of the file. Raises ValueError for a name that is not there."""
    cases = {entry["name"]: Case(**entry) for entry in json.loads(CONFIGS.read_text())}
    chosen = list(cases) if names is None else list(names)
    unknown = [name for name in chosen if name not in cases]
    if unknown:
        raise ValueError(f"no configuration {', '.join(unknown)}; there are {', '.join(cases)}")
    return [case for name, case in cases.items() if name in chosen]


@functools.lru_cache(maxsize=2)
def host_inputs(n: int, n_input_dims: int, dtype: str) -> tuple[np.ndarray, ...]:
    """x [n, n_input_dims] uniform in [0, 1), one for every input set. Kept for the next case of the same width."""
    streams = np.random.SeedSequence(n_input_dims).spawn(N_INPUT_SETS)
    return tuple(np.random.default_rng(s).random((n, n_input_dims), np.float32).astype(dtype) for s in streams)


def targets(x: np.ndarray, n_output_dims: int) -> np.ndarray:
    """y [n, n_output_dims] in [0.1, 0.9], float32: a smooth function of x that a network can learn."""
    n_input_dims = x.shape[1]
    rng = np.random.default_rng(n_output_dims)
    directions = rng.standard_normal((n_input_dims, n_output_dims)).astype(np.float32) * (4 / np.sqrt(n_input_dims))
    phase = x.astype(np.float32, copy=False) @ directions
    return np.float32(0.5) + np.float32(0.4) * np.sin(phase, dtype=np.float32)


@dataclass(frozen=True)
class DeviceData:
    """One batch size's input sets, targets and outputs on the device."""

    x: tuple[DeviceArray, ...]
    y: tuple[DeviceArray, ...]
    out: DeviceArray
    out_half: DeviceArray | None

    @classmethod
    def of(cls, case: Case, batch: int) -> DeviceData:
        x = host_inputs(batch, case.n_input_dims, case.input_dtype)
        nan = np.full((batch, case.n_output_dims), np.nan, np.float32)
        return cls(
            tuple(to_device(values) for values in x),
            tuple(to_device(targets(values, case.n_output_dims)) for values in x),
            to_device(nan),
            to_device(nan.astype(np.float16)) if case.bare else None,
        )
