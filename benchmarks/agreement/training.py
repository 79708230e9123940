"""Runs of several steps, fused and in the reference.

Two right implementations part on the way: each rounds in its own order, and what one step leaves the next ones amplify.
How fast depends on what is asked.

`sgd_run`: the parameters after some steps of SGD. A step is linear in the gradient, so they part by about what the
gradients are apart, far less than 1e-2 of the way (`TRAINED`), as long as the way is short: steps go 1e-3 of the
parameters. Farther, stiff models (relative losses of outputs near 0) are thrown about by any step.

`adam_steps`, `optimizer_run`: an optimizer behind gradients that are the same for both sides. They are measured on the
device and given to the reference's optimizer, whose float32 arithmetic is the same but for quotients, roots, products
that are rounded before they are added or not, and the order of sums over layers: 1e-4 of the way (`SAME_GRADIENTS`).
Adam's own first moments say what its gradients were, to the bit. For other optimizers a second model on the device is
asked; table gradients are summed by atomics, in any order, and where a gradient is all rounding Adam makes a whole step
of its sign. So elements whose gradient was once below 1e-5 of its level's largest are left out there, and counted.
Steps should be long against the last place of a parameter, in which each may differ by one more: Lookahead by
0.3 (w - slow) meets the middle between two float32 numbers in every tenth parameter. Here SGD therefore goes as far
with each step as it goes in all of `sgd_run` (`WAY`), and as far as Adam. Where steps are short (rates that decay,
Novograd's gradients of length 1), a second right optimizer is asked, whose every step ends a last place off.

No run may leave the range of numbers: whether an h of 65510 is infinite is rounding, and behind it nothing moves or can
be compared. So the reference goes first, and where it doesn't stay finite the rate is lowered, a sixteenth at a time.
Where that is no help (AdaBound's steps have a least size, whatever its rate), an optimizer makes fewer steps.

`adam_run`: losses and outputs of some steps of Adam, each side with its own gradients. Here such signs decide in every
element that hardly matters, and runs part as fast as the model lets them: there is no bar that is right for all models.
It is fair to ask how far second right implementations go astray on this one (`second_reference.py`), and to allow some
times that. Below a twentieth of the way that the outputs went (`ADAM_OUTPUTS`) nobody has to ask. A wrong gradient or
optimizer is off by as much as the way itself, so a comparison that allows half of it says nothing, and is counted.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from dataclasses import dataclass

import numpy as np

from numba_tcnn.arrays import host_view
from numba_tcnn.config import parse_optimizer
from numba_tcnn.layout import parameter_blocks
from numba_tcnn.reference import make_optimizer
from numba_tcnn.reference.engine import ReferenceRuntime
from numba_tcnn.reference.optimizer_contract import Optimizer

from .comparison import TOLERANCES, Figure, relative_error
from .draws import Config, Draw
from .fused_model import FusedModel
from .random_optimizers import names_of, with_sgd_rate
from .second_reference import SecondReference, round_otherwise

TRAINED = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 1e-3}
ADAM_LOSSES = {"float16": 1e-2, "bfloat16": 1e-2, "float32": 1e-4}
ADAM_OUTPUTS = {"float16": 5e-2, "bfloat16": 5e-2, "float32": 1e-3}
"""Two right implementations keep these in 19 of 20 random draws; the median is a hundredth of them, or less."""

SAME_GRADIENTS = 1e-4
SHAMPOO = 2e-3
"""Of the way, in place of SAME_GRADIENTS: inverse roots of sums of products that are 1e-7 apart differ by more."""
ALL_ROUNDING = 1e-5

SGD = {"otype": "SGD", "l2_reg": 0.0}
ADAM = {"otype": "Adam", "l2_reg": 0.0}
ADAM_RATE, NARROW = 2e-4, 64
"""Learning rate of networks of such a width; less of wider ones, whose sums of steps grow with it."""

MOST_RATES = 4
WAY, WAY_STEPS = 1e-3, 20
"""How far SGD is to go, relative to the parameters that move, and in how many steps of `sgd_run`."""


@dataclass(frozen=True)
class TrainingData:
    """x [batch, n_input_dims], targets [batch, n_output_dims]."""

    draw: Draw
    x: np.ndarray
    y: np.ndarray

    @property
    def numbers(self) -> np.ndarray:
        """x in float32, which holds all of its dtypes' values."""
        return self.x.astype(np.float32)

    def run(
        self, params: np.ndarray, optimizer: Config, rate: float, n_steps: int, *, second: int | None = None
    ) -> ReferenceRun:
        """Some steps in the reference, or in the second right implementation with that noise."""
        draw, density = self.draw, self.draw.densities(len(self.x))
        runtime = ReferenceRuntime(draw.spec, params, draw.reference_dtype)
        if second is not None:
            round_otherwise(runtime.model, second)
        runtime.configure_training(parse_optimizer(optimizer), draw.loss_spec)
        runtime.set_max_level(draw.levels(len(self.x)))
        runtime.learning_rate = rate
        x, y = host_view(self.numbers), host_view(self.y)
        density = None if density is None else host_view(density.astype(np.float32))
        losses = [float(runtime.training_step(x, y, data_pdf=density)) for _ in range(n_steps)]
        outputs = np.empty(self.y.shape, np.float32)
        runtime.inference(x, host_view(outputs))
        return ReferenceRun(runtime, np.array(losses), outputs)


@dataclass(frozen=True)
class ReferenceRun:
    """The trained runtime, the losses [n_steps], and the outputs for the same x."""

    runtime: ReferenceRuntime
    losses: np.ndarray
    outputs: np.ndarray


def training_data(draw: Draw, params: np.ndarray, batch: int) -> TrainingData:
    x = draw.inputs(batch)
    outputs = draw.model(params, "float32", batch).forward(x.astype(np.float32))
    return TrainingData(draw, x, draw.targets(outputs))


# --------------------------------------------------------------------------------------------- SGD


def sgd_run(fused: FusedModel, data: TrainingData, n_steps: int) -> Figure:
    """Distance of the parameters after some steps, over the way that the reference's went."""
    start = fused.params
    rate, reference = finite_run(data, start, SGD, sgd_rate(data, start, WAY_STEPS), n_steps)
    trainer, placed = fused.train(SGD, rate), fused.batch(data.x, data.y)
    for _ in range(n_steps):
        fused.step(trainer, placed)
    assert trainer.skipped_steps == 0, "a step was skipped"
    expected = reference.runtime.params
    way = np.linalg.norm(expected.astype(np.float64) - start)

    def distance(params: np.ndarray) -> float:
        return float(np.linalg.norm(params.astype(np.float64) - expected) / way) if way else float("inf")

    def second_error(seed: int) -> float:
        return distance(data.run(start, SGD, rate, n_steps, second=seed).runtime.params)

    return Figure.measured(distance(fused.network.params), TRAINED[data.draw.dtype], second_error)


class NotFinite(RuntimeError):
    """The reference leaves the range of numbers, whatever the learning rate."""


def finite_run(data: TrainingData, params: np.ndarray, optimizer: Config, rate: float, n_steps: int):
    """(rate, the reference's run with it): of less than `rate` where training would leave the range of numbers."""
    for _ in range(MOST_RATES):
        with np.errstate(all="ignore"):  # of what leaves it, and of matrices without roots
            run = data.run(params, optimizer, rate, n_steps)
        if run.runtime.skipped_steps == 0 and np.isfinite(run.losses).all() and np.isfinite(run.outputs).all():
            return rate, run
        rate /= 16
    raise NotFinite(f"no learning rate down to {rate:g} keeps the reference finite")


def finite_course(data: TrainingData, optimizer: Config, params: np.ndarray, rate: float, n_steps: int):
    """(rate, steps) with which the reference stays finite: as many steps as can be."""
    for fewer in range(n_steps, 1, -1):
        with contextlib.suppress(NotFinite):
            return finite_run(data, params, optimizer, rate, fewer)[0], fewer
    return finite_run(data, params, optimizer, rate, 1)[0], 1


def sgd_rate(data: TrainingData, params: np.ndarray, n_steps: int) -> float:
    """With which so many steps go `WAY` of the parameters that have a gradient."""
    model = data.draw.model(params, "float32", len(data.x))
    density = data.draw.densities(len(data.x))
    _, gradients = model.loss_and_gradients(data.numbers, data.y, data.draw.loss_spec, density, input=False)
    moving = gradients.params != 0
    return float(WAY / n_steps * np.linalg.norm(params[moving]) / max(np.linalg.norm(gradients.params), 1e-30))


# ----------------------------------------------------------------------------------- given gradients


def adam_steps(fused: FusedModel, data: TrainingData, n_steps: int = 2) -> Figure:
    """Steps of Adam from identical gradients: those that its own first moments show, m = β m + (1 - β) g. Elements of a
    table that were not stepped had the gradient 0."""
    trainer, placed = fused.train(ADAM), fused.batch(data.x, data.y)
    spec, n_params = parse_optimizer(ADAM), len(fused.params)
    twin, expected = make_optimizer(spec, n_params, data.draw.spec.layer_shapes), fused.params.copy()
    moments, steps = np.zeros(n_params), np.zeros(n_params, np.uint32)
    for _ in range(n_steps):
        fused.step(trainer, placed)
        state = trainer.optimizer.state_dict()
        now, steps_now = state["first_moments"].astype(np.float64), state["param_steps"]
        gradients = np.where(steps_now > steps, (now - spec.beta1 * moments) / (1 - spec.beta1), 0)
        twin.step(expected, gradients.astype(np.float32))
        moments, steps = now, steps_now
    return Figure(distance_over_way(fused.network.params, expected, fused.params), SAME_GRADIENTS)


def optimizer_run(fused: FusedModel, data: TrainingData, optimizer: Config, n_steps: int) -> OptimizerRun:
    """Some steps of any optimizer, the gradient of each measured on a second model on the device."""
    draw, start = data.draw, fused.params
    if "SGD" in names_of(optimizer):  # a power of two: few kernels for many draws
        optimizer = with_sgd_rate(optimizer, 2.0 ** round(np.log2(sgd_rate(data, start, 1))))
    twin = make_optimizer(parse_optimizer(optimizer), len(start), draw.spec.layer_shapes)
    rate, n_steps = finite_course(data, optimizer, start, twin.learning_rate, n_steps)
    trainer = fused.train(optimizer, None if rate == twin.learning_rate else rate)
    twin.learning_rate = rate
    placed, probe = fused.batch(data.x, data.y), FusedModel(draw, start)
    given, settled = [], np.ones(len(start), bool)
    for _ in range(n_steps):
        probe.params = probe.network.params = fused.network.params
        _, gradients = probe.training_step(data.x, data.y)
        settled &= is_settled(draw, gradients)
        given.append(gradients)
        fused.step(trainer, placed)
    bar = SHAMPOO if "Shampoo" in names_of(optimizer) else SAME_GRADIENTS
    expected, expected_kept = steps_from(twin, start, given)
    params, kept = fused.network.params, trainer.optimizer.inference_params
    assert (kept is None) == (expected_kept is None), "only one side keeps parameters for inference"

    def errors_of(params: np.ndarray, kept: np.ndarray | None) -> dict[str, float]:
        errors = {"parameters": distance_over_way(params[settled], expected[settled], start[settled])}
        if kept is not None:
            errors["those of inference"] = distance_over_way(kept[settled], expected_kept[settled], start[settled])
        return errors

    def second_error(seed: int) -> float:
        second = make_optimizer(parse_optimizer(optimizer), len(start), draw.spec.layer_shapes)
        second.learning_rate = rate
        return errors_of(*steps_from(second, start, given, np.random.default_rng(seed)))[where]

    errors = errors_of(params, kept)
    where = max(errors, key=errors.get)
    assert trainer.skipped_steps == 0, "a step was skipped"
    used = params if kept is None else kept
    expected_outputs = draw.model(used, draw.reference_dtype, len(data.x)).forward(data.numbers)

    def output_error(outputs: np.ndarray) -> float:
        return relative_error(outputs, expected_outputs)

    return OptimizerRun(
        Figure.measured(errors[where], bar, second_error, where),
        Figure.measured(
            output_error(fused.inference(data.x, "float32")),
            TOLERANCES[draw.dtype],
            lambda seed: output_error(SecondReference(draw, used, seed).inference(data.x, "float32")),
        ),
        float(1 - settled.mean()),
        n_steps,
    )


@dataclass(frozen=True)
class OptimizerRun:
    """`outputs`: of inference with the parameters of after; `left_out`: the fraction of the elements; `n_steps`: those
    that were made."""

    params: Figure
    outputs: Figure
    left_out: float
    n_steps: int


def steps_from(
    optimizer: Optimizer, start: np.ndarray, gradients: list[np.ndarray], noise: np.random.Generator | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """(parameters, those of inference if it keeps some) behind a step of each gradient; with `noise`, a parameter may
    be one place off, either way, behind each."""
    params = start.copy()
    for gradient in gradients:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of matrices without roots
            optimizer.step(params, gradient.copy())
        if noise is not None:
            params += np.spacing(params) * noise.integers(-1, 2, params.shape, np.int8)
    return params, optimizer.inference_params


def is_settled(draw: Draw, gradients: np.ndarray) -> np.ndarray:
    """Where a gradient is 0 or large enough for its sign to be no rounding, [n_params]."""
    settled = np.ones(len(gradients), bool)
    for block in parameter_blocks(draw.spec):
        size = np.abs(block.stored(gradients))
        block.stored(settled)[...] = (size == 0) | (size > ALL_ROUNDING * size.max(initial=0))
    return settled


def distance_over_way(params: np.ndarray, expected: np.ndarray, start: np.ndarray) -> float:
    """|params - expected| beyond a rounding of the parameters themselves to float32, over |expected - start|."""
    expected = expected.astype(np.float64)
    difference = np.maximum(np.abs(params - expected) - 2.0**-23 * np.abs(expected), 0)
    way = np.linalg.norm(expected - start)
    return 0.0 if not difference.any() else float(np.linalg.norm(difference) / way) if way else float("inf")


# ------------------------------------------------------------------------------------------- Adam


@dataclass(frozen=True)
class AdamRun:
    """losses    the largest difference of a step, over the largest loss
    outputs   distance over the way that training went: 1 is what no training at all would give
    """

    losses: Figure
    outputs: Figure


def adam_run(fused: FusedModel, data: TrainingData, n_steps: int) -> AdamRun:
    """From the same parameters, each side with its own gradients."""
    start = fused.params
    rate, reference = finite_run(data, start, ADAM, adam_rate(data.draw), n_steps)
    trainer, placed = fused.train(ADAM, rate), fused.batch(data.x, data.y)
    predict = fused.predictor(placed, data.y.shape)
    predict()  # what comes again later is a recorded call, where there are any
    losses, outputs = np.array([float(fused.step(trainer, placed)) for _ in range(n_steps)]), predict()
    before = data.draw.model(start, data.draw.reference_dtype, len(data.x)).forward(data.numbers)
    way, dtype = np.linalg.norm(before.astype(np.float64) - reference.outputs), data.draw.dtype

    @functools.cache
    def second(seed: int) -> ReferenceRun:
        return data.run(start, ADAM, rate, n_steps, second=seed)

    def loss_error(values: np.ndarray) -> float:
        largest = np.abs(reference.losses).max()
        return float(np.abs(values - reference.losses).max() / largest) if largest else float(np.abs(values).max())

    def output_error(values: np.ndarray) -> float:
        difference = np.linalg.norm(values.astype(np.float64) - reference.outputs)
        return float(difference / way) if way else float(difference)

    return AdamRun(
        Figure.measured(loss_error(losses), ADAM_LOSSES[dtype], lambda seed: loss_error(second(seed).losses)),
        Figure.measured(output_error(outputs), ADAM_OUTPUTS[dtype], lambda seed: output_error(second(seed).outputs)),
    )


def adam_rate(draw: Draw) -> float:
    widest = max((width for shape in draw.spec.layer_shapes for width in shape), default=NARROW)
    return ADAM_RATE * min(1.0, NARROW / widest)
