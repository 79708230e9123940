"""Kernel bodies to machine code: Numba to PTX, nvJitLink to a cubin, the disk cache around both. Needs no GPU."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable

from ..engines import EngineUnavailable
from . import cache
from .cache import CompiledKernel
from .fragments import Target
from .stage_io import KernelBody
from .target import cuda_target

MAX_SPILL_BYTES = 128
"""A plan whose kernel spills more gives way to the next candidate."""

WITH_OWN_INSTRUCTIONS = ((9, 0),)
"""Compute capabilities with instructions of their own, e.g. wgmma: kernels are made for sm_90a."""

SERIALIZED = "C7512"
"""The assembler's warning that it let each wgmma wait for the one before, mostly for lack of registers."""

INSTRUCTIONS = {
    "mma_instructions": re.compile(r"(?<![\w.])(?:mma|wgmma\.mma_async)\."),
    "vector_loads": re.compile(r"(?<![\w.])ld\.(?:[\w:]+\.)*global\.(?:[\w:]+\.)*v[248]\."),
    "reductions": re.compile(r"(?<![\w.])(?:red|atom)\.(?:[\w:]+\.)*global\."),
}
"""What is counted in the PTX of a kernel; see `CompiledKernel`."""

EMPTY_KERNEL = ".visible .entry nothing() { ret; }"


class CompileError(EngineUnavailable):
    """A kernel did not compile; the cause is chained and named."""


def key_of(description: str, capability: tuple[int, int], *, threads: int, min_blocks: int) -> str:
    """The cache key of what `compile_kernel` makes of the same arguments."""
    return cache.kernel_key(f"{description} threads={threads} min_blocks={min_blocks}", capability)


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
    key = key_of(description, capability, threads=threads, min_blocks=min_blocks)
    known = cache.load(key)
    if known is not None:
        return known
    try:
        compiled = _compile(make_body, capability, threads, min_blocks)
    except ImportError as error:
        raise CompileError(f"the CUDA toolchain can't be used: {error}") from error
    except Exception as error:  # numba, llvmlite and nvJitLink each raise their own
        cause = " ".join(str(error).split())
        raise CompileError(f"a kernel did not compile ({type(error).__name__}: {cause[:300]})") from error
    cache.store(key, compiled)
    return compiled


def _compile(make_body, capability, threads: int, min_blocks: int) -> CompiledKernel:
    from . import numba_bridge

    start = time.thread_time()
    with numba_bridge.compiler_lock:  # closures and intrinsics are shared by kernels: made once, by one thread
        body = make_body(cuda_target(10 * capability[0] + capability[1]))
    architecture = (*capability, "a") if capability in WITH_OWN_INSTRUCTIONS else capability
    text, entry = numba_bridge.kernel_to_ptx(
        body.name,
        body.function,
        body.parameters,
        len(body.own),
        architecture,
        threads=threads,
        min_blocks=min_blocks,
    )
    cubin, log = assemble(text, architecture)
    return CompiledKernel(
        cubin=cubin,
        entry=entry,
        registers=int(_first(r"Used (\d+) registers", log)),
        spill_bytes=int(_first(r"(\d+) bytes spill stores", log)),
        compile_seconds=time.thread_time() - start,
        local_bytes=int(_first(r"(\d+) bytes stack frame", log)),
        serialized=SERIALIZED in log,
        **count_instructions(text),
    )


def count_instructions(text: str) -> dict[str, int]:
    """How often the instructions in `INSTRUCTIONS` stand in a PTX text: written, not executed."""
    code = re.sub(r"//.*", "", text)
    return {name: len(pattern.findall(code)) for name, pattern in INSTRUCTIONS.items()}


def toolchain_problem(capabilities: Iterable[tuple[int, int]]) -> str | None:
    """Why kernels can't be compiled for all of these compute capabilities by what is installed, or None."""
    try:
        from . import numba_bridge

        numba_bridge.check_nvvm()
    except Exception as error:  # ImportError, or an error of the library that looked for a file
        return f"numba-cuda and NVVM can't be used: {error}"
    for major, minor in capabilities:
        try:
            assemble(f".version 6.5\n.target sm_75\n.address_size 64\n{EMPTY_KERNEL}", (major, minor))
        except ImportError as error:
            return f"nvJitLink can't be used: {error}"
        except Exception as error:  # each library has errors of its own
            return f"nvJitLink can't assemble for sm_{major}{minor}: {error}"
    return None


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
