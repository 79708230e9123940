"""tiny-cuda-nn's own snapshots, what its `Trainer::serialize` makes, as JSON or MessagePack, read and written.

    {"n_params": N, "params_type": "__half" | "float", "params_binary": <bytes>, "optimizer": {...} or absent}

A run of bytes is MessagePack's "bin", in JSON {"bytes": [0 ... 255, ...], "subtype": null}. `params_binary` holds the
parameters that inference uses. What the optimizers write is told in `tcnn_optimizer_states.py`.

What we write:

- `params_type` is always "float", which tiny-cuda-nn reads whatever it computes in: its "__half" loses the masters.
- Numbers that are of tiny-cuda-nn's compute type wherever they stand (averages of parameters, Batched's gradients) are
  half, as in its usual build, from a model in float16 or bfloat16, and float from one in float32 or float64.
- Where the optimizer keeps other parameters for inference, the trained ones are added in float32, under a key of ours
  that tiny-cuda-nn passes over, `params_full_precision_binary`; `load` goes on from them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from .modules import Module
from .snapshot_files import SnapshotError, file_name, one_line, problems_of, replace_file
from .tcnn_layout import flat_layout
from .tcnn_optimizer_states import FLOAT, HALF, Entries, Target, state_from_tcnn, state_to_tcnn
from .trainer import Trainer

FORMATS = ("json", "msgpack")
PARAMS_TYPES = {"__half": (HALF,), "float": (FLOAT,), None: (HALF, FLOAT)}
"""Dtypes of `params_binary`; a snapshot that doesn't say is in tiny-cuda-nn's compute type, which its length tells."""
TRAINED_PARAMS = "params_full_precision_binary"


# --------------------------------------------------------------------------------------------- loading


def load(source: str | os.PathLike | bytes, network: Module, trainer: Trainer) -> None:
    """Parameters, and where they are there the optimizer's state, from a file or its content.

    Raises SnapshotError for whatever doesn't fit, before anything changes.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        name, content = f"snapshot of {len(source):,} bytes", bytes(source)
    else:
        name, content = file_name(source), Path(os.fsdecode(source)).read_bytes()
    engine, state = network.engine, None
    with problems_of(name):
        layout = flat_layout(network.spec)
        entries = Entries(decode(content), "", layout)
        n_params = entries.count("n_params")
        if n_params != layout.n_tcnn_params:
            raise SnapshotError(
                f"holds {n_params:,} parameters, tiny-cuda-nn's for this model are {layout.n_tcnn_params:,}"
            )
        inference_params = entries.params("params_binary", *params_dtypes(entries))
        params = entries.params(TRAINED_PARAMS, FLOAT) if TRAINED_PARAMS in entries else inference_params
        if "optimizer" in entries:
            found = Entries(entries.value("optimizer"), "optimizer", layout)
            state = state_from_tcnn(trainer.optimizer.spec, found, engine.runtime.optimizer_state(), inference_params)
    if state is None:
        engine.set_params(params)
    else:
        engine.restore(params, state, 0)


def params_dtypes(entries: Entries) -> tuple[Any, ...]:
    params_type = entries.value("params_type") if "params_type" in entries else None
    if not isinstance(params_type, str | None) or params_type not in PARAMS_TYPES:
        raise SnapshotError(f'params_type is neither "__half" nor "float": {params_type!r:.40}')
    return PARAMS_TYPES[params_type]


def decode(content: bytes) -> Any:
    """The document, from JSON or MessagePack: a JSON object begins with a brace, which no map in MessagePack does."""
    import msgpack

    is_json = content[:64].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    try:
        document = json.loads(content) if is_json else msgpack.unpackb(content)
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise SnapshotError(
            f"is no {'JSON' if is_json else 'MessagePack'}, or not all of it: {one_line(error)}"
        ) from error
    if not isinstance(document, dict):
        raise SnapshotError("is neither a JSON object nor a map in MessagePack")
    return document


# --------------------------------------------------------------------------------------------- saving


def save(path: str | os.PathLike, network: Module, trainer: Trainer, format: str, optimizer: bool) -> None:
    if format not in FORMATS:
        raise ValueError(f"format: {format!r} is none of {', '.join(FORMATS)}")
    engine = network.engine
    with problems_of(file_name(path)):
        layout = flat_layout(network.spec)
        target = Target(layout, FLOAT if network.dtype in ("float32", "float64") else HALF)
        params, own = engine.get_params(), engine.runtime.inference_params
        document = {
            "n_params": layout.n_tcnn_params,
            "params_type": "float",
            "params_binary": target.params(params if own is None else own, FLOAT),
        }
        if own is not None:
            document[TRAINED_PARAMS] = target.params(params, FLOAT)
        if optimizer:
            state = engine.runtime.optimizer_state()
            document["optimizer"] = state_to_tcnn(trainer.optimizer.spec, state, params, target)
    replace_file(path, encode(document, format))


def encode(document: dict[str, Any], format: str) -> bytes:
    """Keys in alphabetical order, as tiny-cuda-nn writes them; in MessagePack all floats are float32 there."""
    import msgpack

    if format == "msgpack":
        return msgpack.packb(sorted_by_key(document), use_single_float=True)
    return json.dumps(document, sort_keys=True, separators=(",", ":"), default=bytes_as_json).encode()


def sorted_by_key(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sorted_by_key(value[key]) for key in sorted(value)}
    return [sorted_by_key(item) for item in value] if isinstance(value, list) else value


def bytes_as_json(value: bytes) -> dict[str, Any]:
    return {"bytes": list(value), "subtype": None}
