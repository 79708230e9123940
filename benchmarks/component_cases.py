"""One small configuration for every component there is: each encoding alone and as a part of a Composite, each
activation, loss and optimizer, and networks of every kind of plan. Taken from the tables that configs are parsed by, so
that a component that is added is in the list."""

from __future__ import annotations

from typing import Any

from numba_tcnn.config import parse_model
from numba_tcnn.config_encodings import ENCODINGS
from numba_tcnn.config_optimizers import OPTIMIZERS
from numba_tcnn.layout import n_params
from numba_tcnn.specs import ACTIVATIONS, LOSSES

from .cases import Case

GRID = {"n_levels": 4, "log2_hashmap_size": 12, "base_resolution": 4}
ENCODING_KEYS: dict[str, dict[str, Any]] = {
    "Grid": GRID,
    "HashGrid": GRID,
    "TiledGrid": {"n_levels": 3, "base_resolution": 4},
    "DenseGrid": {"n_levels": 3, "base_resolution": 4},
    "Frequency": {"n_frequencies": 6},
    "TriangleWave": {"n_frequencies": 6},
    "OneBlob": {"n_bins": 16},
    "OneBlobFrequency": {"n_frequencies": 6, "n_bins": 8},
    "Composite": {"nested": [{"otype": "Identity"}]},
}
N_INPUT_DIMS = {"OneBlobFrequency": 8}
"""Of those that don't take 3."""

ONLY_NESTED = ("Empty",)
"""Encodings that have no columns."""

WRAPPED = {"otype": "Adam", "learning_rate": 1e-2}
LOSS_KEYS: dict[str, dict[str, Any]] = {"ConstantGradient": {"gradient": [1.0, -2.0, 0.5]}}
NETWORKS: dict[str, dict[str, Any]] = {
    "16 wide": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 2},
    "64 wide, 4 deep": {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 4},
    "128 wide": {"otype": "FullyFusedMLP", "n_neurons": 128, "n_hidden_layers": 2},
    "512 wide": {"otype": "CutlassMLP", "n_neurons": 512, "n_hidden_layers": 2},
    "24 deep": {"otype": "CutlassMLP", "n_neurons": 32, "n_hidden_layers": 24},
    "80, 48 and 20 wide": {"otype": "CutlassMLP", "hidden": [80, 48, 20]},
    "with biases": {"otype": "CutlassMLP", "n_neurons": 32, "n_hidden_layers": 2, "bias": True},
    "without hidden layers": {"otype": "CutlassMLP", "n_neurons": 32, "n_hidden_layers": 0},
}
NETWORK = NETWORKS["16 wide"]


def component_cases() -> list[Case]:
    """Models with three outputs on float32 inputs."""

    def case(name: str, n_input_dims: int = 3, **parts: Any) -> Case:
        usual = {"encoding": {"otype": "Identity"}, "network": NETWORK, "loss": {"otype": "L2"}, "optimizer": WRAPPED}
        return Case(name, n_input_dims, 3, usual | parts)

    cases = []
    for otype in (component.name for component in ENCODINGS.components):
        encoding, n_dims = {"otype": otype} | ENCODING_KEYS.get(otype, {}), N_INPUT_DIMS.get(otype, 3)
        nested = [encoding | {"n_dims_to_encode": n_dims}, {"otype": "Identity"}]
        if otype not in ONLY_NESTED:
            cases.append(case(f"encoding {otype}", n_dims, encoding=encoding))
        cases.append(
            case(f"encoding {otype} in a Composite", n_dims + 2, encoding={"otype": "Composite", "nested": nested})
        )
    for name in ACTIVATIONS:
        activations = {"activation": name, "output_activation": name}
        cases.append(case(f"activation {name}", network=NETWORK | activations))
    for name in (*LOSSES, "ConstantGradient"):
        cases.append(case(f"loss {name}", loss={"otype": name} | LOSS_KEYS.get(name, {})))
    encoding = {"otype": "HashGrid"} | GRID
    for component in OPTIMIZERS.components:
        optimizer: dict[str, Any] = {"otype": component.name}
        if component.name == "Composite":
            total = n_params(parse_model(3, 3, encoding, NETWORK))
            sizes = (total // 3, total - total // 3)
            parts = zip((WRAPPED, {"otype": "SGD"}), sizes, strict=True)
            optimizer["nested"] = [part | {"n_params_to_optimize": size} for part, size in parts]
        elif any(key.name == "nested" for key in component.keys):
            optimizer["nested"] = WRAPPED
        cases.append(case(f"optimizer {component.name}", encoding=encoding, optimizer=optimizer))
    cases += [case(f"network {name}", 16, network=network) for name, network in NETWORKS.items()]
    return cases
