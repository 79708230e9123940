"""Cases of tests/golden: arrays that tiny-cuda-nn computed, and the specs that describe them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from numba_tcnn.config import parse_loss, parse_model, parse_optimizer
from numba_tcnn.specs import IdentitySpec, LossSpec, ModelSpec, NetworkSpec, OptimizerSpec

FOLDER = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Comparison:
    case: str
    what: str
    error: float
    tolerance: float
    reason: str


COMPARISONS: list[Comparison] = []
"""All that were made in this session."""


def agree(case: str, what: str, error: float, tolerance: float, reason: str) -> None:
    """Fails beyond the tolerance; whether or not, the comparison goes into the table of `--golden-table`."""
    COMPARISONS.append(Comparison(case, what, error, tolerance, reason))
    assert error <= tolerance, f"{case}: {what} is off by {error:.1e}, allowed are {tolerance:.1e} ({reason})"


def table() -> Iterator[str]:
    """For each case the comparison that is nearest to its tolerance, or farthest beyond."""
    worst: dict[str, Comparison] = {}
    for c in COMPARISONS:
        so_far = worst.setdefault(c.case, c)
        if not c.error * so_far.tolerance <= so_far.error * c.tolerance:  # so that NaN is the worst
            worst[c.case] = c
    yield f"{'case':38} {'worst of':>8} {'what':32} {'error':>8} {'allowed':>8}  why not 0"
    for name, c in sorted(worst.items()):
        n = sum(other.case == name for other in COMPARISONS)
        yield f"{name:38} {n:8} {c.what:32} {c.error:8.1e} {c.tolerance:8.1e}  {c.reason}"
    missing = sorted(set(names("*")) - set(worst))
    yield f"{len(worst)} cases, {len(COMPARISONS)} comparisons; cases without any: {', '.join(missing) or 'none'}"


def names(pattern: str) -> list[str]:
    """Names of the cases that match a glob pattern, sorted; an empty list would hide a missing folder, so it raises."""
    found = sorted(path.stem for path in FOLDER.glob(f"{pattern}.npz"))
    if not found:
        raise FileNotFoundError(f"no golden case matches {pattern}")
    return found


class GoldenCase:
    """`case[array]`, `case.meta`, and the spec of what was computed.

    modes   "nojit" and "jit", tiny-cuda-nn's two implementations, as far as it has a result for them
    """

    def __init__(self, name: str):
        with np.load(FOLDER / f"{name}.npz") as arrays:
            self.arrays = {key: arrays[key] for key in arrays.files if key != "meta"}
            self.meta = json.loads(arrays["meta"].tobytes())
        self.name = name
        self.modes = [mode for mode in ("nojit", "jit") if self.meta.get("modes", {}).get(mode, {}).get("ok")]

    def __getitem__(self, key: str) -> np.ndarray:
        return self.arrays[key]

    @property
    def half(self) -> bool:
        """Whether tiny-cuda-nn computed in half precision."""
        return self.meta["param_type"] == "float16"

    def model_spec(self) -> ModelSpec:
        meta, config = self.meta, self.meta["config"]
        if "network" in config:
            return parse_model(meta["n_in"], meta["n_out"], config["encoding"], config["network"])
        if "n_neurons" in config:  # a bare network: its input is not padded
            keys = ("otype", "n_neurons", "n_hidden_layers", "activation", "output_activation")
            network = NetworkSpec(**{key: config[key] for key in keys})
            n_in, n_out = config["n_input_dims"], config["n_output_dims"]
            return ModelSpec(n_in, n_out, IdentitySpec(n_in), network, n_in)
        return parse_model(meta["n_in"], None, config, None, alignment=meta["alignment"])

    def loss_spec(self) -> LossSpec:
        return parse_loss(self.meta.get("loss") or self.meta["config"]["loss"])

    def optimizer_spec(self) -> OptimizerSpec:
        config = self.meta["config"]
        return parse_optimizer(config.get("optimizer", config))


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """‖actual - expected‖ / ‖expected‖ in float64; 0 where both are 0."""
    difference = np.linalg.norm(np.subtract(actual, expected, dtype=np.float64))
    return float(difference / norm) if (norm := np.linalg.norm(expected.astype(np.float64))) else float(difference)


def row_errors(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The relative error of every row."""
    difference = np.linalg.norm(np.subtract(actual, expected, dtype=np.float64), axis=1)
    return difference / np.maximum(np.linalg.norm(expected.astype(np.float64), axis=1), 1e-30)
