"""Gradient programs: from a batch to partial sums of gradients, by one kernel or in stages.

They leave their results for an optimizer program, which adds the rows up: dW in a matrix of partial sums, one row a
block, and the gradients of the encoding's parameters in the model's float32 table gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import n_network_params
from ..specs import ModelSpec
from .jobs import GradientJob
from .keepers import saved_units
from .plan import StagedPlan
from .programs import PartialSums, Program, Toolbox, Workspace

SAVED_BYTES = 96 * 2**20
"""Memory for the fragments of a chunk in staged plans."""


@dataclass(frozen=True)
class Batch:
    """Addresses and row strides (bytes) of one batch in device memory; 0 for what there isn't."""

    size: int
    x: int
    x_stride: int
    y: int
    y_stride: int
    density: int = 0
    density_stride: int = 0
    dx: int = 0
    dx_stride: int = 0

    def rows(self, start: int, count: int) -> Batch:
        return Batch(
            count,
            self.x + start * self.x_stride, self.x_stride,
            self.y + start * self.y_stride, self.y_stride,
            self.density + start * self.density_stride, self.density_stride,
            self.dx + start * self.dx_stride, self.dx_stride,
        )  # fmt: skip


BATCH_FIELDS = ("batch", "x", "x_stride", "y", "y_stride", "density", "density_stride", "dx", "dx_stride")


def _fields(batch: Batch) -> tuple[int, ...]:
    return (
        batch.size, batch.x, batch.x_stride, batch.y, batch.y_stride, batch.density, batch.density_stride,
        batch.dx, batch.dx_stride,
    )  # fmt: skip


class GradientProgram:
    """Gradients of a whole batch; leaves partial sums for an optimizer program. One of the three classes below."""

    def __init__(self, spec: ModelSpec, plan, programs: list[Program], workspace: Workspace, constants: dict[str, int]):
        self.spec, self.plan, self.workspace, self.programs = spec, plan, workspace, programs
        self.row_bytes = max(16, -(-4 * n_network_params(spec) // 16) * 16)
        for program in self.programs:
            program.kernel.set(row_bytes=self.row_bytes, **constants)
        self._prepare()

    def _prepare(self) -> None:
        raise NotImplementedError

    def run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        raise NotImplementedError


class EncodingGradientProgram(GradientProgram):
    """A bare encoding: everything goes to the table's gradient and to dL/dx."""

    def _prepare(self) -> None:
        (self._program,) = self.programs
        self._set = self._program.kernel.setter("n_tiles", "mark", *BATCH_FIELDS)

    def run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        n_tiles = -(-batch.size // self.plan.tile_rows)
        self._set(n_tiles, mark, *_fields(batch))
        self._program.kernel.launch(min(n_tiles, self._program.max_blocks), stream)
        nothing = self.workspace.get("partial sums", self.row_bytes)
        return PartialSums(nothing, 0, self.row_bytes, nothing, 0)


class SingleGradientProgram(GradientProgram):
    """One kernel for everything."""

    def _prepare(self) -> None:
        (self._program,) = self.programs
        self._set = self._program.kernel.setter("n_tiles", "partial_sums", "losses", "mark", *BATCH_FIELDS)

    def run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        n_tiles = -(-batch.size // self.plan.tile_rows)
        n_blocks = min(n_tiles, self._program.max_blocks)
        partial = self.workspace.get("partial sums", n_blocks * self.row_bytes)
        losses = self.workspace.get("losses", 4 * n_blocks)
        self._set(n_tiles, partial, losses, mark, *_fields(batch))
        self._program.kernel.launch(n_blocks, stream)
        return PartialSums(partial, n_blocks, self.row_bytes, losses, n_blocks)


class StagedGradientProgram(GradientProgram):
    """Chunk after chunk of the batch: a propagate kernel, then a weight-gradient kernel a layer shape."""

    def _prepare(self) -> None:
        self._propagate, *self._weight_gradients = self.programs
        self._set = self._propagate.kernel.setter("n_tiles", "losses", "mark", *BATCH_FIELDS)
        self._set_weight_gradients = [p.kernel.setter("n_tiles", "accumulate", "mark") for p in self._weight_gradients]
        self._layer_counts = [len(layers) for _, layers in self.plan.weight_gradients]

    def chunk_rows(self, batch: int) -> int:
        """Samples a chunk: whole waves of blocks, as many as `SAVED_BYTES` holds, at least one."""
        plan = self.plan.propagate
        bytes_per_row = 128 * saved_units(self.spec, plan.rows)[2] // plan.rows
        wave = self._propagate.max_blocks * plan.tile_rows
        rows = max(1, SAVED_BYTES // (bytes_per_row * wave)) * wave
        return min(rows, -(-batch // plan.tile_rows) * plan.tile_rows)

    def run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        plan, workspace = self.plan.propagate, self.workspace
        chunk_rows = self.chunk_rows(batch.size)
        n_chunks = -(-batch.size // chunk_rows)
        n_slots, n_tiles = chunk_rows // plan.rows, chunk_rows // plan.tile_rows
        saved = workspace.get("saved fragments", 128 * saved_units(self.spec, plan.rows)[2] * n_slots)
        n_blocks = min(n_tiles, self._propagate.max_blocks)
        losses = workspace.get("losses", 4 * n_blocks * n_chunks)
        row_counts = [
            max(1, min(n_tiles, program.max_blocks // n_layers))
            for program, n_layers in zip(self._weight_gradients, self._layer_counts, strict=True)
        ]
        n_rows = max(row_counts)
        partial = workspace.get("partial sums", n_rows * self.row_bytes)
        if min(row_counts) < n_rows:  # layers with fewer rows leave the others' untouched
            workspace.buffer("partial sums").fill_zero(stream)
        for program in self.programs:
            program.kernel.set(saved=saved, n_slots=n_slots, partial_sums=partial)
        for chunk in range(n_chunks):
            start = chunk * chunk_rows
            rows = min(chunk_rows, batch.size - start)
            n_tiles = -(-rows // plan.tile_rows)
            self._set(n_tiles, losses + 4 * n_blocks * chunk, mark, *_fields(batch.rows(start, rows)))
            self._propagate.kernel.launch(n_blocks, stream)
            for program, set_values, n, n_layers in zip(
                self._weight_gradients, self._set_weight_gradients, row_counts, self._layer_counts, strict=True
            ):
                set_values(n_tiles, int(chunk > 0), mark)
                program.kernel.launch(n, stream, n_layers)
        return PartialSums(partial, n_rows, self.row_bytes, losses, n_blocks * n_chunks)


def make_gradient_program(
    toolbox: Toolbox, job: GradientJob, workspace: Workspace, constants: dict[str, int]
) -> GradientProgram:
    """The gradient program of a model: single where dW fits the registers, else staged."""
    plan, programs = toolbox.load_first_that_fits(job)
    if job.spec.network is None:
        kind = EncodingGradientProgram
    else:
        kind = StagedGradientProgram if isinstance(plan, StagedPlan) else SingleGradientProgram
    return kind(job.spec, plan, programs, workspace, constants)
