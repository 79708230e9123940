"""First and second derivatives of every encoding against central differences in float64; see `gradient_checks.py`.

Second derivatives are differences of the analytic first one. 400 random encodings each, levels switched off in some.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from encoding_draws import encodings, inputs_off_kinks
from gradient_checks import BATCH, assert_close, check_input_gradient, check_parameter_gradient
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from numba_tcnn.config_encodings import parse_encoding
from numba_tcnn.layout import n_encoding_params
from numba_tcnn.reference.encoding_contract import Encoding, Samples
from numba_tcnn.reference.encodings import ENCODINGS, make_encoding
from numba_tcnn.reference.precision import Precision
from numba_tcnn.specs import EncodingSpec


@dataclass(frozen=True)
class Case:
    """An encoding at random points: y, S and their gradients. u stands for dL/dy, v for dL_ddx."""

    encoding: Encoding
    params: np.ndarray
    x: np.ndarray
    u: np.ndarray
    v: np.ndarray
    samples: Samples

    @classmethod
    def draw(cls, spec: EncodingSpec, seed: int) -> Case:
        random = np.random.default_rng(seed)
        x = inputs_off_kinks(spec, random, BATCH)
        max_level = (None, random.uniform(0, 1.2), random.uniform(0, 1.2, len(x)))[seed % 3]
        return cls(
            make_encoding(spec, Precision("float64")),
            random.uniform(-1, 1, n_encoding_params(spec)),
            x,
            random.standard_normal((len(x), spec.n_output_dims)),
            random.standard_normal(x.shape),
            Samples(max_level=max_level),
        )

    def forward(self, x: np.ndarray, params: np.ndarray) -> tuple[np.ndarray, object]:
        y = np.empty((len(x), self.encoding.spec.n_output_dims))
        return y, self.encoding.forward(x, params, y, self.samples)

    def backward(self, x: np.ndarray, u: np.ndarray, params: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(dL/dparams, dL/dx)."""
        _, context = self.forward(x, params)
        dL_dparams, dL_dx = np.zeros_like(params), np.zeros_like(x)
        self.encoding.backward(context, params, u, dL_dparams, dL_dx)
        return dL_dparams, dL_dx

    def L(self, x: np.ndarray, params: np.ndarray) -> np.ndarray:
        """Σ u·y of each sample."""
        return np.sum(self.u * self.forward(x, params)[0], axis=1)

    def S(self, x: np.ndarray, u: np.ndarray, params: np.ndarray) -> np.ndarray:
        """Σ v·dL/dx of each sample."""
        return np.sum(self.v * self.backward(x, u, params)[1], axis=1)


def check_first_order(case: Case, seed: int) -> None:
    dL_dparams, dL_dx = case.backward(case.x, case.u, case.params)
    check_input_gradient(lambda x: case.L(x, case.params), case.x, dL_dx)
    if len(case.params):
        check_parameter_gradient(
            lambda p: float(case.L(case.x, p).sum()), case.params, dL_dparams, np.random.default_rng(seed)
        )


def check_second_order(case: Case, seed: int) -> None:
    """S is linear in u, so its derivative by u needs no small step: S at each unit vector."""
    x, u, params = case.x, case.u, case.params
    dL_ddLdy, dL_dparams, dL_dx = case.encoding.backward_backward_input(x, u, case.v, params, case.samples)
    assert (dL_ddLdy.shape, dL_dparams.shape, dL_dx.shape) == (u.shape, params.shape, x.shape)
    by_column = [case.S(x, np.tile(unit, (len(x), 1)), params) for unit in np.eye(u.shape[1])]
    assert_close(dL_ddLdy, np.stack(by_column, axis=1), np.abs(by_column).max())
    check_input_gradient(lambda x: case.S(x, u, params), x, dL_dx)
    if len(params):
        check_parameter_gradient(
            lambda p: float(case.S(x, u, p).sum()), params, dL_dparams, np.random.default_rng(seed)
        )


@settings(deadline=None, max_examples=400)
@given(encodings(), st.integers(0, 2**32 - 1))
def test_first_order(spec: EncodingSpec, seed: int) -> None:
    case = Case.draw(spec, seed)
    assume(len(case.x) > 0)
    check_first_order(case, seed)


@settings(deadline=None, max_examples=400)
@given(encodings(), st.integers(0, 2**32 - 1))
def test_second_order(spec: EncodingSpec, seed: int) -> None:
    case = Case.draw(spec, seed)
    assume(len(case.x) > 0)
    check_second_order(case, seed)


ONE_OF_EACH = [
    ("Grid", 3, {"otype": "Grid", "n_levels": 3, "base_resolution": 4, "interpolation": "Smoothstep"}),
    ("Identity", 2, {"otype": "Identity", "scale": -1.5, "offset": 0.25}),
    ("Frequency", 2, {"otype": "Frequency", "n_frequencies": 6}),
    ("TriangleWave", 2, {"otype": "TriangleWave", "n_frequencies": 6}),
    ("OneBlob", 2, {"otype": "OneBlob", "n_bins": 64}),
    *(("SphericalHarmonics", 3, {"otype": "SphericalHarmonics", "degree": degree}) for degree in range(1, 9)),
    ("Composite", 9, {"otype": "NRC", "n_frequencies": 5}),
    (
        "Composite",
        3,
        {
            "otype": "Composite",
            "reduction": "Product",
            "nested": [
                {"otype": "Frequency", "n_frequencies": 2, "n_dims_to_encode": 2, "dims_to_encode_begin": 0},
                {"otype": "OneBlob", "n_bins": 4, "n_dims_to_encode": 2, "dims_to_encode_begin": 1},
                {"otype": "TriangleWave", "n_frequencies": 4, "n_dims_to_encode": 2, "dims_to_encode_begin": 1},
            ],
        },
    ),
]


@pytest.mark.parametrize(("otype", "n_dims", "config"), ONE_OF_EACH)
def test_one_of_each(otype: str, n_dims: int, config: dict) -> None:
    """Whatever hypothesis draws, every encoding and every degree is checked, and none is trivially zero."""
    case = Case.draw(parse_encoding(config, n_dims), 3)
    assert type(case.encoding.spec).__name__ == f"{otype}Spec" and len(case.x) == BATCH
    check_first_order(case, 3)
    check_second_order(case, 3)
    curved = case.encoding.backward_backward_input(case.x, case.u, case.v, case.params, case.samples)[2].any()
    degree = config.get("degree", 8)
    assert curved == (otype not in ("Identity", "TriangleWave") and degree > 2)


def test_registry_is_complete() -> None:
    assert set(ENCODINGS) == set(EncodingSpec.__args__)
