"""Programs: the kernels of one job, compiled, loaded and launched in order.

A program is made for one set of options (dtypes, loss, which gradients) and used for any batch size. Its plan is the
first candidate whose kernels compile without spilling; which that is, the disk cache remembers kernel by kernel.
What does not change between calls, addresses of parameters above all, is set once (`constants`); a call sets the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..engines import KernelReport
from ..layout import n_network_params, n_params
from ..specs import AdamSpec, ModelSpec
from . import gradient_scale_kernels, kernels, optimizer_kernels
from .cache import CompiledKernel
from .compiler import MAX_SPILL_BYTES, CompileError, compile_kernel
from .driver import Device, DeviceBuffer, LoadedKernel
from .fragments import Target
from .fuser import GradientOptions, saved_units
from .gradient_scale_kernels import make_largest_gradient_kernel, make_write_scales_kernel
from .kernels import InferenceOptions, KernelBody
from .plan import (
    Architecture,
    KernelPlan,
    StagedPlan,
    architecture,
    encoding_gradient_plan,
    gradient_plans,
    inference_plans,
)
from .target import EmulatorTarget

SAVED_BYTES = 96 * 2**20
"""Memory for the fragments of a chunk in staged plans."""


@dataclass(frozen=True)
class KernelSource:
    """How to make one kernel: its body for a target, its layout, and what it is a function of (its cache key)."""

    make_body: Callable[[Target], KernelBody]
    description: str
    plan: KernelPlan | None = None  # None: no tiles, and the following numbers hold
    threads: int = 0
    min_blocks: int = 1
    shared_bytes: int = 0

    @classmethod
    def planned(cls, make_body: Callable[[Target], KernelBody], description: str, plan: KernelPlan) -> KernelSource:
        return cls(make_body, f"{description} {plan!r}", plan, plan.threads, plan.min_blocks, plan.shared_bytes)


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
            plan=self.source.plan.describe() if self.source.plan else "element-wise",
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

    @property
    def chip(self) -> Architecture:
        return architecture(self.device.properties.capability)

    def compile(self, source: KernelSource) -> CompiledKernel:
        return compile_kernel(
            source.make_body,
            source.description,
            self.device.properties.capability,
            threads=source.threads,
            min_blocks=source.min_blocks,
        )

    def load(self, source: KernelSource) -> Program:
        """Compile (or find in the cache) and load one kernel."""
        compiled = self.compile(source)
        body = source.make_body(EmulatorTarget())  # for its name and parameters; costs no compiling
        loaded = LoadedKernel(
            self.device, compiled.cubin, compiled.entry, body.parameters, name=body.name,
            threads=source.threads, shared_bytes=source.shared_bytes,
        )  # fmt: skip
        return Program(loaded, compiled, source)

    def first_that_fits(self, plans: list, sources_of: Callable[[object], list[KernelSource]]) -> tuple:
        """(plan, its kernels' sources) of the first candidate of which no kernel spills."""
        reasons = []
        for plan in plans:
            sources, problem = sources_of(plan), None
            for source in sources:
                compiled = self.compile(source)
                if compiled.spill_bytes > MAX_SPILL_BYTES:
                    problem = f"{source.plan.describe()}: {compiled.spill_bytes} bytes spilled"
                    break
            if problem is None:
                return plan, sources
            reasons.append(problem)
        raise CompileError("every kernel plan spills registers: " + "; ".join(reasons))


class Workspace:
    """Device memory that programs of one model share; each piece grows with the largest batch seen."""

    def __init__(self, device: Device):
        self.device = device
        self._buffers: dict[str, DeviceBuffer] = {}

    def get(self, name: str, n_bytes: int) -> int:
        """Address of a piece of at least `n_bytes`; its contents are lost when it grows."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < n_bytes:
            if buffer is not None:
                self.device.synchronize()
                del self._buffers[name]
                buffer.free()
            buffer = self._buffers[name] = DeviceBuffer(self.device, n_bytes)
        return buffer.address

    def buffer(self, name: str) -> DeviceBuffer:
        return self._buffers[name]

    def free(self) -> None:
        for buffer in self._buffers.values():
            buffer.free()
        self._buffers.clear()


class InferenceProgram:
    """Outputs of a batch, by one kernel."""

    def __init__(self, toolbox: Toolbox, spec: ModelSpec, options: InferenceOptions, constants: dict[str, int]):
        def sources(plan: KernelPlan) -> list[KernelSource]:
            def make_body(target):
                return kernels.make_inference_kernel(target, spec, plan, options)

            return [KernelSource.planned(make_body, f"inference {spec!r} {options!r}", plan)]

        plan, (source,) = toolbox.first_that_fits(inference_plans(spec, toolbox.chip), sources)
        self.program = toolbox.load(source)
        self.program.kernel.set(**constants)
        self._tile_rows = plan.tile_rows
        self._set = self.program.kernel.setter("n_tiles", "x", "x_stride", "batch", "y", "y_stride")

    @property
    def programs(self) -> list[Program]:
        return [self.program]

    def run(self, x: int, x_stride: int, out: int, out_stride: int, batch: int, stream: int) -> None:
        n_tiles = -(-batch // self._tile_rows)
        self._set(n_tiles, x, x_stride, batch, out, out_stride)
        self.program.kernel.launch(min(n_tiles, self.program.max_blocks), stream)


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


@dataclass(frozen=True)
class PartialSums:
    """Where the gradient kernels left their results: rows of dW [n_rows, row_bytes / 4] and the blocks' losses."""

    address: int
    n_rows: int
    row_bytes: int
    losses: int
    n_losses: int


class GradientProgram:
    """Gradients of a whole batch; leaves partial sums for an optimizer program. One of the three classes below."""

    def __init__(self, toolbox: Toolbox, spec: ModelSpec, plan, sources: list[KernelSource], workspace: Workspace,
                 constants: dict[str, int]):  # fmt: skip
        self.spec, self.plan, self.workspace = spec, plan, workspace
        self.programs = [toolbox.load(source) for source in sources]
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
        self._set = self._program.kernel.setter("n_tiles", *BATCH_FIELDS)

    def run(self, batch: Batch, mark: int, stream: int) -> PartialSums:
        n_tiles = -(-batch.size // self.plan.tile_rows)
        self._set(n_tiles, *_fields(batch))
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
        self._set = self._propagate.kernel.setter("n_tiles", "losses", *BATCH_FIELDS)
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
            self._set(n_tiles, losses + 4 * n_blocks * chunk, *_fields(batch.rows(start, rows)))
            self._propagate.kernel.launch(n_blocks, stream)
            for program, set_values, n, n_layers in zip(
                self._weight_gradients, self._set_weight_gradients, row_counts, self._layer_counts, strict=True
            ):
                set_values(n_tiles, int(chunk > 0), mark)
                program.kernel.launch(n, stream, n_layers)
        return PartialSums(partial, n_rows, self.row_bytes, losses, n_blocks * n_chunks)


def make_gradient_program(
    toolbox: Toolbox, spec: ModelSpec, options: GradientOptions, workspace: Workspace, constants: dict[str, int]
) -> GradientProgram:
    """The gradient program of a model: single where dW fits the registers, else staged."""

    def sources(plan) -> list[KernelSource]:
        return gradient_sources(spec, options, plan)

    if spec.network is None:
        plans = [encoding_gradient_plan(spec, toolbox.chip)]
    else:
        plans = gradient_plans(spec, toolbox.chip, encoding_gradient=options.encoding_gradient)
    plan, chosen = toolbox.first_that_fits(plans, sources)
    if spec.network is None:
        program = EncodingGradientProgram
    else:
        program = StagedGradientProgram if isinstance(plan, StagedPlan) else SingleGradientProgram
    return program(toolbox, spec, plan, chosen, workspace, constants)


def gradient_sources(spec: ModelSpec, options: GradientOptions, plan: KernelPlan | StagedPlan) -> list[KernelSource]:
    """The kernels of a gradient plan, in launch order."""
    text = f"{spec!r} {options!r}"
    if isinstance(plan, KernelPlan):
        make = kernels.make_encoding_gradient_kernel if spec.network is None else kernels.make_single_gradient_kernel
        return [KernelSource.planned(lambda target: make(target, spec, plan, options), f"{plan.kind} {text}", plan)]
    sources = [
        KernelSource.planned(
            lambda target: kernels.make_propagate_kernel(target, spec, plan.propagate, options),
            f"propagate {text}",
            plan.propagate,
        )
    ]
    for kernel_plan, layers in plan.weight_gradients:

        def make_body(target, kernel_plan=kernel_plan, layers=layers):
            return kernels.make_weight_gradient_kernel(target, spec, kernel_plan, layers)

        sources.append(KernelSource.planned(make_body, f"weight gradient {spec!r} {layers!r}", kernel_plan))
    return sources


class OptimizerProgram:
    """Adam, or with `optimizer` None the collection of gradients: what comes behind a gradient program."""

    def __init__(self, toolbox: Toolbox, spec: ModelSpec, optimizer: AdamSpec | None, constants: dict[str, int]):
        def make_body(target):
            if optimizer is None:
                return optimizer_kernels.make_collect_kernel(target)
            return optimizer_kernels.make_adam_kernel(target, optimizer)

        source = KernelSource(
            make_body, f"optimizer {optimizer!r}", threads=optimizer_kernels.THREADS,
            min_blocks=optimizer_kernels.MIN_BLOCKS, shared_bytes=optimizer_kernels.SHARED_BYTES,
        )  # fmt: skip
        self.program = toolbox.load(source)
        n_network, total = n_network_params(spec), n_params(spec)
        self._n_blocks = optimizer_kernels.n_blocks(n_network, total)
        self.program.kernel.set(n_network=n_network, n_params=total, **constants)
        self._set = self.program.kernel.setter(
            "n_partials", "partial_sums", "row_bytes", "losses", "n_losses", "loss", "scales"
        )

    @property
    def programs(self) -> list[Program]:
        return [self.program]

    def run(self, partial: PartialSums, loss: int, scales: int, scale: float, stream: int, **more: int | float) -> None:
        """`scale` is the factor of the loss and of the gradients (1 / (n_out batch) for a loss's own)."""
        kernel = self.program.kernel
        self._set(partial.n_rows, partial.address, partial.row_bytes, partial.losses, partial.n_losses, loss, scales)
        kernel.set(loss_scale=scale, gradient_scale=scale, **more)
        kernel.launch(self._n_blocks, stream)


class GradientScaleProgram:
    """Finds the power of two for given output gradients of one dtype, and writes it and its inverse."""

    def __init__(self, toolbox: Toolbox, dtype: str, maximum: DeviceBuffer, scales: int):
        self.largest = toolbox.load(
            KernelSource(
                lambda target: make_largest_gradient_kernel(target, dtype),
                f"largest gradient {dtype}",
                threads=gradient_scale_kernels.THREADS,
            )
        )
        self.write = toolbox.load(KernelSource(make_write_scales_kernel, "write scales", threads=32))
        self._maximum = maximum
        self.largest.kernel.set(maximum=maximum.address)
        self.write.kernel.set(maximum=maximum.address, scales=scales)

    @property
    def programs(self) -> list[Program]:
        return [self.largest, self.write]

    def run(self, y: int, y_stride: int, batch: int, n_columns: int, stream: int) -> None:
        self._maximum.fill_zero(stream)
        self.largest.kernel.set(y=y, y_stride=y_stride, batch=batch, n_columns=n_columns)
        n_blocks = -(-batch * n_columns // gradient_scale_kernels.THREADS)
        self.largest.kernel.launch(min(n_blocks, self.largest.max_blocks), stream)
        self.write.kernel.launch(1, stream)
