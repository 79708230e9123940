"""A whole model from tiny-cuda-nn's JSON: network with input encoding, loss, optimizer and trainer in one object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import snapshots, tcnn_snapshots
from .config import config_parts, load_config, parse_loss, parse_model, parse_optimizer
from .config_losses import check_loss
from .engine_selection import EngineOptions
from .engines import Explanation
from .fit import History, fit, predict
from .layout import n_params
from .modules import Module, NetworkWithInputEncoding, NotPickled
from .objectives import Loss, Optimizer
from .trainer import LossValue, Trainer


class Model(NotPickled):
    """A module and its trainer as one: `.network`, `.trainer`, `.optimizer`, `.loss`. See `create_from_config`.

    Made from a module and a trainer of one's own, its config is theirs, every key spelled out.
    """

    def __init__(self, network: Module, trainer: Trainer, config: dict[str, Any] | None = None):
        if trainer.network is not network:
            raise ValueError("the trainer trains another network")
        self.network = network
        self.trainer = trainer
        self.config = snapshots.full_config(network, trainer) if config is None else config

    @property
    def loss(self) -> Loss:
        return self.trainer.loss

    @property
    def optimizer(self) -> Optimizer:
        return self.trainer.optimizer

    def __repr__(self) -> str:
        return f"Model({self.network!r}, {self.loss!r}, {self.optimizer!r})"

    def fit(
        self,
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
        """Train on the data set x [n, n_input_dims], y [n, n_output_dims]; see `fit.fit`."""
        return fit(
            self.trainer,
            x,
            y,
            steps=steps,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            progress=progress,
            callback=callback,
        )

    def predict(self, x: Any, *, batch_size: int | None = None) -> Any:
        """y [n, n_output_dims] for x [n, n_input_dims], computed `batch_size` rows at a time."""
        return predict(self.network, x, batch_size=batch_size)

    # -- snapshots

    def save(self, path: str | os.PathLike) -> None:
        """Write parameters, optimizer state and config to one file, from which `numba_tcnn.load` goes on bit for bit.

        A file of that name is replaced, but only once the new one is complete.
        """
        snapshots.save(path, self.network, self.trainer)

    def load_tcnn(self, source: str | os.PathLike | bytes) -> None:
        """Take over a snapshot of tiny-cuda-nn's Trainer, JSON or MessagePack: the path of a file, or its content.

        The config is not in it: it must be that of this model. Where the snapshot holds the optimizer's state training
        goes on from there; otherwise the optimizer stays as it is, but for averages of parameters, which start again.
        tiny-cuda-nn saves the parameters that it uses for inference; where its optimizer averages, training goes on
        from those. Raises `SnapshotError` for whatever doesn't fit, and leaves the model as it was.
        """
        tcnn_snapshots.load(source, self.network, self.trainer)

    def save_tcnn(self, path: str | os.PathLike, format: str = "json", *, optimizer: bool = True) -> None:
        """Write a snapshot that tiny-cuda-nn's Trainer reads.

        format     "json", where each byte is a number in text, or "msgpack", a fourth of the size or less
        optimizer  whether the optimizer's state goes in too

        Numbers that tiny-cuda-nn keeps in half precision (averages of parameters) are rounded to it, unless this model
        computes in float32 or float64. `save` is the format that loses nothing.
        """
        tcnn_snapshots.save(path, self.network, self.trainer, format, optimizer)

    # -- the network's own attributes, for short

    @property
    def n_input_dims(self) -> int:
        return self.network.n_input_dims

    @property
    def n_output_dims(self) -> int:
        return self.network.n_output_dims

    @property
    def n_params(self) -> int:
        return self.network.n_params

    @property
    def layer_sizes(self) -> tuple[tuple[int, int], ...]:
        return self.network.layer_sizes

    @property
    def params(self) -> np.ndarray:
        return self.network.params

    @params.setter
    def params(self, values: Any) -> None:
        self.network.params = values

    def blocks(self) -> dict[str, np.ndarray]:
        return self.network.blocks()

    def set_block(self, name: str, values: Any) -> None:
        self.network.set_block(name, values)

    @property
    def jit_fusion(self) -> bool:
        return self.network.jit_fusion

    @jit_fusion.setter
    def jit_fusion(self, wanted: bool) -> None:
        self.network.jit_fusion = wanted

    def explain(self) -> Explanation:
        return self.network.explain()

    def device_function(self, block_size: int = 256) -> Callable:
        return self.network.device_function(block_size)

    @property
    def device_params(self) -> Any:
        return self.network.device_params


def create_from_config(
    n_input_dims: int,
    n_output_dims: int,
    config: Mapping[str, Any] | str | os.PathLike,
    *,
    engine: str = "auto",
    dtype: str = "float16",
    device: int = 0,
    seed: int = 1337,
    deterministic: bool = False,
    strict: bool = False,
) -> Model:
    """A model ready to train, from tiny-cuda-nn's JSON: a dict, a JSON text with comments, or the path of a file.

    engine         "auto": fused where a usable GPU is present, else the NumPy reference; "fused" or "reference"
    dtype          float16, bfloat16 or float32 on either engine, float64 on the reference
    device         number of the CUDA device
    seed           of the initial parameters, which are those of tiny-cuda-nn's Trainer for the same seed
    deterministic  the same run gives the same parameters, bit by bit
    strict         raise `EngineUnavailable` where the reference would have to take over from the fused engine

    Raises `ConfigError` for a config that can't become a model, before anything is compiled or allocated.
    """
    loaded = load_config(config)
    parts = config_parts(loaded)
    spec = parse_model(n_input_dims, n_output_dims, parts.encoding, parts.network)
    loss = Loss(parse_loss(parts.loss))
    check_loss(loss.spec, spec.n_output_dims)
    optimizer = Optimizer(parse_optimizer(parts.optimizer, n_params=n_params(spec)))
    options = EngineOptions(engine, dtype, device, seed, deterministic, strict)
    network = NetworkWithInputEncoding._of(spec, options, seeding="trainer")
    return Model(network, Trainer(network, optimizer, loss, keep_parameters=True), loaded)


def load(path: str | os.PathLike, *, engine: str = "auto", device: int = 0) -> Model:
    """The model that `Model.save` wrote to a file; its training goes on as if it had never stopped.

    Raises `SnapshotError` where the file is damaged, of a later version, or no snapshot, OSError where it can't be
    read, and `EngineUnavailable` where `engine="fused"` can't be had.
    """
    return Model(*snapshots.load(path, engine=engine, device=device))
