"""Which row of a grid level's table a vertex has.

A vertex p has uint32 coordinates p_d, D of them. Its row is, modulo the number of entries of the table,

    the dense index Σ_d p_d N^d      where the lattice N^D fits the table, and always in Dense and Tiled grids
    a hash of p                      in a Hash grid whose table is smaller than the lattice

Coordinates wrap, so every input has a row: cells left of 0 wrap around the table, as in tiny-cuda-nn. Hashes are
computed modulo 2^32:

    Prime, CoherentPrime, ReversedPrime    ⊕_d p_d c_d with the constants of `FACTORS`, ⊕ being the exclusive or
    BaseConvert                            Σ_d p_d b^(D-d), b = 2531011
    Rng                                    output number ⊕_d p_d 2^(d ⌊64/D⌋) (modulo 2^64) of pcg32 with seed 1337
"""

from __future__ import annotations

import numpy as np

from numba_tcnn.initial_values import Pcg32
from numba_tcnn.layout import GridLevel
from numba_tcnn.specs import GridSpec

FACTORS = {
    "CoherentPrime": (1, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737),
    "Prime": (1958374283, 2654435761, 805459861, 3674653429, 2097192037, 1434869437, 2165219737),
    "ReversedPrime": (2165219737, 1434869437, 2097192037, 3674653429, 805459861, 2654435761, 1958374283),
}
BASE = 2531011
RNG_SEED = 1337

MAX_UINT32_RESOLUTION = (2**32 - 1, 65535, 1625, 255, 84, 40, 23)
"""For D = 1, 2, ...: the largest N with N^D < 2^32. Finer dense lattices are indexed in uint64."""


def rows_of_vertices(vertices: np.ndarray, level: GridLevel, spec: GridSpec) -> np.ndarray:
    """Table rows [C, B] of the vertices whose coordinates in dimension d are vertices[d], uint32 [1 or 2, B].

    C counts the combinations of coordinates, dimension 0 running fastest.
    """
    row = hashes(vertices, spec.hash) if level.hashed else dense_indices(vertices, level.resolution)
    size = row.dtype.type(level.n_entries)
    if level.n_entries & (level.n_entries - 1) == 0:
        row &= size - row.dtype.type(1)
    else:
        row %= size
    return row.astype(np.intp)


def dense_indices(vertices: np.ndarray, resolution: int) -> np.ndarray:
    """Σ_d p_d N^d, modulo 2^32, or modulo 2^64 where N^D does not fit 32 bits."""
    n_dims = len(vertices)
    index_type = np.uint32 if resolution <= MAX_UINT32_RESOLUTION[n_dims - 1] else np.uint64
    return weighted_sum(vertices.astype(index_type), [resolution**d for d in range(n_dims)])


def hashes(vertices: np.ndarray, name: str) -> np.ndarray:
    n_dims = len(vertices)
    if name in FACTORS:
        factors = np.array(FACTORS[name][:n_dims], np.uint32)
        return outer(np.bitwise_xor, [v * factor for v, factor in zip(vertices, factors, strict=True)])
    if name == "BaseConvert":
        return weighted_sum(vertices, [BASE ** (n_dims - d) for d in range(n_dims)])
    bits = np.uint64(64 // n_dims)
    steps = outer(np.bitwise_xor, [v.astype(np.uint64) << (np.uint64(d) * bits) for d, v in enumerate(vertices)])
    return Pcg32(RNG_SEED).uint32_after(steps)


def weighted_sum(vertices: np.ndarray, weights: list[int]) -> np.ndarray:
    """Σ_d p_d w_d of all combinations [C, B], modulo 2^32 or 2^64 by the type of the vertices."""
    modulus = 1 << (8 * vertices.dtype.itemsize)
    factors = np.array([weight % modulus for weight in weights], vertices.dtype)
    return outer(np.add, [v * factor for v, factor in zip(vertices, factors, strict=True)])


def outer(combine: np.ufunc, factors: list[np.ndarray]) -> np.ndarray:
    """combine(factors[0][c_0], factors[1][c_1], ...) for all combinations: [n_0·n_1·..., B], c_0 running fastest."""
    result = factors[0]
    for factor in factors[1:]:
        result = combine(result[None], factor[:, None]).reshape(-1, result.shape[-1])
    return result
