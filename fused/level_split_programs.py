"""Programs of level-split plans: encode kernels, the network's kernel, and for training the kernels of the grid's
gradient, chunk after chunk of a batch whose planes would take too much memory."""

from __future__ import annotations

from ..specs import ModelSpec, round_up
from .gradient_programs import Batch, SingleGradientProgram
from .jobs import LevelSplitGradientJob, LevelSplitInferenceJob
from .level_plan import LevelPlan
from .planes import network_behind_planes
from .programs import PartialSums, Program, Toolbox, Workspace

PLANES_BYTES = 256 * 2**20
"""Memory for the planes of a chunk's features; their gradients take as much."""

ROWS_ALIGNMENT = 64

LAUNCHED = ("n_tiles", "planes", "plane_bytes", "x", "x_stride", "batch")
"""What is different in each launch of a level kernel."""


class LevelKernels:
    """The kernels of one kind for all levels, one after the other."""

    def __init__(self, plans: tuple[LevelPlan, ...], programs: list[Program]):
        self._kernels = [
            (program.kernel, program.kernel.setter(*LAUNCHED), plan, max(1, program.max_blocks // plan.n_rows))
            for plan, program in zip(plans, programs, strict=True)
        ]

    def launch(self, planes: int, plane_bytes: int, x: int, x_stride: int, n: int, stream: int) -> None:
        for kernel, set_values, plan, max_blocks in self._kernels:
            n_tiles = -(-n // plan.tile_rows)
            set_values(n_tiles, planes, plane_bytes, x, x_stride, n)
            kernel.launch(min(n_tiles, max_blocks), stream, plan.n_rows)


class _Planes:
    """Where a chunk's planes are."""

    def __init__(self, spec: ModelSpec, workspace: Workspace):
        self._workspace = workspace
        self._n_levels = spec.encoding.n_levels
        self.row_bytes = 2 * spec.encoding.n_features_per_level
        self.max_rows = max(PLANES_BYTES // (self._n_levels * self.row_bytes), 1) // ROWS_ALIGNMENT * ROWS_ALIGNMENT

    def rows(self, batch: int) -> int:
        """Samples of a chunk."""
        return min(round_up(batch, ROWS_ALIGNMENT), self.max_rows)

    def place(self, name: str, n_rows: int) -> int:
        return self._workspace.get(name, self._n_levels * self.row_bytes * n_rows)


class LevelSplitInferenceProgram:
    """Outputs of a batch."""

    def __init__(self, toolbox: Toolbox, job: LevelSplitInferenceJob, workspace: Workspace, constants: dict[str, int]):
        self.plan, self.programs = toolbox.load_first_that_fits(job)
        for program in self.programs:
            program.kernel.set(**constants)
        self._parameters = constants["parameters"]
        self._planes = _Planes(job.spec, workspace)
        n_encode = len(self.plan.encode)
        self._encode = LevelKernels(self.plan.encode, self.programs[:n_encode])
        self._network = self.programs[n_encode]
        self._set = self._network.kernel.setter("n_tiles", "x", "x_stride", "batch", "y", "y_stride")

    def use(self, parameters: int, table: int) -> None:
        """Compute with the parameters at these addresses from now on."""
        if parameters != self._parameters:
            self._parameters = parameters
            for program in self.programs:
                program.kernel.set(parameters=parameters, table=table)

    def run(self, x: int, x_stride: int, out: int, out_stride: int, batch: int, stream: int) -> None:
        chunk = self._planes.rows(batch)
        planes, plane_bytes = self._planes.place("feature planes", chunk), self._planes.row_bytes * chunk
        tile_rows = self.plan.network.tile_rows
        for start in range(0, batch, chunk):
            n = min(chunk, batch - start)
            self._encode.launch(planes, plane_bytes, x + start * x_stride, x_stride, n, stream)
            n_tiles = -(-n // tile_rows)
            self._set(n_tiles, planes, plane_bytes, n, out + start * out_stride, out_stride)
            self._network.kernel.launch(min(n_tiles, self._network.max_blocks), stream)


class LevelSplitGradientProgram:
    """Gradients of a batch; as a `GradientProgram`, it leaves partial sums for an optimizer program."""

    def __init__(self, toolbox: Toolbox, job: LevelSplitGradientJob, workspace: Workspace, constants: dict[str, int]):
        self.spec, self.workspace = job.spec, workspace
        self.plan, self.programs = toolbox.load_first_that_fits(job)
        for program in self.programs:
            program.kernel.set(**constants)
        self._planes = _Planes(job.spec, workspace)
        n_encode = len(self.plan.encode)
        self._encode = LevelKernels(self.plan.encode, self.programs[:n_encode])
        self._gradients = LevelKernels(self.plan.gradients, self.programs[n_encode + 1 :])
        self._network = SingleGradientProgram(
            network_behind_planes(job.spec), self.plan.network, [self.programs[n_encode]], workspace, constants
        )

    def run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        planes, workspace, network = self._planes, self.workspace, self._network
        chunk = planes.rows(batch.size)
        n_rows = sum(network.n_blocks(min(chunk, batch.size - start)) for start in range(0, batch.size, chunk))
        partial = workspace.get("partial sums", n_rows * network.row_bytes)
        losses = workspace.get("losses", 4 * n_rows)
        features, gradients = planes.place("feature planes", chunk), planes.place("gradient planes", chunk)
        plane_bytes = planes.row_bytes * chunk
        network.programs[0].kernel.set(table_gradient=gradients)
        row = 0
        for start in range(0, batch.size, chunk):
            part = batch.rows(start, min(chunk, batch.size - start))
            self._encode.launch(features, plane_bytes, part.x, part.x_stride, part.size, stream)
            behind = part.with_inputs(features, plane_bytes)
            network.launch(behind, mark, stream, partial + row * network.row_bytes, losses + 4 * row)
            self._gradients.launch(gradients, plane_bytes, part.x, part.x_stride, part.size, stream)
            row += network.n_blocks(part.size)
        return PartialSums(partial, n_rows, network.row_bytes, losses, n_rows)
