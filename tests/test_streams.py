"""Streams as users give them, for every call that takes one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulated_driver import EmulatedDriver

import numba_tcnn as tcnn
from numba_tcnn.fused import to_device
from numba_tcnn.streams import stream_handle


class WithProtocol:
    """As of cuda.core and Numba."""

    def __init__(self, handle: int):
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


STREAMS = {
    "handle": 5,
    "NumPy integer": np.uint64(5),
    "protocol": WithProtocol(5),
    "PyTorch": types.SimpleNamespace(cuda_stream=5),
    "CuPy": types.SimpleNamespace(ptr=5),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_handles(kind: str) -> None:
    assert stream_handle(STREAMS[kind], 7) == 5


def test_none_is_the_default() -> None:
    assert stream_handle(None, 7) == 7 and stream_handle(None, None) is None
    assert stream_handle(0, 7) == stream_handle(WithProtocol(0), 7) == 0, "the default stream is a stream"


CALLS: dict[str, Callable[[tcnn.NetworkWithInputEncoding, tcnn.Trainer, Any, Any, Any], Any]] = {
    "inference": lambda network, trainer, x, y, stream: network.inference(x, stream=stream),
    "prepared inference": lambda network, trainer, x, y, stream: network.prepare(x, y)(stream=stream),
    "forward": lambda network, trainer, x, y, stream: network.forward(x, stream=stream),
    "backward": lambda network, trainer, x, y, stream: network.backward(network.forward(x)[1], y, stream=stream),
    "second order": lambda network, trainer, x, y, stream: network.backward_backward_input(
        network.forward(x)[1], x, y, stream=stream
    ),
    "training step": lambda network, trainer, x, y, stream: trainer.training_step(x, y, stream=stream),
}


def model_and_arrays() -> tuple[tcnn.NetworkWithInputEncoding, tcnn.Trainer, Any, Any]:
    config = {"encoding": {"otype": "Identity"}, "network": {"otype": "FullyFusedMLP", "n_neurons": 16}}
    model = tcnn.create_from_config(2, 1, config)
    x = np.random.default_rng(0).random((40, 2), np.float32)
    return model.network, model.trainer, to_device(x), to_device(x[:, :1].copy())


@pytest.mark.parametrize("call", CALLS)
def test_calls_launch_on_the_stream_of_an_object(call: str, gpu: EmulatedDriver, no_reference: None) -> None:
    *model, x, y = model_and_arrays()
    gpu.launches.clear()
    CALLS[call](*model, x, y, WithProtocol(5))
    assert gpu.launches[-1][2] == 5


@pytest.mark.parametrize(
    "stream", ["abc", 1.5, True, -1, object()], ids=["text", "fraction", "bool", "negative", "object"]
)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_stream_is_named(call: str, stream: Any) -> None:
    config = {"encoding": {"otype": "Identity"}, "network": {"otype": "FullyFusedMLP", "n_neurons": 16}}
    model = tcnn.create_from_config(2, 1, config, engine="reference")
    x = np.random.default_rng(0).random((4, 2), np.float32)
    with pytest.raises(TypeError, match="stream must be the handle of a CUDA stream"):
        CALLS[call](model.network, model.trainer, x, x[:, :1].copy(), stream)
