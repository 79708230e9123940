"""Random draws from the whole space of configs that run fused.

Draw number k of a seed is the same everywhere. Its main components are dealt (`deck.py`): among as many draws as there
are values of a component, each value comes once. What can't be combined gives way: a loss of positive numbers chooses
the output activation, a network of a dtype or depth that no kernel has becomes a smaller one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numba_tcnn.config import parse_encoding
from numba_tcnn.layout import n_encoding_params, n_network_params, n_params
from numba_tcnn.specs import ACTIVATIONS, LOSSES, N_COLOURS, ModelSpec

from .deck import Chance, Deck
from .draws import CONSTANT_GRADIENT, LOSSES_OF_POSITIVES, Draw
from .random_encodings import GRIDS, LARGE, REDUCTIONS, is_blind, leaves_of, random_composite, random_leaf
from .random_optimizers import random_optimizer

Config = dict[str, Any]

KINDS = (*GRIDS, *GRIDS, "HashGrid", "Frequency", "TriangleWave", "OneBlob", "Identity", "SphericalHarmonics")
KINDS += (*REDUCTIONS, "Concatenation", "OneBlobFrequency")
"""Of encodings; grids more often than others, for they have more options."""

SHAPES = ("16", "32", "64", "128", "64", "any", "any", "no hidden layer", "own widths", "wide", "deep", "no network")
DTYPES = ("float16", "float16", "float16", "bfloat16", "float32")
LAYOUTS = ("aligned", "aligned", "unaligned", "columns", "every other row", "host", "columns on the host")
DENSITIES = (None, None, None, "float32", "float16")
LEVELS = (None, None, None, "fraction", "rows")
GRID_OPTIONS = ((), (), (), ("stochastic_interpolation",), ("fixed_point_pos",),
                ("stochastic_interpolation", "fixed_point_pos"))  # fmt: skip

POSITIVE = ("Exponential", "Sigmoid", "Squareplus")
"""Output activations whose values stay far enough above 0 for 1/p and 1/p^2 to fit float16 (Softplus's do not)."""

MANY_LAYERS = ("None", "Softplus", "Squareplus")
"""Activations of deep networks: the others' gradients vanish on the way back, or their gates are in doubt too often."""

WITH_GATES = ("ReLU", "LeakyReLU")

MOST = {"float32": (128, 16, 128)}
"""Widest layer, hidden layers and outputs, by dtype: in float32 there are no kernels that go layer by layer."""
MOST_ELSE = (512, 20, 300)

MAX_ENCODING_WIDTH = 128
MAX_ENCODING_PARAMS = 1 << 19
MAX_SHAMPOO_WIDTH, MAX_SHAMPOO_LAYERS = 128, 5
FEW_OUTPUTS = 16
"""So many outputs have a luminance whatever the plan."""


def random_draw(deck: Deck | Chance, *, dtype: str | None = None, bare: bool = True) -> Draw:
    """Anything, in any dtype unless one is given; `bare`: encodings without a network, too."""
    random = deck.random
    dtype = dtype or deck.deal("dtype", DTYPES)
    n_input_dims, encoding = random_encoding(deck)
    most_outputs = MOST.get(dtype, MOST_ELSE)[2]
    n_output_dims = random.choice((random.randint(1, 20), random.randint(1, 20), random.randint(21, most_outputs)))
    loss = deck.deal("loss", (*LOSSES, CONSTANT_GRADIENT))
    network = random_network(deck, loss, blind=is_blind(encoding), dtype=dtype, bare=bare)
    if network is None:
        n_output_dims = parse_encoding(encoding, n_input_dims).n_output_dims
    if loss == "RelativeL2Luminance":
        n_output_dims = n_output_dims if network is None else max(N_COLOURS, min(n_output_dims, FEW_OUTPUTS))
    if (network is None and loss in LOSSES_OF_POSITIVES) or (
        loss == "RelativeL2Luminance" and n_output_dims < N_COLOURS
    ):
        loss = "L2"
    layout = deck.deal("layout", LAYOUTS)
    input_dtype = deck.deal("input dtype", ("float32", "float32", "float16", "float64"))
    if input_dtype == "float64" and layout in ("unaligned", "columns", "every other row"):
        layout = "aligned"  # they are copied, by Numba where nobody else can
    draw = Draw(
        n_input_dims,
        n_output_dims,
        encoding,
        network,
        loss,
        input_dtype,
        deck.deal("output dtype", ("float32", "float16")),
        random.getrandbits(32),
        dtype,
        density_dtype=deck.deal("density dtype", DENSITIES),
        max_level=random_levels(deck, encoding, network),
        layout=layout,
        deterministic=deck.deal("deterministic", (False, False, False, True)) and dtype == "float16",
    )
    return replace(draw, optimizer=random_optimizer_of(deck, draw.spec))


def random_encoding(deck: Deck | Chance) -> tuple[int, Config]:
    """(n_input_dims, encoding)."""
    random, kind = deck.random, deck.deal("encoding", KINDS)
    if kind == "OneBlobFrequency":
        config = {"otype": kind, "n_frequencies": random.randint(1, 12), "n_bins": random.choice((1, 4, 8))}
        return random.randint(8, 12), config
    if kind == "Identity":
        n_dims = random.choice((random.randint(1, 7), random.randint(8, 48), random.randint(49, MAX_ENCODING_WIDTH)))
        return n_dims, random_leaf(deck, n_dims, LARGE, kind)
    if kind == "SphericalHarmonics":
        return 3, random_leaf(deck, 3, LARGE, kind)
    n_dims = deck.deal("grid dims" if kind in GRIDS else "dims", (1, 2, 3, 4, 5, 6, 7))
    while True:
        if kind in REDUCTIONS:
            config = random_composite(Chance(random), n_dims, LARGE, kind)  # children unlike each other
        else:
            config = random_leaf(deck, n_dims, LARGE, kind)
        if kind == "HashGrid" and random.random() < 0.2:
            config["log2_hashmap_size"] = random.randint(15, 18)
        with_grid_options(deck, config)
        spec = parse_encoding(config, n_dims)
        if 0 < spec.n_output_dims <= MAX_ENCODING_WIDTH and n_encoding_params(spec) <= MAX_ENCODING_PARAMS:
            return n_dims, config


def with_grid_options(deck: Deck | Chance, config: Config) -> None:
    """Switch options on, in all grids of an encoding or in none."""
    options = deck.deal("grid options", GRID_OPTIONS)
    for leaf in leaves_of(config):
        if leaf["otype"] in GRIDS:
            leaf.update(dict.fromkeys(options, True))


def random_network(deck: Deck | Chance, loss: str, *, blind: bool, dtype: str, bare: bool) -> Config | None:
    """None: an encoding alone. `blind`: dL/dx shows nothing of the network, so that no flipped gate could be seen."""
    random, shape = deck.random, deck.deal("network", SHAPES if bare else SHAPES[:-1])
    widest, deepest, _ = MOST.get(dtype, MOST_ELSE)
    network: Config = {"otype": "CutlassMLP"}
    match shape:
        case "no network":
            return None
        case "any":
            network |= {"n_neurons": random.randint(1, 128), "n_hidden_layers": random.randint(1, 4)}
        case "no hidden layer":
            network |= {"n_neurons": 16, "n_hidden_layers": 0}
        case "own widths":
            network |= {"hidden": [random.randint(1, min(160, widest)) for _ in range(random.randint(1, 4))]}
        case "wide":
            network |= {"n_neurons": random.randint(min(129, widest), widest), "n_hidden_layers": random.randint(1, 2)}
        case "deep":  # rounding adds up: at 32 layers, two right ones differ by 3e-3
            network |= {"n_neurons": random.randint(8, 64), "n_hidden_layers": random.randint(5, deepest)}
        case _:
            network = {"otype": "FullyFusedMLP", "n_neurons": int(shape), "n_hidden_layers": random.randint(1, 4)}
    activation = deck.deal("activation", ACTIVATIONS)
    if (shape == "deep" and activation not in MANY_LAYERS) or (blind and activation in WITH_GATES):
        activation = random.choice(MANY_LAYERS)
    output_activation = deck.deal("output activation", ACTIVATIONS)
    if blind and output_activation in WITH_GATES:
        output_activation = "Tanh"
    if loss in LOSSES_OF_POSITIVES:
        output_activation = deck.deal("positive output", POSITIVE)
    return network | {"activation": activation, "output_activation": output_activation, "bias": random.random() < 0.5}


def random_levels(deck: Deck | Chance, encoding: Config, network: Config | None) -> float | str | None:
    """`Draw.max_level`. Samples of Nearest grids may have to be computed one by one: there all have one fraction."""
    levels = deck.deal("max_level", LEVELS)
    grids = [leaf for leaf in leaves_of(encoding) if leaf["otype"] in GRIDS]
    if levels is None or not grids:
        return None
    if levels == "rows" and not any(grid["interpolation"] == "Nearest" for grid in grids):
        return "rows"
    return round(deck.random.uniform(0.2, 0.9), 2)


def random_optimizer_of(deck: Deck | Chance, spec: ModelSpec) -> Config:
    """An optimizer for a model, with Shampoo where its matrices are small."""
    widths = [width for shape in spec.layer_shapes for width in shape]
    small = max(widths, default=0) <= MAX_SHAMPOO_WIDTH and len(spec.layer_shapes) <= MAX_SHAMPOO_LAYERS
    return random_optimizer(deck, n_params(spec), n_network_params(spec), with_shampoo=small)
