"""Numba's front end without what our kernels don't need: two thirds of its time, the same code.

A kernel is some hundred small functions, and numba-cuda does for each of them what a user's program might need: it
reads its configuration again, asks all registries for news, formats flags for events, and runs passes over its
intermediate code that find nothing, as kernels hold no comprehensions, closures, arrays or inlined functions. While one
of our kernels compiles, behind Numba's lock, that is left out. What a user compiles goes the usual way.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from unittest import mock

from numba.cuda import compiler
from numba.cuda.core import compiler_machinery, config, targetconfig, typed_passes, untyped_passes
from numba.cuda.descriptor import cuda_target

PASSES_THAT_FIND_NOTHING = (
    untyped_passes.WithLifting,
    untyped_passes.InlineClosureLikes,
    untyped_passes.InlineInlinables,
    typed_passes.InlineOverloads,
    typed_passes.NopythonRewrites,
    typed_passes.IRLegalization,
)


_define_pipelines = compiler.CUDACompiler.define_pipelines
_shared_pipelines: list[compiler_machinery.PassManager] = []


def _define_once(compilation) -> list[compiler_machinery.PassManager]:
    """The other passes, in Numba's order. All functions share them: our flags differ in nothing that passes ask for."""
    if not _shared_pipelines:
        (manager,) = _define_pipelines(compilation)
        manager.passes = [(which, why) for which, why in manager.passes if which not in PASSES_THAT_FIND_NOTHING]
        _shared_pipelines.append(manager)
    return _shared_pipelines


def _run_pass(manager, index: int, which, state) -> None:
    which.analysis = manager._analysis
    which.run_initialization(state)
    which.run_pass(state)
    which.run_finalizer(state)


def _install_intrinsics(context) -> None:
    """Intrinsics that have been met since go to the registry that the context installed first."""
    context.install_registry(next(iter(context._registries)))


@functools.cache
def _hash_of_names(kind: type) -> int:
    """What `TargetConfig.__hash__` gives: it hashes the options' names only."""
    return hash(tuple(sorted(kind.options)))


def _same_options(one, other) -> bool:
    return one is other or (type(one) is type(other) and one._values == other._values)


@contextlib.contextmanager
def lean_compilation() -> Iterator[None]:
    """Whoever enters holds Numba's lock, once in a thread. The cyclic garbage collector rests too: what a compilation
    makes lives until its end, and going through it again and again finds nothing."""
    cuda_target.target_context.refresh()  # the typing context's too: once a kernel instead of twice a function
    collects = gc.isenabled()
    gc.disable()
    try:
        with (
            mock.patch.object(config, "reload_config", lambda: None),
            mock.patch.object(type(cuda_target.typing_context), "refresh", lambda self: None),
            mock.patch.object(type(cuda_target.target_context), "refresh", _install_intrinsics),
            mock.patch.object(compiler.CUDACompiler, "define_pipelines", _define_once),
            mock.patch.object(compiler_machinery.PassManager, "_runPass", _run_pass),
            mock.patch.object(targetconfig.TargetConfig, "__eq__", _same_options),
            mock.patch.object(targetconfig.TargetConfig, "__hash__", lambda self: _hash_of_names(type(self))),
        ):
            yield
    finally:
        if collects:
            gc.enable()
