"""Fixtures and the rule for tests that need a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import numba_tcnn.fused
import numba_tcnn.reference


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where fused kernels can't run, with the device's own reason."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    status = numba_tcnn.fused.device_status(0)
    if not status.usable:
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason=f"no usable GPU: {status.reason}"))


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """While fused code is tested the reference engine raises: a fallback is a failure, not a slower success."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the reference engine was asked to compute in a test of fused code")

    monkeypatch.setattr(numba_tcnn.reference, "create_runtime", refuse)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20241130)
