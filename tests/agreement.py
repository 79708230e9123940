"""Compares an implementation of a model with the float16 reference: outputs, dL/dx, and every block of dL/dparams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from gate_flips import CLOSED, Explanation, explain_rows
from model_draws import Draw

from numba_tcnn.layout import parameter_blocks
from numba_tcnn.reference.losses import loss_function
from numba_tcnn.reference.model import Gradients, Model

TOLERANCE = 5e-3
"""Relative L2 error. A float16 has 2^-11 = 5e-4; both sides round at the same places, so that what is left is where
sums in another order cross a rounding boundary, and approximate exponentials. A wrong factor, index, sample or
derivative costs per cents at least."""

MAX_ROWS_ONE_BY_ONE = 1000


class Implementation(Protocol):
    """What is compared. Arrays are NumPy's; x has the draw's input dtype."""

    def inference(self, x: np.ndarray) -> np.ndarray: ...

    def backward(self, x: np.ndarray, dL_dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(dL/dparams, dL/dx) for given dL/dy."""

    def training_step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
        """(loss, dL/dparams) of a training step from the draw's parameters."""


@dataclass
class Agreement:
    """Relative L2 errors by tensor against the float16 reference; `distance` is that to the float32 one."""

    batch: int
    errors: dict[str, float] = field(default_factory=dict)
    distance: dict[str, float] = field(default_factory=dict)
    n_suspicious: int = 0
    n_flipped: int = 0
    unexplained: list[int] = field(default_factory=list)

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.errors.items(), key=lambda item: (np.isnan(item[1]), item[1]))

    @property
    def holds(self) -> bool:
        return not self.unexplained and all(error <= TOLERANCE for error in self.errors.values())

    def __str__(self) -> str:
        name, error = self.worst
        distance = ", ".join(f"{key} {value:.1e}" for key, value in self.distance.items())
        gates = f"{self.n_flipped} samples with flipped gates" if self.n_suspicious else "no flipped gates"
        unexplained = f"; UNEXPLAINED samples {self.unexplained[:5]}" if self.unexplained else ""
        overall = ", ".join(f"{key} {self.errors[key]:.1e}" for key in list(self.errors)[:3])
        return f"batch {self.batch}: {overall}; worst {name} {error:.1e}; {gates}{unexplained}; to float32: {distance}"


def relative_error(values: np.ndarray, expected: np.ndarray) -> float:
    """|values - expected| / |expected| in L2; 0 where both are exactly zero."""
    difference = np.linalg.norm(values.astype(np.float64) - expected)
    if difference == 0:
        return 0.0
    size = np.linalg.norm(expected.astype(np.float64))
    return float(difference / size) if size > 0 else float("inf")


def compare(draw: Draw, params: np.ndarray, implementation: Implementation, x: np.ndarray) -> Agreement:
    """All comparisons on one batch."""
    model, exact = Model(draw.spec, params, "float16"), Model(draw.spec, params, "float32")
    result = Agreement(len(x))
    numbers = x.astype(np.float32)

    expected_y = model.forward(numbers)
    y = implementation.inference(x)
    result.errors["outputs"] = relative_error(y, expected_y.astype(draw.output_dtype))
    result.distance["outputs"] = relative_error(y, exact.forward(numbers))

    dL_dy = draw.output_gradients(len(x))
    scale = model.precision.gradient_scale(dL_dy)
    expected = model.backward(numbers, dL_dy)
    got_params, got_dx = implementation.backward(x, dL_dy)
    explanation = _explain(draw, model, implementation, x, dL_dy * np.float32(scale), expected, got_params, got_dx)
    result.n_suspicious, result.n_flipped = explanation.n_suspicious, len(explanation.rows)
    result.unexplained = explanation.unexplained.tolist() if has_gates(draw) else []
    twin_params, twin_dx = explanation.apply(expected, model, numbers, dL_dy * np.float32(scale), 1 / scale)
    result.errors["input gradients"] = relative_error(got_dx, twin_dx)
    _add_params(result, draw, "parameter gradients", got_params, twin_params)
    exact_gradients = exact.backward(numbers, dL_dy)
    result.distance["input gradients"] = relative_error(got_dx, exact_gradients.input)
    result.distance["parameter gradients"] = relative_error(got_params, exact_gradients.params)

    targets = draw.targets(expected_y)
    expected_loss, expected = model.loss_and_gradients(numbers, targets, draw.loss_spec)
    loss, got_params = implementation.training_step(x, targets)
    _, dloss_dy = loss_function(draw.loss_spec, draw.n_output_dims)(expected_y, targets, 1.0)
    twin_params, _ = explanation.apply(expected, model, numbers, dloss_dy, 1 / targets.size)
    result.errors["loss"] = abs(loss - expected_loss) / abs(expected_loss)
    _add_params(result, draw, "training gradients", got_params, twin_params)
    return result


def has_gates(draw: Draw) -> bool:
    network = draw.spec.network
    return network.output_activation in CLOSED or (network.n_hidden_layers > 0 and network.activation in CLOSED)


def _add_params(result: Agreement, draw: Draw, name: str, values: np.ndarray, expected: np.ndarray) -> None:
    result.errors[name] = relative_error(values, expected)
    for block in parameter_blocks(draw.spec):
        part = slice(block.offset, block.offset + block.size)
        result.errors[f"{name} of {block.name}"] = relative_error(values[part], expected[part])


def _explain(
    draw: Draw,
    model: Model,
    implementation: Implementation,
    x: np.ndarray,
    scaled: np.ndarray,
    expected: Gradients,
    got_params: np.ndarray,
    got_dx: np.ndarray,
) -> Explanation:
    """Which gates the implementation found different. dL/dx shows it, but for Nearest grids, where it is 0: there the
    samples are looked at one by one, and only if the whole batch's gradients differ."""
    numbers = x.astype(np.float32)
    scale = model.precision.gradient_scale(draw.output_gradients(len(x)))
    nearest = draw.encoding.get("interpolation") == "Nearest"
    whole = Agreement(len(x))
    _add_params(whole, draw, "", got_params, expected.params)
    if nearest and has_gates(draw) and not whole.holds and len(x) <= MAX_ROWS_ONE_BY_ONE:
        dL_dy = draw.output_gradients(len(x))
        features = [
            feature_gradients(draw, implementation.backward(x[i : i + 1], dL_dy[i : i + 1])[0]) for i in range(len(x))
        ]
        return explain_rows(model, numbers, scaled, np.stack(features) * np.float32(scale), of="features")
    return explain_rows(model, numbers, scaled, got_dx * np.float32(scale))


def feature_gradients(draw: Draw, params_gradient: np.ndarray) -> np.ndarray:
    """dL/dfeatures of one sample from its gradient of a grid's tables: the weights of a sample's entries sum to 1, so
    the sum of a level's gradient over its entries is that of the level's features."""
    blocks = [block for block in parameter_blocks(draw.spec) if block.name.startswith("grid.")]
    tables = (params_gradient[b.offset : b.offset + b.size].reshape(b.shape) for b in blocks)
    return np.concatenate([table.sum(axis=0, dtype=np.float64) for table in tables]).astype(np.float32)
