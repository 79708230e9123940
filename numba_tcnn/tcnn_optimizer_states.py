"""The state of each optimizer as tiny-cuda-nn writes it, and as we keep it: one function a direction and optimizer.

Names and dtypes on its side are those of its serialized optimizers; on ours those of the reference's `state()`. Where
the two hold different things:

- its averages of parameters (EMA, Average, Lookahead) begin with the optimizer, ours count what they have seen, from
  the last time that parameters were set from outside; a snapshot of its is taken to have seen every step;
- Average: its running mean contains the initial parameters for good; ours is made of the samples again. Samples that
  ours does not have yet are written as the mean of those it has;
- Batched: its pool holds the mean's share of each gradient times the loss scale, ours the plain sum. The scale is not
  in the state: it is tiny-cuda-nn's default, 128 in half precision and 1 in float;
- Composite: its base learning rates are those of the config in both, so ours are not read from the state;
- Novograd: its encodings are not trained and have no moment. Where a model has such parameters, the moments start
  again with the next gradient: one that counts as old but is 0 would make steps far too long;
- Adam: snapshots from before every parameter counted its own steps begin these at 0, as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .snapshot_files import SnapshotError
from .specs import (
    AdamSpec,
    AverageSpec,
    BatchedSpec,
    CompositeOptimizerSpec,
    EmaSpec,
    ExponentialDecaySpec,
    LookaheadSpec,
    NovogradSpec,
    OptimizerSpec,
    SgdSpec,
    ShampooSpec,
)
from .tcnn_layout import FlatLayout

State = dict[str, Any]

HALF, FLOAT = np.dtype(np.float16), np.dtype(np.float32)
LOSS_SCALES = {HALF: 128.0, FLOAT: 1.0}
MAX_COUNT = 2**32 - 1


class Entries:
    """One object of a snapshot, its values checked as they are asked for; `path` is where it stands."""

    def __init__(self, found: Any, path: str, layout: FlatLayout):
        if not isinstance(found, Mapping):
            raise SnapshotError(f"{path} is not an object")
        self.found, self.path, self.layout = found, path, layout

    def __contains__(self, key: str) -> bool:
        return key in self.found

    def _path(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def value(self, key: str) -> Any:
        if key not in self.found:
            held = ", ".join(sorted(map(str, self.found))) or "nothing"
            raise SnapshotError(f"{self._path(key)} is missing; there is {held}")
        return self.found[key]

    def count(self, key: str) -> int:
        found = self.value(key)
        if type(found) is not int or not 0 <= found <= MAX_COUNT:
            raise SnapshotError(f"{self._path(key)} is no count: {found!r:.40}")
        return found

    def rate(self, key: str) -> float:
        found = self.value(key)
        if type(found) not in (int, float) or not 0 <= found < math.inf:
            raise SnapshotError(f"{self._path(key)} is no finite number, 0 or larger: {found!r:.40}")
        return float(found)

    def blob(self, key: str) -> bytes:
        """A run of bytes, as MessagePack has it or in JSON's form."""
        found = self.value(key)
        if isinstance(found, bytes):
            return found
        if isinstance(found, Mapping) and isinstance(found.get("bytes"), list):
            try:
                return bytes(found["bytes"])
            except (TypeError, ValueError) as error:
                raise SnapshotError(f"{self._path(key)}.bytes: {error}") from error
        raise SnapshotError(f"{self._path(key)} holds no bytes")

    def array(self, key: str, shape: tuple[int, ...], *dtypes: np.dtype) -> np.ndarray:
        """Numbers of the first of `dtypes` that fits the length."""
        blob, n = self.blob(key), math.prod(shape)
        for dtype in dtypes:
            if len(blob) == n * dtype.itemsize:
                return np.frombuffer(blob, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
        expected = " or ".join(f"{n * dtype.itemsize:,}" for dtype in dtypes)
        raise SnapshotError(f"{self._path(key)} has {len(blob):,} bytes; this model and optimizer need {expected}")

    def params(self, key: str, *dtypes: np.dtype, n_rows: int | None = None) -> np.ndarray:
        """A number for each parameter, [n_params] or [n_rows, n_params], in our layout; halves become float32."""
        rows = () if n_rows is None else (n_rows,)
        values = self.array(key, (*rows, self.layout.n_tcnn_params), *dtypes)
        return self.layout.to_ours(values.astype(np.float32) if values.dtype == HALF else values)

    def nested(self) -> Entries:
        return Entries(self.value("nested"), self._path("nested"), self.layout)

    def all_nested(self, layouts: list[FlatLayout]) -> list[Entries]:
        found, path = self.value("nested"), self._path("nested")
        if not isinstance(found, list) or len(found) != len(layouts):
            raise SnapshotError(f"{path} is not a list of {len(layouts)} optimizers")
        return [Entries(own, f"{path}[{i}]", layouts[i]) for i, own in enumerate(found)]


def steps_of(state: Mapping[str, Any]) -> int:
    """The step number of an optimizer, from its state on our side: its own, or that of the one inside."""
    return state["step"] if "step" in state else steps_of(state["nested"] if "nested" in state else state["nested0"])


def slices(spec: CompositeOptimizerSpec) -> list[tuple[int, int]]:
    """(start, stop) of each nested optimizer's parameters."""
    stops = np.cumsum(spec.n_params_to_optimize).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


# ------------------------------------------------------------------------------ from tiny-cuda-nn to ours


def state_from_tcnn(spec: OptimizerSpec, entries: Entries, own: State, inference_params: np.ndarray) -> State:
    """Our state. `own` is the optimizer's current one, for its shapes; `inference_params` are the snapshot's."""
    if isinstance(spec, ShampooSpec):
        raise SnapshotError("tiny-cuda-nn has no snapshots of Shampoo's state")
    return READERS[type(spec)](spec, entries, own, inference_params)


def _nested_from_tcnn(spec: Any, entries: Entries, own: State, inference_params: np.ndarray) -> State:
    return state_from_tcnn(spec.nested, entries.nested(), own["nested"], inference_params)


def _adam_from_tcnn(spec: AdamSpec, entries: Entries, own: State, _: np.ndarray) -> State:
    steps = "param_steps_binary"
    return {
        "step": entries.count("current_step"),
        "learning_rate": entries.rate("base_learning_rate"),
        "first_moments": entries.params("first_moments_binary", FLOAT),
        "second_moments": entries.params("second_moments_binary", FLOAT),
        "param_steps": entries.params(steps, np.dtype(np.uint32))
        if steps in entries
        else np.zeros_like(own["param_steps"]),
    }


def _sgd_from_tcnn(spec: SgdSpec, entries: Entries, own: State, _: np.ndarray) -> State:
    return {"step": entries.count("current_step"), "learning_rate": entries.rate("learning_rate")}


def _novograd_from_tcnn(spec: NovogradSpec, entries: Entries, own: State, _: np.ndarray) -> State:
    step, n_layers = entries.count("current_step"), len(own["second_moments"]) - 1
    only_matrices = entries.layout.n_params == entries.layout.n_matrix_params
    return {
        "step": step,
        "learning_rate": entries.rate("base_learning_rate"),
        "n_updates": step if only_matrices else 0,
        "first_moments": entries.params("first_moments_binary", FLOAT),
        "second_moments": np.append(
            entries.array("per_layer_second_moments_binary", (n_layers,), FLOAT), np.float32(0)
        ),
    }


def _average_from_tcnn(spec: AverageSpec, entries: Entries, own: State, inference_params: np.ndarray) -> State:
    nested, n = _nested_from_tcnn(spec, entries, own, inference_params), spec.n_samples
    t = steps_of(nested)
    theirs = entries.params("weights_samples_binary", HALF, FLOAT, n_rows=n)
    ages = np.arange(min(t, n))  # the sample of step t - age stands at (t - age) mod n there, one before here
    samples = np.zeros_like(own["samples"])
    samples[(t - 1 - ages) % n] = theirs[(t - ages) % n]
    return {"n_averaged": t, "samples": samples, "total": samples.sum(axis=0, dtype=np.float64), "nested": nested}


def _ema_from_tcnn(spec: EmaSpec, entries: Entries, own: State, inference_params: np.ndarray) -> State:
    nested = _nested_from_tcnn(spec, entries, own, inference_params)
    return {
        "n_averaged": steps_of(nested),
        "average": entries.params("weights_ema_binary", HALF, FLOAT),
        "nested": nested,
    }


def _lookahead_from_tcnn(spec: LookaheadSpec, entries: Entries, own: State, inference_params: np.ndarray) -> State:
    nested = _nested_from_tcnn(spec, entries, own, inference_params)
    n_updates = math.ceil(steps_of(nested) / spec.n_steps)  # at t = 0, n_steps, 2 n_steps, ...
    return {
        "n_averaged": n_updates + 1 if n_updates else 0,
        "slow_params": entries.params("weights_lookahead_binary", HALF, FLOAT),
        "nested": nested,
    }


def _batched_from_tcnn(spec: BatchedSpec, entries: Entries, own: State, inference_params: np.ndarray) -> State:
    step, n = entries.count("current_step"), entries.layout.n_tcnn_params
    compute_type = entries.array("averaged_gradients_half_binary", (n,), HALF, FLOAT).dtype
    pool = entries.params("averaged_gradients_binary", FLOAT)
    n_pooled = step % spec.batch_size_multiplier
    scale = spec.batch_size_multiplier / LOSS_SCALES[compute_type] if n_pooled else 0
    return {
        "step": step,
        "n_pooled": n_pooled,
        "pool": pool * np.float32(scale),
        "nested": _nested_from_tcnn(spec, entries, own, inference_params),
    }


def _exponential_decay_from_tcnn(
    spec: ExponentialDecaySpec, entries: Entries, own: State, inference_params: np.ndarray
) -> State:
    factor = "learning_rate_factor"
    return {
        "base_learning_rate": entries.rate("learning_rate"),
        "learning_rate_factor": entries.rate(factor) if factor in entries else 1.0,
        "nested": _nested_from_tcnn(spec, entries, own, inference_params),
    }


def _composite_from_tcnn(
    spec: CompositeOptimizerSpec, entries: Entries, own: State, inference_params: np.ndarray
) -> State:
    parts = slices(spec)
    states = {
        f"nested{i}": state_from_tcnn(nested, found, own[f"nested{i}"], inference_params[start:stop])
        for i, (nested, found, (start, stop)) in enumerate(
            zip(spec.nested, entries.all_nested([entries.layout.part(*part) for part in parts]), parts, strict=True)
        )
    }
    return {
        "learning_rate_factor": entries.rate("learning_rate_factor"),
        "n_combined": steps_of(states),
        "combined": inference_params[: len(own["combined"])].copy(),  # all of them, or none where nobody keeps any
        **states,
    }


READERS: dict[type, Callable[[Any, Entries, State, np.ndarray], State]] = {
    AdamSpec: _adam_from_tcnn,
    AverageSpec: _average_from_tcnn,
    BatchedSpec: _batched_from_tcnn,
    CompositeOptimizerSpec: _composite_from_tcnn,
    EmaSpec: _ema_from_tcnn,
    ExponentialDecaySpec: _exponential_decay_from_tcnn,
    LookaheadSpec: _lookahead_from_tcnn,
    NovogradSpec: _novograd_from_tcnn,
    SgdSpec: _sgd_from_tcnn,
}


# ------------------------------------------------------------------------------ from ours to tiny-cuda-nn


class Target:
    """Makes the entries for a build of tiny-cuda-nn that computes in `compute_type`, HALF or FLOAT."""

    def __init__(self, layout: FlatLayout, compute_type: np.dtype):
        self.layout, self.compute_type = layout, compute_type

    def params(self, values: np.ndarray, dtype: np.dtype | None = None) -> bytes:
        """A number for each parameter, in the compute type unless another one is named."""
        return as_bytes(self.layout.to_tcnn(values).astype(dtype or self.compute_type))

    def part(self, start: int, stop: int) -> Target:
        return Target(self.layout.part(start, stop), self.compute_type)


def as_bytes(values: np.ndarray) -> bytes:
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def rate(value: float) -> float:
    """As tiny-cuda-nn holds it, in float32."""
    return float(np.float32(value))


def state_to_tcnn(spec: OptimizerSpec, state: State, params: np.ndarray, target: Target) -> State:
    """What tiny-cuda-nn's optimizer would write in our `state`, the trained parameters being `params`."""
    if isinstance(spec, ShampooSpec):
        raise SnapshotError("tiny-cuda-nn has no snapshots of Shampoo's state; optimizer=False leaves it out")
    return WRITERS[type(spec)](spec, state, params, target)


def _nested_to_tcnn(spec: Any, state: State, params: np.ndarray, target: Target) -> State:
    return state_to_tcnn(spec.nested, state["nested"], params, target)


def _adam_to_tcnn(spec: AdamSpec, state: State, params: np.ndarray, target: Target) -> State:
    return {
        "current_step": state["step"],
        "base_learning_rate": rate(state["learning_rate"]),
        "first_moments_binary": target.params(state["first_moments"], FLOAT),
        "second_moments_binary": target.params(state["second_moments"], FLOAT),
        "param_steps_binary": target.params(state["param_steps"], np.dtype(np.uint32)),
    }


def _sgd_to_tcnn(spec: SgdSpec, state: State, params: np.ndarray, target: Target) -> State:
    return {"current_step": state["step"], "learning_rate": rate(state["learning_rate"])}


def _novograd_to_tcnn(spec: NovogradSpec, state: State, params: np.ndarray, target: Target) -> State:
    return {
        "current_step": state["step"],
        "base_learning_rate": rate(state["learning_rate"]),
        "first_moments_binary": target.params(state["first_moments"], FLOAT),
        "per_layer_second_moments_binary": as_bytes(state["second_moments"][:-1]),
    }


def _average_to_tcnn(spec: AverageSpec, state: State, params: np.ndarray, target: Target) -> State:
    n, n_averaged, t = spec.n_samples, state["n_averaged"], steps_of(state)
    n_held = min(n_averaged, n)
    mean = (state["total"] / n_held).astype(np.float32) if n_held else params
    samples = np.broadcast_to(mean, state["samples"].shape).copy()
    ages = np.arange(n_held)
    samples[(t - ages) % n] = state["samples"][(n_averaged - 1 - ages) % n]
    return {
        "weights_samples_binary": target.params(samples),
        "weights_average_binary": target.params(mean),
        "nested": _nested_to_tcnn(spec, state, params, target),
    }


def _ema_to_tcnn(spec: EmaSpec, state: State, params: np.ndarray, target: Target) -> State:
    average = state["average"] if state["n_averaged"] else params
    return {"weights_ema_binary": target.params(average), "nested": _nested_to_tcnn(spec, state, params, target)}


def _lookahead_to_tcnn(spec: LookaheadSpec, state: State, params: np.ndarray, target: Target) -> State:
    slow = state["slow_params"] if state["n_averaged"] else params
    return {"weights_lookahead_binary": target.params(slow), "nested": _nested_to_tcnn(spec, state, params, target)}


def _batched_to_tcnn(spec: BatchedSpec, state: State, params: np.ndarray, target: Target) -> State:
    pool = state["pool"] * np.float32(LOSS_SCALES[target.compute_type] / spec.batch_size_multiplier)
    return {
        "current_step": state["step"],
        "averaged_gradients_binary": target.params(pool, FLOAT),
        "averaged_gradients_half_binary": target.params(pool),
        "nested": _nested_to_tcnn(spec, state, params, target),
    }


def _exponential_decay_to_tcnn(spec: ExponentialDecaySpec, state: State, params: np.ndarray, target: Target) -> State:
    return {
        "learning_rate": rate(state["base_learning_rate"]),
        "learning_rate_factor": rate(state["learning_rate_factor"]),
        "nested": _nested_to_tcnn(spec, state, params, target),
    }


def _composite_to_tcnn(spec: CompositeOptimizerSpec, state: State, params: np.ndarray, target: Target) -> State:
    nested = [
        state_to_tcnn(own, state[f"nested{i}"], params[start:stop], target.part(start, stop))
        for i, (own, (start, stop)) in enumerate(zip(spec.nested, slices(spec), strict=True))
    ]
    return {
        "nested": nested,
        "base_learning_rates": [rate(first_learning_rate(own)) for own in spec.nested],
        "learning_rate_factor": rate(state["learning_rate_factor"]),
    }


def first_learning_rate(spec: OptimizerSpec) -> float:
    """What `learning_rate` of an optimizer is before anybody sets it."""
    if isinstance(spec, CompositeOptimizerSpec):
        return 1.0
    return first_learning_rate(spec.nested) if hasattr(spec, "nested") else spec.learning_rate


WRITERS: dict[type, Callable[[Any, State, np.ndarray, Target], State]] = {
    AdamSpec: _adam_to_tcnn,
    AverageSpec: _average_to_tcnn,
    BatchedSpec: _batched_to_tcnn,
    CompositeOptimizerSpec: _composite_to_tcnn,
    EmaSpec: _ema_to_tcnn,
    ExponentialDecaySpec: _exponential_decay_to_tcnn,
    LookaheadSpec: _lookahead_to_tcnn,
    NovogradSpec: _novograd_to_tcnn,
    SgdSpec: _sgd_to_tcnn,
}
