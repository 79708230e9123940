"""How long recorded calls can be made again."""

from __future__ import annotations


class Validity:
    """A call that was recorded holds as long as `version` is what it was.

    configuration   changes with the kernels, and with what they are told once
    version         changes with that, and when memory moves that their arguments point to
    """

    def __init__(self):
        self.configuration = self.version = 0

    def memory_moved(self) -> None:
        self.version += 1

    def reconfigured(self) -> None:
        self.configuration += 1
        self.version += 1
