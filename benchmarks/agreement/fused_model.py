"""A draw on the device, as `comparison.Implementation`. All that it returns was written over NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import numba_tcnn as tcnn
from numba_tcnn.arrays import batch, view
from numba_tcnn.fused import to_device
from numba_tcnn.reference.model import SecondOrderGradients

from .device_views import DeviceView, poisoned
from .draws import OPTIMIZER, Config, Draw

LAYOUTS = ("aligned", "unaligned", "columns", "every other row", "host", "columns on the host")
"""Where a draw's arrays are: on the device, from an aligned address on (there calls that come again are recorded), or
one element behind it; as columns of a wider array; in every other row of one; or in host memory, also as columns."""
MARGIN = 1
"""Columns before and behind those of a wider array."""


class FusedModel:
    """The draw's model with `params`, and with the optimizer that shows gradients. Raises where it can't run fused."""

    def __init__(self, draw: Draw, params: np.ndarray):
        self.draw, self.params = draw, params
        options = {"dtype": draw.dtype, "strict": True, "deterministic": draw.deterministic}
        if draw.network is None:
            self.network = tcnn.Encoding(draw.n_input_dims, draw.encoding, **options)
        else:
            dims = draw.n_input_dims, draw.n_output_dims
            self.network = tcnn.NetworkWithInputEncoding(*dims, draw.encoding, draw.network, **options)
        assert self.network.explain().engine == "fused"
        self._levels_of: int | None = None
        self.trainer = self.train(OPTIMIZER)
        self._fresh_optimizer = self.trainer.optimizer.state_dict()

    # ------------------------------------------------------------------------------------- arrays
    @property
    def _offset(self) -> int:
        return int(self.draw.layout == "unaligned")

    def place(self, values: np.ndarray) -> Any:
        """A matrix where and as the draw says."""
        match self.draw.layout:
            case "aligned":
                return to_device(values)
            case "unaligned":
                return DeviceView(values, self._offset)
            case "columns":
                return DeviceView(values, margin=MARGIN)
            case "every other row":
                return DeviceView(values, every=2)
            case "host":
                return values
            case "columns on the host":
                return np.pad(values, ((0, 0), (1, 2)))[:, 1:-2]
        raise ValueError(f"layout: {self.draw.layout!r} is none of {', '.join(LAYOUTS)}")

    def _output(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        if "host" in self.draw.layout:
            return np.full(shape, np.nan, dtype)
        return poisoned(shape, dtype, self._offset)

    def _use_levels(self, batch_size: int) -> None:
        if self.draw.max_level is None or (self._levels_of is not None and self.draw.max_level != "rows"):
            return
        if self._levels_of != batch_size:
            self.network.max_level, self._levels_of = self.draw.levels(batch_size), batch_size

    # -------------------------------------------------------------------------------------- calls
    def inference(self, x: np.ndarray, dtype: str) -> np.ndarray:
        self._use_levels(len(x))
        out = self._output((len(x), self.draw.n_output_dims), dtype)
        self.network.inference(self.place(x), out=out)
        return values_of(out)

    def backward(self, x: np.ndarray, dL_dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Through the engine, since the public `backward` makes its own arrays and they can't be poisoned."""
        self._use_levels(len(x))
        params, dx = self._output(self.params.shape), self._output(x.shape)
        self.network.engine.backward(
            *self._given(x=x, dL_dy=dL_dy), params=view(params), accumulate=False, input=view(dx)
        )
        return values_of(params), values_of(dx)

    def backward_backward_input(self, x: np.ndarray, v: np.ndarray, dL_dy: np.ndarray) -> SecondOrderGradients:
        """Raises EngineUnavailable where there are no fused second derivatives."""
        self._use_levels(len(x))
        results = {"dL_doutput": self._output(dL_dy.shape), "params": self._output(self.params.shape)}
        results["input"] = self._output(x.shape)
        self.network.engine.backward_backward_input(
            *self._given(x=x, v=v, dL_dy=dL_dy), **{name: view(result) for name, result in results.items()}
        )
        return SecondOrderGradients(**{name: values_of(result) for name, result in results.items()})

    def _given(self, **arrays: np.ndarray) -> list[Any]:
        """Matrices as the engine takes them, which differs from how they are where it can't read that."""
        return [batch(self.place(values), name, values.shape[1]) for name, values in arrays.items()]

    def training_step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """The optimizer of a draw leaves the gradient in its first moments."""
        self.trainer.optimizer.load_state_dict(self._fresh_optimizer)
        loss = float(self.step(self.trainer, self.batch(x, y)))
        gradients = self.trainer.optimizer.state_dict()["first_moments"]
        assert self.trainer.skipped_steps == 0
        self.network.params = self.params
        return loss, gradients

    # ----------------------------------------------------------------------------------- training
    def train(self, optimizer: Config, learning_rate: float | None = None) -> tcnn.Trainer:
        """Start again from `params`, with another optimizer; an earlier trainer of this model is of no use then."""
        self.network.params = self.params
        trainer = tcnn.Trainer(self.network, optimizer, self.draw.loss_config, keep_parameters=True)
        if learning_rate is not None:
            trainer.learning_rate = learning_rate
        return trainer

    def batch(self, x: np.ndarray, y: np.ndarray) -> PlacedBatch:
        """Arrays of training steps, to be used once or again and again."""
        density = self.draw.densities(len(x))
        return PlacedBatch(self.place(x), self.place(y), None if density is None else self.place(density), len(x))

    def predictor(self, data: PlacedBatch, shape: tuple[int, ...]) -> Callable[[], np.ndarray]:
        """Inference from a batch's x into the same array each time, which holds NaN before the first."""
        out = to_device(np.full(shape, np.nan, np.float32)) if self.draw.layout == "aligned" else self._output(shape)

        def predict() -> np.ndarray:
            self._use_levels(data.size)
            self.network.inference(data.x, out=out)
            return values_of(out).copy()

        return predict

    def step(self, trainer: tcnn.Trainer, data: PlacedBatch) -> tcnn.LossValue:
        self._use_levels(data.size)
        return trainer.training_step(data.x, data.y, data_pdf=data.density)


@dataclass(frozen=True)
class PlacedBatch:
    """x, targets, and sampling densities if there are any, where the draw's layout puts them."""

    x: Any
    y: Any
    density: Any
    size: int


def values_of(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.numpy()
