"""Networks with biases, and plans that go layer by layer, compile to machine code without a device: see
test_fused_compile.py for what is looked for."""

from __future__ import annotations

import functools

import pytest
from test_fused_compile import check, compiler_for, kernels_of, needs_toolkit, ptx_of  # noqa: F401

from numba_tcnn.config import parse_model
from numba_tcnn.fused.compiler import MAX_SPILL_BYTES
from numba_tcnn.fused.element_wise_jobs import OptimizerJob
from numba_tcnn.fused.jobs import GradientJob, InferenceJob, choose
from numba_tcnn.fused.layer_plan import LayeredPlan
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions
from numba_tcnn.specs import AdamSpec, ModelSpec

pytestmark = [pytest.mark.slow, needs_toolkit]

CAPABILITIES = [(9, 0), *(pytest.param(c, marks=pytest.mark.exhaustive) for c in [(7, 5), (8, 0), (12, 0)])]
GRID = {"otype": "HashGrid", "log2_hashmap_size": 15, "per_level_scale": 1.5}


@functools.cache
def spec_of(n_out: int, bias: bool, activation: str, hidden: tuple[int, ...]) -> ModelSpec:
    network = {"otype": "CutlassMLP", "hidden": hidden, "activation": activation, "bias": bias}
    return parse_model(2, n_out, GRID, network)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize(("n_out", "bias", "activation"), [(3, False, "ReLU"), (300, True, "SiLU")])
def test_layer_by_layer(capability, n_out: int, bias: bool, activation: str, ptx_of) -> None:  # noqa: F811
    """The first candidate is taken, without spills: no kernel is compiled in vain."""
    spec, tools = spec_of(n_out, bias, activation, (512, 512)), compiler_for(capability)
    options = GradientOptions(loss="RelativeL2", density_dtype="float32" if bias else None, input_gradient=bias)
    job = GradientJob(spec, options)
    plan, kernels = choose(job, tools.chip, tools.compile)
    assert isinstance(plan, LayeredPlan) and job.plans(tools.chip).index(plan) == 0 and len(kernels) == 7
    for _, kernel in kernels:
        check(kernel, ptx_of)


@pytest.mark.parametrize("hidden", [(512, 512), (16,) * 32], ids=["wide", "deep"])
def test_inference_layer_by_layer(hidden: tuple[int, ...], ptx_of) -> None:  # noqa: F811
    kernels = kernels_of(InferenceJob(spec_of(3, True, "SiLU", hidden), InferenceOptions()), (9, 0))
    assert len(kernels) == 3
    for kernel in kernels:
        check(kernel, ptx_of)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize("hidden", [(64, 64), (128, 128)], ids=["single", "staged"])
def test_biases(capability, hidden: tuple[int, ...], ptx_of) -> None:  # noqa: F811
    spec = spec_of(3, True, "ReLU", hidden)
    jobs = (GradientJob(spec, GradientOptions(loss="RelativeL2")), OptimizerJob((AdamSpec(),), biases=True))
    for kernel in (kernel for job in jobs for kernel in kernels_of(job, capability)):
        check(kernel, ptx_of)


@pytest.mark.parametrize("features, width", [(8, 128), (16, 64)], ids=["128 x 48", "64 x 96"])
def test_biases_in_float32(features: int, width: int) -> None:
    """Sums of d take registers beside dW's: a warp then keeps fewer of those."""
    network = {"otype": "CutlassMLP", "hidden": (width,), "activation": "Sine", "bias": True}
    spec = parse_model(3, 1, {"otype": "Frequency", "n_frequencies": features}, network)
    job = GradientJob(spec, GradientOptions(loss="Mape", table_gradient=False), "float32")
    tools = compiler_for((9, 0))
    _, kernels = choose(job, tools.chip, tools.compile)
    for _, kernel in kernels:
        assert kernel.spill_bytes <= MAX_SPILL_BYTES
