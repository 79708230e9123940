"""Sums in fixed point: accurate, without overflow, and the same bits whatever block adds first."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from emulated_driver import EmulatedDriver
from emulated_models import CONFIG, assert_same_training, batch, make, reference_of, step
from emulation import EmulatedModel, emulator_target, run_kernel
from golden_case import relative_error
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fused_kernels import GRADIENT, HOPPER, data, make_params, make_spec

import numba_tcnn as tcnn
from numba_tcnn.config import parse_encoding
from numba_tcnn.fused.emulated_memory import GlobalMemory
from numba_tcnn.fused.fixed_point import LIMIT, FixedPoint, fixed_point_of, make_add_entry, make_clear, make_load
from numba_tcnn.fused.network_plans import gradient_plans, staged_plans
from numba_tcnn.fused.stage_io import GradientOptions, KernelBody
from numba_tcnn.reference import Model
from numba_tcnn.specs import LossSpec

COLLIDING = {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 3, "base_resolution": 8, "per_level_scale": 2.0}


def product_of(n_dims: int) -> dict[str, Any]:
    child = {"otype": "DenseGrid", "n_levels": 1, "base_resolution": 2}
    child |= {"n_dims_to_encode": n_dims, "dims_to_encode_begin": 0}
    return {"otype": "Composite", "reduction": "Product", "nested": [child, child]}


@pytest.mark.parametrize("size", [1, 2, 1000, 1 << 14, 1 << 18, (1 << 20) + 1, 1 << 24])
@pytest.mark.parametrize("n_dims", [1, 3, 7])
@pytest.mark.parametrize("is_product", [False, True])
def test_no_sum_overflows(size: int, n_dims: int, is_product: bool) -> None:
    """As many samples, all in one cell, with all corners in one entry, and the largest numbers there can be."""
    config = product_of(n_dims) if is_product else {"otype": "DenseGrid", "n_levels": 1, "base_resolution": 2}
    numbers = fixed_point_of(parse_encoding(config, n_dims), size)
    just_below_4, just_below_limit = (float(np.nextafter(np.float32(v), np.float32(0))) for v in (4, LIMIT))
    fine = size * 2**n_dims * round(just_below_4 * 2**numbers.fine)
    shares = 2**n_dims * just_below_limit if is_product else 65504 * (1 + 2**-20)
    coarse = size * math.ceil(shares * 2**numbers.coarse)
    assert max(fine, coarse) < 2**63
    assert numbers.fine >= 29 and numbers.coarse >= (15 if is_product else 22)
    assert size > 1 << 18 or n_dims > 3 or numbers.fine >= 39


def sums_of(values: np.ndarray, index: np.ndarray, n_entries: int, numbers: FixedPoint) -> tuple[np.ndarray, int]:
    """float32 values [n, F] added to entries `index`, in kernels of one warp each; the sums, and the word `bad`."""
    target, memory = emulator_target(), GlobalMemory()
    n_features = values.shape[1]
    add = make_add_entry(target, n_features, 0)
    load, clear = make_load(target, n_features), make_clear(target, n_features)
    sums, bad = np.zeros((n_entries * n_features, 2), np.int64), np.zeros(1, np.uint32)
    place = (memory.place(sums), *numbers.scales.values(), memory.place(bad), 7)

    def body(unused):
        for first in range(0, len(values), 32):
            of_warp, to = values[first : first + 32], index[first : first + 32]
            add(place, to.astype(np.uint32), tuple(of_warp.T))

    result = []

    def read(unused):
        entries = np.arange(32, dtype=np.uint32)
        result.append(
            load(place[0], entries * np.uint32(n_features), np.ones(32, np.uint32), (*numbers.units.values(),))
        )
        clear(place[0], entries * np.uint32(n_features), np.ones(32, np.uint32))

    for function in (body, read):
        run_kernel(
            target, memory, KernelBody("sums", function, (("unused", "u32"),)), [0], threads=32, shared_bytes=16,
            n_blocks=1,
        )  # fmt: skip
    assert not sums.any()
    return np.stack(result[0], axis=1), int(bad[0])


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(-40, 15), st.integers(-40, 15))
def test_sums_are_as_good_as_those_of_float32(seed: int, low: int, high: int) -> None:
    """Of numbers of any two magnitudes, whose sums may cancel, against the exact sums."""
    rng = np.random.default_rng(seed)
    n = 1024
    exponents = np.where(rng.random((n, 2)) < 0.5, low, high)
    values = np.ldexp(rng.uniform(-1, 1, (n, 2)), exponents).astype(np.float32)
    index = rng.integers(0, 32, n)
    numbers = fixed_point_of(parse_encoding({"otype": "DenseGrid", "n_levels": 1, "base_resolution": 2}, 3), n)
    actual, bad = sums_of(values, index, 32, numbers)
    for entry in range(32):
        for feature in range(2):
            terms = values[index == entry, feature].astype(np.float64)
            fine, coarse = terms[np.abs(terms) < 4], terms[np.abs(terms) >= 4]
            exact, magnitude = math.fsum(terms), abs(math.fsum(fine)) + abs(math.fsum(coarse))
            tolerance = len(fine) * 2.0 ** -(numbers.fine + 1) + 2**-23 * magnitude
            assert abs(float(actual[entry, feature]) - exact) <= tolerance
    assert bad == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, LIMIT, -LIMIT, 3e38])
def test_what_does_not_fit_is_noted(value: float) -> None:
    values = np.full((32, 1), 0.5, np.float32)
    values[3] = value
    numbers = FixedPoint(30, 22)
    sums, bad = sums_of(values, np.zeros(32, int), 32, numbers)
    assert bad == 7 and sums[0, 0] == 15.5 and not sums[1:].any()


@pytest.mark.parametrize("staged", [False, True])
def test_any_order_of_blocks_gives_the_same_bits(staged: bool, rng: np.random.Generator) -> None:
    """And in float32 it does not, in this case: the test would notice."""
    spec = make_spec(2, encoding=COLLIDING, n_hidden_layers=1, n_neurons=16)
    params, (x, y) = make_params(spec, rng), data(spec, 900, rng)
    plan = (staged_plans if staged else gradient_plans)(spec, HOPPER, encoding_gradient=True)[0]

    def gradients(seed: int, *, fixed_point: bool) -> tuple[float, np.ndarray, np.ndarray]:
        model = EmulatedModel(spec, params, shuffle=np.random.default_rng(seed))
        options = GradientOptions(aligned_input=False, input_gradient=True, fixed_point=fixed_point)
        return model.gradient(x, y, plan, options, n_blocks=5)

    first, second = (gradients(seed, fixed_point=True) for seed in (1, 2))
    assert first[0] == second[0]
    np.testing.assert_array_equal(first[1], second[1])
    np.testing.assert_array_equal(first[2], second[2])
    value, expected = Model(spec, params, "float16").loss_and_gradients(x, y, LossSpec("L2"))
    assert first[0] == pytest.approx(value, rel=1e-5)
    assert relative_error(first[1], expected.params) <= GRADIENT
    in_float = [gradients(seed, fixed_point=False)[1] for seed in (1, 2)]
    assert not np.array_equal(*in_float)


# ---------------------------------------------------------------------------------------------- the engine


def test_training_is_the_same_in_every_run(gpu: EmulatedDriver, no_reference: None) -> None:
    """Blocks in another order each time; steps of several sizes, whose sums have several units."""
    config = CONFIG | {"encoding": COLLIDING}
    found = []
    for seed in (1, 2):
        gpu.shuffle = np.random.default_rng(seed)
        model = make(config, deterministic=True)
        twin, start = reference_of(model, config), model.params
        losses = []
        for i, size in enumerate((300, 1, 129, 500)):
            x, y = batch(size, seed=i)
            losses.append(float(model.trainer.training_step(x, y)))
            assert losses[-1] == pytest.approx(step(twin, x, y), rel=1e-4)
        assert_same_training(model, twin, start)
        found.append((losses, model.params, model.optimizer.state_dict()["first_moments"]))
    assert found[0][0] == found[1][0]
    assert "summed in fixed point" in str(model.explain()) and "fixed point" not in str(make(config).explain())
    np.testing.assert_array_equal(found[0][1], found[1][1])
    np.testing.assert_array_equal(found[0][2], found[1][2])


def test_gradients_in_fixed_point(gpu: EmulatedDriver, no_reference: None) -> None:
    """Overwritten, accumulated, and NaN where the table's gradient is not finite; the next call knows nothing of it."""
    config = CONFIG | {"encoding": COLLIDING, "network": CONFIG["network"]}
    model = make(config, deterministic=True)
    twin = reference_of(model, config)
    x, dL_dy = batch(70)
    _, context = model.network.forward(x)
    expected = twin.model.backward(x, dL_dy).params
    given = model.network.backward(context, dL_dy).params.copy()
    assert relative_error(given, expected) <= GRADIENT
    doubled = model.network.backward(context, dL_dy, parameters="accumulate").params
    assert relative_error(doubled, 2 * expected) <= GRADIENT
    bad = dL_dy.copy()
    bad[3, 1] = np.inf
    n_network = 2 * 16 * 16
    assert np.isnan(model.network.backward(context, bad).params[n_network:]).all()
    np.testing.assert_array_equal(model.network.backward(context, dL_dy).params, given)


def test_models_without_a_table_need_no_sums(gpu: EmulatedDriver, no_reference: None) -> None:
    model = make(CONFIG | {"encoding": {"otype": "Identity"}}, deterministic=True)
    model.trainer.training_step(*batch(40))
    assert not any("fixed_point=True" in text or "fixed point" in text for text in gpu.compiler.descriptions)


def test_a_deterministic_encoding_alone(gpu: EmulatedDriver, no_reference: None) -> None:
    found = []
    for seed in (1, 2):
        gpu.shuffle = np.random.default_rng(seed)
        encoding = tcnn.Encoding(2, COLLIDING, engine="fused", deterministic=True)
        trainer = tcnn.Trainer(encoding, CONFIG["optimizer"], CONFIG["loss"])
        for i in range(3):
            trainer.training_step(*batch(400, seed=i, n_out=encoding.n_output_dims))
        found.append(encoding.params)
    np.testing.assert_array_equal(*found)
