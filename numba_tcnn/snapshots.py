"""Snapshots of a model and its training in one safetensors file, from which training goes on bit for bit.

Tensors: `params`, the float32 parameters in the order of `layout.py`; `inference_params`, for other readers, where the
optimizer keeps such; `max_level`, where it is set; and every array of the optimizer's state under its path
(`optimizer.first_moments`, `optimizer.nested.first_moments`, ...).

Metadata, each value JSON but for the first three: `format`, `format_version`, `library_version`; `config`, every key
spelled out; `model`, dims, dtype and seed; `training`, step, learning rate, skipped steps and the state of the noise;
`optimizer`, the numbers of its state. `sha256` is taken over all other metadata, the names, dtypes and shapes of all
tensors, and their bytes.

Not in it: engine and device, which are chosen again at loading, and gradients that `Module.backward` accumulates.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._version import __version__
from .config import parse_encoding, parse_loss, parse_model, parse_optimizer, to_config
from .config_encodings import padded_to
from .engine_selection import EngineOptions
from .layout import n_params
from .modules import Encoding, Module, Network, NetworkWithInputEncoding
from .objectives import Loss, Optimizer
from .snapshot_files import SnapshotError, file_name, one_line, problems_of, replace_file
from .specs import ModelSpec
from .trainer import Trainer

FORMAT = "numba-tcnn"
FORMAT_VERSION = 1
"""Raised when older libraries can't read what this one writes."""

KINDS: dict[str, type[Module]] = {
    "NetworkWithInputEncoding": NetworkWithInputEncoding,
    "Network": Network,
    "Encoding": Encoding,
}


def full_config(network: Module, trainer: Trainer) -> dict[str, Any]:
    """The config of a model with every key spelled out; an encoding alone has no "network"."""
    parts = {"loss": trainer.loss.spec, "optimizer": trainer.optimizer.spec}
    return {**to_config(network.spec), **{name: to_config(spec) for name, spec in parts.items()}}


# --------------------------------------------------------------------------------------------- saving


def save(path: str | os.PathLike, network: Module, trainer: Trainer) -> None:
    """Write the snapshot of `network` and its `trainer`; see `snapshot_files.replace_file` for failures."""
    from safetensors.numpy import save as to_bytes

    engine, options, noise = network.engine, network.options, trainer._noise
    tensors = {"params": engine.get_params()}
    if (own := engine.runtime.inference_params) is not None:
        tensors["inference_params"] = own
    if engine.max_level is not None:
        tensors["max_level"] = np.array(engine.max_level, np.float32)
    optimizer_numbers = take_arrays(engine.runtime.optimizer_state(), "optimizer", tensors)
    tensors = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    model = {
        "kind": next(kind for kind, cls in KINDS.items() if isinstance(network, cls)),
        "n_input_dims": network.n_input_dims,
        "n_output_dims": network.n_output_dims,
        "dtype": options.dtype,
        "seed": int(options.seed),
        "deterministic": bool(options.deterministic),
    }
    training = {
        "step": trainer.step,
        "learning_rate": trainer.learning_rate,
        "skipped_steps": trainer.skipped_steps,
        "perturbation_sigma": trainer.perturbation_sigma,
        "noise_state": None if noise is None else noise.random.state,
    }
    metadata = {
        "format": FORMAT,
        "format_version": str(FORMAT_VERSION),
        "library_version": __version__,
        "config": canonical_json(full_config(network, trainer)),
        "model": canonical_json(model),
        "training": canonical_json(training),
        "optimizer": canonical_json(optimizer_numbers),
    }
    metadata["sha256"] = checksum(metadata, tensors)
    replace_file(path, to_bytes(tensors, metadata))


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def checksum(metadata: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of the metadata but for `sha256` itself, of what the tensors are called and look like, and of their
    bytes in the order of their names."""
    names = sorted(tensors)
    described = [[name, tensors[name].dtype.str, tensors[name].shape] for name in names]
    texts = {key: text for key, text in metadata.items() if key != "sha256"}
    digest = hashlib.sha256(canonical_json([texts, described]).encode())
    for name in names:
        digest.update(tensors[name])
    return digest.hexdigest()


def take_arrays(state: Mapping[str, Any], path: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The numbers of an optimizer's state, nested as they are; its arrays go into `tensors` by their path."""
    numbers: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            tensors[f"{path}.{name}"] = value
        else:
            nested = isinstance(value, Mapping)
            numbers[name] = take_arrays(value, f"{path}.{name}", tensors) if nested else value
    return numbers


# --------------------------------------------------------------------------------------------- loading


def load(path: str | os.PathLike, *, engine: str, device: int) -> tuple[Module, Trainer, dict[str, Any]]:
    """A new module with its trainer, and the config, from a file that `save` wrote.

    Raises SnapshotError for whatever is wrong with the content.
    """
    EngineOptions(engine=engine, device=device)  # what the caller got wrong is not the file's fault
    with problems_of(file_name(path)):
        metadata, tensors = read(path)
        config, model, training, optimizer_numbers = (
            json_object(metadata, key) for key in ("config", "model", "training", "optimizer")
        )
        spec = model_spec(config, model)
        params = taken(tensors, "params", np.float32, (n_params(spec),))
        optimizer = Optimizer(parse_optimizer(config.get("optimizer", {}), n_params=n_params(spec)))
        loss = Loss(parse_loss(config.get("loss", {})))
        options = EngineOptions(
            engine,
            value(model, "dtype", str, "model"),
            device,
            value(model, "seed", int, "model"),
            value(model, "deterministic", bool, "model"),
        )
        sigma = value(training, "perturbation_sigma", float, "training")
        cls = KINDS.get(model.get("kind"))
        if cls is None:
            raise SnapshotError(f"model.kind {model.get('kind')!r} is none of {', '.join(KINDS)}")
        module = cls._of(spec, options, seeding="trainer")
        trainer = Trainer(module, optimizer, loss, seed=options.seed, perturbation_sigma=sigma, keep_parameters=True)
        if trainer._noise is not None:
            trainer._noise.random.state = value(training, "noise_state", int, "training")
        state = put_arrays(module.engine.runtime.optimizer_state(), "optimizer", optimizer_numbers, tensors)
        module.engine.restore(params, state, value(training, "skipped_steps", int, "training"))
        if "max_level" in tensors:
            module.max_level = tensors.pop("max_level")
        tensors.pop("inference_params", None)  # follow from the state
        if tensors:
            raise SnapshotError(f"tensor {min(tensors)!r} has no place in this model")
    return module, trainer, config


def read(path: str | os.PathLike) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Metadata and tensors of a file that is whole and that this library can read."""
    from safetensors import SafetensorError, safe_open

    with open(path, "rb"):  # a missing file, a folder, or one that may not be read: the system's own error
        pass
    try:
        with safe_open(os.fsdecode(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, TypeError, ValueError) as error:  # not this format; a dtype that NumPy lacks
        raise SnapshotError(f"is no safetensors file, or not all of it: {one_line(error)}") from error
    if metadata.get("format") != FORMAT:
        raise SnapshotError("is a safetensors file, but not of numba-tcnn")
    version = metadata.get("format_version", "")
    if version != str(FORMAT_VERSION):
        writer = metadata.get("library_version", "unknown")
        raise SnapshotError(
            f"has format version {version!r} (written by numba-tcnn {writer}); numba-tcnn {__version__} reads "
            f"version {FORMAT_VERSION}"
        )
    if metadata.get("sha256") != checksum(metadata, tensors):
        raise SnapshotError("is damaged: its content does not have the SHA-256 that was written with it")
    return metadata, tensors


def model_spec(config: Mapping[str, Any], model: Mapping[str, Any]) -> ModelSpec:
    n_input_dims, n_output_dims = (value(model, key, int, "model") for key in ("n_input_dims", "n_output_dims"))
    if "network" in config:
        return parse_model(n_input_dims, n_output_dims, config.get("encoding", {}), config["network"])
    # An encoding alone: its width is known, whatever alignment led to it.
    encoding = parse_encoding(config.get("encoding", {}), n_input_dims)
    if n_output_dims < encoding.n_output_dims:
        raise SnapshotError(f"the encoding has {encoding.n_output_dims} columns, not {n_output_dims}")
    return ModelSpec(n_input_dims, n_output_dims, padded_to(encoding, n_output_dims), None, n_output_dims)


def json_object(metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    if key not in metadata:
        raise SnapshotError(f"{key} is missing")
    try:
        document = json.loads(metadata[key])
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{key} is not JSON: {one_line(error)}") from error
    if not isinstance(document, dict):
        raise SnapshotError(f"{key} is not a JSON object")
    return document


def value(document: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """What stands under a key of the object called `where`, of just this type; a float may be written as an integer."""
    if key not in document:
        raise SnapshotError(f"{where}.{key} is missing")
    found = document[key]
    if kind is float and type(found) is int:
        found = float(found)
    if type(found) is not kind:
        raise SnapshotError(f"{where}.{key} is {found!r:.40}, not of type {kind.__name__}")
    return found


def taken(tensors: dict[str, np.ndarray], name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of this name, which `tensors` then no longer holds."""
    if name not in tensors:
        raise SnapshotError(f"tensor {name!r} is missing")
    tensor = tensors.pop(name)
    if tensor.shape != shape or tensor.dtype != dtype:
        raise SnapshotError(
            f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, the model needs {np.dtype(dtype)} {list(shape)}"
        )
    return tensor


def put_arrays(
    own: Mapping[str, Any], path: str, numbers: Mapping[str, Any], tensors: dict[str, np.ndarray]
) -> dict[str, Any]:
    """The state that `take_arrays` took apart, in the shape of the model's `own`; arrays leave `tensors`."""
    state: dict[str, Any] = {}
    for name, current in own.items():
        inner = f"{path}.{name}"
        if isinstance(current, np.ndarray):
            state[name] = taken(tensors, inner, current.dtype, current.shape)
        elif isinstance(current, Mapping):
            state[name] = put_arrays(current, inner, value(numbers, name, dict, path), tensors)
        else:
            state[name] = value(numbers, name, type(current), path)
    if unknown := set(numbers) - set(own):
        raise SnapshotError(f"{path}.{min(unknown)} has no place in this model's optimizer")
    return state
