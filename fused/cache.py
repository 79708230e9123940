"""Compiled kernels on disk: one immutable file a kernel, found by everything that could change its code.

Numba's own cache is not used: it returns stale kernels when a constant or an option changes. A key here is a hash of
the specs, plan and options (as their `repr`), the architecture, the versions of the toolchain, and every source file
that takes part. Files are written to a temporary name and renamed, so that many processes may share a folder; a file
that is damaged in any way counts as missing and is written anew. Neither Numba nor a GPU is needed to find one.

NUMBA_TCNN_CACHE_DIR names the folder (default: numba-tcnn in the user's cache folder); set to an empty string, it
turns the disk cache off. (NUMBA_TCNN_COMPILE_PROCESSES, how many processes fill it: `compile_processes.py`.)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import struct
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "NUMBA_TCNN_CACHE_DIR"
MAGIC = b"numba-tcnn kernel 3\n"
TOOLCHAIN = (
    "numba-cuda",
    "numba",
    "llvmlite",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvjitlink-cu12",
)


@dataclass(frozen=True)
class CompiledKernel:
    """A cubin, what the assembler said of it, and what stands in the PTX that it was made from.

    registers         a thread's
    spill_bytes       stored for lack of registers, a thread
    compile_seconds   of processor time
    local_bytes       local memory of a thread: arrays and spills
    serialized        whether its wgmma wait for one another
    mma_instructions  matrix products of tensor cores (mma, wgmma)
    vector_loads      loads of two or more elements at once from global memory
    reductions        red and atom on global memory, vectors counted once
    """

    cubin: bytes
    entry: str
    registers: int
    spill_bytes: int
    compile_seconds: float
    local_bytes: int
    mma_instructions: int
    vector_loads: int
    reductions: int
    serialized: bool = False
    from_cache: bool = False


def cache_directory() -> Path | None:
    """Where compiled kernels are kept; None where the disk cache is off."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA", "~"))
    elif sys.platform == "darwin":
        root = Path("~/Library/Caches")
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return root.expanduser() / "numba-tcnn"


def check_writable() -> None:
    """Raises OSError where kernels can't be kept in the cache folder, which is made if need be."""
    directory = cache_directory()
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass


def cache_size() -> int:
    """Bytes in the disk cache."""
    directory = cache_directory()
    if directory is None or not directory.is_dir():
        return 0
    sizes = []
    for path in directory.glob("*/*.kernel"):
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it
            sizes.append(path.stat().st_size)
    return sum(sizes)


@functools.cache
def toolchain_versions() -> tuple[str, ...]:
    versions = []
    for name in TOOLCHAIN:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return tuple(versions)


@functools.cache
def source_hash() -> str:
    """Hash of every source file of this package, and of the three outside it that kernels are made from."""
    here = Path(__file__).parent
    outside = [Path(sys.modules[f"numba_tcnn.{name}"].__file__) for name in ("initial_values", "layout", "specs")]
    digest = hashlib.sha256()
    for path in [*sorted(here.glob("*.py")), *outside]:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def kernel_key(description: str, capability: tuple) -> str:
    """The key of a kernel described by the `repr` of its specs, plan and options."""
    parts = [description, repr(capability), repr(toolchain_versions()), source_hash()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _path(key: str) -> Path | None:
    directory = cache_directory()
    return None if directory is None else directory / key[:2] / f"{key[2:]}.kernel"


def is_stored(key: str) -> bool:
    """Whether there is a file for this kernel, whatever is in it."""
    path = _path(key)
    return path is not None and path.is_file()


def is_empty() -> bool:
    """Whether the disk cache is off or holds no kernel at all."""
    directory = cache_directory()
    return directory is None or next(directory.glob("*/*.kernel"), None) is None


def load(key: str) -> CompiledKernel | None:
    """The kernel with this key; None where there is none or its file is damaged."""
    path = _path(key)
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError:
        return None
    try:
        if not content.startswith(MAGIC):
            return None
        start = len(MAGIC) + 4
        (length,) = struct.unpack("<I", content[len(MAGIC) : start])
        header = json.loads(content[start : start + length])
        cubin = content[start + length :]
        if hashlib.sha256(cubin).hexdigest() != header.pop("sha256"):
            return None
        return CompiledKernel(cubin=cubin, from_cache=True, **header)
    except (struct.error, ValueError, KeyError, TypeError):
        return None


def store(key: str, kernel: CompiledKernel) -> None:
    """Keep a kernel. A folder that can't be written is no error: the kernel is then compiled again next time."""
    path = _path(key)
    if path is None:
        return
    fields = asdict(kernel)
    cubin = fields.pop("cubin")
    fields.pop("from_cache")
    header = json.dumps(fields | {"sha256": hashlib.sha256(cubin).hexdigest()}).encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + struct.pack("<I", len(header)) + header + cubin)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
