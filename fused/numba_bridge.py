"""Every private name of numba-cuda that this project uses, and the versions they were checked with.

numba-cuda 0.30.4 needs a current device to compile and still wants `numpy.row_stack`, which numpy 2.5 removed; both
are bridged here, so that whole kernels compile to PTX for any architecture without a driver.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np

from . import intrinsics, loop_hints
from .target import TURNS_SINCE

SUPPORTED = ((0, 30, 4), (0, 31))
"""numba-cuda versions, first included to last excluded."""


def _import_numba_cuda():
    """Import numba-cuda's compiler; on numpy >= 2.5 lend it `np.row_stack` for just as long as its import takes."""
    removed_name = "row_stack"
    missing = not hasattr(np, removed_name)
    if missing:
        setattr(np, removed_name, np.vstack)
    try:
        import numba.cuda.np.arrayobj  # noqa: F401  (the module that asks for the name)
        from numba import cuda
        from numba.cuda import codegen, dispatcher
    finally:
        if missing:
            delattr(np, removed_name)
    return cuda, codegen, dispatcher


def _import_names():
    """What a kernel's argument of our own is made of: its base class, its type's, its data model's, typing errors; and
    Numba's lock."""
    from numba.cuda.args import ArgHint
    from numba.cuda.core.compiler_lock import global_compiler_lock
    from numba.cuda.core.errors import TypingError
    from numba.cuda.datamodel import PrimitiveModel
    from numba.cuda.models import register_model
    from numba.cuda.types import Record

    return ArgHint, Record, PrimitiveModel, register_model, TypingError, global_compiler_lock


def _check_version():
    version = importlib.metadata.version("numba-cuda")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        first, last = (".".join(map(str, limit)) for limit in SUPPORTED)
        raise ImportError(f"numba-cuda {version} is installed; this version of numba-tcnn needs >={first},<{last}")


_check_version()
cuda, _codegen, _dispatcher = _import_numba_cuda()
ArgHint, Record, PrimitiveModel, register_model, TypingError, compiler_lock = _import_names()
"""The lock: Numba's and LLVM's global state allow one compilation at a time in a process. It is Numba's own, so that a
user's kernel that another thread compiles meanwhile never sees the device that `_without_device` makes up."""


def check_nvvm() -> None:
    """Raises where the NVVM library or its libdevice can't be found or loaded."""
    from cuda.bindings import nvvm
    from numba.cuda.cudadrv import nvvm as numba_nvvm

    nvvm.version()
    numba_nvvm.get_libdevice()


def _apply_hints_when_finalized():
    """Run `loop_hints.apply_loop_hints` on every device function and kernel before numba hands it to NVVM."""
    original = _codegen.CUDACodeLibrary.finalize
    if getattr(original, "applies_loop_hints", False):
        return

    def finalize(self):
        if self._module is not None:
            loop_hints.apply_loop_hints(self._module)
        return original(self)

    finalize.applies_loop_hints = True
    _codegen.CUDACodeLibrary.finalize = finalize


_apply_hints_when_finalized()


@contextlib.contextmanager
def _without_device(capability: tuple):
    """Let numba-cuda believe that the current device has this compute capability, e.g. (9, 0) or (9, 0, "a")."""
    device = SimpleNamespace(compute_capability=tuple(capability[:2]), id=0)
    with (
        mock.patch.object(_dispatcher, "get_current_device", lambda: device),
        mock.patch.object(
            _codegen.CUDACodeLibrary, "_ensure_cc", lambda self, cc: cc if cc is not None else tuple(capability)
        ),
    ):
        yield


def _kernel_with_flat_parameters(name: str, function, parameters, n_own: int, capability: tuple):
    """`function(*own, io)` as a kernel `name` of scalar parameters; `io` is the tuple of those behind `n_own`.

    The function is inlined whatever its size. LLVM would rather call a large one, and a called function has fewer
    registers: deep networks of costly activations then spilled in every plan, and ended layer by layer.
    """
    names = [name for name, _ in parameters]
    arguments = names[:n_own]
    if n_own < len(names):
        arguments = [*arguments, f"({', '.join(names[n_own:])},)"]
    namespace = {"body": cuda.jit(device=True, fastmath=True, forceinline=True)(function)}
    lines = [f"body({', '.join(arguments)})"]
    if capability[:2] >= TURNS_SINCE:
        namespace["take_turn"] = intrinsics.make_take_turn(10 * capability[0] + capability[1])
        lines.insert(0, "take_turn()")
    exec(f"def {name}({', '.join(names)}):\n    " + "\n    ".join(lines), namespace)
    return namespace[name]


def kernel_to_ptx(
    name: str,
    function,
    parameters,
    n_own: int,
    capability: tuple,
    *,
    threads: int,
    min_blocks: int,
):
    """Compile a plain Python function as a kernel `name`. Returns (PTX, entry name); calls no driver.

    parameters   (name, kind) of all, flat; those behind the first `n_own` reach the function as one tuple
    threads      most threads a block will have
    min_blocks   blocks that should fit on a multiprocessor: caps the registers
    """
    flat = _kernel_with_flat_parameters(name, function, parameters, n_own, capability)
    signature = tuple(intrinsics.NUMBA_TYPES[kind] for _, kind in parameters)
    kernel = cuda.jit(flat, lto=False, fastmath=True, launch_bounds=(threads, min_blocks))
    return jitted_to_ptx(kernel, signature, capability, lean=True)


def jitted_to_ptx(kernel, signature: tuple, capability: tuple, *, lean: bool = False) -> tuple[str, str]:
    """(PTX, entry name) of what `cuda.jit` gave, for arguments of these Numba types; calls no driver.

    lean   a kernel of ours, to which `lean_compilation` does justice
    """
    from .lean_compilation import lean_compilation  # imports numba-cuda, which has to go through this file first

    with compiler_lock, _without_device(capability), lean_compilation() if lean else contextlib.nullcontext():
        with mock.patch.object(_codegen.CUDACodeLibrary, "get_asm_str", lambda self, cc=None: ""):
            compiled = _dispatcher._Kernel(kernel.py_func, signature, **kernel.targetoptions)
        library = compiled._codelibrary
        if library._lto:
            return library.get_lto_ptx().strip("\0"), compiled.entry_name
        library.llvm_strs  # noqa: B018  (kept by the library, as other threads may not write modules meanwhile)
    # NVVM needs no lock: other kernels may go through Numba's front end meanwhile
    return "\n".join(library.get_asm_strs(cc=tuple(capability))), compiled.entry_name


def launched_block() -> tuple[int, ...] | None:
    """Threads of a block, by axis, of the launch that is asking an argument for its address; None outside of one.

    numba-cuda tells arguments the stream only; the block is found in the frame of its `launch`.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not _dispatcher._Kernel.launch.__code__:
        frame = frame.f_back
    return None if frame is None else tuple(frame.f_locals["blockdim"])
