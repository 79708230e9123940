"""Products of a batch with small matrices, in blocks of rows that stay on one core.

A BLAS library splits a product among threads from about 2^18 multiplications on. For layers up to 64 x 64 that gains
little where a core is free, and where it is not, the threads wait for each other: ten times slower was measured beside
one busy process on two cores. Blocks of 64 rows stay below the limit and their operands in the cache; the results then
do not depend on the number of threads either. Wider layers are left to the library.
"""

from __future__ import annotations

import numpy as np

BLOCK_ROWS = 64
MAX_BLOCKED_SIZE = 64 * 64  # elements of the small matrix


def rows_times_matrix(rows: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """rows [B, K] @ matrix [K, N] -> [B, N]."""
    if matrix.size > MAX_BLOCKED_SIZE:
        return rows @ matrix
    batch, n = len(rows), matrix.shape[1]
    whole = batch - batch % BLOCK_ROWS
    product = np.empty((batch, n), rows.dtype)
    np.matmul(in_blocks(rows[:whole]), matrix, out=in_blocks(product[:whole]))
    np.matmul(rows[whole:], matrix, out=product[whole:])
    return product


def sum_of_outer_products(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """leftᵀ @ right for left [B, M] and right [B, N] -> [M, N]."""
    if left.shape[1] * right.shape[1] > MAX_BLOCKED_SIZE:
        return left.T @ right
    whole = len(left) - len(left) % BLOCK_ROWS
    partial = np.matmul(in_blocks(left[:whole]).transpose(0, 2, 1), in_blocks(right[:whole]))
    return partial.sum(axis=0) + left[whole:].T @ right[whole:]


def in_blocks(rows: np.ndarray) -> np.ndarray:
    """[B, K] as [B / 64, 64, K], a view in either memory order; B is a multiple of 64."""
    return rows.reshape(-1, BLOCK_ROWS, rows.shape[1])
