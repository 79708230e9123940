"""The second-order program: from a batch to partial sums of the parameters' gradient, dS/d(dL/dy) and dS/dx."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..layout import n_network_params, n_params
from ..specs import ModelSpec
from . import gradient_scale_kernels, second_order_kernels
from .fixed_point import fixed_point_of
from .gradient_programs import BATCH_FIELDS, Batch, batch_fields
from .gradient_scale_kernels import make_largest_gradient_kernel
from .jobs import KernelSource
from .plan import Architecture
from .programs import PartialSums, Toolbox, Workspace, find_largest_gradient
from .second_order_io import SecondOrderOptions
from .second_order_kernels import LARGEST_TANGENT_PLAN
from .second_order_plan import SecondOrderPlan, second_order_plans


@dataclass(frozen=True)
class SecondOrderJob:
    """Gradients of S = sum <v, dL/dx>: scales for u and v, then one kernel."""

    spec: ModelSpec
    options: SecondOrderOptions
    dtype: str = "float16"

    def plans(self, chip: Architecture) -> list[SecondOrderPlan]:
        return second_order_plans(self.spec, chip, self.dtype)

    def sources(self, plan: SecondOrderPlan) -> list[KernelSource]:
        spec, options = self.spec, self.options
        scale_threads = LARGEST_TANGENT_PLAN.threads
        return [
            KernelSource(
                lambda target: make_largest_gradient_kernel(target, options.target_dtype),
                f"largest gradient {options.target_dtype}",
                threads=gradient_scale_kernels.THREADS,
            ),
            KernelSource(
                lambda target: second_order_kernels.make_largest_tangent_kernel(target, spec, options, self.dtype),
                f"largest tangent {spec!r} {options!r} {self.dtype}",
                threads=scale_threads, min_blocks=LARGEST_TANGENT_PLAN.min_blocks, shared_bytes=4 * scale_threads,
            ),
            KernelSource(
                second_order_kernels.make_write_second_order_scales_kernel, "write second-order scales", threads=32
            ),
            KernelSource.planned(
                lambda target: second_order_kernels.make_second_order_kernel(target, spec, plan, options),
                f"second order {spec!r} {options!r}",
                plan,
            ),
        ]  # fmt: skip

    def describe(self) -> str:
        options = self.options
        return (
            f"second derivatives, {options.input_dtype}, {options.directions_dtype} directions "
            f"and {options.target_dtype} output gradients"
        )


def second_order_job(
    spec: ModelSpec,
    input_dtype: str,
    aligned: bool,
    directions_dtype: str,
    gradient_dtype: str,
    *,
    dtype: str = "float16",
    **how: bool,
) -> SecondOrderJob:
    """The job behind `backward_backward_input`.

    how   fixed_point and max_level, as in `GradientOptions`
    """
    options = SecondOrderOptions(
        input_dtype=input_dtype, aligned_input=aligned, target_dtype=gradient_dtype,
        table_gradient=n_params(spec) > n_network_params(spec), directions_dtype=directions_dtype, **how,
    )  # fmt: skip
    return SecondOrderJob(spec, options, dtype)


@dataclass(frozen=True)
class SecondOrderBatch(Batch):
    """A batch, `y` being dL/dy; v, and where dS/d(dL/dy) goes."""

    directions: int = field(kw_only=True)
    directions_stride: int = field(kw_only=True)
    derivative: int = field(kw_only=True)
    derivative_stride: int = field(kw_only=True)


class SecondOrderProgram:
    """Leaves partial sums for an optimizer program, whose factor of results is in `scales`."""

    def __init__(self, toolbox: Toolbox, job: SecondOrderJob, workspace: Workspace, constants: dict[str, int]):
        self.spec, self._workspace, self._fixed_point = job.spec, workspace, job.options.fixed_point
        self.plan, self.programs = toolbox.load_first_that_fits(job)
        self._largest_gradient, self._largest_tangent, self._write_scales, self._main = self.programs
        self._row_bytes = max(16, -(-4 * n_network_params(job.spec) // 16) * 16)
        maxima, self.scales = workspace.get("second-order maxima", 8), workspace.get("second-order scales", 16)
        self._largest_gradient.kernel.set(maximum=maxima)
        self._largest_tangent.kernel.set(maximum=maxima + 4, **constants)
        self._write_scales.kernel.set(maxima=maxima, scales=self.scales)
        self._main.kernel.set(row_bytes=self._row_bytes, scales=self.scales, **constants)

    def run(self, batch: SecondOrderBatch, mark: int, stream: int) -> PartialSums:
        self._find_scales(batch, stream)
        if self._fixed_point:
            self._main.kernel.set(**fixed_point_of(self.spec.encoding, batch.size, second_order=True).scales)
        n_tiles = -(-batch.size // self.plan.tile_rows)
        n_blocks = min(n_tiles, self._main.max_blocks)
        partial = self._workspace.get("partial sums", n_blocks * self._row_bytes)
        given = self._given(batch) | {"derivative": batch.derivative, "derivative_stride": batch.derivative_stride}
        self._main.kernel.set(n_tiles=n_tiles, partial_sums=partial, mark=mark, **given)
        self._main.kernel.launch(n_blocks, stream)
        n_rows = n_blocks if self.spec.network is not None else 0
        return PartialSums(partial, n_rows, self._row_bytes, partial, 0)

    def units(self, batch: int) -> dict[str, float]:
        """What a collecting program is told of the sums that such a batch has left."""
        return fixed_point_of(self.spec.encoding, batch, second_order=True).units if self._fixed_point else {}

    def _given(self, batch: SecondOrderBatch) -> dict[str, int]:
        directions = {"directions": batch.directions, "directions_stride": batch.directions_stride}
        return dict(zip(BATCH_FIELDS, batch_fields(batch), strict=True)) | directions

    def _find_scales(self, batch: SecondOrderBatch, stream: int) -> None:
        self._workspace.buffer("second-order maxima").fill_zero(stream)
        given = batch.y, batch.y_stride, batch.size, self.spec.n_output_dims
        find_largest_gradient(self._largest_gradient, *given, stream)
        n_tiles = -(-batch.size // LARGEST_TANGENT_PLAN.tile_rows)
        self._largest_tangent.kernel.set(n_tiles=n_tiles, **self._given(batch))
        self._largest_tangent.kernel.launch(min(n_tiles, self._largest_tangent.max_blocks), stream)
        self._write_scales.kernel.launch(1, stream)
