"""Training on a whole data set, and prediction in pieces: the loops behind `Model.fit` and `Model.predict`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .array_kinds import device_array
from .arrays import ArrayView, view
from .modules import Module
from .trainer import LossValue, Trainer

DEFAULT_BATCH_SIZE = {"fused": 1 << 18, "reference": 1 << 12}
"""Samples of a training step where the caller names no number: what keeps a GPU busy, what NumPy does in 20 ms."""

PREDICTION_ROWS = 1 << 20
"""Rows of one inference where the caller names no number: bounds the memory that a large input takes."""

ROWS_GATHERED_AT_ONCE = 1 << 20
"""Shuffled rows are gathered (and, from NumPy to a GPU, uploaded) this many at a time, not batch by batch."""

SECONDS_BETWEEN_REPORTS = 0.25


@dataclass(frozen=True)
class History:
    """loss [steps]: the loss of each step. seconds: wall-clock time of all of them together, compiling included."""

    loss: np.ndarray
    seconds: float

    def __repr__(self) -> str:
        last = f", last loss {self.loss[-1]:.3g}" if len(self.loss) else ""
        return f"History({len(self.loss)} steps in {self.seconds:.2f} s{last})"


def fit(
    trainer: Trainer,
    x: Any,
    y: Any,
    *,
    steps: int = 1000,
    batch_size: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    progress: bool = False,
    callback: Callable[[int, LossValue], Any] | None = None,
) -> History:
    """`steps` training steps on batches of x [n, n_input_dims], y [n, n_output_dims].

    batch_size  None: all of the data, but at most 2^18 rows on the fused engine, 4096 on the reference
    shuffle     a new random order, from `seed`, for each pass over the data; else the rows as they come
    progress    show a bar with the loss
    callback    called as callback(step, loss) after each step, counting from 0; training ends where it returns True
    """
    network = trainer.network
    inputs, targets = network._batch(x, "x", network.n_input_dims), network._batch(y, "y", network.n_output_dims)
    n = inputs.shape[0]
    if targets.shape[0] != n:
        raise ValueError(f"y has {targets.shape[0]} rows, x has {n}")
    if n == 0:
        raise ValueError("x has no rows to train on")
    steps, seed = positive_integer(steps, "steps", allow_zero=True), positive_integer(seed, "seed", allow_zero=True)
    if callback is not None and not callable(callback):
        raise ValueError(f"callback: {callback!r} is no function of (step, loss)")
    default = min(n, DEFAULT_BATCH_SIZE[network.engine.runtime.name])
    batch_size = default if batch_size is None else positive_integer(batch_size, "batch_size")

    losses: list[LossValue] = []
    start = time.perf_counter()
    with ProgressBar(steps, shown=progress) as bar:
        for step, (bx, by) in enumerate(batches(inputs, targets, batch_size, steps, shuffle, seed, network)):
            losses.append(trainer._step(bx, by))
            bar.update(losses[-1])
            if callback is not None and callback(step, losses[-1]) is True:
                break
        values = np.array([float(loss) for loss in losses])
    return History(values, time.perf_counter() - start)


def batches(
    x: ArrayView, y: ArrayView, batch_size: int, steps: int, shuffle: bool, seed: int, network: Module
) -> Iterator[tuple[ArrayView, ArrayView]]:
    """`steps` batches of exactly `batch_size` rows; a batch may begin in one pass over the data and end in the next."""
    if not shuffle and batch_size == x.shape[0]:
        for _ in range(steps):
            yield x, y
        return
    next_rows = row_order(x.shape[0], shuffle, seed)
    batches_at_once = max(1, ROWS_GATHERED_AT_ONCE // batch_size)
    for first in range(0, steps, batches_at_once):
        n_rows = batch_size * min(batches_at_once, steps - first)
        indices = next_rows(n_rows)
        bx, by = (on_engine(v.take(indices), network) for v in (x, y))
        for start in range(0, n_rows, batch_size):
            yield bx.rows(start, start + batch_size), by.rows(start, start + batch_size)


def row_order(n: int, shuffle: bool, seed: int) -> Callable[[int], np.ndarray]:
    """A function that deals out the next `count` row numbers of pass after pass over n rows."""
    generator = np.random.default_rng(seed)
    remaining = np.empty(0, np.int64)

    def next_rows(count: int) -> np.ndarray:
        nonlocal remaining
        pieces = []
        while count > 0:
            if remaining.size == 0:
                remaining = generator.permutation(n) if shuffle else np.arange(n)
            pieces.append(remaining[:count])
            remaining = remaining[count:]
            count -= pieces[-1].size
        return np.concatenate(pieces)

    return next_rows


def on_engine(v: ArrayView, network: Module) -> ArrayView:
    """Host data copied to the GPU if that is where the network runs, anything else as it is."""
    return v if v.on_device or not network.jit_fusion else view(device_array(v.numpy(), network.options.device))


def predict(network: Module, x: Any, *, batch_size: int | None = None) -> Any:
    """network.inference(x), `batch_size` rows at a time (None: 2^20)."""
    batch_size = PREDICTION_ROWS if batch_size is None else positive_integer(batch_size, "batch_size")
    inputs = network._inputs(x)
    n = inputs.shape[0]
    engine = network.engine
    output = engine.empty_like(inputs, (n, network.n_output_dims), network._gradient_dtype)
    for start in range(0, n, batch_size):
        stop = min(start + batch_size, n)
        engine.inference(inputs.rows(start, stop), output.rows(start, stop), stream=inputs.stream)
    return output.result(inputs.stream)


class ProgressBar:
    """A tqdm bar with the loss, which is read a few times a second only: reading waits for the GPU."""

    def __init__(self, steps: int, *, shown: bool):
        self._bar = None
        self._last_report = 0.0
        if shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=steps, unit="step")

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, loss: LossValue) -> None:
        if self._bar is None:
            return
        self._bar.update()
        now = time.perf_counter()
        if now - self._last_report > SECONDS_BETWEEN_REPORTS or self._bar.n == self._bar.total:
            self._bar.set_postfix_str(f"loss {loss:.3g}")
            self._last_report = now


def positive_integer(value: Any, name: str, *, allow_zero: bool = False) -> int:
    lowest = 0 if allow_zero else 1
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < lowest:
        raise ValueError(f"{name}: {value!r} must be a whole number, {lowest} or larger")
    return int(value)
