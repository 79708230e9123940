"""Kernels as a user writes them around a model's device function, for any numbers of inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numba_tcnn.specs import ModelSpec

STEP = 0.125


def call_and_store(f: Callable, spec: ModelSpec, n_calls: int = 1) -> Callable:
    """kernel(x, out, params): y = f(x, params) for each row of x, and n_calls - 1 times again where the last y led."""
    from numba import cuda, float32

    from numba_tcnn.fused.loop_hints import unroll_full

    step, n_in, n_out = float32(STEP), spec.n_input_dims, spec.n_output_dims

    def kernel(x, out, params):
        i = cuda.grid(1)
        row = x[min(i, x.shape[0] - 1)]
        place = from_row(row)
        y = f(place, params)
        for _ in range(n_calls - 1):
            y = f(moved(place, step * y[0]), params)
        if i < x.shape[0]:
            for j in range(n_out):
                unroll_full()
                out[i, j] = y[j]

    names = [f"x{d}" for d in range(n_in)]
    source = (
        f"def from_row(row):\n    return ({', '.join(f'row[{d}]' for d in range(n_in))},)\n"
        f"def moved(place, step):\n    {', '.join(names)}, = place\n"
        f"    return ({', '.join(f'{name} + step' for name in names)},)\n"
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    from_row, moved = (cuda.jit(device=True)(namespace[name]) for name in ("from_row", "moved"))
    return kernel


def next_place(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where such a kernel calls f next, from x with outputs y."""
    return x + np.float32(STEP) * y[:, :1]
