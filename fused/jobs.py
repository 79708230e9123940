"""Jobs: the kernels behind a call, as a function of specs and dtypes alone, before there is a device.

The engine makes a job where a call comes with dtypes that it has not seen, and `offline.py` makes the same jobs ahead
of any call. A job lists candidate plans, best first, and each plan's kernels; `choose` compiles candidates until one
does not spill. What a job compiles is told to the disk cache by each kernel's description, so equal jobs on equal chips
find each other's kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ..layout import n_network_params, n_params
from ..specs import LossSpec, ModelSpec
from . import fuser, level_kernels
from .cache import CompiledKernel
from .compiler import MAX_SPILL_BYTES, CompileError
from .copied_features import with_features_copied
from .fragments import Target
from .layer_jobs import layered_kernels
from .layer_plan import LayeredPlan, LayerGradientPlan, ProductPlan, layered_gradient_plans, layered_inference_plans
from .level_plan import (
    LevelPlan,
    LevelSplitPlan,
    is_splittable,
    level_split_gradient_plans,
    level_split_inference_plans,
)
from .losses import CONSTANT_GRADIENT, needs_luminance
from .network_plans import encoding_gradient_plan, gradient_plans, inference_plans
from .phased_kernel import make_phased_gradient_kernel
from .phased_plan import PhasedPlan
from .plan import MAX_REGISTERS, Architecture, KernelPlan, PlanError, StagedPlan
from .planes import network_behind_planes
from .stage_io import GradientOptions, InferenceOptions, KernelBody

AnyKernelPlan = KernelPlan | LevelPlan | ProductPlan | LayerGradientPlan
"""One kernel's layout."""


@dataclass(frozen=True)
class KernelSource:
    """How to make one kernel: its body for a target, its layout, and what it is a function of (its cache key)."""

    make_body: Callable[[Target], KernelBody]
    description: str
    plan: AnyKernelPlan | None = None  # None: no tiles, and the following numbers hold
    threads: int = 0
    min_blocks: int = 1
    shared_bytes: int = 0
    place: PlaceInJob | None = field(default=None, compare=False)

    @classmethod
    def planned(cls, make_body: Callable[[Target], KernelBody], description: str, plan: AnyKernelPlan) -> KernelSource:
        return cls(make_body, f"{description} {plan!r}", plan, plan.threads, plan.min_blocks, plan.shared_bytes)

    @property
    def overlaps(self) -> bool:
        """Whether the kernel may start while the one before still runs."""
        return not (isinstance(self.plan, LevelPlan) and self.plan.gathers)

    @property
    def plan_in_words(self) -> str:
        return self.plan.describe() if self.plan else "element-wise"

    @property
    def work_of_a_warp(self) -> str:
        """Words that kernels of a job share whose warps do the same, however many there are; empty where what a warp
        does depends on their number, as dW is divided among them."""
        if not isinstance(self.plan, KernelPlan) or self.plan.layers:
            return ""
        return self.plan_in_words.replace(f"{self.plan.warps} warps", "warps")


class Job(Protocol):
    """Frozen, and made of specs and names only: it can be sent to another process."""

    def plans(self, chip: Architecture) -> list:
        """Candidates, best first. Raises PlanError where there are none."""

    def sources(self, plan: object) -> list[KernelSource]:
        """The kernels of one of them, in launch order."""

    def describe(self) -> str:
        """The call that this is for, in a few words."""


@dataclass(frozen=True)
class PlaceInJob:
    """Where another process finds a source, which can't be sent there: the numbers of its plan and of itself."""

    job: Job
    plan: int
    source: int

    def find(self, chip: Architecture) -> KernelSource:
        return self.job.sources(self.job.plans(chip)[self.plan])[self.source]


def placed_sources(job: Job, plans: list, number: int) -> list[KernelSource]:
    """The kernels of one of a job's plans, which know their places."""
    sources = job.sources(plans[number])
    return [dataclasses.replace(source, place=PlaceInJob(job, number, i)) for i, source in enumerate(sources)]


LAST_RESORT_SPILL_BYTES = 2048
"""A kernel may spill as much where all plans spill: memory for every thread that the device can hold, some 0.6 GB."""

Chosen = tuple[object, list[tuple[KernelSource, CompiledKernel]]]


def choose(
    job: Job,
    chip: Architecture,
    compile_source: Callable[[KernelSource], CompiledKernel],
    begin: Callable[[KernelSource], None] | None = None,
) -> Chosen:
    """(plan, its kernels) of a job's first candidate of which no kernel spills, and none has its wgmma serialised; if
    all do either, the first that is only serialised, then the one whose first kernel that spills does so least: slower
    than it could be, and still far from NumPy. `begin` is told of all kernels of the first candidate ahead."""
    reasons, serialized, spilling, hopeless = [], None, [], set()
    plans = job.plans(chip)
    for number, plan in enumerate(plans):
        kernels, problem = [], None
        sources = placed_sources(job, plans, number)
        if begin is not None and number == 0:
            for source in sources:
                begin(source)
        for source in sources:
            if source.work_of_a_warp in hopeless:
                problem = f"{source.plan_in_words}: spills, as with other numbers of warps"
                break
            try:
                compiled = compile_source(source)
            except CompileError as error:
                problem = f"{source.plan_in_words}: {error}"
                break
            kernels.append((source, compiled))
            if compiled.spill_bytes > MAX_SPILL_BYTES:
                problem = f"{source.plan_in_words}: {compiled.spill_bytes} bytes spilled"
                if compiled.spill_bytes <= LAST_RESORT_SPILL_BYTES:
                    spilling.append((compiled.spill_bytes, number))
                if compiled.registers >= MAX_REGISTERS and source.work_of_a_warp:
                    hopeless.add(source.work_of_a_warp)
                break
        if problem is None and any(compiled.serialized for _, compiled in kernels):
            serialized = serialized or (plan, kernels)
        elif problem is None:
            return plan, kernels
        else:
            reasons.append(problem)
    if serialized is not None:
        return serialized
    for _, number in sorted(spilling):
        try:
            sources = placed_sources(job, plans, number)
            return plans[number], [(source, compile_source(source)) for source in sources]
        except CompileError as error:
            reasons.append(str(error))
    raise CompileError("no kernel plan can be used: " + "; ".join(dict.fromkeys(reasons)))


def _then_layer_by_layer(
    make_fused: Callable, make_layered: Callable, spec: ModelSpec, chip: Architecture, dtype: str
) -> list:
    """Fused candidates, if there are any, and behind them those that go layer by layer."""
    try:
        fused = make_fused(spec, chip, dtype=dtype)
    except PlanError:
        return make_layered(spec, chip, dtype)
    try:
        return [*fused, *make_layered(spec, chip, dtype)]
    except PlanError:
        return fused


def _layered_sources(spec: ModelSpec, options, plan: LayeredPlan) -> list[KernelSource]:
    return [
        KernelSource.planned(make_body, f"{role} {text}", kernel_plan)
        for role, make_body, text, kernel_plan in layered_kernels(spec, options, plan)
    ]


@dataclass(frozen=True)
class InferenceJob:
    """Outputs of a batch, by one kernel where the network fits one, else layer by layer."""

    spec: ModelSpec
    options: InferenceOptions
    dtype: str = "float16"

    def plans(self, chip: Architecture) -> list[KernelPlan | LayeredPlan]:
        if self.spec.network is None:
            return inference_plans(self.spec, chip, self.dtype)
        plans = _then_layer_by_layer(inference_plans, layered_inference_plans, self.spec, chip, self.dtype)
        return with_features_copied(plans, self.spec, chip, self.options)

    def sources(self, plan: KernelPlan | LayeredPlan) -> list[KernelSource]:
        if isinstance(plan, LayeredPlan):
            return _layered_sources(self.spec, self.options, plan)

        def make_body(target):
            return fuser.make_inference_kernel(target, self.spec, plan, self.options)

        return [KernelSource.planned(make_body, f"inference {self.spec!r} {self.options!r}", plan)]

    def describe(self) -> str:
        return f"inference, {self.options.input_dtype} to {self.options.output_dtype}"


@dataclass(frozen=True)
class GradientJob:
    """Gradients of a batch: by one of the layouts of `network_plans.py` where one fits, else layer by layer."""

    spec: ModelSpec
    options: GradientOptions
    dtype: str = "float16"

    def plans(self, chip: Architecture) -> list[KernelPlan | StagedPlan | LayeredPlan]:
        if self.spec.network is None:
            return [encoding_gradient_plan(self.spec, chip, self.dtype)]
        fused = functools.partial(gradient_plans, encoding_gradient=self.options.encoding_gradient)
        plans = _then_layer_by_layer(fused, self._layered_plans, self.spec, chip, self.dtype)
        return with_features_copied(plans, self.spec, chip, self.options)

    def _layered_plans(self, spec: ModelSpec, chip: Architecture, dtype: str) -> list[LayeredPlan]:
        """A luminance is that of the first columns, so a block must have all of its rows' columns."""
        plans, loss = layered_gradient_plans(spec, chip, dtype), self.options.loss
        if loss is None or not needs_luminance(loss):
            return plans
        plans = [plan for plan in plans if plan.output.columns >= spec.padded_output_width]
        if not plans:
            raise PlanError(f"the loss {loss} of {spec.n_output_dims} outputs, layer by layer, has no fused kernel yet")
        return plans

    def sources(self, plan: KernelPlan | StagedPlan | LayeredPlan) -> list[KernelSource]:
        spec, options = self.spec, self.options
        if isinstance(plan, LayeredPlan):
            return _layered_sources(spec, options, plan)
        text = f"{spec!r} {options!r}"
        if isinstance(plan, KernelPlan):
            make = fuser.make_encoding_gradient_kernel if spec.network is None else fuser.make_single_gradient_kernel
            if isinstance(plan, PhasedPlan):
                make = make_phased_gradient_kernel
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


def _level_source(spec: ModelSpec, plan: LevelPlan, options: InferenceOptions | GradientOptions) -> KernelSource:
    makers = {
        "encode levels": level_kernels.make_encode_levels_kernel,
        "level gradients": level_kernels.make_level_gradients_kernel,
    }
    text = f"{plan.kind} {spec.encoding!r} {options.input_dtype} {options.aligned_input}"
    return KernelSource.planned(lambda target: makers[plan.kind](target, spec, plan, options), text, plan)


@dataclass(frozen=True)
class LevelSplitInferenceJob:
    """As `InferenceJob`, the grid level by level in kernels of its own."""

    spec: ModelSpec
    options: InferenceOptions

    def plans(self, chip: Architecture) -> list[LevelSplitPlan]:
        return level_split_inference_plans(self.spec, chip)

    def sources(self, plan: LevelSplitPlan) -> list[KernelSource]:
        options = InferenceOptions("float16", True, self.options.output_dtype)
        (network,) = InferenceJob(network_behind_planes(self.spec), options).sources(plan.network)
        return [*(_level_source(self.spec, p, self.options) for p in plan.encode), network]

    def describe(self) -> str:
        return f"inference of large batches, {self.options.input_dtype} to {self.options.output_dtype}"


@dataclass(frozen=True)
class LevelSplitGradientJob:
    """As `GradientJob`, the grid level by level in kernels of its own. There is no gradient of inputs."""

    spec: ModelSpec
    options: GradientOptions

    def plans(self, chip: Architecture) -> list[LevelSplitPlan]:
        return level_split_gradient_plans(self.spec, chip)

    def sources(self, plan: LevelSplitPlan) -> list[KernelSource]:
        options = dataclasses.replace(self.options, input_dtype="float16", aligned_input=True)
        (network,) = GradientJob(network_behind_planes(self.spec), options).sources(plan.network)
        return [
            *(_level_source(self.spec, p, self.options) for p in plan.encode),
            network,
            *(_level_source(self.spec, p, self.options) for p in plan.gradients),
        ]

    def describe(self) -> str:
        return f"{GradientJob(self.spec, self.options).describe()}, large batches"


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
    split: bool = False,
    dtype: str = "float16",
    **how: bool,
) -> GradientJob | LevelSplitGradientJob:
    """The gradients of a training step; `loss` None: with output gradients given in place of targets; `split`: the
    grid level by level, in float16; `dtype`: that the model computes in, the others being those of arrays.

    how   fixed_point and max_level, as in `GradientOptions`
    """
    options = GradientOptions(
        input_dtype=input_dtype, aligned_input=aligned, target_dtype=target_dtype, loss=loss,
        density_dtype=density_dtype, table_gradient=n_params(spec) > n_network_params(spec), **how,
    )  # fmt: skip
    return LevelSplitGradientJob(spec, options) if split else GradientJob(spec, options, dtype)


INPUT_DTYPES = ("float32", "float16")
"""Of training and inference; all others become float32."""


def usual_training_jobs(
    spec: ModelSpec, loss: LossSpec, dtype: str = "float16", **how: bool
) -> list[GradientJob | LevelSplitGradientJob]:
    """The gradients of steps on aligned inputs and float32 targets, of any batch size."""
    loss_name = None if loss.otype == CONSTANT_GRADIENT else loss.otype  # a gradient that is given
    return [
        training_job(
            spec, given, is_aligned(0, spec.n_input_dims * np.dtype(given).itemsize), "float32", loss=loss_name,
            split=split, dtype=dtype, **how,
        )
        for split in ((False, True) if is_splittable(spec, dtype) else (False,))
        for given in INPUT_DTYPES
    ]  # fmt: skip


def inference_job(
    spec: ModelSpec, options: InferenceOptions, *, split: bool = False, dtype: str = "float16"
) -> InferenceJob | LevelSplitInferenceJob:
    """The outputs of a batch; `split`: the grid level by level, in float16."""
    return LevelSplitInferenceJob(spec, options) if split else InferenceJob(spec, options, dtype)


def backward_job(
    spec: ModelSpec,
    input_dtype: str,
    aligned: bool,
    gradient_dtype: str,
    *,
    params: bool,
    input: bool,
    dtype: str = "float16",
    **how: bool,
) -> GradientJob | None:
    """The gradients of a backward pass, of parameters and inputs where asked for; None where no kernel is needed."""
    has_table = n_params(spec) > n_network_params(spec)
    options = GradientOptions(
        input_dtype=input_dtype, aligned_input=aligned, target_dtype=gradient_dtype, loss=None,
        table_gradient=has_table and params, input_gradient=input, **how,
    )  # fmt: skip
    return GradientJob(spec, options, dtype) if spec.network is not None or options.encoding_gradient else None
