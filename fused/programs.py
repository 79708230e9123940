"""Programs: the kernels of one job, compiled, loaded and launched in order.

A program is made for one set of options (dtypes, loss, which gradients) and used for any batch size. Its plan is the
first candidate whose kernels compile without spilling; which that is, the disk cache remembers kernel by kernel.
What does not change between calls, addresses of parameters above all, is set once (`constants`); a call sets the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from ..engines import EngineUnavailable, KernelReport
from ..layout import n_network_params, n_params
from ..specs import ModelSpec
from . import fixed_point, gradient_scale_kernels, optimizer_kernels
from .ahead import AheadOfCalls
from .cache import CompiledKernel, is_stored
from .compile_processes import compile_processes
from .compiler import compile_kernel, key_of
from .driver import Device, DeviceBuffer, LoadedKernel
from .element_wise_jobs import CollectJob, GradientScaleJob, OptimizerJob, optimizer_jobs
from .formats import number_format
from .jobs import Job, KernelSource, choose, placed_sources
from .optimizer_contract import Optimizer, Slice
from .plan import Architecture, KernelPlan, architecture
from .target import OutlineTarget
from .validity import Validity

OUTLINE = OutlineTarget()


@dataclass
class Program:
    """One loaded kernel and where it came from."""

    kernel: LoadedKernel
    compiled: CompiledKernel
    source: KernelSource
    max_blocks: int = field(init=False)  # that the device holds at once

    def __post_init__(self):
        properties = self.kernel.device.properties
        self.max_blocks = self.kernel.blocks_per_multiprocessor * properties.n_multiprocessors

    def report(self) -> KernelReport:
        return KernelReport(
            name=self.kernel.name,
            plan=self.source.plan_in_words,
            registers=self.compiled.registers,
            spill_bytes=self.compiled.spill_bytes,
            shared_bytes=self.kernel.shared_bytes,
            threads=self.kernel.threads,
            blocks=self.max_blocks,
            compile_seconds=self.compiled.compile_seconds,
            from_cache=self.compiled.from_cache,
        )


@dataclass(frozen=True)
class Toolbox:
    """Compiles and loads kernels for one device."""

    device: Device
    ahead: AheadOfCalls = field(default_factory=AheadOfCalls, compare=False)

    @property
    def chip(self) -> Architecture:
        return architecture(self.device.properties.capability)

    def compile(self, source: KernelSource) -> CompiledKernel:
        """By who has begun, else by another process; here where there is none."""
        key = self._key(source)
        self.ahead.start(key, None, functools.partial(self._ask, source, key))
        return self.ahead.take(key) or self._compile(source)

    def _key(self, source: KernelSource) -> str:
        capability = self.device.properties.capability
        return key_of(source.description, capability, threads=source.threads, min_blocks=source.min_blocks)

    def _compile(self, source: KernelSource) -> CompiledKernel:
        return compile_kernel(
            source.make_body,
            source.description,
            self.device.properties.capability,
            threads=source.threads,
            min_blocks=source.min_blocks,
        )

    def start(self, job: Job) -> None:
        """Begin to compile the job's first candidate; `load_first_that_fits` then finds its kernels."""
        try:
            sources = placed_sources(job, job.plans(self.chip), 0)
        except EngineUnavailable:  # who loads the job will hear of it
            return
        for source in sources:
            self._begin(source)

    def _begin(self, source: KernelSource) -> None:
        key = self._key(source)
        self.ahead.start(key, functools.partial(self._compile, source), functools.partial(self._ask, source, key))

    def _ask(self, source: KernelSource, key: str) -> Future[CompiledKernel] | None:
        return compile_processes().begin(source.place, key, self.device.properties.capability)

    def has_stored(self, job: Job) -> bool:
        """Whether the disk cache has the kernels of the job's first candidate."""
        try:
            sources = job.sources(job.plans(self.chip)[0])
        except EngineUnavailable:
            return False
        return all(is_stored(self._key(source)) for source in sources)

    def load(self, source: KernelSource, compiled: CompiledKernel) -> Program:
        body = source.make_body(OUTLINE)
        loaded = LoadedKernel(
            self.device, compiled.cubin, compiled.entry, body.parameters, name=body.name,
            threads=source.threads, shared_bytes=source.shared_bytes, overlaps=source.overlaps,
        )  # fmt: skip
        return Program(loaded, compiled, source)

    def load_first_that_fits(self, job: Job) -> tuple[object, list[Program]]:
        """(plan, its kernels loaded) of the candidate that `jobs.choose` takes."""
        plan, kernels = choose(job, self.chip, self.compile, self._begin)
        return plan, [self.load(source, compiled) for source, compiled in kernels]


class Workspace:
    """Device memory that programs of one model share; each piece grows with the largest batch seen."""

    def __init__(self, device: Device, validity: Validity):
        self.device, self._validity = device, validity
        self._buffers: dict[str, DeviceBuffer] = {}

    def get(self, name: str, n_bytes: int) -> int:
        """Address of a piece of at least `n_bytes`; its contents are lost when it grows."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < n_bytes:
            if buffer is not None:
                self.device.synchronize()
                self._validity.memory_moved()
                del self._buffers[name]
                buffer.free()
            buffer = self._buffers[name] = DeviceBuffer(self.device, n_bytes)
        return buffer.address

    def buffer(self, name: str) -> DeviceBuffer:
        return self._buffers[name]

    def free(self) -> None:
        self._validity.memory_moved()
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()


class InferenceProgram:
    """Outputs of a batch, by one kernel."""

    def __init__(self, plan: KernelPlan, program: Program, constants: dict[str, int]):
        self.program = program
        self.program.kernel.set(**constants)
        self._parameters = constants["parameters"]
        self._tile_rows = plan.tile_rows
        self._set = self.program.kernel.setter("n_tiles", "x", "x_stride", "batch", "y", "y_stride")

    @property
    def programs(self) -> list[Program]:
        return [self.program]

    def use(self, parameters: int, table: int) -> None:
        """Compute with the parameters at these addresses from now on."""
        if parameters != self._parameters:
            self._parameters = parameters
            self.program.kernel.set(parameters=parameters, table=table)

    def run(
        self,
        x: int,
        x_stride: int,
        out: int,
        out_stride: int,
        batch: int,
        stream: int,
        max_levels: tuple[int, int] | None = None,
    ) -> None:
        """max_levels   address and bytes a sample of the fractions of levels in use, where kernels read them"""
        n_tiles = -(-batch // self._tile_rows)
        self._set(n_tiles, x, x_stride, batch, out, out_stride)
        if max_levels is not None:
            self.program.kernel.set(max_levels=max_levels[0], max_level_stride=max_levels[1])
        self.program.kernel.launch(min(n_tiles, self.program.max_blocks), stream)


@dataclass(frozen=True)
class PartialSums:
    """Where the gradient kernels left their results: rows of dW [n_rows, row_bytes / 4] and the blocks' losses."""

    address: int
    n_rows: int
    row_bytes: int
    losses: int
    n_losses: int


SUMS = ("n_partials", "partial_sums", "row_bytes", "losses", "n_losses", "loss", "scales")
"""What changes at every launch of a kernel that adds them up."""


class CollectProgram:
    """Hands out the gradients that a gradient program left; `fixed_point`: the table's are summed so."""

    def __init__(self, toolbox: Toolbox, spec: ModelSpec, constants: dict[str, int], *, fixed_point: bool = False):
        _, (self.program,) = toolbox.load_first_that_fits(CollectJob(fixed_point))
        n_network, total = n_network_params(spec), n_params(spec)
        self._n_blocks = optimizer_kernels.n_blocks(n_network, total)
        self.program.kernel.set(n_network=n_network, n_params=total, **constants)
        self._set = self.program.kernel.setter(*SUMS)

    @property
    def programs(self) -> list[Program]:
        return [self.program]

    def run(self, partial: PartialSums, loss: int, scales: int, scale: float, stream: int, **more: float) -> None:
        """`scale` is the factor of the loss and of the gradients (1 / (n_out batch) for a loss's own)."""
        kernel = self.program.kernel
        self._set(partial.n_rows, partial.address, partial.row_bytes, partial.losses, partial.n_losses, loss, scales)
        kernel.set(loss_scale=scale, gradient_scale=scale, **more)
        kernel.launch(self._n_blocks, stream)


class OptimizerProgram:
    """What comes behind a gradient program: an optimizer's step, slice after slice of the parameters.

    `constants` hold the addresses of whole arrays; `unread` is memory for what a slice must not write: the loss, and
    the count of skipped steps, which the last slice sees to. `fixed_point`: the table's gradient is summed so.
    """

    def __init__(
        self, toolbox: Toolbox, spec: ModelSpec, optimizer: Optimizer, constants: dict[str, int], unread: int,
        dtype: str = "float16", *, fixed_point: bool = False,
    ):  # fmt: skip
        jobs = optimizer_jobs(optimizer, n_network_params(spec), dtype, fixed_point=fixed_point)
        self._optimizer, self._unread = optimizer, unread
        self._slices = [
            _SliceProgram(toolbox, job, where, links, n_network_params(spec), constants) for job, where, links in jobs
        ]
        for part in self._slices[:-1]:
            part.programs[0].kernel.set(skipped=unread)

    @property
    def programs(self) -> list[Program]:
        return [program for part in self._slices for program in part.programs]

    def numbers(self) -> Iterator[tuple[Callable[[], dict[str, int | float]], dict[str, str], list[LoadedKernel]]]:
        """(numbers, names, kernels): what kernels are told anew in each step, and their names for it."""
        for part in self._slices:
            yield from part.numbers()

    def run(self, partial: PartialSums, loss: int, scales: int, scale: float, stream: int, **more: float) -> None:
        """One step; `scale` as in `CollectProgram`. more   `mark`, and the units of sums in fixed point"""
        self._optimizer.step()
        for part in self._slices[:-1]:
            part.run(replace(partial, n_losses=0), self._unread, scales, scale, stream, **more)
        self._slices[-1].run(partial, loss, scales, scale, stream, **more)
        self._optimizer.turn()


class _SliceProgram:
    """The kernels that update one slice: those of its chain, and its leaf's own between them if it has some."""

    def __init__(
        self, toolbox: Toolbox, job: OptimizerJob, where: Slice, links: list[Optimizer], n_network: int,
        constants: dict[str, int],
    ):  # fmt: skip
        _, self.programs = toolbox.load_first_that_fits(job)
        self._start, n_params = where.start, where.sizes.n_params
        own_network = min(max(n_network - where.start, 0), n_params)
        first_of_table = max(where.start - n_network, 0)
        parameter_bytes = number_format(job.dtype).parameter_bytes
        addresses = constants | {
            "weights": constants["weights"] + 4 * where.start,
            "copy": constants["copy"] + parameter_bytes * where.start,
            "kept_copy": constants["kept_copy"] + parameter_bytes * where.start,
            "table_gradient": constants["table_gradient"]
            + (fixed_point.BYTES if job.fixed_point else 4) * first_of_table,
        }
        leaf = links[-1].constants(where.start)
        sizes = {"n_matrix": where.sizes.n_matrix_params, "n_network": own_network, "n_params": n_params}
        for program in self.programs:
            program.kernel.set(**sizes, **addresses, **leaf)
            for depth, link in enumerate(links):
                program.kernel.set(**{f"{name}_{depth}": v for name, v in link.constants(where.start).items()})
        self._set = self.programs[0].kernel.setter(*SUMS)
        self._links = []  # with the kernels' names of what they give to each step
        for depth, link in enumerate(links):
            is_by_layers = link is links[-1] and bool(job.layer_kernels())
            names = {name: name if is_by_layers else f"{name}_{depth}" for name in link.numbers(where.start)}
            self._links.append((link, names))
        self._grids = [(optimizer_kernels.n_blocks(own_network, n_params, job.vector), 1)]
        self._grids += [(kernel.n_blocks, kernel.n_rows) for kernel in job.layer_kernels()]
        if len(self._grids) < len(self.programs):
            self._grids.append((max(1, -(-n_params // (optimizer_kernels.THREADS * job.vector_after))), 1))

    def numbers(self) -> Iterator[tuple[Callable[[], dict[str, int | float]], dict[str, str], list[LoadedKernel]]]:
        """See `OptimizerProgram.numbers`."""
        kernels = [program.kernel for program in self.programs]
        for link, names in self._links:
            yield functools.partial(link.numbers, self._start), names, kernels

    def run(self, partial: PartialSums, loss: int, scales: int, scale: float, stream: int, **more: float) -> None:
        self._set(
            partial.n_rows, partial.address + 4 * self._start, partial.row_bytes, partial.losses, partial.n_losses,
            loss, scales,
        )  # fmt: skip
        self.programs[0].kernel.set(loss_scale=scale, gradient_scale=scale, **more)
        numbers = {}
        for link, names in self._links:
            for name, value in link.numbers(self._start).items():
                numbers[names[name]] = value
        for program, (n_blocks, n_rows) in zip(self.programs, self._grids, strict=True):
            program.kernel.set(**numbers)
            program.kernel.launch(n_blocks, stream, n_rows)


class GradientScaleProgram:
    """Finds the power of two for given output gradients of one dtype, and writes it and its inverse."""

    def __init__(self, toolbox: Toolbox, dtype: str, maximum: DeviceBuffer, scales: int):
        _, (self.largest, self.write) = toolbox.load_first_that_fits(GradientScaleJob(dtype))
        self._maximum = maximum
        self.largest.kernel.set(maximum=maximum.address)
        self.write.kernel.set(maximum=maximum.address, scales=scales)

    @property
    def programs(self) -> list[Program]:
        return [self.largest, self.write]

    def run(self, y: int, y_stride: int, batch: int, n_columns: int, stream: int) -> None:
        self._maximum.fill_zero(stream)
        find_largest_gradient(self.largest, y, y_stride, batch, n_columns, stream)
        self.write.kernel.launch(1, stream)


def find_largest_gradient(program: Program, y: int, y_stride: int, batch: int, n_columns: int, stream: int) -> None:
    """Raise the maximum that the kernel knows to that of |y|, as many rows at a time as it counts elements of."""
    chunk = max(1, gradient_scale_kernels.MAX_ELEMENTS // n_columns)
    for start in range(0, batch, chunk):
        rows = min(chunk, batch - start)
        program.kernel.set(y=y + start * y_stride, y_stride=y_stride, batch=rows, n_columns=n_columns)
        n_blocks = -(-rows * n_columns // gradient_scale_kernels.THREADS)
        program.kernel.launch(min(n_blocks, program.max_blocks), stream)
