"""Kernel bodies to machine code: Numba to PTX, nvJitLink to a cubin, the disk cache around both. Needs no GPU."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from ..engines import EngineUnavailable
from . import cache
from .cache import CompiledKernel
from .fragments import Target
from .stage_io import KernelBody
from .target import cuda_target

MAX_SPILL_BYTES = 64
"""A plan whose kernel spills more gives way to the next candidate."""


class CompileError(EngineUnavailable):
    """A kernel did not compile; the cause is chained and named."""


def compile_kernel(
    make_body: Callable[[Target], KernelBody],
    description: str,
    capability: tuple[int, int],
    *,
    threads: int,
    min_blocks: int,
) -> CompiledKernel:
    """Machine code of one kernel for a compute capability, e.g. (9, 0).

    make_body     makes the body for a target; called only where the cache has no kernel
    description   what the body is a function of: the `repr` of its specs, plan and options
    threads       of a block
    min_blocks    blocks a multiprocessor shall hold at once
    """
    key = cache.kernel_key(f"{description} threads={threads} min_blocks={min_blocks}", capability)
    known = cache.load(key)
    if known is not None:
        return known
    start = time.perf_counter()
    try:
        compiled = _compile(make_body, capability, threads, min_blocks, start)
    except ImportError as error:
        raise CompileError(f"the CUDA toolchain can't be used: {error}") from error
    except Exception as error:  # numba, llvmlite and nvJitLink each raise their own
        cause = " ".join(str(error).split())
        raise CompileError(f"a kernel did not compile ({type(error).__name__}: {cause[:300]})") from error
    cache.store(key, compiled)
    return compiled


def _compile(make_body, capability, threads: int, min_blocks: int, start: float) -> CompiledKernel:
    from . import numba_bridge

    body = make_body(cuda_target(10 * capability[0] + capability[1]))
    text, entry = numba_bridge.kernel_to_ptx(
        body.name, body.function, body.parameters, len(body.own), capability, threads=threads, min_blocks=min_blocks
    )
    cubin, log = assemble(text, capability)
    return CompiledKernel(
        cubin=cubin,
        entry=entry,
        registers=int(_first(r"Used (\d+) registers", log)),
        spill_bytes=int(_first(r"(\d+) bytes spill stores", log)),
        compile_seconds=time.perf_counter() - start,
    )


def assemble(text: str, capability: tuple) -> tuple[bytes, str]:
    """PTX to a cubin by nvJitLink, and the assembler's report, which nvJitLink's own cache would leave out."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    arch = "sm_" + "".join(str(part) for part in capability)
    options = LinkerOptions(arch=arch, ptxas_options=["-v"], no_cache=True)
    linker = Linker(ObjectCode.from_ptx(text.encode()), options=options)
    cubin = bytes(linker.link("cubin").code)
    return cubin, linker.get_info_log() + linker.get_error_log()


def _first(pattern: str, log: str) -> str:
    found = re.search(pattern, log)
    if found is None:
        raise RuntimeError(f"the assembler's report has no {pattern!r}: {log[:200]!r}")
    return found.group(1)
