"""Kernels ahead of any call, and without a device: what a model's first calls will look for, compiled into the cache.

`first_calls` lists jobs, `compile_jobs` compiles them in a few processes (Numba and LLVM compile one kernel at a time
in a process) and tells of each kernel. Jobs are those of the engine (`jobs.py`), so it finds every kernel by its key.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..engines import EngineUnavailable
from ..layout import n_network_params, n_params
from ..parameter_sizes import ParameterSizes
from ..specs import LossSpec, ModelSpec, OptimizerSpec
from .cache import CompiledKernel
from .compiler import CompileError, compile_kernel, key_of
from .element_wise_jobs import CollectJob, GradientScaleJob, optimizer_jobs
from .formats import number_format
from .jobs import (
    INPUT_DTYPES,
    Job,
    KernelSource,
    LevelSplitGradientJob,
    LevelSplitInferenceJob,
    backward_job,
    choose,
    inference_job,
    is_aligned,
    usual_training_jobs,
)
from .level_plan import can_split, is_splittable
from .optimizer_contract import Slice
from .optimizers import make_optimizer
from .plan import PlanError, architecture
from .stage_io import InferenceOptions
from .target import OutlineTarget

CAPABILITIES = {
    f"sm_{major}{minor}": (major, minor)
    for major, minor in (
        (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1),
    )
}  # fmt: skip
"""Compute capabilities of devices by the name of their architecture; kernels are made for one device's exactly."""

MAX_PROCESSES = 8
"""Unless the user asks for more: each takes some 300 MB, and a login node is shared."""

OUTPUT_DTYPES = ("float32", "float16")


def first_calls(spec: ModelSpec, optimizer: OptimizerSpec, loss: LossSpec, dtype: str = "float16") -> list[Job]:
    """What a model's first calls compile, the longest first:

    - a training step on float32 or float16 inputs (all other dtypes become float32) and float32 targets, with the
      optimizer, or without (`run_optimizer=False`);
    - backward on float32 inputs with float32 output gradients, of parameters and inputs;
    - inference from float32 or float16 inputs to float32 or float16 outputs;
    - training and inference of large batches too, where they have kernels of their own,

    of a model that computes in `dtype`.

    Arrays are taken to begin at a multiple of 16 bytes, as all do but parts of arrays. What is left out (float16
    targets or output gradients, sampling densities, external gradients, backward on float16 inputs or of parameters
    alone, second derivatives, `deterministic=True`, `max_level`) compiles when it is first called.
    """
    aligned = {given: is_aligned(0, spec.n_input_dims * np.dtype(given).itemsize) for given in INPUT_DTYPES}
    splits = (False, True) if is_splittable(spec, dtype) else (False,)
    made = make_optimizer(optimizer, Slice(0, ParameterSizes(n_params(spec), spec.layer_shapes)))
    jobs: list[Job | None] = [
        *usual_training_jobs(spec, loss, dtype),
        backward_job(spec, "float32", aligned["float32"], "float32", params=True, input=True, dtype=dtype),
        *(
            inference_job(spec, InferenceOptions(given, aligned[given], output), split=split, dtype=dtype)
            for split in splits
            for given in INPUT_DTYPES
            for output in OUTPUT_DTYPES
        ),
        *dict.fromkeys(job for job, _, _ in optimizer_jobs(made, n_network_params(spec), dtype)),
        CollectJob(),
        GradientScaleJob("float32") if number_format(dtype).scales_given_gradients else None,
    ]
    return [job for job in jobs if job is not None]


@dataclass(frozen=True)
class KernelRecord:
    """One kernel of a job. `seconds` are those of its compilation, whenever that was; it is not `taken` where it, or
    another of the same plan, spills. Calls may share a kernel, which then has the same `key` in the cache."""

    arch: str
    call: str
    kernel: str
    plan: str
    seconds: float
    from_cache: bool
    registers: int
    spill_bytes: int
    local_bytes: int
    shared_bytes: int
    threads: int
    mma_instructions: int
    vector_loads: int
    reductions: int
    taken: bool
    key: str


@dataclass(frozen=True)
class JobRecord:
    """A job's kernels for one architecture, and the seconds that they took now. `problem`: why none could be taken."""

    arch: str
    call: str
    seconds: float
    kernels: tuple[KernelRecord, ...]
    problem: str = ""

    @property
    def taken(self) -> list[KernelRecord]:
        return [kernel for kernel in self.kernels if kernel.taken]


def compile_job(job: Job, arch: str) -> JobRecord:
    """Compile a job's kernels for `arch`, e.g. "sm_90", or find them in the cache. A failure is in `problem`."""
    start = time.perf_counter()
    capability, compiled = CAPABILITIES[arch], []

    def compile_source(source: KernelSource) -> CompiledKernel:
        kernel = compile_kernel(
            source.make_body, source.description, capability, threads=source.threads, min_blocks=source.min_blocks
        )
        compiled.append((source, kernel))
        return kernel

    problem, chosen = "", []
    try:
        _, chosen = choose(job, architecture(capability), compile_source)
    except (PlanError, CompileError) as error:
        problem = str(error)
    taken = [source for source, _ in chosen]
    kernels = tuple(_record(job, arch, source, kernel, source in taken) for source, kernel in compiled)
    return JobRecord(arch, job.describe(), time.perf_counter() - start, kernels, problem)


def _record(job: Job, arch: str, source: KernelSource, kernel: CompiledKernel, taken: bool) -> KernelRecord:
    return KernelRecord(
        arch=arch,
        call=job.describe(),
        kernel=source.make_body(OutlineTarget()).name,
        plan=source.plan_in_words,
        seconds=kernel.compile_seconds,
        from_cache=kernel.from_cache,
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        local_bytes=kernel.local_bytes,
        shared_bytes=source.shared_bytes,
        threads=source.threads,
        mma_instructions=kernel.mma_instructions,
        vector_loads=kernel.vector_loads,
        reductions=kernel.reductions,
        taken=taken,
        key=key_of(source.description, CAPABILITIES[arch], threads=source.threads, min_blocks=source.min_blocks),
    )


def check_plans(jobs: Sequence[Job], archs: Sequence[str]) -> None:
    """Raises PlanError, naming the architecture, if a job has no plan there; compiles nothing."""
    for arch in archs:
        for job in jobs:
            try:
                job.plans(architecture(CAPABILITIES[arch]))
            except EngineUnavailable as error:
                raise PlanError(f"{arch}: {error}") from error


def called_jobs(jobs: Sequence[Job], archs: Sequence[str]) -> list[tuple[Job, str]]:
    """Each job for each architecture on which a model makes the call, in the order in which they compile."""
    return [(job, arch) for arch in archs for job in jobs if _is_called(job, arch)]


def compile_jobs(jobs: Sequence[Job], archs: Sequence[str], *, processes: int) -> Iterator[JobRecord]:
    """Those of `called_jobs`, in order, compiled in `processes` processes; with 1, in this one."""
    tasks = called_jobs(jobs, archs)
    processes = min(processes, len(tasks))
    if processes == 1:
        for job, arch in tasks:
            yield compile_job(job, arch)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=_ignore_interrupts
    )
    try:
        with _interrupts_ignored():
            futures = [pool.submit(compile_job, job, arch) for job, arch in tasks]
        for future in futures:
            yield future.result()
    except BaseException:  # Ctrl-C, or nobody wants the rest: a kernel can take half a minute
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _is_called(job: Job, arch: str) -> bool:
    """Whether a model ever makes this call on `arch`: only where there is a plan does it split a batch."""
    splits = isinstance(job, LevelSplitGradientJob | LevelSplitInferenceJob)
    return not splits or can_split(job.spec, architecture(CAPABILITIES[arch]))


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes that are started meanwhile ignore Ctrl-C from their first moment, and say nothing about it."""
    if threading.current_thread() is not threading.main_thread():  # only there may handlers change
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
