"""Models inside kernels of a user's own, on a real device: what they give there is what `inference` gives.

Both round to float16 at the same points and add up in float32 in another order: `TOLERANCE` of the largest output is a
hidden value that went the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from embedding_kernels import call_and_store, next_place
from test_embedding import COMPOSITE, CUTLASS, GRID, PRODUCT
from test_fused_kernels import make_params

import numba_tcnn as tcnn
from benchmarks.agreement.device_views import DeviceView, poisoned

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("no_reference")]

TOLERANCE = 1e-3
SIZES = (1, 31, 257, 1000)


def network_of(n_in: int, n_out: int, encoding: dict, **network: Any) -> tcnn.NetworkWithInputEncoding:
    """Parameters are such that everything is of order 1."""
    config = {"otype": "FullyFusedMLP"} | network
    module = tcnn.NetworkWithInputEncoding(n_in, n_out, encoding, config, strict=True)
    module.params = make_params(module.spec, np.random.default_rng(7))
    assert module.explain().engine == "fused"
    return module


def run(
    module: tcnn.Module, x: np.ndarray, *, n_calls: int = 1, block: Any = 256, function: Callable | None = None
) -> np.ndarray:
    """The outputs of a kernel that calls the model's device function, written over NaN between guards."""
    from numba import cuda

    f = function or module.device_function(256)
    kernel = cuda.jit(call_and_store(f, module.spec, n_calls))
    out = poisoned((len(x), module.n_output_dims), "float32")
    kernel[-(-len(x) // int(np.prod(block))), block](DeviceView(x), out, module.device_params)
    cuda.synchronize()
    return out.numpy()


def assert_equal(actual: np.ndarray, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    assert np.isfinite(actual).all()
    assert np.abs(actual - expected).max() <= tolerance * max(np.abs(expected).max(), 1.0)


MODELS: dict[str, Callable[[], tcnn.Module]] = {
    "image": lambda: network_of(2, 3, GRID | {"n_levels": 16, "log2_hashmap_size": 12}, n_neurons=64),
    "volume": lambda: network_of(3, 16, GRID | {"n_levels": 8}, n_neurons=64, n_hidden_layers=1),
    "wide entries": lambda: network_of(3, 1, GRID | {"n_features_per_level": 8}, n_neurons=32),
    "frequency": lambda: network_of(3, 4, {"otype": "Frequency", "n_frequencies": 8}, n_neurons=128, n_hidden_layers=3),
    "oneblob": lambda: network_of(2, 3, {"otype": "OneBlob", "n_bins": 16}, n_neurons=16, activation="Tanh"),
    "composite": lambda: network_of(7, 5, COMPOSITE, n_neurons=32, activation="SiLU"),
    "product": lambda: network_of(2, 3, PRODUCT, n_neurons=16, activation="Squareplus"),
    "64 outputs": lambda: network_of(3, 64, GRID, n_neurons=64, output_activation="Sigmoid"),
    "57 outputs, 128 wide": lambda: network_of(3, 57, GRID, n_neurons=128, n_hidden_layers=2),
    "odd widths": lambda: network_of(2, 17, GRID, **CUTLASS, hidden=[40, 25, 100], activation="Softplus"),
    "network alone": lambda: tcnn.Network(20, 2, {"otype": "FullyFusedMLP", "n_neurons": 64}, strict=True),
    "encoding alone": lambda: tcnn.Encoding(3, {"otype": "SphericalHarmonics", "degree": 4}, strict=True),
    "grid alone": lambda: tcnn.Encoding(2, GRID, strict=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_inference(name: str, rng) -> None:
    module = MODELS[name]()
    for n in SIZES:
        x = rng.random((n, module.n_input_dims), np.float32)
        x[n // 2 :] = 3 * x[n // 2 :] - 1
        assert_equal(run(module, x), module.inference(x))


def test_blocks_of_two_dimensions(rng) -> None:
    """Warps are counted through all axes: with threadIdx.x alone they would share their scratch."""
    from numba import cuda, float32

    module = MODELS["image"]()
    f = module.device_function(256)

    def kernel(x, out, params):
        column, row = cuda.grid(2)
        i = row * cuda.gridsize(2)[0] + column
        j = min(i, x.shape[0] - 1)
        y = f((float32(x[j, 0]), float32(x[j, 1])), params)
        if i < x.shape[0]:
            for d in range(3):
                out[i, d] = y[d]

    x, out = rng.random((1024, 2), np.float32), poisoned((1024, 3), "float32")
    cuda.jit(kernel)[(2, 2), (16, 16)](DeviceView(x), out, module.device_params)
    assert_equal(out.numpy(), module.inference(x))


@pytest.mark.parametrize("encoding", [{"otype": "Frequency", "n_frequencies": 2}, {"otype": "OneBlob", "n_bins": 4}])
def test_calls_in_a_loop(encoding: dict, rng) -> None:
    """Each call starts where the last one led. Smooth encodings: with octaves and levels that are steep, a difference
    in one call would be a hundred times as large behind the next."""
    module = network_of(3, 4, encoding, n_neurons=64, activation="Tanh")
    x = rng.random((257, module.n_input_dims), np.float32)
    got, place = run(module, x, n_calls=3), x
    for _ in range(2):
        place = next_place(x, module.inference(place))
    assert_equal(got, module.inference(place), 20 * TOLERANCE)


def test_lanes_that_need_different_numbers_of_calls(rng) -> None:
    """The whole warp goes on while any of its lanes does; the others' results stay what they were."""
    from numba import cuda, float32

    module = MODELS["volume"]()
    f = module.device_function(128)

    def kernel(x, counts, out, params):
        i = cuda.grid(1)
        inside = i < x.shape[0]
        j = min(i, x.shape[0] - 1)
        left, total = counts[j] if inside else 0, float32(0)
        while cuda.any_sync(0xFFFFFFFF, left > 0):
            y = f((x[j, 0], x[j, 1], x[j, 2]), params)
            if left > 0:
                total += y[left % 16]
                left -= 1
        if inside:
            out[i, 0] = total

    x, counts = rng.random((500, 3), np.float32), rng.integers(0, 9, 500).astype(np.int32)
    out = poisoned((500, 1), "float32")
    cuda.jit(kernel)[4, 128](DeviceView(x), cuda.to_device(counts), out, module.device_params)
    y = module.inference(x)
    expected = [sum(y[i, k % 16] for k in range(1, count + 1)) for i, count in enumerate(counts)]
    assert_equal(out.numpy()[:, 0], np.array(expected), 8 * TOLERANCE)


def test_two_models_in_one_kernel(rng) -> None:
    """The second evaluates where the first one said, in the warps in which a lane wants it."""
    from numba import cuda, float32

    one, two = MODELS["image"](), MODELS["volume"]()
    f, g = one.device_function(256), two.device_function(256)

    def kernel(x, out, params, other):
        i = cuda.grid(1)
        inside = i < x.shape[0]
        j = min(i, x.shape[0] - 1)
        y = f((x[j, 0], x[j, 1]), params)
        wanted = inside and i % 96 < 40
        result = float32(-1)
        if cuda.any_sync(0xFFFFFFFF, wanted):
            z = g((y[0], y[1], y[2]), other)
            result = z[5]
        if inside:
            out[i, 0] = result if wanted else y[0]

    x, out = rng.random((1000, 2), np.float32), poisoned((1000, 1), "float32")
    cuda.jit(kernel)[4, 256](DeviceView(x), out, one.device_params, two.device_params)
    y = one.inference(x)
    z, wanted = two.inference(y)[:, 5], np.arange(1000) % 96 < 40
    got = out.numpy()[:, 0]
    assert_equal(got[~wanted], y[~wanted, 0])
    # the second sees the first one's differences, and is steep at its finest level
    assert np.quantile(np.abs(got - z)[wanted], 0.9) <= 20 * TOLERANCE


CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
    "encoding": GRID,
    "network": {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 2},
}


def test_each_kernel_sees_the_steps_before_it_and_none_behind(rng) -> None:
    """One kernel and one argument, on the stream of the steps and on one that nobody makes wait for it."""
    from numba import cuda

    model = tcnn.create_from_config(2, 3, CONFIG, strict=True)
    kernel = cuda.jit(call_and_store(model.device_function(256), model.network.spec))
    x, params, seen = rng.random((4096, 2), np.float32), model.device_params, []
    device_x, y, other = DeviceView(x), np.sin(9 * x[:, :1] + np.arange(3, dtype=np.float32)), cuda.stream()
    for stream in (0, other, 0, other):
        for _ in range(5):
            model.trainer.training_step(x, y)
        expected, out = model.network.inference(x), poisoned((4096, 3), "float32")
        kernel[16, 256, stream](device_x, out, params)
        for _ in range(5):
            model.trainer.training_step(x, y)
        cuda.synchronize()
        assert_equal(out.numpy(), expected)
        assert np.abs(model.network.inference(x) - expected).max() > 2 * TOLERANCE
        seen.append(out.numpy())
    assert np.abs(seen[0] - seen[-1]).max() > 10 * TOLERANCE


def test_warps_beyond_the_block_size_get_nan(rng) -> None:
    """Where a larger function exists too, the launch can't tell; no warp touches another's scratch."""
    module = MODELS["image"]()
    small, _ = module.device_function(64), module.device_function(256)
    x = rng.random((256, 2), np.float32)
    got = run(module, x, block=256, function=small)
    assert_equal(got[:64], module.inference(x[:64]))
    assert np.isnan(got[64:]).all()


def test_a_launch_with_too_many_threads_is_refused(rng) -> None:
    module = network_of(2, 3, GRID, n_neurons=16, n_hidden_layers=4)
    with pytest.raises(ValueError, match="made for 64: launch with at most 64"):
        run(module, rng.random((128, 2), np.float32), block=128, function=module.device_function(64))


@pytest.mark.parametrize("library", ["cupy", "numba"])
def test_arrays_of_other_libraries(library: str, rng) -> None:
    from numba import cuda

    module, x = MODELS["oneblob"](), rng.random((300, 2), np.float32)
    if library == "cupy":
        cupy = pytest.importorskip("cupy")
        given, out, to_host = cupy.asarray(x), cupy.full((300, 3), np.nan, np.float32), cupy.asnumpy
    else:
        given, out = cuda.to_device(x), cuda.to_device(np.full((300, 3), np.nan, np.float32))

        def to_host(array: Any) -> np.ndarray:
            return array.copy_to_host()

    kernel = cuda.jit(call_and_store(module.device_function(128), module.spec))
    kernel[3, 128](given, out, module.device_params)
    assert_equal(to_host(out), module.inference(x))


def test_extreme_inputs_stay_in_their_lane(rng) -> None:
    module, x = MODELS["image"](), rng.random((257, 2), np.float32)
    expected, x[100, 0], x[101, 1], x[102, 0] = module.inference(x), np.nan, np.inf, 1e30
    others = ~np.isin(np.arange(257), (100, 101, 102))
    assert_equal(run(module, x)[others], expected[others])
