"""Whole kernels compile to machine code for every architecture, without a device, and the code is what was meant.

What is checked in the PTX: no arrays in local memory (a tuple or a loop that was not unrolled), no float64 (a constant
of the wrong type), no functions beside the kernel (something that was not inlined), no comparison of float16 numbers
that takes subnormal ones for 0 (fast mathematics does: derivatives of ReLU would be wrong), no memory that is touched
before the kernel's turn. In the assembler's report: the spills of the plan that is taken. The benchmark's kernels on
sm_90 are in test_kernel_record.py.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from numba_tcnn.config import parse_model, parse_optimizer
from numba_tcnn.fused import compiler
from numba_tcnn.fused.cache import CompiledKernel
from numba_tcnn.fused.compiler import MAX_SPILL_BYTES
from numba_tcnn.fused.element_wise_jobs import CollectJob, GradientScaleJob, OptimizerJob, optimizer_jobs
from numba_tcnn.fused.jobs import GradientJob, InferenceJob, Job, choose
from numba_tcnn.fused.network_plans import staged_plans
from numba_tcnn.fused.optimizer_contract import Slice
from numba_tcnn.fused.optimizers import make_optimizer
from numba_tcnn.fused.plan import Architecture, StagedPlan
from numba_tcnn.fused.programs import OUTLINE, Toolbox
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions
from numba_tcnn.fused.target import TURNS_SINCE
from numba_tcnn.parameter_sizes import ParameterSizes
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
REQUIRED = os.environ.get("NUMBA_TCNN_TEST_TOOLKIT") == "required"
needs_toolkit = pytest.mark.skipif(REASON is not None and not REQUIRED, reason=REASON or "")

CAPABILITIES = [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
SAMPLE = [(7, 5), (9, 0)]  # without mma.m16n8k16 and asynchronous copies, and with wgmma


def compiler_for(capability: tuple[int, int]) -> Toolbox:
    """The engine's toolbox, for a chip that is not there: kernels are compiled and chosen, but not loaded."""
    return Toolbox(SimpleNamespace(properties=SimpleNamespace(capability=capability)))


def kernels_of(job: Job, capability: tuple[int, int]) -> list[CompiledKernel]:
    tools = compiler_for(capability)
    return [kernel for _, kernel in choose(job, tools.chip, tools.compile)[1]]


class StagedOnly(GradientJob):
    def plans(self, chip: Architecture) -> list[StagedPlan]:
        return staged_plans(self.spec, chip, encoding_gradient=False)


@dataclass(frozen=True)
class KeptPtx:
    """The PTX of kernels by their machine code, in a folder that all processes of a test run share."""

    folder: Path

    def _path(self, cubin: bytes) -> Path:
        return self.folder / f"{hashlib.sha256(cubin).hexdigest()}.ptx"

    def __getitem__(self, cubin: bytes) -> str:
        return self._path(cubin).read_text()

    def keep(self, cubin: bytes, text: str) -> None:
        path = self._path(cubin)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text)
        unfinished.replace(path)


@pytest.fixture(scope="module", autouse=True)
def ptx_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptPtx]:
    """The PTX of every kernel that is compiled in the files that use this.

    They share a cache of kernels that begins empty with each test run, so one that several of them ask for is compiled
    once: its key holds all that it depends on, the sources too.
    """
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "kernels"
    folder.mkdir(exist_ok=True)
    kept, assemble = KeptPtx(folder), compiler.assemble

    def keeping(text: str, capability: tuple) -> tuple[bytes, str]:
        cubin, log = assemble(text, capability)
        assert cubin.startswith(b"\x7fELF")
        kept.keep(cubin, text)
        return cubin, log

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_TCNN_CACHE_DIR", str(folder))
        patch.setattr(compiler, "assemble", keeping)
        yield kept


def check(kernel: CompiledKernel, ptx_of: KeptPtx, *, float64: bool = False) -> None:
    text = ptx_of[kernel.cubin]
    check_text(text, kernel.entry, float64=float64)
    check_turn(text, kernel.entry)
    assert kernel.spill_bytes <= MAX_SPILL_BYTES


def check_text(text: str, name: str, *, float64: bool = False) -> None:
    """The PTX of a kernel."""
    assert not re.search(r"\.local\b", text), f"{name} has arrays in local memory"
    assert float64 or ".f64" not in text, f"{name} computes in float64"
    assert not re.search(r"^\s*(\.\w+\s+)*\.func\b", text, re.M), f"{name} calls functions"
    comparisons = re.findall(r"setp?\.\S*ftz\.\S*f16\S*", text)
    assert not comparisons, f"{name} compares float16 numbers, subnormal ones as 0: {comparisons}"


def check_turn(text: str, name: str) -> None:
    """A kernel that may start while the one before still runs touches no memory until that has ended."""
    before, wait, _ = text[text.index(".entry") :].partition("griddepcontrol.wait;")
    takes_turns = int(re.search(r"\.target sm_(\d+)", text).group(1)) >= 10 * TURNS_SINCE[0] + TURNS_SINCE[1]
    assert bool(wait) == takes_turns, f"{name} does not wait for the kernel before"
    early = re.findall(r"^\s*(?:@\S+ )?((?:ld|st|cp|red|atom)\.(?!param)\S+)", before, re.M) if wait else []
    assert not early, f"{name} reads or writes before its turn: {early}"


def spec_of(n_in: int, n_out: int, encoding: dict, **network) -> ModelSpec:
    return parse_model(n_in, n_out, encoding, {"otype": "FullyFusedMLP"} | network)


IMAGE_HASH = spec_of(
    2, 3, {"otype": "HashGrid", "log2_hashmap_size": 15, "per_level_scale": 1.5}, n_neurons=64, n_hidden_layers=2,
)  # fmt: skip
ONE_FEATURE = spec_of(
    3, 1, {"otype": "HashGrid", "n_levels": 8, "n_features_per_level": 1, "interpolation": "Smoothstep"},
    n_neurons=32, n_hidden_layers=1, activation="SiLU", output_activation="Sigmoid",
)  # fmt: skip
WIDE = spec_of(16, 3, {"otype": "Identity"}, n_neurons=128, n_hidden_layers=2)


def sampled(capabilities: list[tuple[int, int]]) -> pytest.MarkDecorator:
    """Those of them that always run; the others are exhaustive."""
    exhaustive = pytest.mark.exhaustive
    each = [c if c in SAMPLE else pytest.param(c, marks=exhaustive) for c in capabilities]
    return pytest.mark.parametrize("capability", each, ids=lambda c: f"sm_{c[0]}{c[1]}")


@needs_toolkit
@sampled([c for c in CAPABILITIES if c != (9, 0)])  # there, test_kernel_record.py compiles the same
class TestImageHash:
    def test_training(self, capability, ptx_of) -> None:
        for kernel in kernels_of(GradientJob(IMAGE_HASH, GradientOptions(loss="RelativeL2")), capability):
            check(kernel, ptx_of)

    def test_inference(self, capability, ptx_of) -> None:
        (kernel,) = kernels_of(InferenceJob(IMAGE_HASH, InferenceOptions(output_dtype="float16")), capability)
        check(kernel, ptx_of)


@needs_toolkit
@sampled(CAPABILITIES)
class TestEveryArchitecture:
    def test_a_grid_of_one_feature_in_three_dims(self, capability, ptx_of) -> None:
        options = GradientOptions(
            loss="Smape", input_dtype="float16", target_dtype="float16", density_dtype="float32", input_gradient=True
        )
        for kernel in kernels_of(GradientJob(ONE_FEATURE, options), capability):
            check(kernel, ptx_of)

    def test_a_wide_network(self, capability, ptx_of) -> None:
        """128 wide, in several kernels."""
        kernels = kernels_of(StagedOnly(WIDE, GradientOptions(table_gradient=False)), capability)
        assert len(kernels) == 4  # propagate, and dW of each shape
        for kernel in kernels:
            check(kernel, ptx_of)

    def test_optimizers(self, capability, ptx_of) -> None:
        """Registers for four blocks of 256 threads on a multiprocessor, without spilling at all."""
        spec = AdamSpec(adabound=True, absolute_decay=1e-3, clipping_magnitude=1.0, gradient_clipping_magnitude=1.0)
        jobs = (OptimizerJob((spec,)), CollectJob(), GradientScaleJob("float16"))
        for kernel in (kernel for job in jobs for kernel in kernels_of(job, capability)):
            check(kernel, ptx_of)
            assert kernel.spill_bytes == 0 and kernel.registers <= 64


MANY_KEYS = {"otype": "Adam", "adabound": True, "absolute_decay": 1e-3, "clipping_magnitude": 1.0,
             "gradient_clipping_magnitude": 1.0, "skip_zero_grad_non_matrix_params": False}  # fmt: skip
CHAINS = {
    "SGD": {"otype": "SGD"},
    "Novograd": {"otype": "Novograd", "relative_decay": 0.1},
    "Shampoo": {"otype": "Shampoo"},
    "EMA of Batched Adam": {"otype": "EMA", "nested": {"otype": "Batched"}},
    "everything around Adam": {
        "otype": "EMA",
        "nested": {
            "otype": "Lookahead",
            "nested": {"otype": "Batched", "nested": {"otype": "Average", "nested": MANY_KEYS}},
        },
    },
    "Lookahead of Shampoo": {"otype": "Lookahead", "nested": {"otype": "Shampoo"}},
    "slices": {
        "otype": "Composite",
        "nested": [{"otype": "EMA", "n_params_to_optimize": 7171}, {"otype": "SGD", "n_params_to_optimize": 997}],
    },
}
SIZES = ParameterSizes(7168 + 1000, ((64, 32), (64, 64), (16, 64)))


@needs_toolkit
@pytest.mark.parametrize(("name", "capability"), [
    *((name, (9, 0)) for name in CHAINS), ("everything around Adam", (7, 5)), ("Shampoo", (7, 5)), ("Shampoo", (12, 0)),
])  # fmt: skip
def test_chains_of_optimizers(name: str, capability: tuple[int, int], ptx_of) -> None:
    """No spills. float64 only where sums over layers, matrix roots or Average need it."""
    optimizer = make_optimizer(parse_optimizer(CHAINS[name], n_params=SIZES.n_params), Slice(0, SIZES))
    for job, _, _ in optimizer_jobs(optimizer, SIZES.n_matrix_params):
        tools = compiler_for(capability)
        for source, kernel in choose(job, tools.chip, tools.compile)[1]:
            kernel_name = source.make_body(OUTLINE).name
            wide = ("average", "norms", "moments", "momentum", "move", "roots")
            check(kernel, ptx_of, float64=any(part in kernel_name for part in wide))
            assert kernel.spill_bytes == 0
            assert kernel.registers <= (128 if kernel_name == "shampoo_roots" else 64)


DEEP = spec_of(64, 16, {"otype": "Identity"}, n_neurons=64, n_hidden_layers=4)


class TooManyRegisters(GradientJob):
    """First a plan that keeps four layers' outputs in registers that it does not have."""

    def plans(self, chip: Architecture) -> list:
        first, *others = super().plans(chip)
        return [replace(first, remembers_in_registers=True), first, *others]


@needs_toolkit
def test_plans_whose_wgmma_is_serialised_are_passed_over() -> None:
    tools, job = compiler_for((9, 0)), TooManyRegisters(DEEP, GradientOptions(loss="L2", table_gradient=False))
    (source,) = job.sources(job.plans(tools.chip)[0])
    assert tools.compile(source).serialized
    assert choose(job, tools.chip, tools.compile)[0] == job.plans(tools.chip)[1]


# ------------------------------------------------------------------------------------------- large kernels


@needs_toolkit
@pytest.mark.exhaustive
def test_large_kernels_are_one_function(ptx_of) -> None:
    """LLVM would rather call the body of a large kernel, which then spills: fused plans were passed over for that."""
    spec = spec_of(3, 18, {"otype": "Identity"}, n_neurons=128, n_hidden_layers=4, activation="Softplus")
    job = GradientJob(spec, GradientOptions(loss="Variance", table_gradient=False))
    for kernel in kernels_of(job, (9, 0)):
        check(kernel, ptx_of)
        assert kernel.registers > 128


# ----------------------------------------------------------------------------------- other number formats

SMALL_IMAGE = spec_of(
    2, 3, {"otype": "HashGrid", "log2_hashmap_size": 15, "per_level_scale": 1.5}, n_neurons=32, n_hidden_layers=2,
)  # fmt: skip


@needs_toolkit
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "capability",
    [(9, 0), *(pytest.param(c, marks=pytest.mark.exhaustive) for c in [(8, 0), (8, 6), (10, 0), (12, 0)])],
    ids=lambda c: f"sm_{c[0]}{c[1]}",
)
def test_dtypes_compile_wherever_bfloat16_is_multiplied(dtype: str, capability: tuple[int, int], ptx_of) -> None:
    jobs = [
        GradientJob(SMALL_IMAGE, GradientOptions(loss="RelativeL2"), dtype),
        InferenceJob(SMALL_IMAGE, InferenceOptions(), dtype),
        OptimizerJob((AdamSpec(),), dtype=dtype),
    ]
    for kernel in (kernel for job in jobs for kernel in kernels_of(job, capability)):
        check(kernel, ptx_of)
        text = ptx_of[kernel.cubin]
        assert "f16.f16.f32" not in text.replace("bf16.bf16.f32", ""), f"{kernel.entry} multiplies float16"
        assert not re.search(r"mul\.(rn\.)?bf16|fma\.(rn\.)?bf16", text)


@needs_toolkit
def test_turing_multiplies_eight_deep(ptx_of) -> None:
    (kernel,) = kernels_of(InferenceJob(SMALL_IMAGE, InferenceOptions()), (7, 5))
    check(kernel, ptx_of)
    text = ptx_of[kernel.cubin]
    assert "m16n8k8" in text and "m16n8k16" not in text and "cp.async" not in text and "stmatrix" not in text


@needs_toolkit
@pytest.mark.parametrize("width", [16, 64, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_float32_has_plans_for_the_usual_widths(width: int, ptx_of) -> None:
    """Three planes leave few registers: the widest that tiny-cuda-nn fuses must not spill either."""
    spec = spec_of(16, 3, {"otype": "Identity"}, n_neurons=width, n_hidden_layers=2)
    options = GradientOptions(table_gradient=False, input_gradient=True, loss=None)
    for job in (GradientJob(spec, options, "float32"), InferenceJob(spec, InferenceOptions(), "float32")):
        for kernel in kernels_of(job, (9, 0)):
            check(kernel, ptx_of)
