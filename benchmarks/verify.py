"""Proves that the kernels about to be timed are right, at the batch size that is timed.

The batch is a short one repeated to full length, so that every tile and block of the real launch works, and yet the
NumPy reference need only compute the short one: all outputs repeat, and loss and gradient, being means, are the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

import numba_tcnn as tcnn
from numba_tcnn.fused import to_device
from numba_tcnn.layout import n_network_params
from numba_tcnn.reference.model import Model

from .cases import Case, host_inputs, targets

N_DISTINCT = 1 << 12
OUTPUT_TOLERANCE = 5e-3
GRADIENT_TOLERANCE = 2e-2
"""Relative L2 errors against the float16 reference. Gradients of ReLU networks get more: a unit within rounding of 0
may be open here and closed there, which moves single samples by per cents. tests/test_fused_gpu.py looks closer."""


@dataclass(frozen=True)
class Checks:
    """Relative L2 errors of one batch."""

    inference: float
    inference_half: float | None
    gradient: float
    loss: float

    @property
    def problem(self) -> str | None:
        """What is wrong, None if nothing."""
        limits = {
            "inference": OUTPUT_TOLERANCE,
            "inference_half": OUTPUT_TOLERANCE,
            "gradient": GRADIENT_TOLERANCE,
            "loss": OUTPUT_TOLERANCE,
        }
        wrong = [
            f"{name} error {getattr(self, name):.1e} > {limit:g}"
            for name, limit in limits.items()
            if getattr(self, name) is not None and not getattr(self, name) <= limit
        ]
        return ", ".join(wrong) or None


def relative_error(values: np.ndarray, expected: np.ndarray) -> float:
    """In L2; NaN where any value is NaN."""
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(values - expected) / max(np.linalg.norm(expected), np.finfo(np.float64).tiny))


def repeated(values: np.ndarray, batch: int) -> np.ndarray:
    return np.tile(values, (-(-batch // len(values)), 1))[:batch]


def check_kernels(case: Case, trainer: tcnn.Trainer, batch: int) -> Checks:
    """Compare inference and one training step with the reference, and leave `trainer` as it was: fresh.

    Tables are drawn anew for it: the initial ones are so small that an error could hide. The gradient is seen through
    the first moments of the optimizer, compared with what the reference's optimizer makes of its own gradient.
    """
    network = trainer.network
    n = math.gcd(N_DISTINCT, batch)  # every sample appears equally often, or the means would differ
    x = host_inputs(batch, case.n_input_dims, case.input_dtype)[0][:n]
    y = targets(x, case.n_output_dims)
    initial, fresh_state = network.params, trainer.optimizer.state_dict()
    params = initial.copy()
    n_network = n_network_params(network.spec)
    params[n_network:] = np.random.default_rng(0).uniform(-0.5, 0.5, len(params) - n_network)
    network.params = params
    model = Model(network.spec, params, "float16")
    expected = model.forward(x)

    long_x, long_y = to_device(repeated(x, batch)), to_device(repeated(y, batch))
    errors = {}
    for dtype in ("float32", "float16"):
        if dtype == "float16" and not case.bare:
            continue
        out = to_device(np.full((batch, case.n_output_dims), np.nan, dtype))
        network.inference(long_x, out=out)
        errors[dtype] = relative_error(out.numpy(), repeated(expected, batch))

    loss = float(trainer.training_step(long_x, long_y))
    expected_loss, gradients = model.loss_and_gradients(x, y, trainer.loss.spec, input=False)
    optimizer = tcnn.Optimizer(trainer.optimizer.spec)
    optimizer.allocate(network.n_params, network.layer_sizes)
    optimizer.step(params.copy(), gradients.params)
    moments, expected_moments = (o.state_dict()["first_moments"] for o in (trainer.optimizer, optimizer))
    checks = Checks(
        inference=errors["float32"],
        inference_half=errors.get("float16"),
        gradient=relative_error(moments, expected_moments),
        loss=abs(loss - expected_loss) / abs(expected_loss),
    )
    network.params = initial
    trainer.optimizer.load_state_dict(fresh_state)
    return checks
