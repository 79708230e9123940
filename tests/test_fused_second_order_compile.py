"""Kernels of second derivatives compile to machine code, without a device: see test_fused_compile.py for what is
looked for.

A distance function of 64 x 2 or 64 x 3 hidden units in one kernel on sm_80 and sm_90 keeps a few loop invariants (up to
16 bytes a thread) in local memory; 64 bytes are allowed.
"""

from __future__ import annotations

import pytest
from test_fused_compile import check, kernels_of, needs_toolkit, ptx_of, spec_of  # noqa: F401
from test_fused_encodings import CONCATENATIONS, REDUCTIONS, composite

from numba_tcnn.config import parse_model
from numba_tcnn.fused.second_order_programs import second_order_job
from numba_tcnn.specs import ModelSpec

pytestmark = pytest.mark.slow

GRID = {"otype": "HashGrid", "log2_hashmap_size": 19, "per_level_scale": 1.38}
SMALL_GRID = {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 8, "base_resolution": 8}


def distance_function(n_hidden_layers: int, activation: str) -> ModelSpec:
    encoding = GRID | {"interpolation": "Smoothstep"}
    return spec_of(3, 1, encoding, n_neurons=64, n_hidden_layers=n_hidden_layers, activation=activation)


def check_job(spec: ModelSpec, capability: tuple[int, int], ptx_of, dtype: str = "float32") -> None:  # noqa: F811
    for kernel in kernels_of(second_order_job(spec, dtype, False, dtype, dtype), capability):
        check(kernel, ptx_of)


@needs_toolkit
@pytest.mark.parametrize(
    "capability",
    [(9, 0), *(pytest.param(c, marks=pytest.mark.exhaustive) for c in [(8, 0), (8, 6), (12, 0)])],
    ids=lambda c: f"sm_{c[0]}{c[1]}",
)
def test_a_distance_function(capability: tuple[int, int], ptx_of) -> None:  # noqa: F811
    check_job(distance_function(2, "Softplus"), capability, ptx_of)


@needs_toolkit
@pytest.mark.exhaustive
def test_a_deeper_distance_function(ptx_of) -> None:  # noqa: F811
    check_job(distance_function(3, "Sine"), (9, 0), ptx_of)


@needs_toolkit
@pytest.mark.exhaustive
def test_networks_on_turing(ptx_of) -> None:  # noqa: F811
    spec = spec_of(16, 16, {"otype": "Identity"}, n_neurons=32, n_hidden_layers=2, activation="SiLU")
    check_job(spec, (7, 5), ptx_of, "float16")


ALONE = {
    "harmonics of degree 4": (3, {"otype": "SphericalHarmonics", "degree": 4}),
    "octaves": (2, {"otype": "Frequency", "n_frequencies": 12}),
    "triangles and bins": CONCATENATIONS["nrc"],
    "1 dim": (1, SMALL_GRID),
    "7 dims": (7, SMALL_GRID),
    "Rng": (3, SMALL_GRID | {"hash": "Rng", "interpolation": "Nearest"}),
    "gaps and overlaps": CONCATENATIONS["gaps and overlaps"],
    "sum": (3, composite(*REDUCTIONS["grid, waves and blob"][1], reduction="Sum")),
    "product": (5, composite(*REDUCTIONS["harmonics and identity"][1], reduction="Product")),
    "product of a sum": (3, composite(*REDUCTIONS["a sum inside"][1], reduction="Product")),
}


LONGEST = ("7 dims", "sum", "product of a sum", "gaps and overlaps")  # a product, and grids of other dims, always are


@needs_toolkit
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in LONGEST else name for name in ALONE]
)
def test_encodings_alone(name: str, ptx_of) -> None:  # noqa: F811
    n_in, encoding = ALONE[name]
    check_job(parse_model(n_in, None, encoding, None, alignment=1), (9, 0), ptx_of)
