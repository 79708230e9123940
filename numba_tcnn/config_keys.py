"""What a config may hold: typed keys with ranges, components as tables of keys, and the error that names the culprit.

A component (an encoding, an optimizer, ...) is one `Component` entry: its name, the spec it becomes, and its keys.
Defaults are not repeated here: a key that the config leaves out is left out of the spec's constructor too.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)
MAX_NESTING = 16
"""How deep composites and optimizers may stand inside each other."""


class ConfigError(ValueError):
    """A config that can't become a model. One line: key path, value, what is allowed, the nearest spelling."""


def describe(value: object) -> str:
    """`value` as JSON on one line, shortened: what an error message shows of it."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(word: object, candidates: Iterable[str]) -> str:
    """', did you mean X?' with the candidate spelled most like `word` (case ignored), or nothing."""
    names = {name.lower(): name for name in candidates}
    nearest = difflib.get_close_matches(str(word)[:64].lower(), names, n=1)
    return f", did you mean {names[nearest[0]]}?" if nearest else ""


# -------------------------------------------------------------------------------------------------- keys

_REFUSED = object()


@dataclass(frozen=True)
class Key:
    """One key of a component. Subclasses say in `allowed` what it may hold and turn a value into that in `convert`."""

    name: str

    @property
    def allowed(self) -> str:
        raise NotImplementedError

    def convert(self, value: object) -> Any:
        """The value as the spec stores it, or `_REFUSED`."""
        raise NotImplementedError

    def hint(self, value: object) -> str:
        return ""

    def read(self, value: object, path: str) -> Any:
        """The checked value of the key at `path`, such as encoding.n_levels; raises `ConfigError`."""
        converted = self.convert(value)
        if converted is _REFUSED:
            raise ConfigError(f"{path}: {describe(value)} is not {self.allowed}{self.hint(value)}")
        return converted


def _integer(value: object) -> Any:
    """An int from any integral number. 2.0 is one, 2.5 and true are not."""
    if isinstance(value, bool):
        return _REFUSED
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, float | np.floating) and math.isfinite(value) and value == math.floor(value):
        return int(value)
    return _REFUSED


@dataclass(frozen=True)
class Integer(Key):
    low: int
    high: int

    @property
    def allowed(self) -> str:
        return f"an integer from {self.low} to {self.high}"

    def convert(self, value: object) -> Any:
        number = _integer(value)
        return number if number is _REFUSED or self.low <= number <= self.high else _REFUSED


@dataclass(frozen=True)
class IntegerOf(Key):
    """An integer out of a short list."""

    values: tuple[int, ...]

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(map(str, self.values))}"

    def convert(self, value: object) -> Any:
        number = _integer(value)
        return number if number in self.values else _REFUSED


@dataclass(frozen=True)
class Number(Key):
    """A finite real number; both bounds are allowed values."""

    low: float
    high: float

    @property
    def allowed(self) -> str:
        return f"a number from {self.low:.8g} to {self.high:.8g}"

    def convert(self, value: object) -> Any:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return _REFUSED
        # Compared before the conversion: an integer beyond float64 has no float, and NaN fails both comparisons.
        return float(value) if self.low <= value <= self.high else _REFUSED


@dataclass(frozen=True)
class Flag(Key):
    @property
    def allowed(self) -> str:
        return "true or false"

    def convert(self, value: object) -> Any:
        return bool(value) if isinstance(value, bool | np.bool_) else _REFUSED


@dataclass(frozen=True)
class Choice(Key):
    """One of a list of names, whatever their case; `aliases` maps other spellings (lower case) to a listed name."""

    choices: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def allowed(self) -> str:
        return f"{'one of ' if len(self.choices) > 1 else ''}{', '.join(self.choices)}"

    def convert(self, value: object) -> Any:
        if not isinstance(value, str):
            return _REFUSED
        by_lower_case = {name.lower(): name for name in self.choices} | dict(self.aliases)
        return by_lower_case.get(value.lower(), _REFUSED)

    def hint(self, value: object) -> str:
        return did_you_mean(value, self.choices) if isinstance(value, str) else ""


@dataclass(frozen=True)
class Array(Key):
    """An array of numbers, each of which `item` allows; its value is a tuple."""

    item: Key
    shortest: int
    longest: int

    @property
    def allowed(self) -> str:
        return f"an array of {self.shortest} to {self.longest} items, each {self.item.allowed}"

    def convert(self, value: object) -> Any:
        if not isinstance(value, list | tuple) or not self.shortest <= len(value) <= self.longest:
            return _REFUSED
        items = tuple(self.item.convert(item) for item in value)
        return _REFUSED if any(item is _REFUSED for item in items) else items


@dataclass(frozen=True)
class Objects(Key):
    """A non-empty array of objects; who asked for it reads each."""

    @property
    def allowed(self) -> str:
        return "a non-empty array of objects"

    def convert(self, value: object) -> Any:
        is_array = isinstance(value, list | tuple) and len(value) > 0
        return list(value) if is_array and all(isinstance(item, Mapping) for item in value) else _REFUSED


@dataclass(frozen=True)
class Parsed(Key):
    """A config inside a config, read by another parser `parse(config, path)`."""

    parse: Callable[[Any, str], Any]

    def read(self, value: object, path: str) -> Any:
        return self.parse(value, path)


# -------------------------------------------------------------------------------------------- components


@dataclass(frozen=True)
class Component:
    """One otype: the spec class it becomes, its keys (all optional but `required`), and other names it goes by.

    `build` is what the family's parser calls with the values read; None calls the spec class itself.
    """

    name: str
    spec: type
    keys: tuple[Key, ...] = ()
    aliases: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    build: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Family:
    """All components that may stand in one place; `default` is meant where the config has no otype.

    `common` are keys that every member knows.
    """

    kind: str
    default: str
    components: tuple[Component, ...]
    common: tuple[Key, ...] = ()

    def select(self, config: object, path: str) -> tuple[Component, dict[str, Any]]:
        """The component that `config` names and the values of the keys it holds, all checked."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"{path}: {describe(config)} is not an object")
        if path.count(".nested") > MAX_NESTING:
            raise ConfigError(f"{path.split('.')[0]}: nested more than {MAX_NESTING} deep")
        by_lower_case = {name.lower(): c for c in self.components for name in (c.name, *c.aliases)}
        names = [name for c in self.components for name in (c.name, *c.aliases)]
        otype = config.get("otype", self.default)
        if not isinstance(otype, str) or otype.lower() not in by_lower_case:
            hint = did_you_mean(otype, names) or f"; there are {', '.join(names)}"
            raise ConfigError(f"{path}.otype: {describe(otype)} is not {self.kind}{hint}")
        component = by_lower_case[otype.lower()]
        for name in component.required:
            if name not in config:
                raise ConfigError(f"{join(path, name)}: missing, {component.name} needs it")
        return component, read_keys(config, (*component.keys, *self.common), path, ignored=("otype",))


def read_keys(config: Mapping, keys: Iterable[Key], path: str, ignored: tuple[str, ...] = ()) -> dict[str, Any]:
    """The checked values of the keys that `config` holds. Any other key is an error, unless it starts with '_'."""
    known = {key.name: key for key in keys}
    values = {}
    for name, value in config.items():
        if name in known:
            values[name] = known[name].read(value, join(path, name))
        elif name not in ignored and not str(name).startswith("_"):
            shown = name if isinstance(name, str) and name.isidentifier() and len(name) <= 60 else describe(name)
            hint = did_you_mean(name, (*known, *ignored)) or f"; known are {', '.join((*ignored, *known))}"
            raise ConfigError(f"{join(path, shown)}: unknown key{hint}")
    return values


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
