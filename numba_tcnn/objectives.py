"""Losses and optimizers as objects: parts of a Trainer, or used alone in a training loop of one's own."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .arrays import HALF_TO_DOUBLE, batch, view
from .config import parse_loss, parse_optimizer
from .config_optimizers import LARGEST_RATE, check_size
from .engine_selection import SelectedEngine
from .specs import LossSpec, OptimizerSpec


class Loss:
    """A loss between predictions and targets, both [batch, n_output_dims]."""

    def __init__(self, spec: LossSpec):
        self.spec = spec

    def __repr__(self) -> str:
        return f"Loss({self.spec.otype})"

    def evaluate(
        self, prediction: Any, target: Any, *, data_pdf: Any = None, loss_scale: float = 1.0
    ) -> tuple[np.ndarray, np.ndarray]:
        """(values, gradients), NumPy arrays [batch, n_output_dims], computed on the host.

        Values are divided by n_output_dims * batch: their sum is the mean loss. Gradients are those of that sum with
        respect to the prediction, times `loss_scale`; ConstantGradient's are just its numbers times `loss_scale`.
        Both are divided by `data_pdf` [batch, n_output_dims], the density with which a sample was drawn.
        float64 predictions stay float64, all others become float32.
        """
        predicted = view(prediction, "prediction")
        if len(predicted.shape) != 2:
            raise ValueError(f"prediction must be [batch, n_output_dims], not {list(predicted.shape)}")
        dtype = np.float64 if predicted.dtype == np.float64 else np.float32
        n_rows, n_columns = predicted.shape

        def host(array: Any, name: str) -> np.ndarray:
            v = batch(array, name, n_columns, exact=HALF_TO_DOUBLE)
            if v.shape[0] != n_rows:
                raise ValueError(f"{name} has {v.shape[0]} rows, prediction has {n_rows}")
            return v.numpy().astype(dtype, copy=False)

        evaluate_loss = importlib.import_module("numba_tcnn.reference").evaluate_loss
        density = None if data_pdf is None else host(data_pdf, "data_pdf")
        return evaluate_loss(self.spec, host(prediction, "prediction"), host(target, "target"), density, loss_scale)


class Optimizer:
    """An optimizer's rule and its state: its own after `allocate`, or its trainer's.

    Alone: `allocate(n_params, layer_sizes)`, then `step(params, gradients)` on float32 NumPy vectors, in place.
    In a Trainer the state lives where the model does, and the trainer does the steps.
    """

    def __init__(self, spec: OptimizerSpec):
        self.spec = spec
        self._engine: SelectedEngine | None = None
        self._own: Any = None

    def __repr__(self) -> str:
        return f"Optimizer({type(self.spec).__name__.removesuffix('Spec')})"

    def allocate(self, n_params: int, layer_sizes: Sequence[tuple[int, int]] = ()) -> None:
        """Fresh state for `n_params` parameters, the first of which are matrices of `layer_sizes` (rows, columns)."""
        if self._engine is not None:
            raise RuntimeError("this optimizer belongs to a Trainer, which holds its state")
        check_size(self.spec, n_params, "optimizer")
        sizes = (n_params, tuple(layer_sizes))
        self._own = self._first_state(*sizes)
        self._sizes = sizes

    def _first_state(self, n_params: int, layer_sizes: Sequence[tuple[int, int]]) -> Any:
        return importlib.import_module("numba_tcnn.reference").make_optimizer(self.spec, n_params, layer_sizes)

    def step(self, params: np.ndarray, gradients: np.ndarray, loss_scale: float = 1.0) -> None:
        """One update of `params` in place from gradients that hold `loss_scale`; both float32 [n_params]."""
        if self._own is None:
            raise RuntimeError(
                "allocate(n_params, layer_sizes) comes before step()"
                if self._engine is None
                else "this optimizer belongs to a Trainer: training_step() does its steps"
            )
        shape = self._sizes[:1]
        for array, name in ((params, "params"), (gradients, "gradients")):
            if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.shape != shape:
                raise ValueError(f"{name} must be a float32 NumPy array of shape {shape}")
        self._own.step(params, gradients, loss_scale)

    @property
    def inference_params(self) -> np.ndarray | None:
        """A copy of the parameters that inference uses where the optimizer keeps some for it; None: the trained ones.

        Average, EMA and Lookahead do, from their first step on, and whatever holds one of them. The outermost counts.
        """
        own = self._holder().inference_params
        return None if own is None else own.copy()

    @property
    def learning_rate(self) -> float:
        return self._holder().learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._holder().learning_rate = checked_learning_rate(value)

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that `load_state_dict` needs to go on from here, bit for bit.

        Names to arrays and numbers, and to dicts of the same kind for nested optimizers.
        """
        holder = self._holder()
        return holder.state() if self._engine is None else holder.optimizer_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of the same optimizer and as many parameters; ValueError for any other, without effect.

        Where parameters are set too, set them first: that starts averages of parameters again.
        """
        self._holder()
        if self._engine is not None:
            self._engine.runtime.load_optimizer_state(dict(state))
            return
        loaded = self._first_state(*self._sizes)
        loaded.load_state(state)
        self._own = loaded

    def _holder(self) -> Any:
        """What holds the state: this optimizer's own, or the runtime of the trained model."""
        if self._engine is not None:
            return self._engine.runtime
        if self._own is None:
            raise RuntimeError("the optimizer has no state yet: call allocate() or give it to a Trainer")
        return self._own

    def _attach(self, engine: SelectedEngine) -> None:
        if self._own is not None or self._engine not in (None, engine):
            raise ValueError("this optimizer already holds the state of other parameters; create one for each Trainer")
        self._engine = engine


def create_loss(config: Mapping[str, Any] | str) -> Loss:
    """A loss from its config, such as {"otype": "L2"}, or its name."""
    return Loss(parse_loss(config))


def create_optimizer(config: Mapping[str, Any] | str) -> Optimizer:
    """An optimizer from its config, such as {"otype": "Adam", "learning_rate": 1e-2}, or its name."""
    return Optimizer(parse_optimizer({"otype": config} if isinstance(config, str) else config))


def checked_learning_rate(value: Any) -> float:
    """A learning rate as a config may give it, too: float32 holds it, and its product with a step."""
    rate = non_negative(value, "learning_rate")
    if rate > LARGEST_RATE:
        raise ValueError(f"learning_rate: {value!r} must be at most {LARGEST_RATE:g}")
    return rate


def non_negative(value: Any, name: str) -> float:
    number = float(value)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"{name}: {value!r} must be a finite number, 0 or larger")
    return number
