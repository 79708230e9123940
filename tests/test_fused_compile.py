"""Whole kernels compile to machine code for every architecture, without a device, and the code is what was meant.

What is checked in the PTX: no arrays in local memory (a tuple or a loop that was not unrolled), no float64 (a constant
of the wrong type), no functions beside the kernel (something that was not inlined), no comparison of float16 numbers
(fast mathematics takes subnormal ones for 0 there: derivatives of ReLU would be wrong). In the assembler's report: the
spills of the plan that is taken, and registers within a budget recorded with the pinned toolchain.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from numba_tcnn.config import parse_model
from numba_tcnn.fused import compiler
from numba_tcnn.fused.cache import CompiledKernel
from numba_tcnn.fused.compiler import MAX_SPILL_BYTES
from numba_tcnn.fused.jobs import GradientJob, GradientScaleJob, InferenceJob, Job, OptimizerJob, choose
from numba_tcnn.fused.plan import Architecture, StagedPlan, staged_plans
from numba_tcnn.fused.programs import Toolbox
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions
from numba_tcnn.specs import AdamSpec, ModelSpec

pytestmark = pytest.mark.slow


def missing_toolkit() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        from cuda.bindings import nvjitlink
        from cuda.bindings.nvvm import version

        version()
        nvjitlink.version()
    except Exception as error:  # each library has errors of its own for a file that is not there
        return f"the CUDA toolkit's compiler libraries can't be loaded: {error}"
    return None


REASON = missing_toolkit()
needs_toolkit = pytest.mark.skipif(REASON is not None, reason=REASON or "")

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def compiler_for(capability: tuple[int, int]) -> Toolbox:
    """The engine's toolbox, for a chip that is not there: kernels are compiled and chosen, but not loaded."""
    return Toolbox(SimpleNamespace(properties=SimpleNamespace(capability=capability)))


def kernels_of(job: Job, capability: tuple[int, int]) -> list[CompiledKernel]:
    tools = compiler_for(capability)
    return [kernel for _, kernel in choose(job, tools.chip, tools.compile)[1]]


class StagedOnly(GradientJob):
    def plans(self, chip: Architecture) -> list[StagedPlan]:
        return staged_plans(self.spec, chip, encoding_gradient=False)


@pytest.fixture(scope="module", autouse=True)
def ptx_of() -> Iterator[dict[bytes, str]]:
    """The PTX of every kernel compiled in this file, by machine code; nothing comes from the disk cache."""
    made: dict[bytes, str] = {}
    assemble = compiler.assemble

    def recording(text: str, capability: tuple) -> tuple[bytes, str]:
        cubin, log = assemble(text, capability)
        assert cubin.startswith(b"\x7fELF")
        made[cubin] = text
        return cubin, log

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_TCNN_CACHE_DIR", "")
        patch.setattr(compiler, "assemble", recording)
        yield made


def check(kernel: CompiledKernel, ptx_of: dict[bytes, str]) -> None:
    text, name = ptx_of[kernel.cubin], kernel.entry
    assert not re.search(r"\.local\b", text), f"{name} has arrays in local memory"
    assert ".f64" not in text, f"{name} computes in float64"
    assert not re.search(r"^\s*(\.\w+\s+)*\.func\b", text, re.M), f"{name} calls functions"
    comparisons = re.findall(r"setp?\.\S*f16\S*", text)
    assert not comparisons, f"{name} compares float16 numbers: {comparisons}"
    assert kernel.spill_bytes <= MAX_SPILL_BYTES


def spec_of(n_in: int, n_out: int, encoding: dict, **network) -> ModelSpec:
    return parse_model(n_in, n_out, encoding, {"otype": "FullyFusedMLP"} | network)


IMAGE_HASH = spec_of(
    2, 3, {"otype": "HashGrid", "log2_hashmap_size": 15, "per_level_scale": 1.5}, n_neurons=64, n_hidden_layers=2,
)  # fmt: skip
NERF_DENSITY = spec_of(
    3, 16, {"otype": "HashGrid", "log2_hashmap_size": 19, "per_level_scale": 1.5}, n_neurons=64, n_hidden_layers=1,
)  # fmt: skip
ONE_FEATURE = spec_of(
    3, 1, {"otype": "HashGrid", "n_levels": 8, "n_features_per_level": 1, "interpolation": "Smoothstep"},
    n_neurons=32, n_hidden_layers=1, activation="SiLU", output_activation="Sigmoid",
)  # fmt: skip
WIDE = spec_of(16, 3, {"otype": "Identity"}, n_neurons=128, n_hidden_layers=2)


@functools.cache
def gradient_kernels(
    spec: ModelSpec, capability: tuple[int, int], options: GradientOptions
) -> tuple[int, list[CompiledKernel]]:
    """How many plans were passed over because they spill, and the kernels of the first that does not."""
    tools, job = compiler_for(capability), GradientJob(spec, options)
    plan, kernels = choose(job, tools.chip, tools.compile)
    return job.plans(tools.chip).index(plan), [kernel for _, kernel in kernels]


@needs_toolkit
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
class TestEveryArchitecture:
    def test_image_hash(self, capability, ptx_of) -> None:
        for kernel in gradient_kernels(IMAGE_HASH, capability, GradientOptions(loss="RelativeL2"))[1]:
            check(kernel, ptx_of)

    def test_a_grid_of_one_feature_in_three_dims(self, capability, ptx_of) -> None:
        options = GradientOptions(
            loss="Smape", input_dtype="float16", target_dtype="float16", density_dtype="float32", input_gradient=True
        )
        for kernel in gradient_kernels(ONE_FEATURE, capability, options)[1]:
            check(kernel, ptx_of)

    def test_a_wide_network(self, capability, ptx_of) -> None:
        """128 wide, in several kernels."""
        kernels = kernels_of(StagedOnly(WIDE, GradientOptions(table_gradient=False)), capability)
        assert len(kernels) == 4  # propagate, and dW of each shape
        for kernel in kernels:
            check(kernel, ptx_of)

    def test_inference(self, capability, ptx_of) -> None:
        (kernel,) = kernels_of(InferenceJob(IMAGE_HASH, InferenceOptions(output_dtype="float16")), capability)
        check(kernel, ptx_of)

    def test_optimizers(self, capability, ptx_of) -> None:
        """Registers for four blocks of 256 threads on a multiprocessor, without spilling at all."""
        spec = AdamSpec(adabound=True, absolute_decay=1e-3, clipping_magnitude=1.0, gradient_clipping_magnitude=1.0)
        jobs = (OptimizerJob(spec), OptimizerJob(None), GradientScaleJob("float16"))
        for kernel in (kernel for job in jobs for kernel in kernels_of(job, capability)):
            check(kernel, ptx_of)
            assert kernel.spill_bytes == 0 and kernel.registers <= 64


BUDGET = {"image_hash": (IMAGE_HASH, 255, 0), "nerf_density": (NERF_DENSITY, 255, 0)}
"""Of the gradient kernel on sm_90: registers, and plans that may be passed over because they spill."""


@needs_toolkit
@pytest.mark.parametrize("name", BUDGET)
def test_registers_stay_within_their_budget(name: str) -> None:
    spec, most_registers, most_passed_over = BUDGET[name]
    passed_over, (kernel,) = gradient_kernels(spec, (9, 0), GradientOptions(loss="RelativeL2"))
    assert kernel.registers <= most_registers and kernel.spill_bytes == 0
    assert passed_over <= most_passed_over
