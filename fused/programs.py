"""Programs: the kernels of one job, compiled, loaded and launched in order.

A program is made for one set of options (dtypes, loss, which gradients) and used for any batch size. Its plan is the
first candidate whose kernels compile without spilling; which that is, the disk cache remembers kernel by kernel.
What does not change between calls, addresses of parameters above all, is set once (`constants`); a call sets the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engines import KernelReport
from ..layout import n_network_params, n_params
from ..specs import AdamSpec, ModelSpec
from . import gradient_scale_kernels, optimizer_kernels
from .cache import CompiledKernel
from .compiler import compile_kernel
from .driver import Device, DeviceBuffer, LoadedKernel
from .jobs import GradientScaleJob, InferenceJob, Job, KernelSource, OptimizerJob, choose
from .plan import Architecture, architecture
from .target import OutlineTarget

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

    def load(self, source: KernelSource, compiled: CompiledKernel) -> Program:
        body = source.make_body(OUTLINE)
        loaded = LoadedKernel(
            self.device, compiled.cubin, compiled.entry, body.parameters, name=body.name,
            threads=source.threads, shared_bytes=source.shared_bytes,
        )  # fmt: skip
        return Program(loaded, compiled, source)

    def load_first_that_fits(self, job: Job) -> tuple[object, list[Program]]:
        """(plan, its kernels loaded) of the first candidate of which no kernel spills."""
        plan, kernels = choose(job, self.chip, self.compile)
        return plan, [self.load(source, compiled) for source, compiled in kernels]


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

    def __init__(self, toolbox: Toolbox, job: InferenceJob, constants: dict[str, int]):
        plan, (self.program,) = toolbox.load_first_that_fits(job)
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
class PartialSums:
    """Where the gradient kernels left their results: rows of dW [n_rows, row_bytes / 4] and the blocks' losses."""

    address: int
    n_rows: int
    row_bytes: int
    losses: int
    n_losses: int


class OptimizerProgram:
    """Adam, or with `optimizer` None the collection of gradients: what comes behind a gradient program."""

    def __init__(self, toolbox: Toolbox, spec: ModelSpec, optimizer: AdamSpec | None, constants: dict[str, int]):
        _, (self.program,) = toolbox.load_first_that_fits(OptimizerJob(optimizer))
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
        _, (self.largest, self.write) = toolbox.load_first_that_fits(GradientScaleJob(dtype))
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
