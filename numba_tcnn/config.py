"""tiny-cuda-nn's JSON configs as specs, and back.

`load_config` reads JSON, `config_parts` takes a full config apart, `parse_*` turn the parts into the frozen
dataclasses of `specs.py`, and `to_config` writes a spec as JSON again. Names, aliases and defaults are those of
tiny-cuda-nn; unlike there, unknown keys and values out of range are errors, found before anything is allocated.
A key that starts with an underscore is a comment.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from .config_encodings import ENCODINGS, check_n_params, padded_width, parse_encoding
from .config_keys import ConfigError, Parsed, describe, read_keys
from .config_losses import parse_loss
from .config_networks import N_OUTPUT_DIMS, network_and_dims, parse_network
from .config_optimizers import OPTIMIZERS, parse_optimizer
from .layout import n_params
from .specs import (
    TENSOR_CORE_WIDTH,
    CompositeOptimizerSpec,
    CompositeSpec,
    EncodingSpec,
    GridSpec,
    LossSpec,
    ModelSpec,
    NestedEncoding,
    NetworkSpec,
    OptimizerSpec,
)

__all__ = [
    "ConfigError",
    "ConfigParts",
    "config_parts",
    "load_config",
    "parse_encoding",
    "parse_loss",
    "parse_model",
    "parse_network",
    "parse_optimizer",
    "to_config",
]

# ------------------------------------------------------------------------------------------- reading JSON

_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def load_config(source: Mapping | str | os.PathLike) -> dict[str, Any]:
    """A config from a dict, a JSON text with // and /* */ comments, or the path of a JSON file.

    A string is taken as JSON where its first character behind comments is a brace, else as a path.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"config: {describe(source)} is not a dict, a JSON text or a path")
    if isinstance(source, str) and _without_comments(source).lstrip().startswith("{"):
        return _parse_json(source, "config")
    path = os.fsdecode(source)
    name = f"config {json.dumps(path)}"
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{name}: can't be read: {reason}") from error
    return _parse_json(text, name)


def _without_comments(text: str) -> str:
    """`text` with comments blanked, line numbers kept."""

    def blank(match: re.Match[str]) -> str:
        token = match.group()
        return token if token.startswith('"') else re.sub(r"[^\n]", " ", token)

    return _STRING_OR_COMMENT.sub(blank, text)


def _parse_json(text: str, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        config = dict(pairs)
        if len(config) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"{name}: key {describe(twice)} stands twice in one object")
        return config

    try:
        config = json.loads(_without_comments(text), object_pairs_hook=unique)
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"{name}: nested too deeply") from error
    except ValueError as error:  # JSONDecodeError with line and column, or an integer of thousands of digits
        raise ConfigError(f"{name}: not valid JSON, {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{name}: {describe(config)} is not an object")
    return config


class ConfigParts(NamedTuple):
    """The four parts of a full config; {} where it leaves one out, which means tiny-cuda-nn's default."""

    encoding: Mapping
    network: Mapping
    loss: Mapping
    optimizer: Mapping


def config_parts(source: Mapping | str | os.PathLike) -> ConfigParts:
    """The encoding, network, loss and optimizer of a full config, each still to be parsed."""
    keys = [Parsed(name, lambda part, path: part) for name in ConfigParts._fields]
    parts = read_keys(load_config(source), keys, "")
    return ConfigParts(**{name: parts.get(name, {}) for name in ConfigParts._fields})


# --------------------------------------------------------------------------------------- config to specs


def parse_model(
    n_input_dims: int,
    n_output_dims: int | None,
    encoding_config: Mapping,
    network_config: Mapping | None,
    *,
    alignment: int = 0,
) -> ModelSpec:
    """The spec of an encoding and the network behind it, or of an encoding alone (`network_config` None).

    Before a network the encoding is padded to a multiple of 16. Alone it is padded to `alignment`, and its width is
    the number of output dims: `n_output_dims` may then be None.
    """
    has_network = network_config is not None
    alignment = TENSOR_CORE_WIDTH if has_network else alignment
    encoding = parse_encoding(encoding_config, n_input_dims, alignment=alignment)
    width = padded_width(encoding, alignment)
    if width == 0:
        raise ConfigError("encoding: has no output columns")
    if not has_network:
        if n_output_dims not in (None, width):
            raise ConfigError(f"n_output_dims: {describe(n_output_dims)} is not {width}, the width of the encoding")
        return ModelSpec(encoding.n_input_dims, width, encoding, None, width)

    n_output_dims = N_OUTPUT_DIMS.read(n_output_dims, "n_output_dims")
    network, dims = network_and_dims(network_config, "network")
    spec = ModelSpec(encoding.n_input_dims, n_output_dims, encoding, network, width)
    if dims.get("n_output_dims", n_output_dims) != n_output_dims:
        raise ConfigError(f"network.n_output_dims: {dims['n_output_dims']} disagrees with the model's {n_output_dims}")
    # A network's own input is the encoding's output; configs are seen with either number, padded or not.
    inputs = (spec.n_input_dims, encoding.n_output_dims, width)
    if dims.get("n_input_dims", width) not in inputs:
        raise ConfigError(
            f"network.n_input_dims: {dims['n_input_dims']} disagrees with the model's {spec.n_input_dims} "
            f"and the encoding's {width}"
        )
    check_n_params(n_params(spec), "network")
    return spec


# --------------------------------------------------------------------------------------- specs to config

_OTYPES = {component.spec: component.name for component in (*reversed(ENCODINGS.components), *OPTIMIZERS.components)}
_OTYPES[CompositeSpec] = "Composite"


def to_config(spec: EncodingSpec | NetworkSpec | LossSpec | OptimizerSpec | ModelSpec) -> dict[str, Any]:
    """The config that parses to `spec` (given the same n_input_dims, alignment ...), every key spelled out."""
    if isinstance(spec, ModelSpec):
        parts = {"encoding": spec.encoding, "network": spec.network}
        return {name: to_config(part) for name, part in parts.items() if part is not None}
    config: dict[str, Any] = {} if isinstance(spec, NetworkSpec | LossSpec) else {"otype": _OTYPES[type(spec)]}
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name == "nested":
            config["nested"] = _nested_to_config(spec, value)
        elif field.name not in ("n_input_dims", "n_params_to_optimize"):
            config[field.name] = list(value) if isinstance(value, tuple) else value
    return {key: value for key, value in config.items() if key not in _without_meaning(spec)}


def _without_meaning(spec: Any) -> tuple[str, ...]:
    """Keys that say nothing here, and those of ours that tiny-cuda-nn does not know, where they are off."""
    if isinstance(spec, NetworkSpec):
        widths = ("hidden",) if spec.hidden is None else ("n_neurons", "n_hidden_layers")
        return widths if spec.bias else (*widths, "bias")
    if isinstance(spec, LossSpec) and not spec.gradient:
        return ("gradient",)
    if isinstance(spec, GridSpec) and spec.type != "Hash":
        return ("log2_hashmap_size",)
    return ()


def _nested_to_config(spec: Any, nested: Any) -> Any:
    if isinstance(spec, CompositeSpec):
        return [_child_to_config(child) for child in nested]
    if isinstance(spec, CompositeOptimizerSpec):
        sizes = spec.n_params_to_optimize
        return [{**to_config(o), "n_params_to_optimize": size} for o, size in zip(nested, sizes, strict=True)]
    return to_config(nested)


def _child_to_config(child: NestedEncoding) -> dict[str, Any]:
    return {
        **to_config(child.encoding),
        "n_dims_to_encode": child.encoding.n_input_dims,
        "dims_to_encode_begin": child.first_input_dim,
    }
