"""Networks: the `network` part of a config as a spec, its keys and ranges.

`hidden` and `bias` are options of ours that tiny-cuda-nn does not have; both are off unless given.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config_encodings import MAX_WIDTH, N_INPUT_DIMS
from .config_keys import Array, Choice, Component, ConfigError, Family, Flag, Integer
from .specs import ACTIVATIONS, NetworkSpec

FULLY_FUSED_WIDTHS = (16, 32, 64, 128)
MAX_HIDDEN_LAYERS = 1024
N_OUTPUT_DIMS = Integer("n_output_dims", 1, MAX_WIDTH)

N_NEURONS = Integer("n_neurons", 1, MAX_WIDTH)
NETWORK_KEYS = (
    N_NEURONS,
    Integer("n_hidden_layers", 0, MAX_HIDDEN_LAYERS),
    Choice("activation", ACTIVATIONS),
    Choice("output_activation", ACTIVATIONS),
    Array("hidden", N_NEURONS, 0, MAX_HIDDEN_LAYERS),
    Flag("bias"),
)
NETWORKS = Family(
    "a network",
    default="MLP",
    components=(
        Component("FullyFusedMLP", NetworkSpec, NETWORK_KEYS, aliases=("MegakernelMLP",)),
        Component("CutlassMLP", NetworkSpec, NETWORK_KEYS, aliases=("MLP",)),
    ),
    common=(N_INPUT_DIMS, N_OUTPUT_DIMS),
)


def parse_network(config: Mapping, *, path: str = "network") -> NetworkSpec:
    """The spec of a multi-layer perceptron. How wide its input and output are is in the `ModelSpec`."""
    spec, _ = network_and_dims(config, path)
    return spec


def network_and_dims(config: Mapping, path: str) -> tuple[NetworkSpec, dict[str, int]]:
    """The spec, and n_input_dims and n_output_dims where the config has them."""
    component, values = NETWORKS.select(config, path)
    dims = {key.name: values.pop(key.name) for key in (N_INPUT_DIMS, N_OUTPUT_DIMS) if key.name in values}
    for other in ("n_neurons", "n_hidden_layers"):
        if "hidden" in values and other in values:
            raise ConfigError(f"{path}.hidden: gives the width of every hidden layer; leave {other} out")
    spec = NetworkSpec(component.name, **values)
    if spec.otype == "FullyFusedMLP":
        _check_fully_fused(spec, path)
    return spec, dims


def _check_fully_fused(spec: NetworkSpec, path: str) -> None:
    for width in spec.hidden_widths:
        if width not in FULLY_FUSED_WIDTHS:
            key = "n_neurons" if spec.hidden is None else "hidden"
            raise ConfigError(
                f"{path}.{key}: {width} is not one of {', '.join(map(str, FULLY_FUSED_WIDTHS))}, the widths of "
                f"FullyFusedMLP; otype CutlassMLP takes any"
            )
    if not spec.hidden_widths:
        key = "n_hidden_layers: 0 is not" if spec.hidden is None else "hidden: [] does not name"
        raise ConfigError(f"{path}.{key} at least 1, which FullyFusedMLP needs; otype CutlassMLP takes 0")
