"""Every optimizer's formulas once more, in float64 and from the config's own keys; nothing of the library is used.

Where the library carries a state along, this file remembers everything and computes from the beginning: exponential
averages as sums over all that went in, averages of parameters from their history, decay schedules by counting, inverse
roots from eigenvalues. Gradients come without a loss scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np

ADAM_DEFAULTS = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
    "l2_reg": 1e-8,
    "non_matrix_l2_reg": 0.0,
    "non_matrix_learning_rate_factor": 1.0,
    "relative_decay": 0.0,
    "absolute_decay": 0.0,
    "clipping_magnitude": 0.0,
    "gradient_clipping_magnitude": 0.0,
    "adabound": False,
    "optimize_matrix_params": True,
    "optimize_non_matrix_params": True,
    "skip_zero_grad_non_matrix_params": True,
}
SGD_DEFAULTS = {"learning_rate": 1e-3, "l2_reg": 1e-8}
NOVOGRAD_DEFAULTS = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
    "relative_decay": 0.0,
    "absolute_decay": 0.0,
}
SHAMPOO_DEFAULTS = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.99,
    "beta3": 0.9,
    "beta_shampoo": 0.9,
    "epsilon": 1e-8,
    "identity": 0.01,
    "cg_on_momentum": True,
    "l2_reg": 1e-5,
    "relative_decay": 0.0,
    "absolute_decay": 0.0,
    "frobenius_normalization": True,
}


def formulas(config: dict[str, Any], n: int, layers: list[tuple[int, int]]) -> Any:
    """An object with `step(w, g) -> w`, `inference(w)`, `rate` and `count`."""
    return FORMULAS[config["otype"]](config, n, layers)


def exponential_average(values: list[np.ndarray], decay: float, first: int = 1) -> np.ndarray:
    """Σ_i d^(t-i) x_i · (1 - d)/(1 - d^t) over i = first ... t; `values` are x_first ... x_t."""
    t = len(values) + first - 1
    powers = decay ** np.arange(len(values) - 1, -1, -1.0)
    return np.tensordot(powers, np.array(values), 1) * (1 - decay) / (1 - decay**t)


def shrink(w: np.ndarray, relative: np.ndarray | float, absolute: np.ndarray | float) -> np.ndarray:
    return w * (1 - relative) - np.where(np.signbit(w), -absolute, absolute)


class Leaf:
    defaults: dict[str, Any]

    def __init__(self, config: dict[str, Any], n: int, layers: list[tuple[int, int]]):
        self.__dict__.update(self.defaults)
        self.__dict__.update({key: value for key, value in config.items() if key != "otype"})
        self.rate = self.learning_rate
        self.count = 0
        self.n, self.layers = n, layers
        self.is_matrix = np.arange(n) < sum(rows * columns for rows, columns in layers)

    def step(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.count += 1
        return self.moved(w, g)

    def inference(self, w: np.ndarray) -> np.ndarray:
        return w


class Adam(Leaf):
    defaults = ADAM_DEFAULTS

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.m, self.v, self.k = np.zeros(self.n), np.zeros(self.n), np.zeros(self.n)

    def moved(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        considered = np.where(self.is_matrix, self.optimize_matrix_params, self.optimize_non_matrix_params)
        left_alone = ~self.is_matrix & (g == 0) & self.skip_zero_grad_non_matrix_params
        on = considered.astype(bool) & ~left_alone
        g = g + np.where(self.is_matrix, self.l2_reg, self.non_matrix_l2_reg) * w
        if self.gradient_clipping_magnitude > 0:
            g = np.sign(g) * np.minimum(np.abs(g), self.gradient_clipping_magnitude)
        self.m = np.where(on, self.beta1 * self.m + (1 - self.beta1) * g, self.m)
        self.v = np.where(on, self.beta2 * self.v + (1 - self.beta2) * g**2, self.v)
        self.k = self.k + on
        k = np.maximum(self.k, 1)
        rate = self.rate * np.where(self.is_matrix, 1.0, self.non_matrix_learning_rate_factor)
        rate = rate * np.sqrt(1 - self.beta2**k) / (1 - self.beta1**k)
        effective = rate / (np.sqrt(self.v) + self.epsilon)
        if self.adabound:
            t = (1 - self.beta2) * self.count
            effective = np.minimum(np.maximum(effective, 0.1 - 0.1 / (t + 1)), 0.1 + 0.1 / t)
        new = shrink(w, self.relative_decay * rate, self.absolute_decay * rate) - effective * self.m
        if self.clipping_magnitude > 0:
            new = np.sign(new) * np.minimum(np.abs(new), self.clipping_magnitude)
        return np.where(on, new, w)


class Sgd(Leaf):
    defaults = SGD_DEFAULTS

    def moved(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        return w - self.rate * g - self.rate * self.l2_reg * w


class Novograd(Leaf):
    defaults = NOVOGRAD_DEFAULTS

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        sizes = [rows * columns for rows, columns in self.layers]
        self.layer_of = np.repeat(np.arange(len(sizes) + 1), [*sizes, self.n - sum(sizes)])
        self.v = np.zeros(len(sizes) + 1)
        self.m = np.zeros(self.n)

    def moved(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        squared = np.bincount(self.layer_of, g**2, minlength=len(self.v))
        if self.count == 1:
            self.v = squared
            self.m = g / (np.sqrt(self.v) + self.epsilon)[self.layer_of]
        else:
            self.v = self.beta2 * self.v + (1 - self.beta2) * squared
            self.m = self.beta1 * self.m + (1 - self.beta1) * g / (np.sqrt(self.v) + self.epsilon)[self.layer_of]
        return shrink(w, self.relative_decay * self.rate, self.absolute_decay * self.rate) - self.rate * self.m


class Shampoo(Leaf):
    defaults = SHAMPOO_DEFAULTS

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.gammas: list[np.ndarray] = []
        offsets = np.cumsum([0, *(rows * columns for rows, columns in self.layers)])
        self.spans = [slice(a, b) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        self.products = [([], []) for _ in self.layers]
        self.roots: list[Any] = [None for _ in self.layers]
        self.steps = [[] for _ in self.layers]
        self.group = np.cumsum([0, *(a != b for a, b in zip(self.layers[:-1], self.layers[1:], strict=True))])

    def moved(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.gammas.append(g + self.l2_reg * w)
        m = exponential_average(self.gammas, self.beta1)
        v = exponential_average([gamma**2 for gamma in self.gammas], self.beta2)
        u = m / (np.sqrt(v) + self.epsilon)
        new = shrink(w, self.relative_decay * self.rate, self.absolute_decay * self.rate) - self.rate * u
        for i, (span, shape) in enumerate(zip(self.spans, self.layers, strict=True)):
            U = u[span].reshape(shape)
            G = U if self.cg_on_momentum else g[span].reshape(shape)
            self.products[i][0].append(G @ G.T)
            self.products[i][1].append(G.T @ G)
            new[span] = self.moved_matrix(i, w[span], U) if self.count > 1 else w[span]
        n_groups = self.group[-1] + 1 if self.layers else 0
        if n_groups:
            q = max(1, (10 if self.count < 100 else 200) // n_groups)
            for i in range(len(self.layers)):
                turn = self.count % q == 0 and self.group[i] == self.count // q % n_groups
                if self.count == 1 or turn:
                    self.roots[i] = [self.inverse_fourth_root(side) for side in self.products[i]]
        return new

    def moved_matrix(self, i: int, w: np.ndarray, U: np.ndarray) -> np.ndarray:
        left, right = self.roots[i]
        self.steps[i].append(left @ U @ right)
        s = exponential_average(self.steps[i], self.beta_shampoo, first=2)
        rate = self.rate
        if self.frobenius_normalization:
            rate *= np.linalg.norm(U) / np.linalg.norm(s)
        return shrink(w, self.relative_decay * rate, self.absolute_decay * rate) - rate * s.reshape(-1)

    def inverse_fourth_root(self, history: list[np.ndarray]) -> np.ndarray:
        A = exponential_average(history, self.beta3)
        A = A * (1 - self.identity) + self.identity * np.eye(len(A))
        values, vectors = np.linalg.eigh(A)
        return (vectors * values**-0.25) @ vectors.T


class Around:
    """What the wrappers have in common: the nested optimizer and its rate."""

    def __init__(self, config: dict[str, Any], n: int, layers: list[tuple[int, int]]):
        self.config = config
        self.nested = formulas(config["nested"], n, layers)

    @property
    def rate(self) -> float:
        return self.nested.rate

    @rate.setter
    def rate(self, value: float) -> None:
        self.nested.rate = value

    @property
    def count(self) -> int:
        return self.nested.count

    def inference(self, w: np.ndarray) -> np.ndarray:
        return self.nested.inference(w)


class Average(Around):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.history: list[np.ndarray] = []

    def step(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        w = self.nested.step(w, g)
        self.history.append(w)
        return w

    def inference(self, w: np.ndarray) -> np.ndarray:
        return np.mean(self.history[-self.config.get("n_samples", 128) :], axis=0) if self.history else w


class Ema(Average):
    def step(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        w = self.nested.step(w, g)
        self.history.append(self.nested.inference(w))
        return w

    def inference(self, w: np.ndarray) -> np.ndarray:
        return exponential_average(self.history, self.config.get("decay", 0.99)) if self.history else w


class Lookahead(Around):
    slow: np.ndarray | None = None

    def step(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        alpha = self.config.get("alpha", 0.5)
        if self.slow is None:
            self.slow = w
        elif self.count % self.config.get("n_steps", 16) == 0:
            w = self.slow = (1 - alpha) * self.slow + alpha * w
        return self.nested.step(w, g)

    def inference(self, w: np.ndarray) -> np.ndarray:
        return w if self.slow is None else self.slow


class Batched(Around):
    count = 0

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.waiting: list[np.ndarray] = []

    def step(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.count += 1
        self.waiting.append(g)
        if len(self.waiting) == self.config.get("batch_size_multiplier", 16):
            w = self.nested.step(w, np.mean(self.waiting, axis=0))
            self.waiting = []
        return w


class ExponentialDecay(Around):
    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.base = self.nested.rate

    def step(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        config, t = self.config, self.count
        start, interval = config.get("decay_start", 10_000), config.get("decay_interval", 10_000)
        last = min(t, config.get("decay_end", 10_000_000))
        n_decays = (last - start) // interval + 1 if last >= start else 0
        self.nested.rate = self.base * config.get("decay_base", 0.1) ** n_decays
        return self.nested.step(w, g)


class Composite:
    """For nested optimizers that only ask what belongs to a matrix, not to which."""

    rate = 1.0

    def __init__(self, config: dict[str, Any], n: int, layers: list[tuple[int, int]]):
        n_matrix = sum(rows * columns for rows, columns in layers)
        self.nested, self.spans, start = [], [], 0
        for own in config["nested"]:
            stop = start + own["n_params_to_optimize"]
            n_own_matrix = max(0, min(stop, n_matrix) - start)
            rest = {key: value for key, value in own.items() if key != "n_params_to_optimize"}
            self.nested.append(formulas(rest, stop - start, [(1, n_own_matrix)] if n_own_matrix else []))
            self.spans.append(slice(start, stop))
            start = stop

    @property
    def count(self) -> int:
        return self.nested[0].count

    def step(self, w: np.ndarray, g: np.ndarray) -> np.ndarray:
        return np.concatenate([own.step(w[s], g[s]) for own, s in zip(self.nested, self.spans, strict=True)])

    def inference(self, w: np.ndarray) -> np.ndarray:
        return np.concatenate([own.inference(w[s]) for own, s in zip(self.nested, self.spans, strict=True)])


FORMULAS = {
    "Adam": Adam,
    "SGD": Sgd,
    "Novograd": Novograd,
    "Shampoo": Shampoo,
    "Average": Average,
    "EMA": Ema,
    "Lookahead": Lookahead,
    "Batched": Batched,
    "ExponentialDecay": ExponentialDecay,
    "Composite": Composite,
}
