"""The level-split plan: a grid, its network and the grid's gradient as kernels of their own.

    encode      level by level, features to planes                     (level_kernels.py)
    network     a single kernel whose encoding reads those planes      (planes.py, fuser.py)
    gradients   level by level, planes of dL/dfeatures to the table gradient

A level whose table fits a block's shared memory is worked on there. Which levels do is settled by their size; they are
the first ones, as levels grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..layout import GridLevel, grid_levels
from ..specs import GridSpec, ModelSpec
from .copied_features import with_features_copied
from .network_plans import inference_plans, single_plans
from .plan import Architecture, KernelPlan
from .planes import network_behind_planes
from .stage_io import InferenceOptions

LEVEL_SPLIT_BATCH = 1 << 15
"""Samples from which on kernels that work level by level pay for their launches and for filling shared memory, where
the gradients of all levels are summed in shared memory;"""

WITH_GLOBAL_SUMS = 4
"""and so many times as many where those of some are summed in global memory. (Measured with tables of 2^19 entries: at
2^15 and 2^16 samples a step was 12 and 5 % slower level by level.)"""

TURNS_AT_ONCE = 2
"""Samples that a thread has in hand, so that the gathers of one hide those of the other."""

PLANES_IN = InferenceOptions("float16", True)
"""How the network's kernel reads features."""

THREADS = (1024, 512, 256)
COPY_BYTES = 16


@dataclass(frozen=True)
class LevelPlan:
    """One kernel that works level by level.

    first, count     levels
    shared           whether tables, or sums of gradients, are in shared memory
    rows_a_level     blocks along the grid's y axis a level: one, or one a feature
    """

    kind: str  # "encode levels" | "level gradients"
    first: int
    count: int
    shared: bool
    threads: int
    shared_bytes: int
    rows_a_level: int = 1
    min_blocks: int = 1

    @property
    def tile_rows(self) -> int:
        """Samples that a block has in hand."""
        return self.threads * TURNS_AT_ONCE

    @property
    def n_rows(self) -> int:
        return self.count * self.rows_a_level

    @property
    def gathers(self) -> bool:
        """Whether the kernel lives on the L1 cache. Of a multiprocessor's memory that has what shared memory leaves, as
        divided for the kernel before until all of its blocks are gone."""
        return self.kind == "encode levels" and not self.shared

    def describe(self) -> str:
        where = "shared" if self.shared else "global"
        return f"{self.kind}, {self.count} levels in {where} memory"


@dataclass(frozen=True)
class LevelSplitPlan:
    """Kernel plans in launch order. Without `gradients` for inference."""

    encode: tuple[LevelPlan, ...]
    network: KernelPlan
    gradients: tuple[LevelPlan, ...] = ()


def is_splittable(spec: ModelSpec, dtype: str = "float16") -> bool:
    """Whether a model is a grid with a network behind it, and computes in float16, which planes hold. (Its kernels know
    nothing of `grid_options.py`.)"""
    grid = spec.encoding
    if not isinstance(grid, GridSpec) or grid.stochastic_interpolation or grid.fixed_point_pos:
        return False
    return spec.network is not None and dtype == "float16"


def can_split(spec: ModelSpec, chip: Architecture, dtype: str = "float16") -> bool:
    """Whether, on this chip, the network has a single kernel to put between the grid's."""
    return is_splittable(spec, dtype) and bool(level_split_gradient_plans(spec, chip))


def split_batch(spec: ModelSpec, chip: Architecture, dtype: str = "float16") -> int | None:
    """Samples from which on a batch is worth splitting; None where it can't be."""
    plans = level_split_gradient_plans(spec, chip) if is_splittable(spec, dtype) else []
    if not plans:
        return None
    plan, *_ = plans
    return LEVEL_SPLIT_BATCH if all(part.shared for part in plan.gradients) else LEVEL_SPLIT_BATCH * WITH_GLOBAL_SUMS


def level_split_inference_plans(spec: ModelSpec, chip: Architecture) -> list[LevelSplitPlan]:
    """Candidates, best first."""
    behind = network_behind_planes(spec)
    networks = with_features_copied(inference_plans(behind, chip), behind, chip, PLANES_IN)
    return [
        LevelSplitPlan(_encode_plans(spec.encoding, chip, threads), network)
        for network in networks
        for threads in THREADS
    ]


def level_split_gradient_plans(spec: ModelSpec, chip: Architecture) -> list[LevelSplitPlan]:
    """Candidates, best first; none where the network has no single kernel."""
    grid: GridSpec = spec.encoding
    behind = network_behind_planes(spec)
    networks = with_features_copied(single_plans(behind, chip, encoding_gradient=True), behind, chip, PLANES_IN)
    return [
        LevelSplitPlan(_encode_plans(grid, chip, threads), network, _gradient_plans(grid, chip, threads))
        for network in networks
        for threads in THREADS
    ]


def _encode_plans(grid: GridSpec, chip: Architecture, threads: int) -> tuple[LevelPlan, ...]:
    """A table is copied to shared memory in pieces of 16 bytes, so it must consist of such."""

    def bytes_of(level: GridLevel) -> int:
        entry = 2 * grid.n_features_per_level
        whole = (level.offset * entry) % COPY_BYTES == 0 and (level.n_entries * entry) % COPY_BYTES == 0
        return level.n_entries * entry if whole else chip.shared_per_block + 1

    return _by_memory("encode levels", grid, chip, threads, 1, bytes_of)


def _gradient_plans(grid: GridSpec, chip: Architecture, threads: int) -> tuple[LevelPlan, ...]:
    """A block sums one feature of a level: two neighbouring features would share their banks."""
    return _by_memory(
        "level gradients", grid, chip, threads, grid.n_features_per_level, lambda level: 4 * level.n_entries
    )


def _by_memory(
    kind: str,
    grid: GridSpec,
    chip: Architecture,
    threads: int,
    rows_a_level: int,
    bytes_of: Callable[[GridLevel], int],
) -> tuple[LevelPlan, ...]:
    sizes = [bytes_of(level) for level in grid_levels(grid)]
    n_shared = next((i for i, size in enumerate(sizes) if size > chip.shared_per_block), len(sizes))
    plans = []
    if n_shared:
        shared_bytes = max(threads // 8, *sizes[:n_shared])  # a word a warp at least, for sums over the block
        plans.append(LevelPlan(kind, 0, n_shared, True, threads, shared_bytes, rows_a_level))
    if n_shared < len(sizes):
        # blocks of 256 threads: what hides latency here is blocks, of which many fit
        plans.append(LevelPlan(kind, n_shared, len(sizes) - n_shared, False, min(threads, 256), 16, min_blocks=4))
    return tuple(plans)
