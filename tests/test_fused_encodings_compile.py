"""Kernels of every encoding compile to machine code for sm_90, without a device, and the code is what was meant: see
test_fused_compile.py for what is looked for. These are encodings alone, held to no spills at all; those in front of a
network are in test_kernel_record.py.
"""

from __future__ import annotations

import pytest
from test_fused_compile import check, compiler_for, needs_toolkit, ptx_of  # noqa: F401
from test_fused_encodings import CONCATENATIONS, REDUCTIONS, composite

from numba_tcnn.config import parse_model
from numba_tcnn.fused.jobs import GradientJob, InferenceJob, choose
from numba_tcnn.fused.plan import architecture
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions
from numba_tcnn.layout import n_encoding_params
from numba_tcnn.specs import ModelSpec

pytestmark = pytest.mark.slow

HASH = {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 8, "base_resolution": 8}
ALONE = {
    "harmonics of degree 8": (3, {"otype": "SphericalHarmonics", "degree": 8}),
    "64 octaves": (2, {"otype": "Frequency", "n_frequencies": 64}),
    "64 octaves of triangles": (2, {"otype": "TriangleWave", "n_frequencies": 64}),
    "4 bins": (5, {"otype": "OneBlob", "n_bins": 4}),
    "64 bins": (2, {"otype": "OneBlob", "n_bins": 64}),
    "7 dims": (7, HASH),
    "1 dim": (1, HASH),
    "Rng": (3, HASH | {"hash": "Rng"}),
    "BaseConvert": (5, HASH | {"hash": "BaseConvert"}),
    "gaps and overlaps": CONCATENATIONS["gaps and overlaps"],
    "off its alignment": CONCATENATIONS["two grids, the second off its alignment"],
    "sum": (3, composite(*REDUCTIONS["grid, waves and blob"][1], reduction="Sum")),
    "product": (4, composite(*REDUCTIONS["grids of unlike entries"][1], reduction="Product")),
    "product of harmonics": (5, composite(*REDUCTIONS["harmonics and identity"][1], reduction="Product")),
    "product of a sum": (3, composite(*REDUCTIONS["a sum inside"][1], reduction="Product")),
}


def kernels_of(job: InferenceJob | GradientJob) -> list:
    _, kernels = choose(job, architecture((9, 0)), compiler_for((9, 0)).compile)
    return [kernel for _, kernel in kernels]


LONGEST = ("product", "gaps and overlaps", "sum")  # a product of a sum is always compiled


@needs_toolkit
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in LONGEST else name for name in ALONE]
)
def test_encodings_alone(name: str, ptx_of) -> None:  # noqa: F811
    """Features, and both gradients."""
    n_in, encoding = ALONE[name]
    spec: ModelSpec = parse_model(n_in, None, encoding, None, alignment=1)
    options = GradientOptions(
        aligned_input=False, loss=None, table_gradient=n_encoding_params(spec.encoding) > 0, input_gradient=True
    )
    for kernel in [*kernels_of(InferenceJob(spec, InferenceOptions())), *kernels_of(GradientJob(spec, options))]:
        check(kernel, ptx_of)
        assert kernel.spill_bytes == 0
