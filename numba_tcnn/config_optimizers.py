"""Optimizers: the `optimizer` part of a config as a spec, its keys and ranges.

To add an optimizer: a spec class in `specs.py` and one `Component` in `OPTIMIZERS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config_keys import Component, ConfigError, Family, Flag, Integer, Number, Objects, Parsed, join
from .specs import (
    AdamSpec,
    AverageSpec,
    BatchedSpec,
    CompositeOptimizerSpec,
    EmaSpec,
    ExponentialDecaySpec,
    LookaheadSpec,
    NovogradSpec,
    OptimizerSpec,
    SgdSpec,
    ShampooSpec,
)

BELOW_ONE = 1 - 2**-24
"""The largest float32 below 1: a decay of 1 makes the bias correction 1 - decay^k zero."""
SMALLEST_EPSILON = 2.0**-126
"""The smallest normal float32: with none, a gradient that was always zero divides by zero."""
LARGEST_RATE = 1e6
MAX_STEPS = 2**32 - 1
MAX_HISTORY = 2**31
"""Most values that Average may remember: n_samples times the parameters."""


def parse_optimizer(config: Mapping, path: str = "optimizer", *, n_params: int | None = None) -> OptimizerSpec:
    """The spec of an optimizer. With the model's `n_params`, sizes that depend on it are checked too."""
    component, values = OPTIMIZERS.select(config, path)
    spec = component.build(path, **values) if component.build else component.spec(**values)
    if n_params is not None:
        check_size(spec, n_params, path)
    return spec


def check_size(spec: OptimizerSpec, n_params: int, path: str) -> None:
    """Raises ConfigError where a Composite's slices are not all of `n_params`, or an Average would be too large."""
    if isinstance(spec, AverageSpec) and spec.n_samples * n_params > MAX_HISTORY:
        raise ConfigError(
            f"{join(path, 'n_samples')}: {spec.n_samples} copies of {n_params:,} parameters are "
            f"{spec.n_samples * n_params:,} values, more than 2^31"
        )
    if isinstance(spec, CompositeOptimizerSpec):
        total = sum(spec.n_params_to_optimize)
        if total != n_params:
            raise ConfigError(f"{join(path, 'nested')}: n_params_to_optimize sum to {total:,}, not to all {n_params:,}")
        for i, (nested, n_own) in enumerate(zip(spec.nested, spec.n_params_to_optimize, strict=True)):
            check_size(nested, n_own, f"{join(path, 'nested')}[{i}]")
    elif hasattr(spec, "nested"):
        check_size(spec.nested, n_params, join(path, "nested"))


def _composite(path: str, nested: list[Mapping]) -> CompositeOptimizerSpec:
    """One optimizer for each consecutive slice of the parameters."""
    specs, sizes = [], []
    for i, config in enumerate(nested):
        child_path = f"{path}.nested[{i}]"
        own = dict(config)
        size = own.pop(N_PARAMS_TO_OPTIMIZE.name, 0)
        sizes.append(N_PARAMS_TO_OPTIMIZE.read(size, f"{child_path}.{N_PARAMS_TO_OPTIMIZE.name}"))
        specs.append(parse_optimizer(own, child_path))
    return CompositeOptimizerSpec(tuple(specs), tuple(sizes))


N_PARAMS_TO_OPTIMIZE = Integer("n_params_to_optimize", 0, 2**31)
LEARNING_RATE = Number("learning_rate", 0, LARGEST_RATE)
L2_REG = Number("l2_reg", 0, LARGEST_RATE)
EPSILON = Number("epsilon", SMALLEST_EPSILON, 1)
BETAS = (Number("beta1", 0, BELOW_ONE), Number("beta2", 0, BELOW_ONE))
DECAYS = (Number("relative_decay", 0, LARGEST_RATE), Number("absolute_decay", 0, LARGEST_RATE))
NESTED = Parsed("nested", parse_optimizer)

OPTIMIZERS = Family(
    "an optimizer",
    default="Adam",
    components=(
        Component(
            "Adam",
            AdamSpec,
            (
                LEARNING_RATE,
                *BETAS,
                EPSILON,
                L2_REG,
                Number("non_matrix_l2_reg", 0, LARGEST_RATE),
                Number("non_matrix_learning_rate_factor", 0, LARGEST_RATE),
                *DECAYS,
                Number("clipping_magnitude", 0, LARGEST_RATE),
                Number("gradient_clipping_magnitude", 0, LARGEST_RATE),
                Flag("adabound"),
                Flag("optimize_matrix_params"),
                Flag("optimize_non_matrix_params"),
                Flag("skip_zero_grad_non_matrix_params"),
            ),
        ),
        Component("Average", AverageSpec, (NESTED, Integer("n_samples", 1, 2**16))),
        Component("Batched", BatchedSpec, (NESTED, Integer("batch_size_multiplier", 1, 2**16))),
        Component("Composite", CompositeOptimizerSpec, (Objects("nested"),), required=("nested",), build=_composite),
        Component("EMA", EmaSpec, (NESTED, Number("decay", 0, BELOW_ONE), Flag("full_precision"))),
        Component(
            "ExponentialDecay",
            ExponentialDecaySpec,
            (
                NESTED,
                Number("decay_base", 0, LARGEST_RATE),
                Integer("decay_start", 0, MAX_STEPS),
                Integer("decay_end", 0, MAX_STEPS),
                Integer("decay_interval", 1, MAX_STEPS),
            ),
        ),
        Component("Lookahead", LookaheadSpec, (NESTED, Number("alpha", 0, 1), Integer("n_steps", 1, MAX_STEPS))),
        Component("Novograd", NovogradSpec, (LEARNING_RATE, *BETAS, EPSILON, *DECAYS)),
        Component("SGD", SgdSpec, (LEARNING_RATE, L2_REG)),
        Component(
            "Shampoo",
            ShampooSpec,
            (
                LEARNING_RATE,
                *BETAS,
                Number("beta3", 0, BELOW_ONE),
                Number("beta_shampoo", 0, BELOW_ONE),
                EPSILON,
                Number("identity", 0, 1),
                Flag("cg_on_momentum"),
                L2_REG,
                *DECAYS,
                Flag("frobenius_normalization"),
            ),
        ),
    ),
)
