"""Rows of all corners at once against those corner by corner, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from emulation import emulator_target

from numba_tcnn.config import parse_model
from numba_tcnn.fused import emulator
from numba_tcnn.fused.corner_rows import has_corner_rows, make_corner_rows
from numba_tcnn.fused.emulated_memory import GlobalMemory
from numba_tcnn.fused.grid_rows import DENSE, HASHED, make_index

THREADS = 64
HASHES = ("Prime", "CoherentPrime", "ReversedPrime", "BaseConvert")


def spec_of(n_dims: int, hash_name: str = "CoherentPrime"):
    encoding = {"otype": "Grid", "type": "Hash", "hash": hash_name, "n_levels": 1}
    return parse_model(n_dims, None, encoding, None).encoding


@pytest.mark.parametrize("n_dims", [1, 2, 3, 4])
@pytest.mark.parametrize(("kind", "hash_name"), [(DENSE, "Prime"), *((HASHED, name) for name in HASHES)])
def test_all_at_once_is_one_by_one(n_dims: int, kind: str, hash_name: str, rng: np.random.Generator) -> None:
    """For cells inside, at the border, and far outside the lattice, negative ones too."""
    spec, target = spec_of(n_dims, hash_name), emulator_target()
    assert has_corner_rows(spec, kind)
    target.block = emulator.Block(GlobalMemory(), THREADS, 16)
    resolution = 9
    n_entries = 256 if kind == HASHED else -(-(resolution**n_dims) // 8) * 8
    cells = [rng.integers(0, resolution, THREADS).astype(np.uint32) for _ in range(n_dims)]
    for d in range(n_dims):
        cells[d][d * 8 : d * 8 + 8] = rng.integers(0, 2**32, 8)
        cells[d][40:44] = (2**32 - 1, 2**31, resolution - 1, resolution)
    n, size = np.uint32(resolution), np.uint32(n_entries)
    rows = make_corner_rows(target, spec, kind)(cells, n, size)
    index = make_index(target, spec, kind)
    assert len(rows) == 2**n_dims
    for corner, row in enumerate(rows):
        np.testing.assert_array_equal(row, index(cells, corner, n, size))
        assert (row < size).all()


def test_where_corners_are_taken_one_by_one() -> None:
    assert not has_corner_rows(spec_of(5), DENSE)
    assert not has_corner_rows(spec_of(3, "Rng"), HASHED)
    assert has_corner_rows(spec_of(3, "Rng"), DENSE)
