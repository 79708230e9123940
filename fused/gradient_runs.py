"""Gradients of a model: programs that leave sums, and what stands around each of their runs.

A run takes the table's gradient, leaves partial sums, and must be followed by a program that collects both: an
optimizer's (training.py), or `CollectProgram`, which hands gradients out.
"""

from __future__ import annotations

import numpy as np

from ..arrays import ArrayView
from . import fixed_point
from .device_model import DeviceModel
from .driver import DeviceBuffer
from .gradient_programs import Batch, GradientProgram
from .jobs import GradientJob, LevelSplitGradientJob
from .level_split_programs import LevelSplitGradientProgram
from .make_programs import make_gradient_program
from .programs import CollectProgram, GradientScaleProgram, PartialSums
from .second_order_programs import SecondOrderProgram


class GradientRuns:
    """Programs and runs of one model."""

    def __init__(self, model: DeviceModel):
        self._model = model
        self._maximum = DeviceBuffer(model.device, 16)
        self._mark = 0

    def free(self) -> None:
        self._maximum.free()

    @property
    def kinds(self) -> dict[str, bool]:
        """What gradient jobs of now are, beyond their dtypes."""
        return {"fixed_point": self._model.sums_in_fixed_point, "max_level": self._model.has_max_level}

    def program(self, job: GradientJob | LevelSplitGradientJob) -> GradientProgram | LevelSplitGradientProgram:
        """A new program."""
        model = self._model
        make = LevelSplitGradientProgram if isinstance(job, LevelSplitGradientJob) else make_gradient_program
        constants = model.constants() | {"scales": model.words.given_scales}
        return make(model.toolbox, job, model.workspace, constants)

    def set_scales(self, y: int, y_stride: int, dtype: np.dtype, n_rows: int, stream: int) -> None:
        """The power of two for given output gradients, so that the largest of them is about 8 in float16; 1 in formats
        that need none."""
        model = self._model
        if not model.format.scales_given_gradients:
            return
        scales = (model.toolbox, dtype.name, self._maximum, model.words.given_scales)
        program = model.program(("scales", dtype), GradientScaleProgram, *scales)
        program.run(y, y_stride, n_rows, model.spec.n_output_dims, stream)

    def next_mark(self) -> int:
        """A number larger than any before, that kernels write where they meet a gradient that is not finite."""
        self._mark += 1
        return self._mark

    def run(
        self,
        program: GradientProgram | LevelSplitGradientProgram | SecondOrderProgram,
        batch: Batch,
        mark: int,
        stream: int,
    ) -> PartialSums:
        """Leaves sums that must be collected."""
        self._model.table_gradient.take(stream)
        return program.run(batch, mark, stream)

    def units(self, batch: int) -> dict[str, float]:
        """What a collecting program is told of the sums that a gradient program of such a batch has left."""
        model = self._model
        return fixed_point.fixed_point_of(model.spec.encoding, batch).units if model.sums_in_fixed_point else {}

    def collect_program(self) -> CollectProgram:
        return self._model.program(("collect",), self._make_collect_program)

    def _make_collect_program(self) -> CollectProgram:
        model = self._model
        return CollectProgram(model.toolbox, model.spec, model.constants(), fixed_point=model.sums_in_fixed_point)

    def hand_out(
        self, partial: PartialSums, params: ArrayView, scales: int, stream: int, *, accumulate: bool = False,
        **more: float,
    ) -> None:  # fmt: skip
        """Write the gradient to `params`, or add it to what that holds.

        more   further arguments of the collecting kernel: `mark`, and the units of sums in fixed point
        """
        model = self._model
        address, finish = model.arrays.write("gradients", params, stream, keep=accumulate)
        self.collect_program().run(
            partial, model.words.unread, scales, 1.0, stream, gradients=address, accumulate=int(accumulate), **more
        )
        finish()
