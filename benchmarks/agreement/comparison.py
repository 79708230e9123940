"""Compares an implementation of a model with the reference of its dtype: outputs, dL/dx, and every block of dL/dparams.

Every figure is a relative L2 error. Three things keep it a measure of the implementation rather than of luck:

- Gates of ReLU units that are in doubt are settled sample by sample, with proof (`gate_flips.py`), and what the
  implementation stored for a sample has the last word (`stored_values.py`).
- The loss's derivative is taken at the outputs that the implementation itself gave. RelativeL1, for one, has the
  derivative 1/(|p| + 0.01): where p is near 0 it turns an allowed difference of 1e-4 in p into one of 1 %.
- With fewer than 257 samples an error is relative to the size that such a tensor typically has in this model, where
  its own is smaller: one sample's output, dL/dx or gradient of a level is a sum that may cancel to almost nothing.

Some models are worse conditioned than the tolerance foresees: 17 layers, a relative loss of outputs that are almost 0,
one sample that outweighs all others. An error beyond the tolerance is therefore measured against a second right
implementation too (`second_reference.py`): it may be as large as `TIMES_THE_SPREAD` times what those two are apart.
Which errors needed that is told (`Agreement.beyond`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from numba_tcnn.layout import ParameterBlock, parameter_blocks
from numba_tcnn.reference.losses import loss_function, mean_factor
from numba_tcnn.reference.model import Gradients

from .draws import Draw
from .gate_flips import CLOSED, Explanation, explain_rows, typical_size
from .second_reference import MOST_SECONDS, N_SECONDS, SecondReference
from .stored_values import guessed_rows, settle

TOLERANCE = 5e-3
"""Both sides round to float16 (2^-11 = 5e-4) at the same places, so that what is left is where sums in another order
cross a rounding boundary, and approximate exponentials. A wrong factor, index, sample or derivative costs per cents."""

TOLERANCES = {"float16": TOLERANCE, "bfloat16": TOLERANCE, "float32": 1e-5}
"""By dtype. bfloat16 rounds 8 times as coarsely (2^-8 = 4e-3), but sums cross 8 times as few boundaries, so that the
root of the sum of squares grows by sqrt(8). float32 is compared with float64 and is what this project promises."""

TIMES_THE_SPREAD = 4
"""Rounding is luck: the same model with other noise may be off by some times as much."""

HALF_OUTPUTS = 2.0**-11
"""Where outputs are float16, both sides round them once more, and float32 is no better than that."""

FEW_SAMPLES = 256
MAX_ROWS_ONE_BY_ONE = 1000


class Implementation(Protocol):
    """What is compared. Arrays are NumPy's; x has the draw's input dtype."""

    def inference(self, x: np.ndarray, dtype: str) -> np.ndarray: ...

    def backward(self, x: np.ndarray, dL_dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(dL/dparams, dL/dx) for given dL/dy."""

    def training_step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """(loss, dL/dparams) of a training step from the draw's parameters."""


@dataclass
class Agreement:
    """Errors by tensor against the reference of the dtype; `distance` is that to the float32 one, for the record.

    spread         errors of a second right implementation; measured only where some error is beyond the tolerance
    n_suspicious   samples whose gates were looked at; of `n_read` an implementation was asked what it had stored
    """

    batch: int
    tolerance: float = TOLERANCE
    half_outputs: bool = False
    errors: dict[str, float] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=dict)
    distance: dict[str, float] = field(default_factory=dict)
    n_suspicious: int = 0
    n_flipped: int = 0
    n_read: int = 0
    unexplained: list[int] = field(default_factory=list)

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.errors.items(), key=lambda item: (np.isnan(item[1]), item[1]))

    @property
    def beyond(self) -> dict[str, float]:
        """Errors beyond the tolerance."""
        return {name: error for name, error in self.errors.items() if not error <= self._tolerance_of(name)}

    def allowed(self, name: str) -> float:
        """The largest error that this tensor may have."""
        return max(self._tolerance_of(name), TIMES_THE_SPREAD * self.spread.get(name, 0.0))

    @property
    def wrong(self) -> dict[str, float]:
        """Errors that no right implementation has."""
        return {name: error for name, error in self.errors.items() if not error <= self.allowed(name)}

    @property
    def holds(self) -> bool:
        return not self.unexplained and not self.wrong

    def _tolerance_of(self, name: str) -> float:
        return max(self.tolerance, HALF_OUTPUTS) if self.half_outputs and name == "outputs" else self.tolerance

    def figures(self, names: Sequence[str]) -> Iterator[tuple[str, Figure]]:
        """One for each tensor, under the name of the group that it is of."""
        for name, error in self.errors.items():
            group, _, block = name.partition(" of ")
            where = f"{block or group}, {self.batch} samples"
            if group in names:
                yield group, Figure(error, self._tolerance_of(name), self.spread.get(name), where)

    def __str__(self) -> str:
        def text(errors: dict[str, float]) -> str:
            return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())

        whole = {name: error for name, error in self.errors.items() if " of " not in name}
        parts = [f"batch {self.batch}: {text(whole)}", f"worst: {text(dict([self.worst]))}"]
        parts.append(
            f"{self.n_flipped} samples with flipped gates of {self.n_suspicious} looked at, {self.n_read} read"
        )
        if self.beyond:
            parts.append("beyond the tolerance, of two right ones: " + text({n: self.spread[n] for n in self.beyond}))
        if self.unexplained:
            parts.append(f"UNEXPLAINED samples: {self.unexplained[:5]}")
        return "; ".join([*parts, *([f"from float32: {text(self.distance)}"] if self.distance else [])])


@dataclass(frozen=True)
class Figure:
    """The error of one comparison of a draw, and the largest that it may have: `bar`, or some times the `spread`
    between two right implementations, which is measured where the bar is not kept.

    where   which tensor or batch it is of
    """

    error: float
    bar: float
    spread: float | None = None
    where: str = ""

    @property
    def limit(self) -> float:
        return max(self.bar, TIMES_THE_SPREAD * (self.spread or 0.0))

    @property
    def severity(self) -> float:
        """The error over its limit; infinite for NaN."""
        ratio = self.error / self.limit
        return float("inf") if np.isnan(ratio) else ratio

    @property
    def holds(self) -> bool:
        return self.error <= self.limit

    def __str__(self) -> str:
        text = f"{self.error:.1e}, of at most {self.limit:.1e}"
        text += "" if self.spread is None else f" (two right ones: {self.spread:.1e})"
        return text + (f", {self.where}" if self.where else "")

    @classmethod
    def measured(cls, error: float, bar: float, second: Callable[[int], float], where: str = "") -> Figure:
        """`second`: the error of the second right implementation with this noise, asked only if it matters."""
        figure = cls(error, bar, None, where)
        for seed in range(MOST_SECONDS):
            if figure.holds:
                break
            figure = cls(error, bar, max(figure.spread or 0.0, second(seed)), where)
        return figure


def relative_error(values: np.ndarray, expected: np.ndarray, typical: float = 0.0) -> float:
    """|values - expected| in L2, relative to |expected| or `typical`, whichever is larger; 0 where nothing differs."""
    difference = np.linalg.norm(values.astype(np.float64) - expected)
    if difference == 0:
        return 0.0
    size = max(float(np.linalg.norm(expected.astype(np.float64))), typical)
    return float(difference / size) if size > 0 else float("inf")


class Comparison:
    """One model, its parameters and inputs x [n, n_input_dims]; `on(implementation, batch)` compares the first rows.

    with_distance   also measure the distance to the float32 reference
    """

    def __init__(self, draw: Draw, params: np.ndarray, x: np.ndarray, *, with_distance: bool = True):
        self.draw, self.params, self.x, self.with_distance = draw, params, x, with_distance
        self.tolerance = TOLERANCES[draw.dtype]
        self.evaluate_loss = loss_function(draw.loss_spec, draw.n_output_dims)
        few = x[:1000].astype(np.float32)
        model, dL_dy = draw.model(params, draw.reference_dtype, len(few)), draw.output_gradients(len(few))
        self.typical_y = typical_size(model.forward(few))
        self.typical_slope = typical_size(model.backward(few, dL_dy, params=False).input) / typical_size(dL_dy)

    def on(self, implementation: Implementation, batch: int) -> Agreement:
        result = self._of(implementation, batch)
        if result.beyond:
            seconds = [self._of(SecondReference(self.draw, self.params, i), batch).errors for i in range(N_SECONDS)]
            result.spread = {name: max(errors[name] for errors in seconds) for name in result.errors}
        return result

    def _of(self, implementation: Implementation, batch: int) -> Agreement:
        self.model = self.draw.model(self.params, self.draw.reference_dtype, batch)
        result = Agreement(batch, self.tolerance, self.draw.output_dtype == "float16")
        x = self.x[:batch]
        explanation = self._outputs_and_given_gradients(result, implementation, x)
        self._training(result, implementation, x, explanation)
        return result

    def _outputs_and_given_gradients(self, result: Agreement, implementation: Implementation, x: np.ndarray):
        draw, model, numbers = self.draw, self.model, x.astype(np.float32)
        few = len(x) <= FEW_SAMPLES
        y = implementation.inference(x, draw.output_dtype)
        expected_y = model.forward(numbers)
        typical = self.typical_y * np.sqrt(len(x)) if few else 0.0
        result.errors["outputs"] = relative_error(y, expected_y.astype(draw.output_dtype), typical)

        dL_dy = draw.output_gradients(len(x))
        scale = np.float32(model.precision.gradient_scale(dL_dy))
        expected = model.backward(numbers, dL_dy)
        params, dx = implementation.backward(x, dL_dy)
        typical = self.typical_slope * typical_size(dL_dy)
        explanation = self._explain(implementation, x, dL_dy, scale, expected, params, dx, typical * scale)
        if has_gates(draw):
            result.n_read = len(guessed_rows(explanation))
            explanation = self._settled(explanation, implementation, x, dL_dy, dx, typical)
        result.n_suspicious, result.n_flipped = explanation.n_suspicious, len(explanation.rows)
        result.unexplained = explanation.unexplained.tolist() if has_gates(draw) else []

        twin_params, twin_dx = explanation.apply(expected, model, numbers, dL_dy * scale, 1 / scale)
        result.errors["dL/dx"] = relative_error(dx, twin_dx, typical * np.sqrt(len(x)) if few else 0.0)
        result.errors |= self._block_errors("dL/dparams", params, twin_params, few)
        if self.with_distance:
            exact = draw.model(self.params, "float32", len(x))
            gradients = exact.backward(numbers, dL_dy)
            result.distance["outputs"] = relative_error(y, exact.forward(numbers))
            result.distance["dL/dx"] = relative_error(dx, gradients.input)
            result.distance["dL/dparams"] = relative_error(params, gradients.params)
        return explanation

    def _training(self, result: Agreement, implementation: Implementation, x: np.ndarray, explanation: Explanation):
        draw, model, numbers = self.draw, self.model, x.astype(np.float32)
        own = implementation.inference(x, "float32")
        targets, density = draw.targets(own), draw.densities(len(x))
        values, dL_dy = self.evaluate_loss(own, targets, 1.0 if density is None else density.astype(np.float32))
        loss, params = implementation.training_step(x, targets)
        size = np.abs(values).mean(dtype=np.float64)  # 0 for a ConstantGradient, whose loss is
        result.errors["loss"] = float(abs(loss - values.mean(dtype=np.float64)) / size) if size else abs(loss)
        # as in `Model.loss_and_gradients`: the mean's factor comes last, in float32
        scale = np.float32(model.precision.gradient_scale(np.array(draw.loss_spec.gradient)))
        factor = mean_factor(draw.loss_spec, own.size) / scale
        dL_dy = dL_dy.astype(model.precision.compute) * scale
        expected = model._gradients(numbers, lambda rows, y: dL_dy[rows], factor, params=True, input=True, out=None)
        twin, _ = explanation.apply(expected, model, numbers, dL_dy, factor)
        result.errors |= self._block_errors("training", params, twin, len(x) <= FEW_SAMPLES)

    def _block_errors(self, name: str, values: np.ndarray, expected: np.ndarray, few: bool) -> dict[str, float]:
        """Of the whole vector and of every block."""

        def part(vector: np.ndarray, block: ParameterBlock) -> np.ndarray:
            return vector[block.offset : block.offset + block.size]

        blocks = parameter_blocks(self.draw.spec)
        levels: dict[str, list[float]] = {}  # sizes, by grid
        for block in blocks:
            levels.setdefault(grid_of(block), []).append(np.linalg.norm(part(expected, block)))
        errors = {name: relative_error(values, expected)}
        for block in blocks:
            grid = grid_of(block)
            typical = np.sqrt(np.mean(np.square(levels[grid]))) if few and grid else 0.0
            errors[f"{name} of {block.name}"] = relative_error(part(values, block), part(expected, block), typical)
        return errors

    def _explain(
        self,
        implementation: Implementation,
        x: np.ndarray,
        dL_dy: np.ndarray,
        scale: np.float32,
        expected: Gradients,
        params: np.ndarray,
        dx: np.ndarray,
        typical: float,
    ) -> Explanation:
        """Which gates the implementation found different. dL/dx shows it, but for Nearest grids, where it is 0: there
        the samples are looked at one by one, and only if the whole batch's gradients differ."""
        numbers = x.astype(np.float32)
        if self.draw.encoding.get("interpolation") == "Nearest" and has_gates(self.draw):
            errors = self._block_errors("", params, expected.params, len(x) <= FEW_SAMPLES)
            if max(errors.values()) > self.tolerance and len(x) <= MAX_ROWS_ONE_BY_ONE:
                one_by_one = [implementation.backward(x[i : i + 1], dL_dy[i : i + 1])[0] for i in range(len(x))]
                features = np.stack([feature_gradients(self.draw, gradient) for gradient in one_by_one])
                return explain_rows(self.model, numbers, dL_dy * scale, features * scale, of="features")
        return explain_rows(self.model, numbers, dL_dy * scale, dx * scale, typical=typical)

    def _settled(
        self,
        explanation: Explanation,
        implementation: Implementation,
        x: np.ndarray,
        dL_dy: np.ndarray,
        dx: np.ndarray,
        typical: float,
    ) -> Explanation:
        """What the implementation itself says about the samples whose gates were guessed, or beyond guessing."""
        numbers = x.astype(np.float32)
        if isinstance(implementation, SecondReference):
            return implementation.settle(explanation, self.model, numbers)

        def backward(some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return implementation.backward(x, some)

        return settle(explanation, self.model, numbers, dL_dy, dx, backward, typical)


def grid_of(block: ParameterBlock) -> str:
    """The grid that a block is a level of; "" for those of the network."""
    grid, level, _ = block.name.partition(".level")
    return grid if level else ""


def has_gates(draw: Draw) -> bool:
    network = draw.spec.network
    if network is None:
        return False
    return network.output_activation in CLOSED or (bool(network.hidden_widths) and network.activation in CLOSED)


def feature_gradients(draw: Draw, params_gradient: np.ndarray) -> np.ndarray:
    """dL/dfeatures of one sample from its gradient of a grid's tables: the weights of a sample's entries sum to 1, so
    the sum of a level's gradient over its entries is that of the level's features."""
    blocks = [block for block in parameter_blocks(draw.spec) if block.name.startswith("grid.")]
    tables = (params_gradient[b.offset : b.offset + b.size].reshape(b.shape) for b in blocks)
    return np.concatenate([table.sum(axis=0, dtype=np.float64) for table in tables]).astype(np.float32)
