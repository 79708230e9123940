"""The reference runtime: the engine contract, training, skipped steps, state."""

from __future__ import annotations

import numpy as np
import pytest

from numba_tcnn.arrays import ArrayView, view
from numba_tcnn.initial_values import initial_params
from numba_tcnn.layout import n_params
from numba_tcnn.reference import Model, ReferenceRuntime, create_runtime
from numba_tcnn.reference.model import GRADIENT_ROWS
from numba_tcnn.specs import (
    AdamSpec,
    GridSpec,
    IdentitySpec,
    LossSpec,
    ModelSpec,
    NetworkSpec,
)

GRID = GridSpec(2, n_levels=6, log2_hashmap_size=10, base_resolution=8, per_level_scale=1.5)
SPEC = ModelSpec(2, 3, GRID, NetworkSpec("FullyFusedMLP", 32, 2), 16)
ADAM = AdamSpec(learning_rate=1e-2, beta2=0.99, epsilon=1e-15, l2_reg=1e-6)


def runtime_of(dtype: str = "float32", spec: ModelSpec = SPEC) -> ReferenceRuntime:
    runtime = create_runtime(spec, initial_params(spec, 1337), dtype=dtype, seed=1337)
    runtime.configure_training(ADAM, LossSpec("L2"))
    return runtime


def data(batch: int, seed: int = 0) -> tuple[ArrayView, ArrayView]:
    x = np.random.default_rng(seed).random((batch, 2), dtype=np.float32)
    y = np.stack([np.sin(6 * x[:, 0]), x[:, 0] * x[:, 1], np.cos(9 * x[:, 1])], axis=1)
    return view(x), view(y)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_training_learns(dtype: str) -> None:
    """A smooth function is learnt to a hundredth of its variance (0.4) in 120 steps, in every dtype."""
    runtime = runtime_of(dtype)
    losses = [float(runtime.training_step(*data(512, seed))) for seed in range(120)]
    assert losses[0] > 0.2 and np.mean(losses[-5:]) < 4e-3
    assert runtime.step == 120 and runtime.skipped_steps == 0
    assert runtime.explain().engine == "reference" and runtime.explain().dtype == dtype


def test_loss_is_that_of_the_parameters_before_the_step() -> None:
    runtime = runtime_of()
    x, y = data(100)
    out = np.empty((100, 3), np.float32)
    runtime.inference(x, view(out))
    assert float(runtime.training_step(x, y)) == pytest.approx(np.square(out - y.numpy()).mean(), rel=1e-5)


def test_steps_are_deterministic() -> None:
    a, b = runtime_of(), runtime_of()
    for seed in range(5):
        a.training_step(*data(300, seed))
        b.training_step(*data(300, seed))
    assert np.array_equal(a.get_params(), b.get_params())


def test_run_optimizer_false_changes_nothing() -> None:
    runtime = runtime_of()
    before = runtime.get_params()
    loss = runtime.training_step(*data(64), run_optimizer=False)
    assert float(loss) > 0 and runtime.step == 0
    assert np.array_equal(runtime.get_params(), before)


@pytest.mark.parametrize("where", ["x", "y"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_non_finite_gradients_skip_the_step(where: str, dtype: str) -> None:
    runtime = runtime_of(dtype)
    runtime.training_step(*data(64))
    before, state = runtime.get_params(), runtime.optimizer_state()
    x, y = data(64, 1)
    {"x": x, "y": y}[where].numpy()[7, 1] = np.nan
    runtime.training_step(x, y)
    assert (runtime.step, runtime.skipped_steps) == (2, 1)
    assert np.array_equal(runtime.get_params(), before)
    assert np.array_equal(runtime.optimizer_state()["first_moments"], state["first_moments"])
    runtime.training_step(*data(64, 2))
    assert (runtime.step, runtime.skipped_steps) == (3, 1)
    assert np.all(np.isfinite(runtime.get_params())) and not np.array_equal(runtime.get_params(), before)


def test_external_gradient_is_the_loss_gradient() -> None:
    """The gradient of L2 handed in from outside makes the same step; float32 scaling by 1/n comes earlier: 1e-5."""
    inside, outside = runtime_of(), runtime_of()
    x, y = data(256)
    prediction = np.empty((256, 3), np.float32)
    outside.inference(x, view(prediction))
    gradient = view((2 * (prediction - y.numpy()) / prediction.size).astype(np.float32))
    inside.training_step(x, y)
    assert float(outside.training_step(x, None, external_gradient=gradient)) == 0
    moved = inside.get_params() - initial_params(SPEC, 1337)
    difference = inside.optimizer_state()["first_moments"] - outside.optimizer_state()["first_moments"]
    assert np.linalg.norm(moved) > 0
    assert np.linalg.norm(difference) <= 1e-5 * np.linalg.norm(inside.optimizer_state()["first_moments"])


def test_density_divides() -> None:
    """A density of 2 everywhere halves the loss."""
    x, y = data(64)
    density = view(np.full((64, 3), 2, np.float32))
    plain = float(runtime_of().training_step(x, y))
    assert float(runtime_of().training_step(x, y, data_pdf=density)) == pytest.approx(plain / 2, rel=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_backward_writes_what_is_asked_for(dtype: str) -> None:
    runtime = runtime_of(dtype)
    x, _ = data(50)
    dL_dy = np.random.default_rng(1).standard_normal((50, 3)).astype(np.float32)
    expected = Model(SPEC, runtime.get_params(), dtype).backward(x.numpy(), dL_dy)
    params, x_gradient = np.full(n_params(SPEC), 5, np.float32), np.full((50, 2), 5, np.float32)

    runtime.backward(x, view(dL_dy), params=view(params), accumulate=False, input=None)
    assert np.array_equal(params, expected.params) and np.all(x_gradient == 5)
    runtime.backward(x, view(dL_dy), params=view(params), accumulate=True, input=view(x_gradient))
    assert np.array_equal(params, expected.params + expected.params)
    assert np.array_equal(x_gradient, expected.input)
    runtime.backward(x, view(dL_dy), params=None, accumulate=False, input=view(x_gradient))
    assert np.array_equal(x_gradient, expected.input)


def test_inference_into_half() -> None:
    runtime = runtime_of("float16")
    x, _ = data(20)
    single, half = np.empty((20, 3), np.float32), np.empty((20, 3), np.float16)
    runtime.inference(x, view(single))
    runtime.inference(x, view(half))
    assert np.array_equal(half, single.astype(np.float16))
    assert not np.array_equal(half, single), "predictions are float32, not rounded"


def test_batches_larger_than_a_piece() -> None:
    """Pieces add up. Sums of 2^14 float32 terms in another order: 1e-5."""
    batch = GRADIENT_ROWS + 33
    x, y = (v.numpy() for v in data(batch))
    model = Model(SPEC, initial_params(SPEC, 1), "float32")
    exact = Model(SPEC, initial_params(SPEC, 1), "float64")
    value, gradients = model.loss_and_gradients(x, y, LossSpec("L2"))
    first, second = slice(0, GRADIENT_ROWS), slice(GRADIENT_ROWS, batch)
    parts = [(exact.loss_and_gradients(x[r], y[r], LossSpec("L2")), r.stop - r.start) for r in (first, second)]
    assert value == pytest.approx(sum(part[0] * n for part, n in parts) / batch, rel=1e-6)
    expected = sum(part[1].params * n for part, n in parts) / batch
    assert np.linalg.norm(gradients.params - expected) <= 1e-5 * np.linalg.norm(expected)
    expected_input = np.concatenate([part[1].input * n for part, n in parts]) / batch
    assert np.linalg.norm(gradients.input - expected_input) <= 1e-4 * np.linalg.norm(expected_input)
    assert np.array_equal(model.forward(x)[second], model.forward(x[second]))


def test_state_moves_to_another_runtime() -> None:
    """As on a change of engine: parameters and optimizer state carry a run over without a difference."""
    whole, first = runtime_of(), runtime_of()
    for seed in range(4):
        whole.training_step(*data(128, seed))
        first.training_step(*data(128, seed))
    whole.learning_rate = first.learning_rate = 3e-3
    second = create_runtime(SPEC, first.get_params(), dtype="float32", seed=0)
    second.configure_training(ADAM, LossSpec("L2"))
    second.load_optimizer_state(first.optimizer_state())
    assert second.step == 4 and second.learning_rate == 3e-3
    for seed in range(4, 8):
        whole.training_step(*data(128, seed))
        second.training_step(*data(128, seed))
    assert np.array_equal(whole.get_params(), second.get_params())


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_set_params(dtype: str) -> None:
    runtime, x = runtime_of(dtype), data(10)[0]
    before, after = np.empty((10, 3), np.float32), np.empty((10, 3), np.float32)
    runtime.inference(x, view(before))
    params = runtime.get_params()
    runtime.set_params(params * 0.5)
    params[:] = 0  # a copy: the runtime does not notice
    runtime.inference(x, view(after))
    expected = Model(SPEC, initial_params(SPEC, 1337) * np.float32(0.5), dtype).forward(x.numpy())
    assert np.array_equal(after, expected.astype(np.float32)) and not np.array_equal(after, before)


def test_identity_pads_with_ones() -> None:
    """The padding columns act as a bias: y = W_padding · 1 at x = 0."""
    spec = ModelSpec(3, 3, IdentitySpec(3), NetworkSpec("CutlassMLP", 16, 0), 16)
    params = np.random.default_rng(0).standard_normal(n_params(spec)).astype(np.float32)
    y = Model(spec, params, "float32").forward(np.zeros((1, 3), np.float32))
    np.testing.assert_allclose(y[0], params.reshape(16, 16)[:3, 3:].sum(axis=1), rtol=1e-5)


def test_training_needs_configuration() -> None:
    runtime = create_runtime(SPEC, initial_params(SPEC, 1), dtype="float32", seed=1)
    with pytest.raises(RuntimeError, match="configure_training"):
        runtime.training_step(*data(4))


def test_wrong_loss_leaves_the_runtime_usable() -> None:
    runtime = runtime_of()
    two = ModelSpec(2, 2, GRID, NetworkSpec("FullyFusedMLP", 32, 2), 16)
    with pytest.raises(ValueError, match="RelativeL2Luminance"):
        runtime_of(spec=two).configure_training(ADAM, LossSpec("RelativeL2Luminance"))
    assert float(runtime.training_step(*data(32))) > 0


def test_parameters_of_the_wrong_size() -> None:
    with pytest.raises(ValueError, match="parameters have shape"):
        Model(SPEC, np.zeros(3, np.float32))
