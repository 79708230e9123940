"""On a real device: bit-equal training in two processes, grid options, levels of detail, losses of whole rows."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import numba_tcnn as tcnn
from benchmarks.agreement.comparison import TOLERANCE, relative_error
from benchmarks.agreement.device_views import DeviceView, poisoned
from numba_tcnn.reference.model import Model
from numba_tcnn.specs import LossSpec

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("no_reference")]

HASH = {"otype": "HashGrid", "n_levels": 8, "log2_hashmap_size": 10, "base_resolution": 16, "per_level_scale": 1.5}
NETWORK = {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2}
CONFIG = {
    "encoding": HASH,
    "network": NETWORK,
    "loss": {"otype": "RelativeL2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
}

TRAINING = """
import hashlib, json, sys
import numpy as np
import numba_tcnn as tcnn
from numba_tcnn.fused import to_device
config, size, steps = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
model = tcnn.create_from_config(2, 3, config, strict=True, deterministic=True)
assert model.explain().engine == "fused"
rng = np.random.default_rng(5)
x = rng.random((size, 2), np.float32)
y = np.stack([np.sin(9 * x[:, 0]), np.cos(7 * x[:, 1]), x[:, 0] * x[:, 1]], axis=1).astype(np.float32)
x, y = to_device(x), to_device(y)
losses = [float(model.trainer.training_step(x, y)) for _ in range(steps)]
assert np.isfinite(losses).all() and losses[-1] < 0.5 * losses[0]
assert model.trainer.skipped_steps == 0
print(hashlib.sha256(model.params.tobytes() + np.array(losses).tobytes()).hexdigest())
"""


@pytest.mark.parametrize("size", [1 << 14, 1 << 18])
def test_two_processes_train_the_same_bits(size: int) -> None:
    """200 steps of a hash grid of 1024 entries a level, in which most vertices collide."""

    command = [sys.executable, "-c", TRAINING, json.dumps(CONFIG), str(size), "200"]
    results = [subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2)]
    for result in results:
        assert result.returncode == 0, result.stderr
    assert results[0].stdout == results[1].stdout and len(results[0].stdout) == 65


def compare(
    n_in: int, n_out: int, config: dict[str, Any], batch: int, *, max_level: Any = None, loss: str = "L2",
    deterministic: bool = False,
) -> None:  # fmt: skip
    """Outputs, both gradients of given output gradients, and those of a training step, against the reference."""
    optimizer = {"otype": "Adam", "beta1": 0.0, "l2_reg": 0.0}  # whose first moments are the gradient
    config = config | {"loss": {"otype": loss}, "optimizer": optimizer}
    model = tcnn.create_from_config(n_in, n_out, config, strict=True, deterministic=deterministic)
    rng = np.random.default_rng(batch)
    params = np.array(model.params)
    n_network = sum(rows * columns for rows, columns in model.layer_sizes)
    params[n_network:] = rng.uniform(-0.5, 0.5, len(params) - n_network)
    model.params = params
    reference = Model(model.network.spec, params, "float16")
    if max_level is not None:
        model.network.max_level = max_level
        reference.max_level = np.float32(max_level) if np.ndim(max_level) == 0 else max_level
    x = rng.random((batch, n_in), np.float32)
    y = rng.random((batch, n_out), np.float32)
    expected = reference.forward(x)
    assert relative_error(model.network.inference(x), expected) <= TOLERANCE
    _, context = model.network.forward(x)
    given, wanted = model.network.backward(context, y), reference.backward(x, y)
    assert relative_error(given.params, wanted.params) <= TOLERANCE
    assert relative_error(given.input, wanted.input) <= TOLERANCE
    value = float(model.trainer.training_step(x, y))
    expected_value, wanted = reference.loss_and_gradients(x, y, LossSpec(loss))
    assert value == pytest.approx(expected_value, rel=1e-4)
    assert relative_error(model.optimizer.state_dict()["first_moments"], wanted.params) <= TOLERANCE
    assert model.explain().engine == "fused"


@pytest.mark.parametrize("batch", [1, 31, 257, 10_000])
@pytest.mark.parametrize("options", [
    {"stochastic_interpolation": True}, {"fixed_point_pos": True},
    {"stochastic_interpolation": True, "fixed_point_pos": True, "interpolation": "Smoothstep"},
], ids=str)  # fmt: skip
def test_grid_options(options: dict[str, Any], batch: int) -> None:
    compare(3, 4, {"encoding": HASH | options, "network": NETWORK | {"activation": "Sigmoid"}}, batch)


@pytest.mark.parametrize("max_level", [0.4, "array"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_levels_in_use(max_level: Any, deterministic: bool, rng: np.random.Generator) -> None:
    fractions = rng.random(5000, np.float32) if max_level == "array" else max_level
    config = {"encoding": HASH, "network": NETWORK | {"activation": "Sigmoid"}}
    compare(2, 3, config, 5000, max_level=fractions, deterministic=deterministic)


@pytest.mark.parametrize("n_out", [3, 5, 6, 17])
def test_luminance(n_out: int) -> None:
    network = NETWORK | {"activation": "Sigmoid", "output_activation": "Sigmoid"}
    compare(2, n_out, {"encoding": HASH, "network": network}, 1000, loss="RelativeL2Luminance")


def test_a_batch_of_16_million(rng: np.random.Generator) -> None:
    """2^24 samples of 64 outputs: 2^30 elements, in addresses beyond 2^32. The last rows are right."""
    network = {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1}
    module = tcnn.NetworkWithInputEncoding(1, 64, {"otype": "Identity"}, network, strict=True)
    size = 1 << 24
    x = np.zeros((size, 1), np.float32)
    x[-1000:, 0] = rng.random(1000, np.float32)
    out = poisoned((size, 64), "float16")
    module.inference(DeviceView(x), out=out)
    expected = Model(module.spec, module.params, "float16").forward(x[-1000:])
    y = out.numpy()
    assert relative_error(y[-1000:], expected) <= 2e-3
    np.testing.assert_array_equal(y[: size // 2 : 9973], np.broadcast_to(y[0], y[: size // 2 : 9973].shape))
