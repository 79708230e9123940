"""Jobs that a compile server's children find by importing this: small, slow and broken ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from numba_tcnn.fused.gradient_scale_kernels import make_write_scales_kernel
from numba_tcnn.fused.jobs import KernelSource
from numba_tcnn.fused.stage_io import KernelBody


def divide_by_zero(folder: str, name: str) -> None:
    print("never to be seen")
    raise ZeroDivisionError("no\nkernel")


def die(folder: str, name: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stay(folder: str, name: str) -> None:
    """Longer than any test."""
    Path(folder, f"{name} {os.getpid()}").touch()
    time.sleep(600)


def meet(folder: str, name: str) -> None:
    """Until there are two."""
    Path(folder, name).touch()
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.01)


@dataclass(frozen=True)
class SmallJob:
    """One plan of small kernels, by their names, each made after `before(folder, name)`."""

    names: tuple[str, ...]
    before: Callable[[str, str], None] | None = None
    folder: str = ""

    def plans(self, chip) -> list[None]:
        return [None]

    def sources(self, plan: None) -> list[KernelSource]:
        def make(name: str) -> Callable[[object], KernelBody]:
            def make_body(target) -> KernelBody:
                if self.before is not None:
                    self.before(self.folder, name)
                return make_write_scales_kernel(target)

            return make_body

        return [KernelSource(make(name), f"small {name}", threads=32) for name in self.names]

    def describe(self) -> str:
        return "small"
