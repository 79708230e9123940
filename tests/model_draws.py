"""Models for tests: random ones of the whole space of configs, and a few in which every choice appears."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from benchmarks.agreement.deck import Chance
from benchmarks.agreement.draws import CONSTANT_GRADIENT, Draw
from benchmarks.agreement.random_draws import random_draw
from numba_tcnn.reference.activations import ACTIVATIONS

LOSSES = ("L1", "L2", "RelativeL1", "RelativeL2", "Mape", "Smape", "CrossEntropy", "Variance")


@st.composite
def draws(draw: st.DrawFn, dtype: str = "float16") -> Draw:
    """Networks behind encodings, and losses that have targets, on contiguous arrays: what kernels alone can be tested
    with. Hypothesis chooses in place of a deck."""
    made = random_draw(Chance(draw(st.randoms(use_true_random=False))), dtype=dtype, bare=False)
    return replace(
        made,
        loss="L2" if made.loss == CONSTANT_GRADIENT else made.loss,
        input_dtype="float16" if made.input_dtype == "float16" else "float32",
        density_dtype=None,
        max_level=None,
        layout="aligned",
        deterministic=False,
    )


def covering(dtype: str = "float16") -> list[Draw]:
    """Twelve models in which every choice of the family appears at least once."""
    names = list(ACTIVATIONS)
    outputs = ("None", "ReLU", "LeakyReLU", "SiLU", "Sine", "Tanh", "Sigmoid", "Exponential")
    outputs += ("Softplus", "Squareplus", "None", "ReLU")
    grids_of = ("HashGrid", "DenseGrid", "TiledGrid")
    interpolations = ("Linear", "Smoothstep", "Nearest")
    result = []
    for i in range(12):
        n_features = (1, 2, 4, 8)[i % 4]
        encoding = {
            "otype": grids_of[i % 3],
            "n_levels": 16 // n_features if i % 2 else 3,
            "n_features_per_level": n_features,
            "base_resolution": 4,
            "per_level_scale": 1.3,
            "interpolation": interpolations[i // 4],
        }
        if i % 3 == 0:
            encoding["log2_hashmap_size"] = 7 + i // 3
        n_input_dims = 2 + (i + i // 3) % 3
        if i >= 10:
            n_input_dims, encoding = (16, 21)[i - 10], {"otype": "Identity", "scale": 1.5, "offset": -0.75}
        network = {
            "otype": ("FullyFusedMLP", "CutlassMLP")[i % 2],
            "n_neurons": ((16, 32, 64, 128)[i // 2 % 4], (24, 100, 5, 128)[i // 2 % 4])[i % 2],
            "n_hidden_layers": i % 5 if i % 2 else i // 2 % 4 + 1,
            "activation": names[i % 10],
            "output_activation": outputs[i],
        }
        dtypes = (("float32", "float16")[i % 2], ("float32", "float16")[i // 2 % 2])
        result.append(Draw(n_input_dims, 1 + 5 * i % 20, encoding, network, LOSSES[i % 8], *dtypes, i, dtype))
    return result


def plain_draw(seed: int, number: int) -> Draw:
    """A random model of what an image needs: a grid of 2 to 4 dimensions or none, any of both MLPs up to 128 wide."""
    chance = random.Random(f"{seed} {number}")
    grid = chance.choice(("HashGrid", "HashGrid", "DenseGrid", "TiledGrid", "Identity"))
    n_input_dims = chance.randint(1, 64) if grid == "Identity" else chance.randint(2, 4)
    encoding = {"otype": grid}
    if grid != "Identity":
        n_features = chance.choice((1, 2, 4, 8))
        encoding |= {
            "n_levels": chance.randint(1, 32 // n_features if grid == "HashGrid" else 4),
            "n_features_per_level": n_features,
            "base_resolution": chance.randint(2, 8),
            "per_level_scale": round(chance.uniform(1.1, 1.5), 3),
            "interpolation": chance.choice(("Linear", "Smoothstep", "Nearest")),
        }
        if grid == "HashGrid":
            encoding["log2_hashmap_size"] = chance.randint(8, 15)
    fully_fused = chance.random() < 0.6
    network = {
        "otype": "FullyFusedMLP" if fully_fused else "CutlassMLP",
        "n_neurons": chance.choice((16, 32, 64, 64, 128)) if fully_fused else chance.randint(1, 128),
        "n_hidden_layers": chance.randint(1, 4),
        "activation": chance.choice(("ReLU", "ReLU", *ACTIVATIONS)),
        "output_activation": chance.choice(("None", "None", "Sigmoid", "Softplus", "Squareplus")),
    }
    return Draw(
        n_input_dims,
        chance.randint(1, 16),
        encoding,
        network,
        chance.choice(("L2", "RelativeL2", "Mape")),
        chance.choice(("float32", "float16")),
        chance.choice(("float32", "float16")),
        chance.getrandbits(32),
    )


CANCELLING = Draw(
    1, 8, {"otype": "Identity", "scale": -0.063, "offset": 0.519},
    {"otype": "CutlassMLP", "n_neurons": 11, "n_hidden_layers": 4, "activation": "ReLU", "output_activation": "ReLU",
     "bias": False},
    "RelativeL1", seed=2027876459,
)  # fmt: skip
"""Draw 160 of seed 20261201: one unit's input cancels to a hundredth, dL/dx is a sixteenth of what is left of dL/dz
that are up to 32, and all samples are almost the same one."""
