"""Jobs without a plan to choose (`jobs.py`): optimizers, gradients handed out, scales of given gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..parameter_sizes import ParameterSizes
from ..specs import CompositeOptimizerSpec, OptimizerSpec
from . import gradient_scale_kernels, optimizer_kernels
from .gradient_scale_kernels import make_largest_gradient_kernel, make_write_scales_kernel
from .jobs import KernelSource
from .layer_optimizers import SHARED_BYTES as LAYER_SHARED_BYTES
from .layer_optimizers import LayerKernel, LayerLeaf
from .optimizer_chains import Chain, make_after_kernel, make_chain_kernel
from .optimizer_contract import Optimizer, Slice
from .optimizer_state import VECTOR
from .optimizers import CLASSES
from .plan import Architecture


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
