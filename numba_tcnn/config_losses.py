"""Losses: the `loss` part of a config as a spec, its keys and ranges."""

from __future__ import annotations

from collections.abc import Mapping

from .config_encodings import MAX_WIDTH
from .config_keys import FLOAT32_MAX, Array, Component, ConfigError, Family, Number
from .specs import LOSSES, N_COLOURS, LossSpec

GRADIENT = Array("gradient", Number("gradient", -FLOAT32_MAX, FLOAT32_MAX), 1, MAX_WIDTH)

LOSS_FAMILY = Family(
    "a loss",
    default="RelativeL2",
    components=(
        *(Component(name, LossSpec) for name in LOSSES),
        Component("ConstantGradient", LossSpec, (GRADIENT,), required=("gradient",)),
    ),
)


def parse_loss(config: Mapping | str, path: str = "loss") -> LossSpec:
    """The spec of a loss, from its config or just its name.

    {"otype": "ConstantGradient", "gradient": [c_0, ...]} is a class of tiny-cuda-nn that its configs can't name.
    """
    component, values = LOSS_FAMILY.select({"otype": config} if isinstance(config, str) else config, path)
    return LossSpec(component.name, **values)


def check_loss(spec: LossSpec, n_output_dims: int, path: str = "loss") -> None:
    """Raises ConfigError where the loss can't be evaluated on rows of `n_output_dims`."""
    if spec.otype == "RelativeL2Luminance" and n_output_dims < N_COLOURS:
        raise ConfigError(
            f"{path}: RelativeL2Luminance needs at least {N_COLOURS} outputs (red, green, blue), not {n_output_dims}"
        )
    if spec.otype == "ConstantGradient" and len(spec.gradient) != n_output_dims:
        raise ConfigError(
            f"{path}.gradient: {len(spec.gradient)} numbers for {n_output_dims} outputs; one for each is needed"
        )
