"""Blocked products: equal to the plain ones in every shape and memory order."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tcnn.reference.matmul import BLOCK_ROWS, rows_times_matrix, sum_of_outer_products


@pytest.mark.parametrize("batch", [1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 5 * BLOCK_ROWS + 7])
@pytest.mark.parametrize(("m", "n"), [(16, 3), (64, 64), (48, 128)])  # the last is not blocked
@pytest.mark.parametrize("order", ["C", "F"])
def test_products(batch: int, m: int, n: int, order: str) -> None:
    """float64, so that only a wrong element can differ by more than 1e-12."""
    random = np.random.default_rng(0)
    left = np.asarray(random.standard_normal((batch, m)), order=order)
    right = np.asarray(random.standard_normal((batch, n)), order=order)
    matrix = random.standard_normal((n, m)).T
    np.testing.assert_allclose(rows_times_matrix(left, matrix), np.einsum("bk,kn->bn", left, matrix), atol=1e-12)
    expected = np.einsum("bm,bn->mn", left, right)
    np.testing.assert_allclose(sum_of_outer_products(left, right), expected, atol=1e-12)
