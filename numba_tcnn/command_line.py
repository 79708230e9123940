"""What every command shares: one-line errors in place of usage dumps, and option types that say what to do."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from .config_keys import did_you_mean


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
