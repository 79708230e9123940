"""An optimizer on a device, without a model: the engine's program behind gradients that the test makes up."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from numba_tcnn.fused.driver import DeviceBuffer, device
from numba_tcnn.fused.formats import number_format
from numba_tcnn.fused.optimizer_contract import Slice
from numba_tcnn.fused.optimizer_state import VECTOR
from numba_tcnn.fused.optimizers import make_optimizer
from numba_tcnn.fused.programs import OptimizerProgram, PartialSums, Toolbox
from numba_tcnn.layout import n_network_params
from numba_tcnn.parameter_sizes import ParameterSizes
from numba_tcnn.specs import OptimizerSpec, round_up


class Sizes:
    """What an optimizer program asks of a model's spec: matrices, perhaps biases, then an encoding's parameters."""

    def __init__(self, layer_shapes: Sequence[tuple[int, int]], biases: bool):
        self.layer_shapes, self.network = tuple(layer_shapes), SimpleNamespace(bias=biases)


class DeviceOptimizer:
    """`params`, the first of them matrices of `layers`, on the current device, the real or an emulated one. Kernels
    read them in the format of `dtype`."""

    def __init__(
        self, spec: OptimizerSpec, params: np.ndarray, layers: Sequence[tuple[int, int]], *, biases: bool = False,
        dtype: str = "float16",
    ):  # fmt: skip
        self.format = number_format(dtype)
        self.owner = device(0)
        self.owner.use()
        self.n_params, sizes = len(params), Sizes(layers, biases)
        self.n_network = n_network_params(sizes)
        padded = round_up(self.n_params, VECTOR)
        self.optimizer = make_optimizer(spec, Slice(0, ParameterSizes(self.n_params, sizes.layer_shapes)))
        self.optimizer.allocate(self.owner, 0)
        self._n_table = round_up(self.n_params - self.n_network, VECTOR)
        lengths = {"weights": 4 * padded, "copy": self.format.parameter_bytes * padded,
                   "kept_copy": self.format.parameter_bytes * padded,
                   "table_gradient": 4 * self._n_table, "words": 32, "scales": 8}  # fmt: skip
        self.buffers = {name: DeviceBuffer(self.owner, size) for name, size in lengths.items()}
        self.buffers["words"].upload(np.zeros(8, np.uint32))
        words = self.buffers["words"].address
        constants = {name: buffer.address for name, buffer in self.buffers.items() if name != "words"}
        constants |= {"bad": words, "skipped": words + 4}
        self._loss, unread = words + 8, words + 12
        self.program = OptimizerProgram(Toolbox(self.owner), sizes, self.optimizer, constants, unread, dtype)
        self._mark = 0
        self.set_params(params)

    def set_params(self, params: np.ndarray) -> None:
        values = np.zeros(round_up(self.n_params, VECTOR), np.float32)
        values[: self.n_params] = params
        self.buffers["weights"].upload(values)
        if not self.format.reads_master:
            self.buffers["copy"].upload(self.format.parameters(values))
        self.optimizer.forget_params()

    def step(self, gradients: np.ndarray, *, n_rows: int = 1, finite: bool = True, scale: float = 1.0,
             given_scale: float = 1.0, losses: Sequence[float] = (0.0,)) -> float:  # fmt: skip
        """One step; the loss. `gradients` reach the kernels as `n_rows` partial sums over scale * given_scale."""
        self._mark += 1
        gradients = gradients / np.float32(scale * given_scale)
        rows = np.full((n_rows, round_up(max(self.n_network, 1), 4)), np.nan, np.float32)
        rows[:, : self.n_network] = 0
        for i in range(n_rows - 1):  # what the last row takes back
            rows[i, : self.n_network] = 2.0 ** (i % 3)
        rest = rows[:-1, : self.n_network].sum(0)
        rows[-1, : self.n_network] = gradients[: self.n_network] - rest
        table = np.zeros(self._n_table, np.float32)
        table[: self.n_params - self.n_network] = gradients[self.n_network :]
        if not finite:
            rows[-1, :1] = np.nan
            table[self.n_params - self.n_network - 1 :][:1] = np.inf
            self.buffers["words"].upload(np.array([self._mark], np.uint32))
        if self._n_table:
            self.buffers["table_gradient"].upload(table)
        self.buffers["scales"].upload(np.array([np.nan, given_scale], np.float32))
        partial, own = DeviceBuffer(self.owner, rows.nbytes), DeviceBuffer(self.owner, max(4 * len(losses), 4))
        partial.upload(rows)
        own.upload(np.array(losses or [0.0], np.float32))
        sums = PartialSums(partial.address, n_rows, rows.strides[0], own.address, len(losses))
        self.program.run(sums, self._loss, self.buffers["scales"].address, scale, 0, mark=self._mark)
        cleared = self.buffers["table_gradient"].download(self._n_table, np.float32)
        assert not cleared.any(), "the table's gradient is set back to zero on the way"
        return float(self.buffers["words"].download(4, np.float32)[2])

    @property
    def params(self) -> np.ndarray:
        values = self.buffers["weights"].download(round_up(self.n_params, VECTOR), np.float32)
        if not self.format.reads_master:
            self._assert_holds("copy", values, "kernels read other parameters than the master's")
        assert not values[self.n_params :].any(), "the padding was written to"
        return values[: self.n_params]

    @property
    def inference_params(self) -> np.ndarray | None:
        """As the host computes them; what the kernels keep must be these, rounded."""
        if not self.optimizer.keeps_now:
            return None
        kept = self.optimizer.inference_params(self.params, 0)
        self._assert_holds("kept_copy", kept, "inference uses other parameters")
        return kept

    def _assert_holds(self, name: str, values: np.ndarray, otherwise: str) -> None:
        """A buffer of parameters as kernels read them."""
        expected = self.format.parameters(values)
        np.testing.assert_array_equal(self.buffers[name].download(len(values), expected.dtype), expected, otherwise)

    @property
    def skipped(self) -> int:
        return int(self.buffers["words"].download(2, np.uint32)[1])

    def state(self) -> dict[str, Any]:
        return self.optimizer.state(0)
