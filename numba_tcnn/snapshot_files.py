"""What both kinds of snapshots share: their error, and files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from .config_keys import ConfigError


class SnapshotError(ValueError):
    """A snapshot whose content can't be used, or a model that a format has no place for. One line: file, problem."""


@contextlib.contextmanager
def problems_of(name: str) -> Iterator[None]:
    """Puts the file's name before a problem that is found inside; a config that can't be used is one of them."""
    try:
        yield
    except (SnapshotError, ConfigError) as error:
        raise SnapshotError(f"{name}: {one_line(error)}") from error


def file_name(path: str | os.PathLike) -> str:
    """How messages name a file."""
    return f"snapshot {json.dumps(os.fsdecode(path))}"


def one_line(error: object) -> str:
    return " ".join(str(error).split())


def replace_file(path: str | os.PathLike, content: bytes) -> None:
    """Write under a temporary name in the same folder, then rename: a failure leaves the file as it was.

    The content reaches the disk before the new name does, so that a power cut leaves one of the two files.
    """
    target = Path(os.path.realpath(os.fsdecode(path)))  # a link stays one
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    with open(temporary, "xb") as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, target)
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
