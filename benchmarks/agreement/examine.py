"""All comparisons of one draw, as a record that can be written as a line of JSON."""

from __future__ import annotations

import dataclasses
import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from numba_tcnn.engines import EngineUnavailable, KernelReport
from numba_tcnn.fused import device_status, dtypes_of
from numba_tcnn.fused.driver import CudaError
from numba_tcnn.fused.jobs import backward_job, inference_job, training_job
from numba_tcnn.fused.plan import PlanError, architecture
from numba_tcnn.fused.stage_io import InferenceOptions
from numba_tcnn.layout import n_network_params, n_params
from numba_tcnn.specs import CompositeSpec, EncodingSpec, GridSpec, ModelSpec

from .comparison import Agreement, Comparison, Figure
from .deck import Deck
from .draws import CONSTANT_GRADIENT, Draw
from .fused_model import FusedModel
from .processes import Lost
from .random_draws import random_draw
from .second_order import compare_second_order
from .training import adam_run, adam_steps, optimizer_run, sgd_run, training_data

COMPARED = ("outputs", "dL/dx", "dL/dparams", "training", "loss")
"""What `comparison.Comparison` compares; dL/dparams, and those of a training step, block by block."""

FIGURES = (*COMPARED, "second order", "SGD run", "Adam steps", "optimizer", "outputs behind it", "Adam run, losses",
           "Adam run, outputs")  # fmt: skip

AGREES, FAILS, NO_PLAN, NO_DTYPE = "agrees", "fails", "no plan", "no dtype"
"""What may become of a draw: NO_PLAN where this chip's planner has none for it, which is a gap, but no error."""


@dataclass(frozen=True)
class Scale:
    """How much of a draw is computed.

    batches        most samples of the small, the ragged and the large batch that calls are compared at. Of the large
                   one, blocks shall have several tiles, and tables of any size be worked on level by level
    training       samples of a training
    steps          of a run of SGD or Adam; `optimizer_steps`: behind given gradients
    pass_seconds   that the reference may take for one pass over the large batch, which else is smaller
    """

    batches: tuple[int, int, int] = (31, 300, 150_000)
    training: int = 700
    steps: int = 20
    optimizer_steps: int = 7
    pass_seconds: float = 0.5

    def sizes(self, draw: Draw) -> list[int]:
        """Ragged, and others for each draw."""
        random = np.random.default_rng([draw.seed, 9])
        small, ragged, large = self.batches
        large = min(large, int(self.pass_seconds / seconds_a_sample(draw.spec)))
        return [
            int(random.integers(1, small + 1)),
            int(random.integers(small + 1, ragged + 1)),
            max(ragged + 1, large - int(random.integers(0, 1 + large // 8))),
        ]


FULL = Scale()
ONLY_RUN = Scale((3, 37, 129), 65, 2, 2)
"""For a sanitizer, under which a kernel takes a hundred times as long."""


def seconds_a_sample(spec: ModelSpec) -> float:
    """About what NumPy takes to go forward and back, on a core of 2024."""
    units = sum(fan_out for fan_out, _ in spec.layer_shapes)
    work = 1.1e-4 * n_network_params(spec) + 0.01 * units + 0.004 * corner_values(spec.encoding)
    return 1e-6 * (work + 0.04 * spec.encoding_width)


def corner_values(encoding: EncodingSpec) -> int:
    """What a sample reads and multiplies in all grids of an encoding."""
    if isinstance(encoding, CompositeSpec):
        return sum(corner_values(child.encoding) for child in encoding.nested)
    if not isinstance(encoding, GridSpec):
        return 0
    n_corners = 1 if encoding.interpolation == "Nearest" else 2**encoding.n_input_dims
    return encoding.n_levels * n_corners * (encoding.n_features_per_level + encoding.n_input_dims)


@dataclass
class Record:
    """What was found about draw `number` of `seed`.

    figures    by comparison (`FIGURES`), of the worst batch and tensor
    failures   in words; a draw without any agrees
    notes      numbers and reasons beside
    plans      of the kernels that ran
    """

    seed: int
    number: int
    draw: dict[str, Any]
    status: str = AGREES
    figures: dict[str, Figure] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    plans: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, figure: Figure) -> None:
        """Keeps the worst of each name: the one that is closest to its limit, or farthest beyond."""
        if not figure.holds:
            self.fail(f"{name}: {figure}")
        if name not in self.figures or not figure.severity <= self.figures[name].severity:
            self.figures[name] = figure

    def fail(self, text: str) -> None:
        self.status = FAILS
        self.failures.append(text)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Record:
        figures = {name: Figure(**figure) for name, figure in values["figures"].items()}
        return cls(**values | {"figures": figures})


class LostContext(Exception):
    """A kernel broke the CUDA context: nothing can be computed in this process any more."""


def examine_number(number: int, *, seed: int, scale: Scale, compare: bool) -> dict[str, Any]:
    """The record of a draw, as JSON holds it. Without `compare` everything is run and nothing looked at."""
    draw = random_draw(Deck(seed, number))
    record = Record(seed, number, dataclasses.asdict(draw))
    try:
        return examine(draw, record, scale, compare=compare).to_json()
    except LostContext as lost:
        raise Lost(record.to_json()) from lost
    finally:
        gc.collect()  # models hold device memory, and are in cycles


def examine(draw: Draw, record: Record, scale: Scale, *, compare: bool = True) -> Record:
    """Raises LostContext where the process is of no use any more."""
    start = time.perf_counter()
    examination = Examination(draw, record, scale)
    stages = examination.comparing() if compare else examination.running()
    examination.attempt("making the model", examination.prepare)
    if record.status == AGREES:
        for name, stage in stages:
            examination.attempt(name, stage)
    record.seconds["all"] = time.perf_counter() - start
    return record


class Examination:
    """One draw's model, on the device and in the reference, and what is done with it stage by stage."""

    def __init__(self, draw: Draw, record: Record, scale: Scale):
        self.draw, self.record, self.scale = draw, record, scale
        self._compiled: dict[str, float] = {}  # seconds, by kernel

    def attempt(self, name: str, stage: Callable[[], None]) -> None:
        """What a stage raises is a failure of the draw, and no reason to leave the next ones out."""
        try:
            stage()
        except CudaError as error:
            self.record.fail(f"{name}: {error}")
            raise LostContext from error
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.record.fail(f"{name}: {type(error).__name__}: {error} ({place.name}, line {place.lineno})")

    def prepare(self) -> None:
        capability = device_status(0).compute_capability
        if self.draw.dtype not in dtypes_of(capability):
            self.record.status = NO_DTYPE
            return
        reason = missing_plan(self.draw, capability)
        if reason:
            self.record.status, self.record.notes["no plan"] = NO_PLAN, reason
            return
        self.sizes = self.scale.sizes(self.draw)
        self.x = self.draw.inputs(max(*self.sizes, self.scale.training))
        self.params = self.draw.params(self.x)
        self.fused = FusedModel(self.draw, self.params)

    # ---------------------------------------------------------------------------------- comparing
    def comparing(self) -> list[tuple[str, Callable[[], None]]]:
        stages = [("calls", self._compare_calls), ("second order", self._compare_second_order)]
        if n_params(self.draw.spec) > 0:
            stages += [
                ("SGD run", self._compare_sgd),
                ("Adam steps", self._compare_adam_steps),
                ("optimizer", self._compare_optimizer),
                ("Adam run", self._compare_adam),
            ]
        return [*stages, ("plans", self._note_plans)]

    def _compare_calls(self) -> None:
        comparison = Comparison(self.draw, self.params, self.x, with_distance=False)
        for size in self.sizes:
            self._add(comparison.on(self.fused, size))
            self._note_plans()

    def _add(self, found: Agreement) -> None:
        for name, figure in found.figures(COMPARED):
            self.record.add(name, figure)
        if found.unexplained:
            self.record.fail(f"{len(found.unexplained)} of {found.batch} samples have gradients that nothing explains")
        gates = {"looked at": found.n_suspicious, "read off": found.n_read, "flipped": found.n_flipped}
        for name, number in gates.items():
            self.record.notes[f"gates {name}"] = self.record.notes.get(f"gates {name}", 0) + number

    def _compare_second_order(self) -> None:
        found = compare_second_order(self.fused, min(self.scale.training, self.sizes[-1]))
        if found.figure is None:
            self.record.notes["no second order"] = found.reason
            return
        self.record.add("second order", found.figure)
        self.record.notes["second order, samples in doubt"] = found.left_out

    def _data(self):
        return training_data(self.draw, self.params, self.scale.training)

    def _compare_sgd(self) -> None:
        self.record.add("SGD run", sgd_run(self.fused, self._data(), self.scale.steps))

    def _compare_adam_steps(self) -> None:
        self.record.add("Adam steps", adam_steps(self.fused, self._data()))

    def _compare_optimizer(self) -> None:
        found = optimizer_run(self.fused, self._data(), self.draw.optimizer, self.scale.optimizer_steps)
        self.record.add("optimizer", found.params)
        self.record.add("outputs behind it", found.outputs)
        self.record.notes["optimizer, elements left out"] = found.left_out
        self.record.notes["optimizer, steps"] = found.n_steps

    def _compare_adam(self) -> None:
        found = adam_run(self.fused, self._data(), self.scale.steps)
        self.record.add("Adam run, losses", found.losses)
        self.record.add("Adam run, outputs", found.outputs)
        self.record.notes["Adam run says nothing"] = found.outputs.limit > 0.5

    def _note_plans(self) -> None:
        """Called while the kernels of calls are still loaded."""
        kernels: tuple[KernelReport, ...] = self.fused.network.explain().kernels
        self.record.plans = sorted({*self.record.plans, *(kernel.plan for kernel in kernels)} - {"element-wise"})
        self._compiled |= {k.plan + k.name: k.compile_seconds for k in kernels if not k.from_cache}
        self.record.seconds["compiling"] = sum(self._compiled.values())

    # ------------------------------------------------------------------------------------- running
    def running(self) -> list[tuple[str, Callable[[], None]]]:
        stages = [("calls", self._run_calls), ("second order", self._run_second_order)]
        if n_params(self.draw.spec) > 0:
            stages.append(("optimizer", self._run_training))
        return [*stages, ("plans", self._note_plans)]

    def _run_calls(self) -> None:
        for size in self.sizes:
            x, dL_dy = self.x[:size], self.draw.output_gradients(size)
            outputs = self.fused.inference(x, self.draw.output_dtype)
            self.fused.backward(x, dL_dy)
            self.fused.training_step(x, self.draw.targets(outputs))

    def _run_second_order(self) -> None:
        x, size = self.x[: self.sizes[1]], self.sizes[1]
        try:
            self.fused.backward_backward_input(x, self.draw.directions(size), self.draw.output_gradients(size))
        except EngineUnavailable as error:
            self.record.notes["no second order"] = str(error)

    def _run_training(self) -> None:
        x = self.x[: self.scale.training]
        placed = self.fused.batch(x, self.draw.targets(self.fused.inference(x, "float32")))
        trainer = self.fused.train(self.draw.optimizer)
        for _ in range(self.scale.steps):
            self.fused.step(trainer, placed)
        self.fused.inference(x, "float32")


def missing_plan(draw: Draw, capability: tuple[int, int]) -> str:
    """Why the planner has no kernels for some call of this draw on such a chip; "" where it has."""
    chip, spec = architecture(capability), draw.spec
    loss = None if draw.loss == CONSTANT_GRADIENT else draw.loss
    jobs = (
        training_job(spec, "float32", False, "float32", loss=loss, dtype=draw.dtype),
        backward_job(spec, "float32", False, "float32", params=True, input=True, dtype=draw.dtype),
        inference_job(spec, InferenceOptions(), dtype=draw.dtype),
    )
    try:
        for job in jobs:
            job.plans(chip)
    except PlanError as error:
        return str(error)
    return ""
