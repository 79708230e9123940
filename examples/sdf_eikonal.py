"""Learn a signed distance function from noisy distances, and from |grad f| = 1.

    python examples/sdf_eikonal.py [--shape torus] [--engine auto] [--steps 1000] [--batch 4096]

f(x) is a hash grid and a small network. The distances d(x) that it is shown carry noise, as those of a scanner do, and
a hash grid would learn the noise. But every distance function fulfils the eikonal equation |grad d| = 1, so the loss
is the mean over a batch of points x in [0, 1]^3 of

    (f - d)^2  +  weight (|df/dx| - 1)^2

Its second term contains a gradient of the network, so its own gradient takes a second backward pass:

    df/dx               backward with dL/df = 1                                        (`backward`)
    dL/d(df/dx)         2 weight (|df/dx| - 1) df/dx / |df/dx| / batch
    dL/d(parameters)    how df/dx depends on the parameters, weighted by that          (`backward_backward_input`)

Arrays are NumPy's on either engine. With a GPU all three passes run as fused kernels.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np

import numba_tcnn as tcnn

GRID = {
    "otype": "HashGrid",
    "n_levels": 8,
    "log2_hashmap_size": 15,
    "base_resolution": 8,
    "per_level_scale": 1.4,
    "interpolation": "Smoothstep",  # a linear one has a df/dx that jumps at every cell's border
}
OPTIMIZER = {"otype": "Adam", "learning_rate": 5e-3, "beta2": 0.99, "epsilon": 1e-12}
NOISE = 0.02
"""Standard deviation of the distances that are shown."""


def distance_to_sphere(x: np.ndarray) -> np.ndarray:
    """d [n] of points [n, 3], to a sphere of radius 0.3 around the middle of the unit cube; negative inside."""
    return np.linalg.norm(x - 0.5, axis=1) - 0.3


def distance_to_torus(x: np.ndarray) -> np.ndarray:
    """The same to a torus with radii 0.28 (of its circle) and 0.12 (around that)."""
    x = x - 0.5
    from_circle = np.hypot(x[:, 0], x[:, 2]) - 0.28
    return np.hypot(from_circle, x[:, 1]) - 0.12


SHAPES = {"sphere": distance_to_sphere, "torus": distance_to_torus}


@dataclass(frozen=True)
class Report:
    """One step: the loss, and over the batch the means of |f - d|, d being the true distance, and of |df/dx|."""

    loss: float
    distance_error: float
    slope: float


class Training:
    """A network, its optimizer, and batches of random points."""

    def __init__(self, shape: str, *, engine: str, activation: str = "Softplus", weight: float = 0.01, seed: int = 1):
        network = {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2, "activation": activation}
        self.distance, self.weight = SHAPES[shape], weight
        self.network = tcnn.NetworkWithInputEncoding(3, 1, GRID, network, seed, engine=engine)
        self.optimizer = tcnn.create_optimizer(OPTIMIZER)
        self.optimizer.allocate(self.network.n_params, self.network.layer_sizes)
        self.params = self.network.params.copy()
        self.random = np.random.default_rng(seed)

    def points(self, batch: int) -> np.ndarray:
        return self.random.random((batch, 3), np.float32)

    def step(self, batch: int) -> Report:
        """One step of gradient descent."""
        x = self.points(batch)
        d = self.distance(x)[:, None].astype(np.float32)
        shown = d + NOISE * self.random.standard_normal(d.shape, np.float32)
        f, context = self.network.forward(x)
        ones = np.ones_like(d)
        slope = self.network.backward(context, ones, parameters="ignore").input
        steepness = np.linalg.norm(slope, axis=1, keepdims=True)

        error = f - shown
        of_values = self.network.backward(context, 2 * error / batch, input=False).params
        dL_dslope = 2 * self.weight * (steepness - 1) * slope / np.maximum(steepness, 1e-6) / batch
        of_slopes = self.network.backward_backward_input(context, dL_dslope, ones).params

        self.optimizer.step(self.params, of_values + of_slopes)
        self.network.params = self.params
        loss = np.mean(error**2) + self.weight * np.mean((steepness - 1) ** 2)
        return Report(float(loss), float(np.mean(np.abs(f - d))), float(np.mean(steepness)))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="torus")
    parser.add_argument("--engine", choices=("auto", "fused", "reference"), default="auto")
    parser.add_argument("--activation", choices=("Softplus", "Sine"), default="Softplus")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=4096)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Report:
    """Train, and print how it goes; what the last step reports."""
    options = parse(arguments)
    training = Training(options.shape, engine=options.engine, activation=options.activation)
    print(f"{training.network}; a {options.shape} from distances with a noise of {NOISE}")
    report = Report(np.nan, np.nan, np.nan)
    for step in range(options.steps):
        report = training.step(options.batch)
        if step % max(1, options.steps // 10) == 0 or step == options.steps - 1:
            print(
                f"step {step:5d}   loss {report.loss:.2e}   mean |f - d| {report.distance_error:.4f}   "
                f"mean |df/dx| {report.slope:.3f}"
            )
    print(training.network.explain())
    return report


if __name__ == "__main__":
    main()
