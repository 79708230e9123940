"""Training on a real device: fused steps against the reference's, state that moves, steps that are skipped, streams."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import numba_tcnn as tcnn
from benchmarks.agreement.comparison import TOLERANCE, relative_error
from benchmarks.agreement.device_views import DeviceView
from numba_tcnn.arrays import host_view
from numba_tcnn.config import parse_loss, parse_optimizer
from numba_tcnn.fused import device_status, dtypes_of, to_device
from numba_tcnn.fused.compile_processes import VARIABLE
from numba_tcnn.layout import n_network_params
from numba_tcnn.reference.engine import ReferenceRuntime
from numba_tcnn.reference.model import Model

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
fused_only = pytest.mark.usefixtures("no_reference")

ROOT = Path(__file__).parent.parent
IMAGE_HASH = ROOT / "examples" / "configs" / "image_hash.json"
CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2, "l2_reg": 0.0},
    "encoding": {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 10, "base_resolution": 8},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 2, "activation": "Tanh"},
}
"""A smooth network, so that no gate can flip. `make` draws its tables: initial ones are too small to show errors."""


def make(**changes) -> tcnn.Model:
    model = tcnn.create_from_config(2, 3, {**CONFIG, **changes}, strict=True)
    assert model.explain().engine == "fused"
    params = model.params.copy()
    n_network = n_network_params(model.network.spec)
    params[n_network:] = np.random.default_rng(3).uniform(-0.5, 0.5, len(params) - n_network)
    model.params = params
    return model


def reference_of(model: tcnn.Model) -> Model:
    return Model(model.network.spec, model.params, "float16")


def picture(x: np.ndarray) -> np.ndarray:
    """Colours [n, 3] in [0, 1] at x [n, 2]: smooth, with detail down to 1/20."""
    u, v = x[:, 0].astype(np.float64), x[:, 1].astype(np.float64)
    red, green = np.sin(9 * u) * np.cos(7 * v), np.sin(20 * u * v)
    return (0.5 + 0.4 * np.stack([red, green, red * green], axis=1)).astype(np.float32)


def data(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    x = rng.random((n, 2), np.float32)
    return x, picture(x)


def first_moments(model: tcnn.Model) -> np.ndarray:
    return model.optimizer.state_dict()["first_moments"]


# --------------------------------------------------------------------------------------- against the reference


@fused_only
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.02), ("bfloat16", 0.05), ("float32", 0.02)])
def test_fifty_steps_of_image_hash_go_as_in_the_reference(dtype, tolerance, rng):
    if dtype not in dtypes_of(device_status(0).compute_capability):
        pytest.skip(f"this device has no {dtype}")
    config = json.loads(IMAGE_HASH.read_text())
    fused = tcnn.create_from_config(2, 3, config, dtype=dtype, strict=True)
    assert fused.explain().engine == "fused" and fused.explain().dtype.startswith(dtype)
    reference = ReferenceRuntime(fused.network.spec, fused.params, dtype)
    reference.configure_training(parse_optimizer(config["optimizer"]), parse_loss(config["loss"]))
    exact = ReferenceRuntime(fused.network.spec, fused.params, "float32")
    exact.configure_training(parse_optimizer(config["optimizer"]), parse_loss(config["loss"]))
    losses = []
    for _ in range(50):
        x, y = data(rng, 1 << 13)
        in_numpy = [float(r.training_step(host_view(x), host_view(y))) for r in (reference, exact)]
        losses.append([float(fused.trainer.training_step(to_device(x), to_device(y))), *in_numpy])
    losses = np.array(losses)
    # Adam turns the sign of a gradient into a step of full size, also where the gradient is all rounding, so runs part
    # slowly; a wrong gradient or optimizer parts them at once
    np.testing.assert_allclose(losses[:, 0], losses[:, 1], rtol=tolerance)
    assert losses[-1, 0] < 0.1 * losses[0, 0] and fused.trainer.step == 50 and fused.trainer.skipped_steps == 0

    x, y = data(rng, 1 << 13)
    got = fused.network.inference(x)
    in_dtype, in_single = (r.model.forward(x) for r in (reference, exact))
    apart, formats_apart = relative_error(got, in_dtype), relative_error(in_dtype, in_single)
    print(f"\nafter 50 steps: fused from {dtype} reference {apart:.1e}, that from float32 {formats_apart:.1e}")
    # no farther than the dtype is from float32, or 1 % where that is less
    assert apart <= max(formats_apart, 0.01)


@fused_only
@pytest.mark.parametrize("loss", ["L2", "Smape", "RelativeL1"])
def test_sampling_densities_divide_loss_and_gradient(loss, rng):
    model = make(loss={"otype": loss}, optimizer={"otype": "Adam", "beta1": 0.0, "l2_reg": 0.0})
    reference = reference_of(model)
    x = rng.random((777, 2), np.float32)
    y = reference.forward(x) + rng.choice([-0.5, 0.5], (777, 3)).astype(np.float32)
    density = rng.uniform(0.3, 3.0, (777, 3)).astype(np.float32)
    expected_loss, expected = reference.loss_and_gradients(x, y, model.loss.spec, density)
    for dtype in ("float32", "float16"):
        model.params = reference.params
        given = density.astype(dtype)
        got = float(model.trainer.training_step(to_device(x), to_device(y), data_pdf=to_device(given)))
        tolerance = TOLERANCE if dtype == "float32" else TOLERANCE + 2.0**-11  # the densities themselves are rounded
        assert abs(got - expected_loss) <= tolerance * expected_loss
        assert relative_error(first_moments(model), expected.params) <= tolerance


@fused_only
def test_external_gradients_replace_the_loss(rng):
    model = make(optimizer={"otype": "Adam", "beta1": 0.0, "l2_reg": 0.0})
    reference = reference_of(model)
    x, gradient = rng.random((500, 2), np.float32), rng.standard_normal((500, 3)).astype(np.float32)
    expected = reference.backward(x, gradient)
    loss = model.trainer.training_step(to_device(x), None, external_gradient=to_device(gradient))
    assert float(loss) == 0.0
    assert relative_error(first_moments(model), expected.params) <= TOLERANCE


@fused_only
def test_without_the_optimizer_only_the_loss_is_measured(rng):
    model = make()
    x, y = data(rng, 300)
    before, state = model.params, model.optimizer.state_dict()
    expected, _ = reference_of(model).loss_and_gradients(x, y, model.loss.spec)
    loss = float(model.trainer.training_step(x, y, run_optimizer=False))
    assert abs(loss - expected) <= TOLERANCE * expected
    np.testing.assert_array_equal(model.params, before)
    for name, value in model.optimizer.state_dict().items():
        np.testing.assert_array_equal(value, state[name])
    # the tables' gradient that it left must not leak into the next step: that of a twin that did not measure first
    twin = make()
    for one in (model, twin):
        one.trainer.training_step(x, y)
    assert relative_error(first_moments(model), first_moments(twin)) < 1e-5


# --------------------------------------------------------------------------------------- forward and backward


@fused_only
def test_contexts_wait_in_any_order_and_accumulate(rng):
    model = make()
    network, reference = model.network, reference_of(model)
    batches = [(rng.random((n, 2), np.float32), rng.standard_normal((n, 3)).astype(np.float32)) for n in (300, 31, 1)]
    contexts = [network.forward(to_device(x))[1] for x, _ in batches]
    expected = [reference.backward(x, dL_dy) for x, dL_dy in batches]
    total = np.zeros(model.n_params, np.float64)
    for i, how in ((2, "overwrite"), (0, "accumulate"), (1, "accumulate")):
        gradients = network.backward(contexts[i], to_device(batches[i][1]), parameters=how)
        total += expected[i].params
        assert relative_error(gradients.params.numpy(), total) <= TOLERANCE
        assert relative_error(gradients.input.numpy(), expected[i].input) <= TOLERANCE
    ignored = network.backward(contexts[0], to_device(batches[0][1]), parameters="ignore")
    assert ignored.params is None and relative_error(ignored.input.numpy(), expected[0].input) <= TOLERANCE
    only = network.backward(contexts[0], to_device(batches[0][1]), input=False)
    assert only.input is None and relative_error(only.params.numpy(), expected[0].params) <= TOLERANCE
    model.trainer.training_step(*data(rng, 100))
    with pytest.raises(RuntimeError, match="run forward"):
        network.backward(contexts[1], to_device(batches[1][1]))


# --------------------------------------------------------------------------------------- state


@fused_only
def test_steps_with_a_gradient_that_is_not_finite_are_skipped(rng):
    model = make()
    x, y = data(rng, 1000)
    model.trainer.training_step(x, y)
    before, moments = model.params, first_moments(model)
    for bad in (np.nan, np.inf):
        broken = y.copy()
        broken[777, 1] = bad
        loss = model.trainer.training_step(x, broken)
        assert not np.isfinite(float(loss))
        np.testing.assert_array_equal(model.params, before)
        np.testing.assert_array_equal(first_moments(model), moments)
    assert model.trainer.skipped_steps == 2 and model.trainer.step == 3
    assert np.isfinite(float(model.trainer.training_step(x, y)))
    assert model.trainer.skipped_steps == 2 and not np.array_equal(model.params, before)
    assert np.isfinite(model.params).all() and np.isfinite(model.network.inference(x)).all()


@fused_only
def test_deep_copies_are_models_of_their_own(rng):
    model = make()
    x, y = data(rng, 1000)
    for _ in range(3):
        model.trainer.training_step(x, y)
    twin = copy.deepcopy(model)
    np.testing.assert_array_equal(twin.params, model.params)
    before = model.params
    losses = [float(twin.trainer.training_step(x, y)) for _ in range(5)]
    np.testing.assert_array_equal(model.params, before)
    # the same steps: float32 sums in another order, by which 5 steps of Adam part a little
    np.testing.assert_allclose([float(model.trainer.training_step(x, y)) for _ in range(5)], losses, rtol=1e-3)
    assert twin.trainer.step == model.trainer.step == 8


def test_switching_engines_carries_the_state_over(rng):
    """Fused, reference, fused again: as if nothing had happened. Uses the reference on purpose."""
    switching, steady = make(), make()
    for step in range(15):
        if step % 5 == 0:
            switching.jit_fusion = step != 5
            assert switching.explain().engine == ("reference" if step == 5 else "fused")
        x, y = data(rng, 1000)
        losses = [float(m.trainer.training_step(x, y)) for m in (switching, steady)]
        assert losses[0] == pytest.approx(losses[1], rel=0.02)  # as in the 50 steps above
    assert switching.trainer.step == 15 and switching.trainer.learning_rate == steady.trainer.learning_rate
    state, other = switching.optimizer.state_dict(), steady.optimizer.state_dict()
    np.testing.assert_array_equal(state["param_steps"] > 0, other["param_steps"] > 0)


@fused_only
def test_the_learning_rate_takes_effect_at_once(rng):
    model = make()
    x, y = data(rng, 500)
    model.trainer.training_step(x, y)
    model.trainer.learning_rate = 0.0
    before = model.params
    model.trainer.training_step(x, y)
    np.testing.assert_array_equal(model.params, before)


@fused_only
def test_batches_of_growing_and_shrinking_size(rng):
    """Workspaces grow with the batch; what an earlier size left in them must not show."""
    model = make()
    for n in (100, 5000, 31, 1 << 17, 1, 3000):
        x, y = data(rng, n)
        expected, _ = reference_of(model).loss_and_gradients(x, y, model.loss.spec, input=False)
        assert float(model.trainer.training_step(to_device(x), to_device(y))) == pytest.approx(expected, rel=TOLERANCE)
    x, _ = data(rng, 2000)
    assert relative_error(model.network.inference(x), reference_of(model).forward(x)) <= TOLERANCE


@fused_only
def test_losses_keep_their_value_until_they_are_read(rng):
    """More of them than the device has places for; some are dropped unread."""
    model = make()
    x, y = data(rng, 4096)
    sizes = rng.integers(1, 4096, 9000)
    handles = [model.trainer.training_step(x[:n], y[:n], run_optimizer=False) for n in sizes]
    del handles[100:2000]
    kept = np.concatenate([sizes[:100], sizes[2000:]])
    values = np.array([float(handle) for handle in handles])
    reference = reference_of(model)
    squares = np.mean(np.square(reference.forward(x).astype(np.float64) - y), axis=1)
    expected = np.cumsum(squares)[kept - 1] / kept
    np.testing.assert_allclose(values, expected, rtol=TOLERANCE)


# --------------------------------------------------------------------------------------- streams


@fused_only
def test_steps_on_a_stream_of_torch(rng):
    """x is still being computed on the stream when the step is launched there."""
    torch = pytest.importorskip("torch")
    model, plain = make(), make()
    x, y = data(rng, 20_000)
    stream = torch.cuda.Stream()
    losses = []
    with torch.cuda.stream(stream):
        busy = torch.randn(3000, 3000, device="cuda")
        for _ in range(5):
            for _ in range(5):
                busy = torch.tanh(busy @ busy)
            late_x = torch.from_numpy(x).cuda() + 0 * busy[0, 0]
            late_y = torch.from_numpy(y).cuda() + 0 * busy[0, 0]
            losses.append(model.trainer.training_step(late_x, late_y))
            del late_x, late_y  # torch may reuse the memory for later work on this stream
        result = model.network.inference(torch.from_numpy(x).cuda())
        result = result.cpu().numpy()
    expected = [float(plain.trainer.training_step(x, y)) for _ in range(5)]
    np.testing.assert_allclose([float(loss) for loss in losses], expected, rtol=1e-3)
    assert relative_error(result, plain.network.inference(x)) <= TOLERANCE


@fused_only
@pytest.mark.parametrize("size", [300, 1 << 14, 1 << 18])
@pytest.mark.parametrize(
    "network",
    [
        {"n_neurons": 16, "n_hidden_layers": 1},
        {"n_neurons": 64, "n_hidden_layers": 2},
        {"n_neurons": 128, "n_hidden_layers": 4},
    ],
    ids=["16 wide", "64 wide", "128 wide"],
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["network", "grid"])
def test_overlapping_launches_change_no_bit(deterministic, network, size, rng):
    """Repeated calls start before the kernels in front of them have ended; those on a stream that is named do not."""
    encoding = CONFIG["encoding"] if deterministic else {"otype": "Identity"}
    config = CONFIG | {"encoding": encoding, "network": CONFIG["network"] | {"activation": "ReLU"} | network}
    batches = [tuple(to_device(array) for array in data(rng, size)) for _ in range(3)]
    outputs = []
    for stream in (None, 0):
        model = tcnn.create_from_config(2, 3, config, strict=True, deterministic=deterministic)
        out = to_device(np.full((size, 3), np.nan, np.float32))
        losses = []
        for i in range(60):
            x, y = batches[i % 3]
            losses.append(model.trainer.training_step(x, y, stream=stream))
            model.network.inference(x, out=out, stream=stream)
        outputs.append((model.params, np.array([float(loss) for loss in losses]), out.numpy()))
    for overlapped, alone in zip(*outputs, strict=True):
        np.testing.assert_array_equal(overlapped, alone)


@fused_only
def test_changing_streams_keeps_the_order(rng):
    torch = pytest.importorskip("torch")
    model, plain = make(), make()
    x, y = data(rng, 50_000)
    device_x, device_y = DeviceView(x), DeviceView(y)
    streams = [0, *(torch.cuda.Stream().cuda_stream for _ in range(3))]
    got = [model.trainer.training_step(device_x, device_y, stream=streams[i % 4]) for i in range(12)]
    expected = [float(plain.trainer.training_step(x, y)) for _ in range(12)]
    # a step that overtook the one before would repeat its loss
    np.testing.assert_allclose([float(loss) for loss in got], expected, rtol=5e-3)


# --------------------------------------------------------------------------------------- first calls

FIRST_CALLS = """
import json, sys, time
import numpy as np
import numba_tcnn as tcnn
from numba_tcnn.fused import to_device
x, y = to_device(np.random.rand(1 << 18, 2).astype("f")), to_device(np.random.rand(1 << 18, 3).astype("f"))
start = time.perf_counter()
model = tcnn.create_from_config(2, 3, sys.argv[1], strict=True)
made = time.perf_counter()
float(model.trainer.training_step(x, y))
trained = time.perf_counter()
model.network.inference(x).synchronize()
done = time.perf_counter()
kernels = [(k.name, k.from_cache, k.compile_seconds) for k in model.explain().kernels]
print(json.dumps({"model": made - start, "training step": trained - made, "inference": done - trained,
                  "kernels": kernels}))
"""


def test_first_calls_cold_and_from_the_cache(tmp_path):
    """Two fresh processes share a new cache folder; the CUDA context exists before the clock starts."""
    environment = {**os.environ, "NUMBA_TCNN_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop(VARIABLE)  # other processes compile, as a user's would
    command = [sys.executable, "-c", FIRST_CALLS, str(IMAGE_HASH)]
    runs = [
        json.loads(subprocess.run(command, env=environment, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
        for _ in range(2)
    ]
    for name, run in zip(("cold", "cached"), runs, strict=True):
        times = ", ".join(f"{part} {run[part]:.2f} s" for part in ("model", "training step", "inference"))
        compiled = ", ".join(f"{kernel} {seconds:.2f} s" for kernel, cached, seconds in run["kernels"] if not cached)
        print(f"\nfirst calls of image_hash, {name}: {times}; compiled: {compiled or 'nothing'}")
    cold, cached = runs
    encode = [from_cache for name, from_cache, _ in cold["kernels"] if name == "encode_levels"]
    assert encode == [False, True]  # the training step's serves inference too
    assert sum(from_cache for _, from_cache, _ in cold["kernels"]) == 1
    assert all(from_cache for _, from_cache, _ in cached["kernels"])
    assert cached["training step"] < 0.5 * cold["training step"]
