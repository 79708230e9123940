"""Random optimizers: every key of every one, wrappers around leaves and around each other, one for each slice."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from .deck import Chance, Deck

Config = dict[str, Any]
Keys = dict[str, tuple]

RATES = (1e-3, 3e-3, 1e-2)
BETAS = (0.0, 0.5, 0.9, 0.95)
SECOND_BETAS = (0.0, 0.9, 0.99, 0.999)
EPSILONS = (1e-15, 1e-8, 1e-3)
REGULARISATIONS = (0.0, 1e-8, 1e-5, 1e-2)
FLAGS = (False, True)
DECAYS: Keys = {"relative_decay": (0.0, 0.1, 0.5), "absolute_decay": (0.0, 0.01, 0.1)}

LEAVES: dict[str, Keys] = {
    "Adam": {
        "learning_rate": RATES,
        "beta1": BETAS,
        "beta2": SECOND_BETAS,
        "epsilon": EPSILONS,
        "l2_reg": REGULARISATIONS,
        "non_matrix_l2_reg": REGULARISATIONS,
        "non_matrix_learning_rate_factor": (0.0, 0.1, 3.0),
        **DECAYS,
        "clipping_magnitude": (0.0, 0.5),
        "gradient_clipping_magnitude": (0.0, 0.3),
        "adabound": FLAGS,
        "optimize_matrix_params": FLAGS,
        "optimize_non_matrix_params": FLAGS,
        "skip_zero_grad_non_matrix_params": FLAGS,
    },
    "SGD": {"learning_rate": (0.0, *RATES, 2e-2), "l2_reg": REGULARISATIONS},
    "Novograd": {
        "learning_rate": (0.0, *RATES, 2e-2),
        "beta1": BETAS,
        "beta2": SECOND_BETAS,
        "epsilon": EPSILONS,
        **DECAYS,
    },
    "Shampoo": {
        "learning_rate": RATES,
        "beta1": BETAS,
        "beta2": (0.5, 0.9, 0.99, 0.999),  # with 0, a gradient of 0 asks for a step of m/ε
        "beta3": BETAS,
        "beta_shampoo": BETAS,
        "epsilon": EPSILONS,
        "identity": (0.01, 0.1, 1.0),
        "cg_on_momentum": FLAGS,
        "l2_reg": REGULARISATIONS,
        **DECAYS,
        "frobenius_normalization": FLAGS,
    },
}
WRAPPERS: dict[str, Keys] = {
    "Average": {"n_samples": (1, 2, 3, 7, 60)},
    "EMA": {"decay": (0.0, 0.5, 0.9, 0.999), "full_precision": FLAGS},
    "Lookahead": {"alpha": (0.0, 0.3, 0.5, 1.0), "n_steps": (1, 2, 3, 7, 20)},
    "Batched": {"batch_size_multiplier": (1, 2, 3, 4, 7)},
    "ExponentialDecay": {
        "decay_base": (0.5, 0.9, 1.1),
        "decay_start": (0, 1, 5, 30),
        "decay_end": (0, 2, 8, 60),
        "decay_interval": (1, 2, 3, 20),
    },
}
"""Values to choose from, by otype and key."""


NEVER_BOTH = ("optimize_matrix_params", "optimize_non_matrix_params")
"""With neither, nothing would move."""


def n_schedules(config: Config) -> int:
    """How many ExponentialDecay stand inside each other: an outer one sets the rate that an inner one scales."""
    return (config["otype"] == "ExponentialDecay") + (n_schedules(config["nested"]) if "nested" in config else 0)


def random_keys(random: Random, keys: Keys) -> Config:
    """A value for each of some of the keys."""
    return {key: random.choice(values) for key, values in keys.items() if random.random() < 0.5}


def random_leaf_optimizer(random: Random, otype: str, rate: float) -> Config:
    """One that moves parameters, with keys as they come, but a learning rate of about `rate`."""
    keys = {key: values for key, values in LEAVES[otype].items() if key not in ("learning_rate", *NEVER_BOTH)}
    config = {"otype": otype, "learning_rate": rate} | random_keys(random, keys)
    return config | ({random.choice(NEVER_BOTH): False} if otype == "Adam" and random.random() < 0.2 else {})


OPTIMIZERS = (*LEAVES, *WRAPPERS, "Composite")

SHORT: Keys = {
    "n_samples": (1, 2, 3),
    "n_steps": (1, 2, 3),
    "batch_size_multiplier": (1, 2, 3),
    "decay_start": (0, 1),
    "decay_end": (2, 5),
    "decay_interval": (1, 2),
}
"""Phases that have come round after some steps."""

RATE = 2.0**-10
"""Of leaves. Of SGD's, whose step is as large as the gradient, the rate that suits the gradient replaces it."""


def random_optimizer(deck: Deck | Chance, n_params: int, n_network: int, *, with_shampoo: bool) -> Config:
    """Any optimizer of `n_params` parameters, the first `n_network` of them the network's.

    Without Shampoo there is Novograd in its place: roots of large matrices take NumPy seconds.
    """
    random = deck.random
    otype = deck.deal("optimizer", OPTIMIZERS)

    def leaf() -> Config:
        return of(random.choice(tuple(LEAVES)))

    def of(otype: str) -> Config:
        if otype in LEAVES:
            return random_leaf_optimizer(random, otype if with_shampoo or otype != "Shampoo" else "Novograd", RATE)
        if otype == "Composite":
            return {"otype": otype, "nested": random_slices(random, n_params, n_network, leaf)}
        keys = {key: SHORT.get(key, values) for key, values in WRAPPERS[otype].items()}
        others = [name for name in WRAPPERS if name != otype]
        nested = of(random.choice(others)) if random.random() < 0.25 else leaf()
        config = {"otype": otype} | {key: random.choice(values) for key, values in keys.items()} | {"nested": nested}
        return config if n_schedules(config) <= 1 else of(otype)

    return of(otype)


def random_slices(random: Random, n_params: int, n_network: int, make: Callable[[], Config]) -> list[Config]:
    """Two or three consecutive slices, cut behind the network or anywhere."""
    cuts = {n_network if random.random() < 0.5 else random.randint(0, n_params) for _ in range(random.randint(1, 2))}
    ends = sorted(cuts | {n_params})
    return [make() | {"n_params_to_optimize": b - a} for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def names_of(config: Config) -> set[str]:
    """The otypes of an optimizer and of all that are inside it."""
    nested = config.get("nested", [])
    return {config["otype"]}.union(*map(names_of, nested if isinstance(nested, list) else [nested]))


def with_sgd_rate(config: Config, rate: float) -> Config:
    """The same optimizer with another rate in all SGD inside it."""
    nested = config.get("nested")
    if isinstance(nested, list):
        return config | {"nested": [with_sgd_rate(part, rate) for part in nested]}
    if nested is not None:
        return config | {"nested": with_sgd_rate(nested, rate)}
    return config | {"learning_rate": rate} if config["otype"] == "SGD" else config
