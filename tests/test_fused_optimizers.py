"""The kernels behind the gradient kernels, and the functions of single numbers at C speed, against the reference.

Adam's kernel and the reference's do the same float32 operations but for the bias correction, which one takes from a
float64 table and the other from expm1: they agree to a few units in the last place (1e-6 of a weight, and of a step).
Sums of gradients are made of small multiples of 1/64, exact in any order.
"""

from __future__ import annotations

import numba
import numpy as np
import pytest
from emulation import EmulatedAdam, emulator_target, run_kernel
from hypothesis import given, settings
from hypothesis import strategies as st

from numba_tcnn.fused import activations, losses, optimizer_kernels
from numba_tcnn.fused.adam import make_adam
from numba_tcnn.fused.emulated_memory import GlobalMemory
from numba_tcnn.fused.formats import FORMATS, number_format
from numba_tcnn.fused.grid_rows import consecutive_groups, index_kind, make_index
from numba_tcnn.fused.target import NjitTarget
from numba_tcnn.layout import GridLevel, grid_levels
from numba_tcnn.reference import activations as reference_activations
from numba_tcnn.reference import losses as reference_losses
from numba_tcnn.reference import make_optimizer
from numba_tcnn.specs import AdamSpec, GridSpec

N_NETWORK, N_TABLE = 256 + 16, 1027  # blocks of 32 and of 1024 parameters that are not full


def exact(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Float32 numbers whose sums are exact in any order."""
    return (rng.integers(-64, 65, shape) / 64).astype(np.float32)


def gradients(rng: np.random.Generator, n_partials: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Partial sums [n_partials, N_NETWORK] in rows of 1104 bytes, table gradients of which half are 0, and the sum."""
    partial = np.full((n_partials, N_NETWORK + 4), np.nan, np.float32)
    partial[:, :N_NETWORK] = exact(rng, n_partials, N_NETWORK)
    table = np.zeros(N_TABLE + 1, np.float32)
    table[:N_TABLE] = exact(rng, N_TABLE) * (rng.random(N_TABLE) < 0.5)
    return partial, table, np.concatenate([partial[:, :N_NETWORK].sum(0), table[:N_TABLE]])


def assert_same_adam(kernel: EmulatedAdam, w: np.ndarray, reference, rate: float) -> None:
    n = len(w)
    np.testing.assert_array_equal(kernel.param_steps[:n], reference.param_steps)
    np.testing.assert_allclose(kernel.first_moments[:n], reference.first_moments, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(kernel.second_moments[:n], reference.second_moments, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(kernel.weights[:n], w, rtol=1e-6, atol=2e-6 * rate)
    np.testing.assert_array_equal(kernel.copy, kernel.weights.astype(np.float16))


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_copy_that_kernels_read_is_in_the_model_s_format(dtype: str, rng: np.random.Generator) -> None:
    """Of network and table parameters alike; in float32 there is none, and nothing is written in its place."""
    w = rng.normal(size=N_NETWORK + N_TABLE).astype(np.float32)
    kernel = EmulatedAdam(AdamSpec(), w, N_NETWORK, dtype=dtype)
    before = kernel.copy.copy()
    kernel.step(*gradients(rng, 3)[:2])
    assert not np.array_equal(kernel.weights[: len(w)], w)
    stored = number_format(dtype)
    np.testing.assert_array_equal(kernel.copy, before if stored.reads_master else stored.parameters(kernel.weights))


SPECS = {
    "defaults": {},
    "image": {"learning_rate": 1e-2, "beta2": 0.99, "epsilon": 1e-15, "l2_reg": 1e-6},
    "no momentum": {"beta1": 0.0, "learning_rate": 1e-2},
    "weight decay": {"relative_decay": 0.1, "absolute_decay": 0.05, "learning_rate": 1e-2},
    "clipping": {"clipping_magnitude": 0.3, "gradient_clipping_magnitude": 0.4},
    "adabound": {"adabound": True, "learning_rate": 1e-2},
    "table": {"non_matrix_l2_reg": 1e-2, "non_matrix_learning_rate_factor": 3.0},
    "every entry": {"skip_zero_grad_non_matrix_params": False},
    "only matrices": {"optimize_non_matrix_params": False},
    "only the table": {"optimize_matrix_params": False},
}


@pytest.mark.parametrize("name", SPECS)
def test_adam(name: str, rng: np.random.Generator) -> None:
    """Four steps with changing numbers of partial sums, more than one turn of 128 rows among them."""
    spec = AdamSpec(**SPECS[name])
    w = (0.5 * rng.normal(size=N_NETWORK + N_TABLE)).astype(np.float32)
    kernel, reference = EmulatedAdam(spec, w, N_NETWORK), make_optimizer(spec, len(w), [(1, N_NETWORK)])
    for n_partials in (1, 5, 131, 2):
        partial, table, total = gradients(rng, n_partials)
        kernel.step(partial, table, gradient_scale=0.25, given_scale=0.5)
        reference.step(w, total * np.float32(0.125))
        assert not table.any(), "the table's gradient is set back to zero on the way"
        assert_same_adam(kernel, w, reference, spec.learning_rate)
    assert kernel.skipped[0] == 0
    assert not kernel.weights[len(w) :].any()


def test_biases_are_no_matrix_parameters(rng: np.random.Generator) -> None:
    """Their own regularisation and learning rate, and left alone where their gradient is 0."""
    spec = AdamSpec(l2_reg=0.1, non_matrix_l2_reg=1e-2, non_matrix_learning_rate_factor=3.0, learning_rate=1e-2)
    w, n_biases = exact(rng, N_NETWORK + N_TABLE), 16
    kernel = EmulatedAdam(spec, w, N_NETWORK, n_biases)
    reference = make_optimizer(spec, len(w), [(1, N_NETWORK - n_biases)])
    for _ in range(3):
        partial, table, total = gradients(rng, 2)
        partial[:, [3, N_NETWORK - 3]] = total[[3, N_NETWORK - 3]] = 0
        kernel.step(partial, table)
        reference.step(w, total)
        assert_same_adam(kernel, w, reference, spec.learning_rate)
    assert kernel.param_steps[3] == 3 and kernel.param_steps[N_NETWORK - 3] == 0


def test_an_untouched_entry_keeps_its_age(rng: np.random.Generator) -> None:
    """The table's entries are debiased by their own number of updates."""
    w = exact(rng, N_NETWORK + N_TABLE)
    kernel = EmulatedAdam(AdamSpec(), w, N_NETWORK)
    for _ in range(3):
        partial, table, total = gradients(rng, 1)
        before = [a.copy() for a in (kernel.weights, kernel.first_moments, kernel.second_moments, kernel.param_steps)]
        kernel.step(partial, table)
        untouched = np.flatnonzero(total == 0)
        untouched = untouched[untouched >= N_NETWORK]
        for old, new in zip(
            before, (kernel.weights, kernel.first_moments, kernel.second_moments, kernel.param_steps), strict=True
        ):
            np.testing.assert_array_equal(new[untouched], old[untouched])
    assert set(np.unique(kernel.param_steps[:N_NETWORK])) == {3}
    assert set(np.unique(kernel.param_steps[N_NETWORK : N_NETWORK + N_TABLE])) == {0, 1, 2, 3}


def test_the_learning_rate_may_change_between_steps(rng: np.random.Generator) -> None:
    w = exact(rng, N_NETWORK + N_TABLE)
    kernel, reference = EmulatedAdam(AdamSpec(), w, N_NETWORK), make_optimizer(AdamSpec(), len(w), [(1, N_NETWORK)])
    for rate in (1e-2, 1e-3, 0.0):
        partial, table, total = gradients(rng, 2)
        kernel.step(partial, table, learning_rate=rate)
        reference.learning_rate = rate
        reference.step(w, total)
        assert_same_adam(kernel, w, reference, rate)


def test_a_marked_step_changes_nothing_and_is_counted(rng: np.random.Generator) -> None:
    """`bad` equals the launch's mark: parameters, moments and counts stay as they are to the bit; an old mark in it
    means nothing."""
    kernel = EmulatedAdam(AdamSpec(), exact(rng, N_NETWORK + N_TABLE), N_NETWORK)
    kernel.step(*gradients(rng, 2)[:2], mark=6)
    names = ("weights", "copy", "first_moments", "second_moments", "param_steps")
    before = {name: getattr(kernel, name).copy() for name in names}
    for skipped in (1, 2):
        kernel.bad[:] = 6 + skipped
        partial, table, _ = gradients(rng, 2)
        partial[0, 7] = np.inf
        table[3] = np.nan
        kernel.step(partial, table, mark=6 + skipped)
        assert not table.any(), "what is not finite must not stay for the next step"
        for name in names:
            np.testing.assert_array_equal(getattr(kernel, name), before[name])
        assert kernel.skipped[0] == skipped
    kernel.step(*gradients(rng, 2)[:2], mark=9)
    assert kernel.skipped[0] == 2 and (kernel.param_steps[:N_NETWORK] == 2).all()
    assert np.isfinite(kernel.weights).all()


@pytest.mark.parametrize("n_losses", [0, 1, 256, 700])
def test_the_blocks_losses_are_summed(n_losses: int, rng: np.random.Generator) -> None:
    kernel = EmulatedAdam(AdamSpec(), exact(rng, N_NETWORK + N_TABLE), N_NETWORK)
    values = exact(rng, max(n_losses, 1))[:n_losses]
    given_losses = values if n_losses else np.zeros(0, np.float32)
    loss = kernel.step(*gradients(rng, 1)[:2], losses=given_losses, loss_scale=0.5)
    assert loss == 0.5 * values.sum(dtype=np.float64)


@pytest.mark.parametrize(("n_network", "n_table"), [(256, 0), (0, 5), (288, 1024), (256, 1)])
def test_models_without_one_of_the_parts(n_network: int, n_table: int, rng: np.random.Generator) -> None:
    w = exact(rng, n_network + n_table)
    spec = AdamSpec(skip_zero_grad_non_matrix_params=False)
    kernel, reference = EmulatedAdam(spec, w, n_network), make_optimizer(spec, len(w), [(1, n_network)])
    partial, table = exact(rng, 2, max(n_network, 4)), np.zeros(-(-n_table // 4) * 4 or 4, np.float32)
    table[:n_table] = exact(rng, n_table)
    total = np.concatenate([partial[:, :n_network].sum(0), table[:n_table]])
    kernel.step(partial, table)
    reference.step(w, total)
    assert_same_adam(kernel, w, reference, spec.learning_rate)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("misaligned", [False, True])
def test_gradients_are_collected(accumulate: bool, misaligned: bool, rng: np.random.Generator) -> None:
    """Into a vector of the user's, which need not start at a multiple of 16 bytes nor be padded."""
    partial, table, total = gradients(rng, 131)
    earlier = exact(rng, len(total))
    storage = np.full(len(total) + misaligned, 77, np.float32)
    result = storage[misaligned:]
    result[:] = earlier if accumulate else np.nan
    memory, target = GlobalMemory(), emulator_target()
    loss, scales = np.zeros(1, np.float32), np.array([np.nan, 0.5], np.float32)
    values = {
        "n_matrix": N_NETWORK,
        "n_network": N_NETWORK, "n_params": len(total), "n_partials": 131, "partial_sums": memory.place(partial),
        "row_bytes": partial.strides[0], "table_gradient": memory.place(table), "losses": memory.place(loss),
        "n_losses": 0, "loss": memory.place(loss), "loss_scale": 1.0,
        "gradients": memory.place(storage) + 4 * misaligned, "accumulate": int(accumulate), "gradient_scale": 0.25,
        "scales": memory.place(scales),
    }  # fmt: skip
    run_kernel(
        target, memory, optimizer_kernels.make_collect_kernel(target), values, threads=optimizer_kernels.THREADS,
        shared_bytes=optimizer_kernels.SHARED_BYTES, n_blocks=optimizer_kernels.n_blocks(N_NETWORK, len(total)),
    )  # fmt: skip
    np.testing.assert_array_equal(result, 0.125 * total + (earlier if accumulate else 0))  # all exact
    assert not misaligned or storage[0] == 77
    assert not table.any()


# ------------------------------------------------------------------------------ single numbers, compiled

N_VALUES = 100_000


@pytest.fixture(scope="module")
def target() -> NjitTarget:
    return NjitTarget()


def over(function, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """A compiled function of single numbers on every row of some columns."""
    names = ", ".join(f"c{i}" for i in range(len(columns)))
    rows = ", ".join(f"c{i}[i]" for i in range(len(columns)))
    first = function(*[c[0] for c in columns])
    n = len(first) if isinstance(first, tuple) else 1
    store = "\n        ".join(f"out[{k}, i] = value[{k}]" if n > 1 else "out[0, i] = value" for k in range(n))
    text = (
        f"def loop(function, out, {names}):\n    for i in range(len(c0)):\n"
        f"        value = function({rows})\n        {store}"
    )
    namespace: dict = {}
    exec(text, namespace)
    out = np.empty((n, len(columns[0])), np.float64)
    numba.njit(namespace["loop"], error_model="numpy")(function, out, *columns)
    return tuple(out)


def assert_close(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float = 0.0) -> None:
    np.testing.assert_allclose(actual, np.asarray(expected, np.float64), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", activations.ACTIVATIONS)
def test_activations_of_single_numbers(name: str, target, rng: np.random.Generator) -> None:
    """Against float64: 1e-6 of the value. Near the zeros of Sine and in saturation of others, 2e-7 absolute: float32's
    ulp of 1. Softplus loses |10 z| ulps to the rounding of the exponent 10 z."""
    z = rng.normal(0, 6, N_VALUES).astype(np.float32)
    z[:3] = (0.0, -0.0, 1e-30)
    wide = z.astype(np.float64)
    reference = reference_activations.ACTIVATIONS[name]
    (value,) = over(activations.make_activation(target, name), z)
    rtol = 2e-5 if name == "Softplus" else 1e-6
    assert_close(value, reference.value(wide), rtol, 2e-7 if name == "Sine" else 1e-45)
    if activations.ACTIVATIONS[name].derivative_of_output:
        argument = reference.value(wide).astype(np.float32)
        expected = reference.derivative_from_output(argument.astype(np.float64))
    else:
        argument, expected = z, reference.derivative_from_input(wide)
    atol = 2e-7 if name in ("Sine", "SiLU", "Tanh", "Sigmoid") else 0.0
    (derivative,) = over(activations.make_gate(target, name), argument)
    atol += 1e-44  # a few of the smallest float32 numbers
    assert_close(derivative, expected, 1e-6, atol)
    g = rng.normal(size=N_VALUES).astype(np.float32)
    (applied,) = over(activations.make_apply_derivative(target, name), g, argument)
    assert_close(applied, g * expected, 1e-6, 5 * atol)


@pytest.mark.parametrize("name", ["ReLU", "LeakyReLU", "Sigmoid", "Softplus", "Squareplus", "Tanh", "SiLU"])
def test_activations_of_huge_numbers_are_finite(name: str, target) -> None:
    z = np.array([-3e38, -1e4, -100, 100, 1e4], np.float32)
    (value,) = over(activations.make_activation(target, name), z)
    assert np.isfinite(value).all()
    assert_close(value[2:], reference_activations.ACTIVATIONS[name].value(z[2:].astype(np.float64)), 1e-6, 1e-37)


@pytest.mark.parametrize("name", [name for name in losses.LOSSES if not losses.needs_luminance(name)])
def test_losses_of_single_numbers(name: str, target, rng: np.random.Generator) -> None:
    """Against float64 from the same float32 numbers: 2e-6, a handful of roundings; p - t of near equals costs more,
    up to float32's ulp of p, and so do the differences within Variance."""
    p = (0.01 + 2 * rng.random(N_VALUES)).astype(np.float32)
    t = rng.normal(0.5, 1, N_VALUES).astype(np.float32)
    density = (0.05 + rng.random(N_VALUES)).astype(np.float32)
    if name not in ("CrossEntropy", "Variance"):
        p *= np.where(rng.random(N_VALUES) < 0.5, -1, 1).astype(np.float32)
    p[:2], t[:2] = (0.5, 1.0), (0.5, 1.0)
    value, gradient = over(losses.make_loss(target, name), p, t, np.float32(1) / density)
    expected = reference_losses.LOSSES[name](*(a.astype(np.float64) for a in (p, t, density)))
    if name == "Variance":
        atol = 2e-6 * np.square(t.astype(np.float64)) / density * np.maximum(1 / p, 1 / density)
        assert (np.abs(value - expected[0]) <= atol).all()
    else:
        assert_close(value, expected[0], 2e-6, 1e-6)
    assert_close(gradient, expected[1], 2e-6, 1e-5)


@settings(deadline=None, max_examples=12)
@given(
    st.builds(
        AdamSpec,
        beta1=st.sampled_from([0.0, 0.5, 0.9, 0.99]), beta2=st.sampled_from([0.9, 0.99, 0.9999]),
        epsilon=st.sampled_from([1e-15, 1e-8, 1e-3]), l2_reg=st.sampled_from([0.0, 1e-6, 1e-2]),
        relative_decay=st.sampled_from([0.0, 0.1]), absolute_decay=st.sampled_from([0.0, 0.02]),
        clipping_magnitude=st.sampled_from([0.0, 0.5]), gradient_clipping_magnitude=st.sampled_from([0.0, 0.5]),
        adabound=st.booleans(), non_matrix_learning_rate_factor=st.sampled_from([1.0, 4.0]),
        skip_zero_grad_non_matrix_params=st.booleans(), optimize_non_matrix_params=st.booleans(),
    ),
    st.booleans(),
)  # fmt: skip
def test_adam_of_single_numbers(spec: AdamSpec, is_matrix: bool) -> None:
    """From any age and any moments, at any step, against the reference's update of whole arrays."""
    rng, n = np.random.default_rng(11), N_VALUES
    w, m = rng.normal(size=(2, n)).astype(np.float32)
    v = np.square(rng.normal(size=n)).astype(np.float32)
    g = np.where(rng.random(n) < 0.2, 0, rng.normal(size=n)).astype(np.float32)
    k = np.floor(10 ** (5 * rng.random(n)) - 1).astype(np.uint32)
    rate, step = np.float32(1e-2), np.uint32(1_000)
    update = make_adam(NJIT, spec, is_matrix)
    columns = (g, w, m, v, k, np.full(n, rate), np.full(n, step))
    w_new, m_new, v_new, k_new = over(update, *columns)

    reference = make_optimizer(spec, n, [(1, n)] if is_matrix else [])
    reference.load_state(
        {"step": int(step) - 1, "learning_rate": float(rate), "first_moments": m, "second_moments": v, "param_steps": k}
    )
    expected = w.copy()
    reference.step(expected, g)
    np.testing.assert_array_equal(k_new, reference.param_steps)
    assert_close(m_new, reference.first_moments, 1e-6, 1e-7)
    assert_close(v_new, reference.second_moments, 1e-6, 1e-7)
    assert_close(w_new, expected, 1e-6, 1e-6 * np.abs(expected - w).max())


NJIT = NjitTarget()

HASH_FACTORS = (1, 2654435761, 805459861, 3674653429)


def row_of(vertex: list[int], spec: GridSpec, level: GridLevel) -> int:
    """A vertex's row of the level's table, in whole numbers: uint32 arithmetic where the lattice's size fits it."""
    if level.hashed:
        row = 0
        for p, factor in zip(vertex, HASH_FACTORS, strict=False):
            row ^= p * factor % 2**32
        return row % level.n_entries
    modulus = 2**32 if level.resolution**spec.n_input_dims < 2**32 else 2**64
    return sum(p * level.resolution**d for d, p in enumerate(vertex)) % modulus % level.n_entries


@pytest.mark.parametrize("spec", [
    GridSpec(2, log2_hashmap_size=10, n_levels=8, base_resolution=4),
    GridSpec(3, log2_hashmap_size=12, n_levels=8, base_resolution=4, per_level_scale=1.5),
    GridSpec(4, log2_hashmap_size=8, n_levels=4, base_resolution=3),
    GridSpec(2, type="Dense", n_levels=4, base_resolution=5),
    GridSpec(3, type="Tiled", n_levels=6, base_resolution=5, per_level_scale=6.0),
], ids=["hash 2", "hash 3", "hash 4", "dense", "tiled"])  # fmt: skip
def test_grid_indices_of_single_vertices(spec: GridSpec, target, rng: np.random.Generator) -> None:
    """Every level and corner at random cells: small, huge and wrapped around."""
    n_dims = spec.n_input_dims
    n = N_VALUES // 50
    small = rng.integers(-3, 40, (n // 2, n_dims)).astype(np.uint32)
    cells = np.concatenate([small, rng.integers(0, 1 << 32, (n - n // 2, n_dims)).astype(np.uint32)])
    kinds = set()
    for level in grid_levels(spec):
        kind = index_kind(spec, level)
        kinds.add(kind)
        index = make_index(target, spec, kind)

        @numba.njit
        def rows(cells, corner, resolution, n_entries, index=index):
            out = np.empty(len(cells), np.uint32)
            for i in range(len(cells)):
                out[i] = index(cells[i], corner, resolution, n_entries)
            return out

        for corner in (0, 1, 2**n_dims - 1):
            vertices = cells + np.array([(corner >> d) & 1 for d in range(n_dims)], np.uint32)
            expected = [row_of(vertex, spec, level) for vertex in vertices.tolist()]
            resolution = np.uint32(level.resolution & 0xFFFFFFFF)
            actual = rows(cells, corner, resolution, np.uint32(level.n_entries))
            np.testing.assert_array_equal(actual, expected)
    assert kinds == {"Hash": {"dense", "hashed"}, "Dense": {"dense"}, "Tiled": {"dense", "wide dense"}}[spec.type]


def test_levels_are_grouped_by_kind_of_index() -> None:
    assert consecutive_groups(["a", "a", "b", "a"]) == [("a", 0, 2), ("b", 2, 1), ("a", 3, 1)]
    fine = GridLevel(1.0, 1626, 8, 0, False)
    assert index_kind(GridSpec(3, type="Tiled"), fine) == "wide dense"
