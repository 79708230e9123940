"""Jobs: the kernels behind a call, as a function of specs and dtypes alone, before there is a device.

The engine makes a job where a call comes with dtypes that it has not seen, and `offline.py` makes the same jobs ahead
of any call. A job lists candidate plans, best first, and each plan's kernels; `choose` compiles candidates until one
does not spill. What a job compiles is told to the disk cache by each kernel's description, so equal jobs on equal chips
find each other's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..layout import n_network_params, n_params
from ..specs import AdamSpec, ModelSpec
from . import fuser, gradient_scale_kernels, optimizer_kernels
from .cache import CompiledKernel
from .compiler import MAX_SPILL_BYTES, CompileError
from .fragments import Target
from .gradient_scale_kernels import make_largest_gradient_kernel, make_write_scales_kernel
from .plan import Architecture, KernelPlan, StagedPlan, encoding_gradient_plan, gradient_plans, inference_plans
from .stage_io import GradientOptions, InferenceOptions, KernelBody


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

    @property
    def plan_in_words(self) -> str:
        return self.plan.describe() if self.plan else "element-wise"


class Job(Protocol):
    """Frozen, and made of specs and names only: it can be sent to another process."""

    def plans(self, chip: Architecture) -> list:
        """Candidates, best first. Raises PlanError where there are none."""

    def sources(self, plan: object) -> list[KernelSource]:
        """The kernels of one of them, in launch order."""

    def describe(self) -> str:
        """The call that this is for, in a few words."""


Chosen = tuple[object, list[tuple[KernelSource, CompiledKernel]]]


def choose(job: Job, chip: Architecture, compile_source: Callable[[KernelSource], CompiledKernel]) -> Chosen:
    """(plan, its kernels) of a job's first candidate of which no kernel spills."""
    reasons = []
    for plan in job.plans(chip):
        kernels, problem = [], None
        for source in job.sources(plan):
            try:
                compiled = compile_source(source)
            except CompileError as error:
                problem = f"{source.plan_in_words}: {error}"
                break
            kernels.append((source, compiled))
            if compiled.spill_bytes > MAX_SPILL_BYTES:
                problem = f"{source.plan_in_words}: {compiled.spill_bytes} bytes spilled"
                break
        if problem is None:
            return plan, kernels
        reasons.append(problem)
    raise CompileError("no kernel plan can be used: " + "; ".join(dict.fromkeys(reasons)))


@dataclass(frozen=True)
class InferenceJob:
    """Outputs of a batch, by one kernel."""

    spec: ModelSpec
    options: InferenceOptions

    def plans(self, chip: Architecture) -> list[KernelPlan]:
        return inference_plans(self.spec, chip)

    def sources(self, plan: KernelPlan) -> list[KernelSource]:
        def make_body(target):
            return fuser.make_inference_kernel(target, self.spec, plan, self.options)

        return [KernelSource.planned(make_body, f"inference {self.spec!r} {self.options!r}", plan)]

    def describe(self) -> str:
        return f"inference, {self.options.input_dtype} to {self.options.output_dtype}"


@dataclass(frozen=True)
class GradientJob:
    """Gradients of a batch: single where dW fits the registers, else staged."""

    spec: ModelSpec
    options: GradientOptions

    def plans(self, chip: Architecture) -> list[KernelPlan | StagedPlan]:
        if self.spec.network is None:
            return [encoding_gradient_plan(self.spec, chip)]
        return gradient_plans(self.spec, chip, encoding_gradient=self.options.encoding_gradient)

    def sources(self, plan: KernelPlan | StagedPlan) -> list[KernelSource]:
        spec, options = self.spec, self.options
        text = f"{spec!r} {options!r}"
        if isinstance(plan, KernelPlan):
            make = fuser.make_encoding_gradient_kernel if spec.network is None else fuser.make_single_gradient_kernel
            return [KernelSource.planned(lambda target: make(target, spec, plan, options), f"{plan.kind} {text}", plan)]
        sources = [
            KernelSource.planned(
                lambda target: fuser.make_propagate_kernel(target, spec, plan.propagate, options),
                f"propagate {text}",
                plan.propagate,
            )
        ]
        for kernel_plan, layers in plan.weight_gradients:

            def make_body(target, kernel_plan=kernel_plan, layers=layers):
                return fuser.make_weight_gradient_kernel(target, spec, kernel_plan, layers)

            sources.append(KernelSource.planned(make_body, f"weight gradient {spec!r} {layers!r}", kernel_plan))
        return sources

    def describe(self) -> str:
        options = self.options
        if options.loss is None:
            given = f"{options.target_dtype} output gradients"
        else:
            given = f"{options.target_dtype} targets, {options.loss}"
        density = f", {options.density_dtype} densities" if options.density_dtype else ""
        dx = ", and of inputs" if options.input_gradient else ""
        return f"gradients, {options.input_dtype} and {given}{density}{dx}"


@dataclass(frozen=True)
class _ElementWiseJob:
    """Kernels without a plan to choose: there is one candidate, None."""

    def plans(self, chip: Architecture) -> list[None]:
        return [None]


@dataclass(frozen=True)
class OptimizerJob(_ElementWiseJob):
    """What comes behind a gradient program: Adam, or with `optimizer` None the collection of gradients."""

    optimizer: AdamSpec | None

    def sources(self, plan: None) -> list[KernelSource]:
        def make_body(target):
            if self.optimizer is None:
                return optimizer_kernels.make_collect_kernel(target)
            return optimizer_kernels.make_adam_kernel(target, self.optimizer)

        return [
            KernelSource(
                make_body, f"optimizer {self.optimizer!r}", threads=optimizer_kernels.THREADS,
                min_blocks=optimizer_kernels.MIN_BLOCKS, shared_bytes=optimizer_kernels.SHARED_BYTES,
            )
        ]  # fmt: skip

    def describe(self) -> str:
        return "gradients handed out" if self.optimizer is None else "optimizer"


@dataclass(frozen=True)
class GradientScaleJob(_ElementWiseJob):
    """The power of two for given output gradients of one dtype: find the largest, then write the factors."""

    dtype: str

    def sources(self, plan: None) -> list[KernelSource]:
        return [
            KernelSource(
                lambda target: make_largest_gradient_kernel(target, self.dtype),
                f"largest gradient {self.dtype}",
                threads=gradient_scale_kernels.THREADS,
            ),
            KernelSource(make_write_scales_kernel, "write scales", threads=32),
        ]

    def describe(self) -> str:
        return f"scale of given {self.dtype} output gradients"


# ----------------------------------------------------------------------------------------- calls to jobs

ALIGNMENT = 16


def is_aligned(address: int, stride: int) -> bool:
    """Whether every row starts at a multiple of 16 bytes, so that kernels may load 16 bytes at a time."""
    return (address | stride) % ALIGNMENT == 0


def training_job(
    spec: ModelSpec,
    input_dtype: str,
    aligned: bool,
    target_dtype: str,
    *,
    loss: str | None,
    density_dtype: str | None = None,
) -> GradientJob:
    """The gradients of a training step; `loss` None: with output gradients given in place of targets."""
    options = GradientOptions(
        input_dtype=input_dtype, aligned_input=aligned, target_dtype=target_dtype, loss=loss,
        density_dtype=density_dtype, table_gradient=n_params(spec) > n_network_params(spec),
    )  # fmt: skip
    return GradientJob(spec, options)


def backward_job(
    spec: ModelSpec, input_dtype: str, aligned: bool, gradient_dtype: str, *, params: bool, input: bool
) -> GradientJob | None:
    """The gradients of a backward pass, of parameters and inputs where asked for; None where no kernel is needed."""
    has_table = n_params(spec) > n_network_params(spec)
    options = GradientOptions(
        input_dtype=input_dtype, aligned_input=aligned, target_dtype=gradient_dtype, loss=None,
        table_gradient=has_table and params, input_gradient=input,
    )  # fmt: skip
    return GradientJob(spec, options) if spec.network is not None or options.encoding_gradient else None
