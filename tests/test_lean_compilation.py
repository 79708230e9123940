"""Leaving out what kernels don't need of Numba's front end: the same code comes out, and Numba is as it was."""

from __future__ import annotations

import contextlib
import gc
import re
import subprocess
import sys
from collections import Counter

import pytest
from test_fused_compile import needs_toolkit

from numba_tcnn.config import parse_loss, parse_model, parse_optimizer
from numba_tcnn.fused import numba_bridge
from numba_tcnn.fused.jobs import Job
from numba_tcnn.fused.offline import CAPABILITIES, first_calls
from numba_tcnn.fused.plan import architecture
from numba_tcnn.fused.target import cuda_target

CAPABILITY = CAPABILITIES["sm_80"]
ENCODING = {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 10}
NETWORK = {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1, "activation": "Sigmoid"}


def jobs() -> dict[str, Job]:
    spec = parse_model(2, 1, ENCODING, NETWORK)
    made = first_calls(spec, parse_optimizer({"otype": "Adam"}), parse_loss({"otype": "MAPE"}))
    return {job.describe(): job for job in made}


def instructions_of(job: Job) -> Counter[str]:
    """Those of the job's first kernel. In which order NVVM lays out blocks, and so which way round it compares and
    joins comparisons, depends on the names of functions, which no two compilations share."""
    source = job.sources(job.plans(architecture(CAPABILITY))[0])[0]
    body = source.make_body(cuda_target(10 * CAPABILITY[0] + CAPABILITY[1]))
    text, _ = numba_bridge.kernel_to_ptx(
        body.name, body.function, body.parameters, len(body.own), CAPABILITY,
        threads=source.threads, min_blocks=source.min_blocks,
    )  # fmt: skip
    found = re.findall(r"^\s+(?:@!?%p\d+ )?((?!setp|bra|mov)[a-z][\w.]+)", text, re.MULTILINE)
    return Counter(re.sub(r"^(and|or)\.pred", "and/or.pred", name) for name in found)


@needs_toolkit
@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["gradients, float32 and float32 targets, Mape", "inference, float32 to float32", "optimizer"]
)
def test_the_code_is_the_same(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lean = instructions_of(jobs()[call])
    assert sum(lean.values()) > 50
    monkeypatch.setattr("numba_tcnn.fused.lean_compilation.lean_compilation", contextlib.nullcontext)
    assert lean == instructions_of(jobs()[call])


@needs_toolkit
def test_numba_is_as_it_was() -> None:
    from numba.cuda import compiler
    from numba.cuda.core import compiler_machinery, targetconfig
    from numba.cuda.descriptor import cuda_target as contexts

    from numba_tcnn.fused.lean_compilation import lean_compilation

    places = (
        (compiler.CUDACompiler, "define_pipelines"),
        (compiler_machinery.PassManager, "_runPass"),
        (targetconfig.TargetConfig, "__eq__"),
        (targetconfig.TargetConfig, "__hash__"),
        (type(contexts.typing_context), "refresh"),
        (type(contexts.target_context), "refresh"),
    )
    before = [getattr(where, name) for where, name in places]
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt), numba_bridge.compiler_lock, lean_compilation():
        assert not gc.isenabled()
        assert all(getattr(where, name) is not value for (where, name), value in zip(places, before, strict=True))
        raise KeyboardInterrupt
    assert gc.isenabled()
    assert [getattr(where, name) for where, name in places] == before


@needs_toolkit
def test_a_collector_that_rests_is_left_resting() -> None:
    from numba_tcnn.fused.lean_compilation import lean_compilation

    gc.disable()
    try:
        with numba_bridge.compiler_lock, lean_compilation():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_numpy_is_as_it_was_behind_the_import() -> None:
    """numba-cuda asks for a name that numpy 2.5 has removed; it is lent to it only for its import."""
    code = (
        "import numpy as np; known = set(dir(np)); from numba_tcnn.fused import numba_bridge; "
        "assert not {'row_stack'} & (set(dir(np)) ^ known), set(dir(np)) ^ known; numba_bridge.cuda.jit; print('done')"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr
