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
from dataclasses import dataclass
from typing import Protocol

from ..layout import n_network_params, n_params
from ..parameter_sizes import ParameterSizes
from ..specs import CompositeOptimizerSpec, ModelSpec, OptimizerSpec
from . import fuser, gradient_scale_kernels, level_kernels, optimizer_kernels
from .cache import CompiledKernel
from .compiler import MAX_SPILL_BYTES, CompileError
from .copied_features import with_features_copied
from .fragments import Target
from .gradient_scale_kernels import make_largest_gradient_kernel, make_write_scales_kernel
from .layer_jobs import layered_kernels
from .layer_optimizers import SHARED_BYTES as LAYER_SHARED_BYTES
from .layer_optimizers import LayerKernel, LayerLeaf
from .layer_plan import LayeredPlan, LayerGradientPlan, ProductPlan, layered_gradient_plans, layered_inference_plans
from .level_plan import LevelPlan, LevelSplitPlan, level_split_gradient_plans, level_split_inference_plans
from .losses import needs_luminance
from .optimizer_chains import Chain, make_after_kernel, make_chain_kernel
from .optimizer_contract import Optimizer, Slice
from .optimizer_state import VECTOR
from .optimizers import CLASSES
from .phased_kernel import make_phased_gradient_kernel
from .phased_plan import PhasedPlan
from .plan import (
    Architecture,
    KernelPlan,
    PlanError,
    StagedPlan,
    encoding_gradient_plan,
    gradient_plans,
    inference_plans,
)
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

    @classmethod
    def planned(cls, make_body: Callable[[Target], KernelBody], description: str, plan: AnyKernelPlan) -> KernelSource:
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
    """(plan, its kernels) of a job's first candidate of which no kernel spills, and none has its wgmma serialised; if
    all do either, the first that is only serialised."""
    reasons, serialized = [], None
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
        if problem is None and any(compiled.serialized for _, compiled in kernels):
            serialized = serialized or (plan, kernels)
        elif problem is None:
            return plan, kernels
        else:
            reasons.append(problem)
    if serialized is not None:
        return serialized
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
    """Gradients of a batch: single where dW fits the registers, else staged, else layer by layer."""

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


@dataclass(frozen=True)
class _ElementWiseJob:
    """Kernels without a plan to choose: there is one candidate, None."""

    def plans(self, chip: Architecture) -> list[None]:
        return [None]


@dataclass(frozen=True)
class OptimizerJob(_ElementWiseJob):
    """What updates one slice of the parameters, behind a gradient program.

    links         the optimizers of its chain without what they are around, the outermost first
    vector        encoding parameters a thread; in `after`, which knows no network, all parameters
    biases        whether some of the network's parameters are no matrices
    sizes         of the slice, where the leaf works layer by layer
    dtype         that the model computes in, and so what parameters are handed to its kernels as
    fixed_point   whether the table's gradient is in fixed point
    """

    links: tuple[OptimizerSpec, ...]
    vector: int = VECTOR
    vector_after: int = VECTOR
    biases: bool = False
    sizes: ParameterSizes | None = None
    dtype: str = "float16"
    fixed_point: bool = False

    def layer_kernels(self) -> list[LayerKernel]:
        leaf = CLASSES[type(self.links[-1])]
        return leaf.layer_kernels(self.links[-1], self.sizes) if issubclass(leaf, LayerLeaf) else []

    def sources(self, plan: None) -> list[KernelSource]:
        layer_kernels = self.layer_kernels()
        if not layer_kernels:
            return [self._chain_source(Chain(self.links))]
        kinds = [CLASSES[type(spec)] for spec in self.links]
        sources = [self._chain_source(Chain(self.links, after=False))]
        for number, kernel in enumerate(layer_kernels):
            description = f"layer optimizer {self.links[-1]!r} {self.sizes!r} {number} {self.dtype}"
            sources.append(
                KernelSource(
                    lambda target, kernel=kernel: kernel.make_body(target.storing(self.dtype)), description,
                    threads=kernel.threads, shared_bytes=LAYER_SHARED_BYTES,
                )
            )  # fmt: skip
        if any(kind.averages or kind.moves_before for kind in kinds):
            chain = Chain(self.links, before=False)
            sources.append(
                KernelSource(
                    lambda target: make_after_kernel(target.storing(self.dtype), chain, self.vector_after),
                    f"after {self._names} vector={self.vector_after} {self.dtype}", threads=optimizer_kernels.THREADS,
                )
            )  # fmt: skip
        return sources

    @property
    def _names(self) -> str:
        return ", ".join(map(repr, self.links))

    def _chain_source(self, chain: Chain) -> KernelSource:
        kind = "optimizer" if chain.is_whole else "before"
        sums = " fixed point" if self.fixed_point else ""
        how = {"biases": self.biases, "fixed_point": self.fixed_point}
        return KernelSource(
            lambda target: make_chain_kernel(target.storing(self.dtype), chain, self.vector, **how),
            f"{kind} {self._names} vector={self.vector} biases={self.biases}{sums} {self.dtype}",
            threads=optimizer_kernels.THREADS, min_blocks=optimizer_kernels.MIN_BLOCKS,
            shared_bytes=optimizer_kernels.SHARED_BYTES,
        )  # fmt: skip

    def describe(self) -> str:
        return "optimizer"


def optimizer_jobs(
    optimizer: Optimizer, n_network: int, dtype: str = "float16", *, fixed_point: bool = False
) -> list[tuple[OptimizerJob, Slice, list[Optimizer]]]:
    """A job for each slice of the parameters that has optimizers of its own, with the slice and those optimizers.

    Those of an empty slice still count their steps.
    """
    total = optimizer.where.sizes.n_params
    jobs = []
    for where, chain in optimizer.chains():
        links = [part for part in chain if part.fields is not None]
        start, stop = where.start, where.stop

        def vector(first: int, start: int = start, stop: int = stop) -> int:
            """Of the parameters from `first` on; a vector must not reach into the next slice."""
            starts_whole = start < first or start % VECTOR == 0
            return VECTOR if starts_whole and (stop <= first or stop == total or stop % VECTOR == 0) else 1

        job = OptimizerJob(
            tuple(bare(part.spec) for part in links),
            vector(n_network),
            vector(0),
            biases=where.sizes.n_matrix_params < min(n_network - start, where.sizes.n_params),
            sizes=where.sizes if isinstance(links[-1], LayerLeaf) else None,
            dtype=dtype,
            fixed_point=fixed_point,
        )
        jobs.append((job, where, links))
    return jobs


def bare(spec: OptimizerSpec) -> OptimizerSpec:
    """What a link is a function of: an optimizer without those that it is around."""
    if isinstance(spec, CompositeOptimizerSpec):
        return dataclasses.replace(spec, nested=(), n_params_to_optimize=())
    return dataclasses.replace(spec, nested=None) if hasattr(spec, "nested") else spec


@dataclass(frozen=True)
class CollectJob(_ElementWiseJob):
    """Gradients handed out instead; `fixed_point` as in `OptimizerJob`."""

    fixed_point: bool = False

    def sources(self, plan: None) -> list[KernelSource]:
        return [
            KernelSource(
                lambda target: optimizer_kernels.make_collect_kernel(target, fixed_point=self.fixed_point),
                "collect gradients, fixed point" if self.fixed_point else "collect gradients",
                threads=optimizer_kernels.THREADS,
                min_blocks=optimizer_kernels.MIN_BLOCKS, shared_bytes=optimizer_kernels.SHARED_BYTES,
            )
        ]  # fmt: skip

    def describe(self) -> str:
        return "gradients handed out"


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
