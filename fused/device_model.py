"""A model on a device: its parameters, what its kernels share, and the programs made so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layout import n_network_params, n_params
from ..specs import ModelSpec, round_up
from . import fixed_point
from .call_arrays import CallArrays
from .driver import Device, DeviceBuffer
from .formats import number_format
from .level_plan import split_batch
from .optimizer_state import VECTOR
from .programs import Toolbox, Workspace
from .stream_order import StreamOrder
from .table_gradient import TableGradient
from .validity import Validity


@dataclass(frozen=True)
class Words:
    """Single numbers that kernels share.

    bad            uint32, the mark of the last call that met a gradient that is not finite
    skipped        uint32, steps left out for that
    unread         for what a kernel writes and nobody reads
    given_scales   two float32, the factor of given output gradients and its inverse (gradient_scale_kernels.py)
    unit_scales    two float32, ones
    """

    buffer: DeviceBuffer

    @classmethod
    def on(cls, owner: Device) -> Words:
        words = cls(DeviceBuffer(owner, 32))
        words.buffer.upload(np.array([0, 0, 0, 0, 1, 1, 1, 1], np.float32))  # scales are 1 until something sets them
        return words

    @property
    def bad(self) -> int:
        return self.buffer.address

    @property
    def skipped(self) -> int:
        return self.buffer.address + 4

    @property
    def unread(self) -> int:
        return self.buffer.address + 8

    @property
    def given_scales(self) -> int:
        return self.buffer.address + 16

    @property
    def unit_scales(self) -> int:
        return self.buffer.address + 24

    def forget_skipped(self, stream: int) -> None:
        """No step has met such a gradient, and none was skipped."""
        self.buffer.upload(np.zeros(2, np.uint32), stream)

    def n_skipped(self, stream: int) -> int:
        count = np.empty(1, np.uint32)
        self.buffer.download_into(count, stream, offset=self.skipped - self.buffer.address)
        return int(count[0])


class DeviceModel:
    """Parameters are a float32 master and, but in float32, a copy of it that kernels read.

    programs   by what they are made for: the same call with the same dtypes finds its own in one look-up
    validity   of recorded calls
    """

    def __init__(self, spec: ModelSpec, params: np.ndarray, owner: Device, dtype: str, *, deterministic: bool):
        self.spec, self.device, self.format = spec, owner, number_format(dtype)
        self.n_params, self.n_network = n_params(spec), n_network_params(spec)
        self.has_table = self.n_params > self.n_network
        self.sums_in_fixed_point = deterministic and self.has_table
        """Of the table's gradient."""
        self.validity = Validity()
        self.toolbox, self.workspace, self.order = Toolbox(owner), Workspace(owner, self.validity), StreamOrder(owner)
        self.arrays = CallArrays(owner, self.workspace, self.order)
        self.programs: dict[tuple, Any] = {}
        self._split_batch = split_batch(spec, self.toolbox.chip, dtype)
        self._padded = round_up(self.n_params, VECTOR)  # optimizer kernels read and write whole vectors
        self._master = DeviceBuffer(owner, 4 * self._padded)
        self._copy = None if self.format.reads_master else self.parameters_buffer()
        self.words = Words.on(owner)
        element = fixed_point.BYTES if self.sums_in_fixed_point else 4
        table_bytes = element * (self._padded - self.n_network) if self.has_table else 0
        self.table_gradient = TableGradient(owner, table_bytes, self.order)
        self._max_levels: tuple[DeviceBuffer, int | None] | None = None  # and of how many samples; None: one for all
        self.set_params(params)

    def free(self) -> None:
        self.programs.clear()
        self.validity.reconfigured()
        self.workspace.free()
        self.table_gradient.free()
        levels = self._max_levels[0] if self._max_levels else None
        for buffer in (self._master, self._copy, self.words.buffer, levels):
            if buffer is not None:
                buffer.free()

    def program(self, key: tuple, make: Callable[..., Any], *arguments: Any) -> Any:
        """The program of this key; the first time `make(*arguments)` makes it."""
        program = self.programs.get(key)
        if program is None:
            program = self.programs[key] = make(*arguments)
        return program

    # ------------------------------------------------------------------------------------ parameters
    def parameters_buffer(self) -> DeviceBuffer:
        """For parameters as kernels read them."""
        return DeviceBuffer(self.device, self.format.parameter_bytes * self._padded)

    def get_params(self) -> np.ndarray:
        self.device.use()
        return self._master.download(self.n_params, np.float32, self.order.join())

    def set_params(self, params: np.ndarray) -> None:
        self.device.use()
        params, stream = np.ascontiguousarray(params, np.float32), self.order.join()
        self._master.upload(params, stream)
        if self._copy is not None:
            self._copy.upload(self.format.parameters(params), stream)

    @property
    def master(self) -> int:
        """Address of the float32 parameters."""
        return self._master.address

    @property
    def parameters(self) -> int:
        """Address of the parameters that kernels read."""
        return (self._copy or self._master).address

    def table_of(self, parameters: int) -> int:
        """Address of the encoding's parameters among those that kernels read."""
        return parameters + self.format.parameter_bytes * self.n_network

    def constants(self) -> dict[str, int]:
        """What every kernel that knows these parameters is told once."""
        return {
            "parameters": self.parameters,
            "table": self.table_of(self.parameters),
            "table_gradient": self.table_gradient.address,
            "bad": self.words.bad,
        }

    # ---------------------------------------------------------------------------------------- levels
    def set_max_level(self, max_level: float | np.ndarray | None) -> None:
        self.validity.reconfigured()
        if max_level is None:
            self._max_levels = None
            return
        self.device.use()
        fractions = np.atleast_1d(np.asarray(max_level, np.float32))
        buffer = DeviceBuffer(self.device, fractions.nbytes)
        buffer.upload(fractions, self.order.join())
        self._max_levels = buffer, len(fractions) if np.ndim(max_level) else None

    @property
    def has_max_level(self) -> bool:
        """Whether kernels read what fraction of a grid's levels is in use; otherwise all are."""
        return self._max_levels is not None

    def levels_of(self, batch: int) -> tuple[int, int]:
        """(address, bytes a sample) of those fractions; (0, 0): all levels are in use."""
        if self._max_levels is None:
            return 0, 0
        buffer, n_samples = self._max_levels
        if n_samples is None:
            return buffer.address, 0
        if n_samples != batch:
            raise ValueError(f"max_level has {n_samples} rows, the batch has {batch}")
        return buffer.address, 4

    def splits(self, batch: int) -> bool:
        """Whether such a batch goes to kernels that work level by level."""
        return self._split_batch is not None and batch >= self._split_batch and not self.has_max_level
