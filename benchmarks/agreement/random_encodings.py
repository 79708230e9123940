"""Random encodings of every kind: grids with all their options, composites inside composites."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .deck import Chance, Deck

HASHES = ("Prime", "CoherentPrime", "ReversedPrime", "Rng", "BaseConvert")
INTERPOLATIONS = ("Linear", "Smoothstep", "Nearest")
GRIDS = ("HashGrid", "DenseGrid", "TiledGrid")
REDUCTIONS = ("Concatenation", "Sum", "Product")

Config = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """How large an encoding may be.

    finest              most vertices along an axis of a dense grid of 1, 2, ... 7 dimensions
    coarser             how many times as many other grids may have, whose tables are bounded
    n_levels            most levels of a grid, where there are few dimensions
    log2_hashmap_size   least and most
    n_frequencies       most octaves of waves
    """

    finest: tuple[int, ...]
    coarser: int
    n_levels: int
    log2_hashmap_size: tuple[int, int]
    n_frequencies: int


LARGE = Limits((64, 64, 24, 12, 6, 4, 3), 4, 16, (4, 14), 12)
SMALL = Limits((64, 40, 20, 9, 6, 4, 3), 1, 4, (2, 7), 6)
"""Of a composite's children, and where differences shall be able to follow the encoding."""

MAX_DIMS_OF_MANY_LEVELS = 4
"""Each level of more dimensions than these has 32 corners or more."""


def random_grid(
    deck: Deck | Chance,
    n_dims: int,
    limits: Limits,
    *,
    otype: str | None = None,
    n_levels: int | None = None,
    n_features: int | None = None,
) -> Config:
    """A grid of n_dims dimensions; what is not given is random."""
    random = deck.random
    otype = otype or random.choice(GRIDS)
    n_features = n_features or deck.deal("n_features_per_level", (1, 2, 4, 8))
    most_levels = min(limits.n_levels if n_dims <= MAX_DIMS_OF_MANY_LEVELS else 3, max(1, 64 // n_features))
    n_levels = n_levels or random.randint(1, most_levels)
    most_vertices = limits.finest[n_dims - 1]
    base = random.randint(2, min(8, most_vertices))
    finest = most_vertices * (1 if otype == "DenseGrid" else limits.coarser)
    largest_scale = (finest / base) ** (1 / max(n_levels - 1, 1))
    config = {
        "otype": otype,
        "n_levels": n_levels,
        "n_features_per_level": n_features,
        "base_resolution": base,
        "per_level_scale": min(random.choice((1.0, 1.3, 1.5, 2.0, largest_scale)), largest_scale),
        "interpolation": deck.deal("interpolation", INTERPOLATIONS),
    }
    if otype == "HashGrid":
        config["log2_hashmap_size"] = random.randint(*limits.log2_hashmap_size)
        config["hash"] = deck.deal("hash", HASHES)
    return config


def random_leaf(deck: Deck | Chance, n_dims: int, limits: Limits, otype: str | None = None) -> Config:
    """An encoding of n_dims dimensions without children, of any kind if none is given."""
    random = deck.random
    if otype is None:
        kinds = ["Frequency", "TriangleWave", "OneBlob", "Identity", "Empty"]
        kinds += [random.choice(GRIDS)] * 3 if n_dims <= 7 else []
        kinds += ["SphericalHarmonics"] * 3 if n_dims == 3 else []
        otype = random.choice(kinds)
    if otype in GRIDS:
        return random_grid(deck, n_dims, limits, otype=otype)
    config: Config = {"otype": otype}
    if otype in ("Frequency", "TriangleWave"):
        config["n_frequencies"] = random.randint(1, limits.n_frequencies)
    elif otype == "OneBlob":
        config["n_bins"] = random.choice((1, 2, 4, 16, 64))
    elif otype == "Identity":
        config |= {"scale": round(random.uniform(-2, 2), 3) or 1.0, "offset": round(random.uniform(-1, 1), 3)}
    elif otype == "SphericalHarmonics":
        config["degree"] = random.randint(1, 8)
    return config


def random_factor(deck: Deck | Chance, n_dims: int, half_width: int, limits: Limits) -> Config:
    """An encoding with 2 n_dims half_width features: what Sum and Product combine has one width."""
    width, otype = 2 * half_width, deck.random.choice(("Frequency", "TriangleWave", "OneBlob", "Grid"))
    if otype == "Grid":
        return random_grid(deck, n_dims, limits, n_levels=n_dims, n_features=width)
    return {
        "Frequency": {"otype": "Frequency", "n_frequencies": half_width},
        "TriangleWave": {"otype": "TriangleWave", "n_frequencies": width},
        "OneBlob": {"otype": "OneBlob", "n_bins": width},
    }[otype]


def random_composite(
    deck: Deck | Chance, n_dims: int, limits: Limits, reduction: str | None = None, *, depth: int = 2
) -> Config:
    """One to three children on ranges of dimensions that may overlap and leave gaps; `depth`: of composites."""
    random = deck.random
    reduction = reduction or random.choice(("Concatenation", *REDUCTIONS))
    count, half_width = random.randint(1, min(n_dims, 3)), random.choice((1, 2, 4))
    nested = []
    for _ in range(random.randint(1, 3)):
        if reduction == "Concatenation":
            count = random.randint(1, min(n_dims, 7))
            if depth > 1 and random.randint(0, 3) == 0:
                child = random_composite(deck, count, limits, depth=depth - 1)
            else:
                child = random_leaf(deck, count, limits)
        else:
            child = random_factor(deck, count, half_width, limits)
        begin = random.randint(0, n_dims - count)
        nested.append({**child, "n_dims_to_encode": count, "dims_to_encode_begin": begin})
    return {"otype": "Composite", "reduction": reduction, "nested": nested}


def leaves_of(config: Config) -> list[Config]:
    """All encodings of a config that have no children."""
    if config["otype"] != "Composite":
        return [config]
    return [leaf for child in config["nested"] for leaf in leaves_of(child)]


def is_blind(config: Config) -> bool:
    """Whether dL/dx is 0 whatever the network does: all leaves are Nearest grids, or Empty."""
    return all(leaf.get("interpolation") == "Nearest" or leaf["otype"] == "Empty" for leaf in leaves_of(config))
