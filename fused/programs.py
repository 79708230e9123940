"""Programs: the kernels of one job, compiled, loaded and launched in order.

A program is made for one set of options (dtypes, loss, which gradients) and used for any batch size. Its plan is the
first candidate whose kernels compile without spilling; which that is, the disk cache remembers kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engines import KernelReport
from ..layout import n_network_params
from ..specs import AdamSpec, ModelSpec
from . import kernels, optimizer_kernels
from .compiler import MAX_SPILL_BYTES, CompileError, compile_kernel
from .driver import Device, DeviceBuffer, LoadedKernel
from .fragments import Target
from .fuser import GradientOptions, saved_units
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
class Toolbox:
    """What programs need of their surroundings."""

    device: Device

    @property
    def chip(self) -> Architecture:
        return architecture(self.device.properties.capability)

    def compile(self, make_body: Callable[[Target], KernelBody], plan: KernelPlan | None, description: str,
                *, threads: int = 0, min_blocks: int = 1):  # fmt: skip
        return compile_kernel(
            make_body,
            f"{description} {plan!r}",
            self.device.properties.capability,
            threads=plan.threads if plan else threads,
            min_blocks=plan.min_blocks if plan else min_blocks,
        )

    def load(self, make_body, plan: KernelPlan | None, description: str, *, threads: int = 0, min_blocks: int = 1,
             shared_bytes: int = 0) -> Program:  # fmt: skip
        """Compile (or find in the cache) and load one kernel."""
        compiled = self.compile(make_body, plan, description, threads=threads, min_blocks=min_blocks)
        body = make_body(EmulatorTarget())  # only for the names of its parameters
        loaded = LoadedKernel(
            self.device, compiled.cubin, compiled.entry, body.parameters, name=body.name,
            threads=plan.threads if plan else threads, shared_bytes=plan.shared_bytes if plan else shared_bytes,
        )  # fmt: skip
        return Program(loaded, compiled, plan)

    def first_that_fits(self, plans: list, make_bodies: Callable) -> tuple:
        """(plan, its bodies' makers with plans and descriptions) of the first candidate without spills.

        make_bodies(plan) -> [(make_body, kernel plan, description), ...]
        """
        reasons = []
        for plan in plans:
            parts = make_bodies(plan)
            problem = None
            for make_body, kernel_plan, description in parts:
                compiled = self.compile(make_body, kernel_plan, description)
                if compiled.spill_bytes > MAX_SPILL_BYTES:
                    problem = f"{kernel_plan.describe()}: {compiled.spill_bytes} bytes spilled"
                    break
            if problem is None:
                return plan, parts
            reasons.append(problem)
        raise CompileError("every kernel plan spills registers: " + "; ".join(reasons))


@dataclass
class Program:
    """One loaded kernel and where it came from."""

    kernel: LoadedKernel
    compiled: object
    plan: KernelPlan | None

    def n_blocks(self, n_tiles: int) -> int:
        """Persistent blocks for so many tiles: as many as the device holds at once."""
        return min(n_tiles, self.kernel.blocks_per_multiprocessor * self.kernel.device.properties.n_multiprocessors)

    def report(self) -> KernelReport:
        compiled, kernel = self.compiled, self.kernel
        return KernelReport(
            name=kernel.name,
            plan=self.plan.describe() if self.plan else "element-wise",
            registers=compiled.registers,
            spill_bytes=compiled.spill_bytes,
            shared_bytes=kernel.shared_bytes,
            threads=kernel.threads,
            blocks=kernel.blocks_per_multiprocessor * kernel.device.properties.n_multiprocessors,
            compile_seconds=compiled.compile_seconds,
            from_cache=compiled.from_cache,
        )


class InferenceProgram:
    def __init__(self, toolbox: Toolbox, spec: ModelSpec, options: InferenceOptions):
        def parts(plan):
            def make_body(target):
                return kernels.make_inference_kernel(target, spec, plan, options)

            return [(make_body, plan, f"inference {spec!r} {options!r}")]

        _, ((make_body, plan, description),) = toolbox.first_that_fits(inference_plans(spec, toolbox.chip), parts)
        self.program = toolbox.load(make_body, plan, description)

    @property
    def programs(self) -> list[Program]:
        return [self.program]

    def run(self, io: dict[str, int], batch: int, stream: int) -> None:
        program = self.program
        n_tiles = -(-batch // program.plan.tile_rows)
        program.kernel.set(n_tiles=n_tiles, batch=batch, **io)
        program.kernel.launch(program.n_blocks(n_tiles), stream)


@dataclass
class PartialSums:
    """Where the gradient kernels left their results: rows of dW [n_rows, row_bytes / 4] and the blocks' losses."""

    address: int
    n_rows: int
    row_bytes: int
    losses: int
    n_losses: int


class Workspace:
    """Device memory that programs of one model share; each piece grows with the largest batch seen."""

    def __init__(self, device: Device):
        self.device = device
        self._buffers: dict[str, DeviceBuffer] = {}

    def get(self, name: str, n_bytes: int) -> int:
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


class GradientProgram:
    """Gradients of a whole batch, by one kernel or in stages; leaves partial sums for an optimizer program."""

    def __init__(self, toolbox: Toolbox, spec: ModelSpec, options: GradientOptions, workspace: Workspace):
        self.spec, self.options, self.workspace = spec, options, workspace
        if spec.network is None:
            plan = encoding_gradient_plan(spec, toolbox.chip)
            self.plan, parts = toolbox.first_that_fits([plan], self._encoding_parts)
        else:
            plans = gradient_plans(spec, toolbox.chip, encoding_gradient=options.encoding_gradient)
            self.plan, parts = toolbox.first_that_fits(plans, self._parts)
        self.programs = [toolbox.load(*part) for part in parts]
        self.row_bytes = -(-4 * n_network_params(spec) // 16) * 16

    def _encoding_parts(self, plan: KernelPlan):
        spec, options = self.spec, self.options

        def make_body(target):
            return kernels.make_encoding_gradient_kernel(target, spec, plan, options)

        return [(make_body, plan, f"encoding gradient {spec!r} {options!r}")]

    def _parts(self, plan: KernelPlan | StagedPlan):
        spec, options = self.spec, self.options
        if isinstance(plan, KernelPlan):

            def make_body(target):
                return kernels.make_single_gradient_kernel(target, spec, plan, options)

            return [(make_body, plan, f"gradient {spec!r} {options!r}")]

        def make_propagate(target):
            return kernels.make_propagate_kernel(target, spec, plan.propagate, options)

        parts = [(make_propagate, plan.propagate, f"propagate {spec!r} {options!r}")]
        for kernel_plan, layers in plan.weight_gradients:

            def make_weight_gradient(target, kernel_plan=kernel_plan, layers=layers):
                return kernels.make_weight_gradient_kernel(target, spec, kernel_plan, layers)

            parts.append((make_weight_gradient, kernel_plan, f"weight gradient {spec!r} {layers!r}"))
        return parts

    def run(self, io: dict[str, int], batch: int, bad: int, mark: int, stream: int) -> PartialSums:
        if self.spec.network is None:
            return self._run_encoding(io, batch, stream)
        if isinstance(self.plan, StagedPlan):
            return self._run_staged(io, batch, bad, mark, stream)
        (program,) = self.programs
        n_tiles = -(-batch // program.plan.tile_rows)
        n_blocks = program.n_blocks(n_tiles)
        partial = self.workspace.get("partial sums", n_blocks * self.row_bytes)
        losses = self.workspace.get("losses", 4 * n_blocks)
        program.kernel.set(
            n_tiles=n_tiles, partial_sums=partial, row_bytes=self.row_bytes, losses=losses, bad=bad, mark=mark,
            batch=batch, **io,
        )  # fmt: skip
        program.kernel.launch(n_blocks, stream)
        return PartialSums(partial, n_blocks, self.row_bytes, losses, n_blocks)

    def _run_encoding(self, io: dict[str, int], batch: int, stream: int) -> PartialSums:
        (program,) = self.programs
        n_tiles = -(-batch // program.plan.tile_rows)
        program.kernel.set(n_tiles=n_tiles, batch=batch, **io)
        program.kernel.launch(program.n_blocks(n_tiles), stream)
        nothing = self.workspace.get("partial sums", 16)
        return PartialSums(nothing, 0, 16, nothing, 0)

    def chunk_rows(self, batch: int) -> int:
        """Samples a chunk of a staged plan: whole waves of blocks, as many as `SAVED_BYTES` holds, at least one."""
        plan, program = self.plan.propagate, self.programs[0]
        bytes_per_row = 128 * saved_units(self.spec, plan.rows)[2] // plan.rows
        wave = program.n_blocks(1 << 30) * plan.tile_rows
        rows = max(1, SAVED_BYTES // (bytes_per_row * wave)) * wave
        return min(rows, -(-batch // plan.tile_rows) * plan.tile_rows)

    def _run_staged(self, io: dict[str, int], batch: int, bad: int, mark: int, stream: int) -> PartialSums:
        propagate, *weight_gradients = self.programs
        plan, workspace = propagate.plan, self.workspace
        chunk_rows = self.chunk_rows(batch)
        n_chunks = -(-batch // chunk_rows)
        n_slots = chunk_rows // plan.rows
        saved = workspace.get("saved fragments", 128 * saved_units(self.spec, plan.rows)[2] * n_slots)
        n_blocks = propagate.n_blocks(chunk_rows // plan.tile_rows)
        losses = workspace.get("losses", 4 * n_blocks * n_chunks)
        n_multiprocessors = propagate.kernel.device.properties.n_multiprocessors
        row_counts = [
            max(1, min(chunk_rows // plan.tile_rows, p.kernel.blocks_per_multiprocessor * n_multiprocessors // len(l)))
            for p, (_, l) in zip(weight_gradients, self.plan.weight_gradients, strict=True)
        ]
        n_rows = max(row_counts)
        partial = workspace.get("partial sums", n_rows * self.row_bytes)
        if min(row_counts) < n_rows:
            workspace.buffer("partial sums").fill_zero(stream)
        for chunk in range(n_chunks):
            start = chunk * chunk_rows
            rows = min(chunk_rows, batch - start)
            n_tiles = -(-rows // plan.tile_rows)
            moved = {
                name: io[name] + start * io[f"{name}_stride"]
                for name in ("x", "y", "density", "dx")
                if io.get(name)
            }
            propagate.kernel.set(
                n_tiles=n_tiles, batch=rows, saved=saved, n_slots=n_slots,
                losses=losses + 4 * n_blocks * chunk, **(io | moved),
            )  # fmt: skip
            propagate.kernel.launch(n_blocks, stream)
            for program, (_, layers), n in zip(weight_gradients, self.plan.weight_gradients, row_counts, strict=True):
                program.kernel.set(
                    saved=saved, n_slots=n_slots, n_tiles=n_tiles, partial_sums=partial, row_bytes=self.row_bytes,
                    accumulate=int(chunk > 0), bad=bad, mark=mark,
                )  # fmt: skip
                program.kernel.launch(n, stream, len(layers))
        return PartialSums(partial, n_rows, self.row_bytes, losses, n_blocks * n_chunks)


class OptimizerProgram:
    """Adam, or with `spec` None the collection of gradients: what comes behind a gradient program."""

    def __init__(self, toolbox: Toolbox, spec: AdamSpec | None):
        def make_body(target):
            if spec is None:
                return optimizer_kernels.make_collect_kernel(target)
            return optimizer_kernels.make_adam_kernel(target, spec)

        self.program = toolbox.load(
            make_body, None, f"optimizer {spec!r}", threads=optimizer_kernels.THREADS, min_blocks=2,
            shared_bytes=4 * optimizer_kernels.THREADS,
        )  # fmt: skip

    @property
    def programs(self) -> list[Program]:
        return [self.program]

    def run(
        self, partial: PartialSums, n_network: int, n_params: int, table_gradient: int, loss: int, loss_scale: float,
        stream: int, **more: int | float,
    ) -> None:  # fmt: skip
        kernel = self.program.kernel
        kernel.set(
            n_network=n_network, n_params=n_params, n_partials=partial.n_rows, partial_sums=partial.address,
            row_bytes=partial.row_bytes, table_gradient=table_gradient, losses=partial.losses,
            n_losses=partial.n_losses, loss=loss, loss_scale=loss_scale, **more,
        )  # fmt: skip
        kernel.launch(optimizer_kernels.n_blocks(n_network, n_params), stream)


class GradientScaleProgram:
    """Finds the power of two for given output gradients of one dtype, and writes it and its inverse."""

    def __init__(self, toolbox: Toolbox, dtype: str):
        self.largest = toolbox.load(
            lambda target: optimizer_kernels.make_largest_gradient_kernel(target, dtype), None,
            f"largest gradient {dtype}", threads=256,
        )  # fmt: skip
        self.write = toolbox.load(optimizer_kernels.make_write_scales_kernel, None, "write scales", threads=32)

    @property
    def programs(self) -> list[Program]:
        return [self.largest, self.write]

    def run(self, y: int, y_stride: int, batch: int, n_columns: int, maximum: DeviceBuffer, scales: int, stream: int):
        maximum.fill_zero(stream)
        self.largest.kernel.set(y=y, y_stride=y_stride, batch=batch, n_columns=n_columns, maximum=maximum.address)
        self.largest.kernel.launch(self.largest.n_blocks(-(-batch * n_columns // 256)), stream)
        self.write.kernel.set(maximum=maximum.address, scales=scales)
        self.write.kernel.launch(1, stream)

