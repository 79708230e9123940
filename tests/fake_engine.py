"""A fused engine for machines without a GPU: the reference under another name, which fails where it is told to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba_tcnn.reference
from numba_tcnn.engines import EngineUnavailable, Explanation


class FakeFusedRuntime:
    """Delegates to a reference runtime; the operation named `fails_at` raises `error` instead of doing anything."""

    name = "fused"

    def __init__(self, inner: Any, fails_at: str | None, error: Exception):
        self.__dict__.update(inner=inner, fails_at=fails_at, error=error, closed=False)

    def __getattr__(self, attribute: str) -> Any:
        if attribute == self.fails_at:
            raise self.error
        return getattr(self.inner, attribute)

    def __setattr__(self, attribute: str, value: Any) -> None:
        setattr(self.inner, attribute, value)

    def explain(self) -> Explanation:
        return replace(self.inner.explain(), engine="fused")

    def close(self) -> None:
        self.__dict__["closed"] = True
        self.inner.close()


class FakeFusedEngine:
    """Stands in for `numba_tcnn.fused`. Change `fails_at` and `error` at any time; runtimes made later obey."""

    def __init__(self, fails_at: str | None = None, reason: str = "ptxas said no", *, no_device: bool = False):
        self.fails_at = fails_at
        self.error = EngineUnavailable(reason, no_device=no_device)
        self.made: list[FakeFusedRuntime] = []
        self.reference_create_runtime = numba_tcnn.reference.create_runtime

    def create_runtime(
        self, spec: Any, params: Any, *, dtype: str, device: int, deterministic: bool
    ) -> FakeFusedRuntime:
        if self.fails_at == "create_runtime":
            raise self.error
        inner = self.reference_create_runtime(spec, params, dtype=dtype, seed=0)
        self.made.append(FakeFusedRuntime(inner, self.fails_at, self.error))
        return self.made[-1]
