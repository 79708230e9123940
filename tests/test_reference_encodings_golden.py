"""Encodings, through the public API, against what tiny-cuda-nn computed on a GPU (tests/golden/enc_*).

An error is ‖ours - theirs‖ / ‖theirs‖ over the whole array; every row counts, those on cell borders too. Of
each kind the worst, with its tolerance and the reason:

            what                           worst    tolerance
    half    grids: features, parameter     8.7e-4   1.5e-3   sums over corners, and gradients by atomics, round to
            gradients, dS/d(dL/dy)                           2^-11 at every step there, once or never here
    half    dL/dx of a Product             4.6e-4   1.0e-3   the factors' output gradients are rounded there
    half    features of other encodings    2.7e-6   5.0e-5   rounded once in both; single elements may differ
    any     Frequency up to 10 octaves     5.7e-5   1.0e-4   hardware sine of arguments up to 2^9 π in float32
    any     dL/dx, first and second order  4.9e-6   1.0e-5   level scales by the hardware's exp2, off by some ulps
    single  everything else                4.1e-6   1.0e-5   the same

tiny-cuda-nn is not the judge where it is wrong: its kernels without JIT fetch two wrong bins of OneBlob beyond 32, and
pad spherical harmonics in front; those with JIT ignore max_level and stochastic_interpolation, and add the diagonal of
Smoothstep's second derivative D - 1 times.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from golden_case import GoldenCase, agree, names, relative_error

import numba_tcnn as tcnn

pytestmark = pytest.mark.golden

STOCHASTIC_BATCH = 256
"""tiny-cuda-nn pads batches to 256 rows, and the random stream of a level starts at its number times that."""


def with_children(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config of an encoding and of all that are nested in it."""
    return [config, *(own for child in config.get("nested", ()) for own in with_children(child))]


def tolerance(case: GoldenCase, array: str) -> tuple[float, str]:
    """By what is compared, and in short the reason that stands in the table above."""
    parts = with_children(case.meta["config"])
    n_octaves = max((own.get("n_frequencies", 12) for own in parts if own["otype"] == "Frequency"), default=None)
    if n_octaves is None:
        return tolerance_without_sines(case, array)
    return max(tolerance_without_sines(case, array), (1e-4 * 2 ** max(0, n_octaves - 10), "hardware sine there"))


def tolerance_without_sines(case: GoldenCase, array: str) -> tuple[float, str]:
    if not case.half:
        return 1e-5, "fast maths of float32 there"
    if array == "dL_dinput" and case.meta["config"].get("reduction") == "Product":
        return 1e-3, "gradients of factors in half there"
    if array in ("dL_dinput", "second_dL_dinput"):
        return 1e-5, "fast maths of float32 there"
    return (1.5e-3, "sums in half there") if len(case["params"]) else (5e-5, "rounded to half in both")


def is_right(case: GoldenCase, array: str, mode: str) -> bool:
    """Whether tiny-cuda-nn's own array is."""
    config = case.meta["config"]
    if mode == "jit":
        if config.get("stochastic_interpolation") or "max_level" in case.name:
            return False
        return not (array == "second_dL_dinput" and config.get("interpolation") == "Smoothstep")
    if any(own["otype"] == "OneBlob" and own.get("n_bins", 16) > 32 for own in with_children(config)):
        return False
    return not (config["otype"] == "SphericalHarmonics" and case.meta["padded_out"] > config["degree"] ** 2)


def computed(case: GoldenCase) -> dict[str, np.ndarray]:
    """Our arrays by tiny-cuda-nn's names."""
    encoding = tcnn.Encoding(
        case.meta["n_in"],
        case.meta["config"],
        alignment=case.meta["alignment"],
        engine="reference",
        dtype="float16" if case.half else "float32",
    )
    encoding.params = case["params"]
    if "max_level" in case.name:
        encoding.max_level = 0.5
    x, dL_dy = case["input"], case["dL_doutput"]
    n_rows = len(x)
    if case.meta["config"].get("stochastic_interpolation"):
        x, dL_dy = (np.pad(a, ((0, STOCHASTIC_BATCH - n_rows), (0, 0))) for a in (x, dL_dy))
    y, context = encoding.forward(x)
    gradients = encoding.backward(context, dL_dy)
    result = {"output": y[:n_rows], "dL_dinput": gradients.input[:n_rows], "dL_dparams": gradients.params}
    if "dL_ddLdinput" in case.arrays:
        second = encoding.backward_backward_input(context, case["dL_ddLdinput"], dL_dy)
        result["second_dL_ddLdoutput"] = second.dL_doutput
        result["second_dL_dparams"] = second.params
        result["second_dL_dinput"] = second.input
    return {name: array for name, array in result.items() if array.size}


@pytest.mark.parametrize("name", names("enc_*"))
def test_encodings(name: str) -> None:
    """Everything that tiny-cuda-nn has right."""
    case, compared = GoldenCase(name), set()
    for array, ours in computed(case).items():
        for mode in case.modes:
            if is_right(case, array, mode):
                compared.add(array)
                agree(name, f"{array}, {mode}", relative_error(ours, case[f"{array}_{mode}"]), *tolerance(case, array))
    assert compared >= {"output", "dL_dinput"}
