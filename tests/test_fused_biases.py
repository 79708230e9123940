"""Biases in whole fused kernels on the emulator, compared as in `test_fused_kernels.py`.

`check` draws biases of the size of the activations (parameters between matrices and tables are of order 0.7), random in
the padding too, where they take no part.
"""

from __future__ import annotations

import numpy as np
import pytest
from test_fused_kernels import GRID, HOPPER, check, make_spec

from numba_tcnn.fused.activations import ACTIVATIONS
from numba_tcnn.fused.network_plans import single_plans, staged_plans
from numba_tcnn.fused.plan import bias_offsets
from numba_tcnn.layout import bias_blocks, n_network_params


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    scale = 0.3 if name == "Exponential" else 1.0
    check(make_spec(activation=name, output_activation="Sine", bias=True), scale=scale)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("staged", [False, True])
def test_other_number_formats(dtype: str, staged: bool) -> None:
    """Each plane of d times ones; biases from their copy, or from the float32 master."""
    spec = make_spec(otype="CutlassMLP", hidden=[32, 20], n_out=17, activation="SiLU", bias=True)
    plan = (staged_plans if staged else single_plans)(spec, HOPPER, encoding_gradient=True, dtype=dtype)[0]
    check(spec, plan=plan, batch=257, dtype=dtype)


def test_the_fewest_sums_a_warp() -> None:
    """What float32 falls back to where registers run out: the second candidate."""
    spec = make_spec(otype="CutlassMLP", hidden=[64], n_out=17, activation="Tanh", bias=True)
    first, second, *_ = staged_plans(spec, HOPPER, encoding_gradient=True, dtype="float32")
    assert first.propagate == second.propagate and first != second
    check(spec, plan=second, batch=257, dtype="float32")


@pytest.mark.parametrize("n_hidden_layers", [0, 1, 5])
@pytest.mark.parametrize("n_out", [1, 17])
def test_depths_and_output_widths(n_hidden_layers: int, n_out: int) -> None:
    shape = {"otype": "CutlassMLP", "n_hidden_layers": n_hidden_layers, "n_neurons": 16}
    check(make_spec(n_out=n_out, bias=True, **shape))


@pytest.mark.parametrize(
    ("hidden", "staged"),
    [
        ((64, 32, 16), False),
        ((20, 40), False),
        ((80,), True),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (((64, 32, 16), True), ((20, 40), True))),
        pytest.param((80,), False, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_hidden_widths(hidden: tuple[int, ...], staged: bool) -> None:
    """Parts of dW that are divided among warps evenly or not, over samples or not."""
    spec = make_spec(otype="CutlassMLP", hidden=list(hidden), activation="Sigmoid", bias=True)
    plans = (staged_plans if staged else single_plans)(spec, HOPPER, encoding_gradient=True)
    distinct = {}
    for plan in plans:
        kernel = plan.propagate if staged else plan
        distinct.setdefault((kernel.warps, kernel.rows), plan)
    for plan in distinct.values():
        check(spec, plan=plan, batch=300, chunk_rows=256 if staged else None)


def test_given_gradients_and_an_encoding_without_parameters() -> None:
    check(make_spec(12, encoding={"otype": "Identity"}, bias=True), loss=None)


def test_layers_of_one_shape() -> None:
    """One weight-gradient kernel for three layers, whose biases stand elsewhere than their matrices."""
    spec = make_spec(otype="CutlassMLP", n_neurons=48, n_hidden_layers=4, n_out=20, bias=True)
    plan = staged_plans(spec, HOPPER, encoding_gradient=True)[0]
    assert [len(layers) for _, layers in plan.weight_gradients] == [1, 3, 1]
    check(spec, plan=plan, batch=200)


def test_where_biases_stand() -> None:
    spec = make_spec(encoding=GRID, bias=True)
    assert bias_offsets(spec) == [block.offset for block in bias_blocks(spec)]
    assert bias_offsets(spec)[-1] + 16 == n_network_params(spec) and bias_offsets(make_spec()) is None
    assert not np.any(np.array(bias_offsets(spec)) % 16), "two biases at a time are read from aligned words"
