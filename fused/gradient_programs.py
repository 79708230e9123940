"""Gradient programs: from a batch to partial sums of gradients, by one kernel or in stages.

They leave their results for an optimizer program, which adds the rows up: dW in a matrix of partial sums, one row a
block, and the gradients of the encoding's parameters in the model's table gradient. Which block computes what follows
from the batch and the device alone, so that rows and their order are the same in every run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..layout import n_network_params
from ..specs import ModelSpec, round_up
from .fixed_point import fixed_point_of
from .formats import number_format
from .keepers import saved_units
from .phased_plan import GROUPS
from .programs import PartialSums, Program, Workspace
from .saved_images import slot_images

SAVED_BYTES = 96 * 2**20
"""Memory for the fragments of a chunk in staged plans."""

IMAGE_BYTES = 512 * 2**20
"""Memory for the images of a chunk in phased plans."""


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
    max_levels: int = 0
    max_level_stride: int = 0
    first_row: int = 0  # the row of the whole batch that row 0 is
    whole: int = 0  # rows of that; 0: this is it

    def rows(self, start: int, count: int) -> Batch:
        return Batch(
            count,
            self.x + start * self.x_stride, self.x_stride,
            self.y + start * self.y_stride, self.y_stride,
            self.density + start * self.density_stride, self.density_stride,
            self.dx + start * self.dx_stride, self.dx_stride,
            self.max_levels + start * self.max_level_stride, self.max_level_stride,
            self.first_row + start, self.whole or self.size,
        )  # fmt: skip

    def with_inputs(self, x: int, x_stride: int) -> Batch:
        return dataclasses.replace(self, x=x, x_stride=x_stride)


BATCH_FIELDS = (
    "batch", "x", "x_stride", "y", "y_stride", "density", "density_stride", "dx", "dx_stride",
    "max_levels", "max_level_stride", "first_row", "batch_size",
)  # fmt: skip


def batch_fields(batch: Batch) -> tuple[int, ...]:
    return (
        batch.size, batch.x, batch.x_stride, batch.y, batch.y_stride, batch.density, batch.density_stride,
        batch.dx, batch.dx_stride, batch.max_levels, batch.max_level_stride, batch.first_row,
        batch.whole or batch.size,
    )  # fmt: skip


class GradientProgram:
    """Gradients of a whole batch; leaves partial sums for an optimizer program."""

    fixed_point = False
    has_loss = True

    def __init__(self, spec: ModelSpec, plan, programs: list[Program], workspace: Workspace, constants: dict[str, int]):
        self.spec, self.plan, self.workspace, self.programs = spec, plan, workspace, programs
        self.row_bytes = max(16, -(-4 * n_network_params(spec) // 16) * 16)
        self.parameters = constants["parameters"]
        for program in self.programs:
            program.kernel.set(row_bytes=self.row_bytes, **constants)
        self._prepare()

    def run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        if self.fixed_point:
            for program in self.programs:
                program.kernel.set(**fixed_point_of(self.spec.encoding, batch.size).scales)
        return self._run(batch, mark, stream)

    def _prepare(self) -> None:
        raise NotImplementedError

    def _run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        raise NotImplementedError


class EncodingGradientProgram(GradientProgram):
    """A bare encoding: everything goes to the table's gradient and to dL/dx."""

    def _prepare(self) -> None:
        (self._program,) = self.programs
        self._set = self._program.kernel.setter("n_tiles", "mark", *BATCH_FIELDS)

    def _run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        n_tiles = -(-batch.size // self.plan.tile_rows)
        n_blocks = min(n_tiles, self._program.max_blocks)
        nothing, losses = self.workspace.get("partial sums", self.row_bytes), self.workspace.get("losses", 4 * n_blocks)
        self._program.kernel.set(losses=losses)
        self._set(n_tiles, mark, *batch_fields(batch))
        self._program.kernel.launch(n_blocks, stream)
        return PartialSums(nothing, 0, self.row_bytes, losses, n_blocks if self.has_loss else 0)


class SingleGradientProgram(GradientProgram):
    """One kernel for everything."""

    def _prepare(self) -> None:
        (self._program,) = self.programs
        self._set = self._program.kernel.setter("n_tiles", "partial_sums", "losses", "mark", *BATCH_FIELDS)

    def n_blocks(self, batch: int) -> int:
        return min(-(-batch // self.plan.tile_rows), self._program.max_blocks)

    def _run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        n_blocks = self.n_blocks(batch.size)
        partial = self.workspace.get("partial sums", n_blocks * self.row_bytes)
        losses = self.workspace.get("losses", 4 * n_blocks)
        self.launch(batch, mark, stream, partial, losses)
        return PartialSums(partial, n_blocks, self.row_bytes, losses, n_blocks)

    def launch(self, batch: Batch, mark: int, stream: int, partial: int, losses: int) -> None:
        """The kernel alone, its `n_blocks` rows of partial sums and losses going where they are told to."""
        self._set(-(-batch.size // self.plan.tile_rows), partial, losses, mark, *batch_fields(batch))
        self._program.kernel.launch(self.n_blocks(batch.size), stream)


class PhasedGradientProgram(GradientProgram):
    """One kernel, launched for each chunk of the batch whose images `IMAGE_BYTES` hold."""

    def _prepare(self) -> None:
        (self._program,) = self.programs
        self._tile_bytes = GROUPS * slot_images(self.spec, len(self.plan.layers))[2]
        self._set = self._program.kernel.setter("n_tiles", "losses", "accumulate", "mark", *BATCH_FIELDS)

    def chunk_tiles(self, batch: int) -> int:
        """Tiles a chunk: whole waves of blocks, chunks alike as far as they allow; all, if nothing is saved."""
        n_tiles, wave = -(-batch // self.plan.tile_rows), self._program.max_blocks
        if not self._tile_bytes:
            return n_tiles
        n_waves, longest = -(-n_tiles // wave), max(1, IMAGE_BYTES // (wave * self._tile_bytes))
        n_chunks = -(-n_waves // longest)
        return min(n_tiles, -(-n_waves // n_chunks) * wave)

    def _run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        chunk_tiles, workspace = self.chunk_tiles(batch.size), self.workspace
        chunk_rows, n_blocks = chunk_tiles * self.plan.tile_rows, min(chunk_tiles, self._program.max_blocks)
        n_chunks = -(-batch.size // chunk_rows)
        saved = workspace.get("saved images", max(16, round_up(chunk_tiles, n_blocks) * self._tile_bytes))
        partial = workspace.get("partial sums", n_blocks * self.row_bytes)
        losses = workspace.get("losses", 4 * n_blocks * n_chunks)
        self._program.kernel.set(saved=saved, partial_sums=partial)
        for chunk in range(n_chunks):
            rows = batch.rows(chunk * chunk_rows, min(chunk_rows, batch.size - chunk * chunk_rows))
            n_tiles = -(-rows.size // self.plan.tile_rows)
            self._set(n_tiles, losses + 4 * n_blocks * chunk, int(chunk > 0), mark, *batch_fields(rows))
            self._program.kernel.launch(n_blocks, stream)
        return PartialSums(partial, n_blocks, self.row_bytes, losses, n_blocks * n_chunks)


class StagedGradientProgram(GradientProgram):
    """Chunk after chunk of the batch: a propagate kernel, then a weight-gradient kernel a layer shape."""

    def _prepare(self) -> None:
        self._propagate, *self._weight_gradients = self.programs
        self._set = self._propagate.kernel.setter("n_tiles", "losses", "mark", *BATCH_FIELDS)
        self._set_weight_gradients = [p.kernel.setter("n_tiles", "accumulate", "mark") for p in self._weight_gradients]
        propagate = self.plan.propagate
        self._saved_units = saved_units(self.spec, propagate.rows, number_format(propagate.dtype).packed_words)[2]
        self._layer_counts = [len(layers) for _, layers in self.plan.weight_gradients]

    def chunk_rows(self, batch: int) -> int:
        """Samples a chunk: whole waves of blocks, as many as `SAVED_BYTES` holds, at least one."""
        plan = self.plan.propagate
        bytes_per_row = 128 * self._saved_units // plan.rows
        wave = self._propagate.max_blocks * plan.tile_rows
        rows = max(1, SAVED_BYTES // (bytes_per_row * wave)) * wave
        return min(rows, -(-batch // plan.tile_rows) * plan.tile_rows)

    def _run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        plan, workspace = self.plan.propagate, self.workspace
        chunk_rows = self.chunk_rows(batch.size)
        n_chunks = -(-batch.size // chunk_rows)
        n_slots, n_tiles = chunk_rows // plan.rows, chunk_rows // plan.tile_rows
        saved = workspace.get("saved fragments", 128 * self._saved_units * n_slots)
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
            self._set(n_tiles, losses + 4 * n_blocks * chunk, mark, *batch_fields(batch.rows(start, rows)))
            self._propagate.kernel.launch(n_blocks, stream)
            for program, set_values, n, n_layers in zip(
                self._weight_gradients, self._set_weight_gradients, row_counts, self._layer_counts, strict=True
            ):
                set_values(n_tiles, int(chunk > 0), mark)
                program.kernel.launch(n, stream, n_layers)
        return PartialSums(partial, n_rows, self.row_bytes, losses, n_blocks * n_chunks)
