"""What every command shares: one-line errors in place of usage dumps, and option types that say what to do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .config import load_config
from .config_keys import ConfigError, did_you_mean


class CommandError(ValueError):
    """Something the user can put right. Its text is the one line that the command prints before it exits with 2."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse that raises CommandError, and knows only options spelled in full."""

    def __init__(self, **kwargs: object):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise CommandError(message.removeprefix("argument "))

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings if len(option) > 2]
            name = unknown[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            hint = did_you_mean(name, options) if kind == "option" else ""
            raise CommandError(f"unknown {kind} {name}{hint or f'; {self.prog} --help lists what there is'}")
        return parsed


def path_of(what: str) -> Callable[[str], Path]:
    """An option's type: a path. An empty text, which `Path` takes for the current folder, is refused."""

    def convert(text: str) -> Path:
        if not text:
            raise argparse.ArgumentTypeError(f"'' is no path; give the path of {what}")
        return Path(text)

    return convert


def read_config(path: Path) -> dict[str, Any]:
    """The config in a file. Raises ConfigError, with what to do where it is the path that is wrong."""
    try:
        return load_config(path)
    except ConfigError as error:
        if isinstance(error.__cause__, OSError | UnicodeError):
            raise ConfigError(f"{error}; give the path of a JSON file") from error
        raise


def whole_number(low: int, high: int) -> Callable[[str], int]:
    """An option's type: an integer in [low, high]."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return convert
