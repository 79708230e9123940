"""The world a device function runs in. Every factory is `make_x(target, spec, ...)`: it writes plain Python functions
that capture what they need, and decorates them last, with `target.device(f)` or `target.scalar(f)`.

- `CudaTarget(cc)`: Numba CUDA device functions for one compute capability;
- `EmulatorTarget(block)`: the same functions on NumPy arrays over the threads of one block (`emulator.py`), for whole
  kernels without a GPU;
- `NjitTarget()`: `numba.njit`, for per-sample functions at C speed on the CPU (their memory is a NumPy array, which
  the caller's sinks read and write);
- `OutlineTarget()`: nothing but a body's name and parameters.

Nothing else in `fused/` names `cuda.jit` or `njit`.

`device(f)` may call other device functions and intrinsics, and its control flow is the same in all threads.
`scalar(f)` works on single float32 or uint32 values, with Python's `math`; only here may a branch depend on data. It
may call scalar functions made with `scalar_part(f)`, and casts with NumPy's types; device functions cast with the
target's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from . import emulator


@functools.cache
def cuda_target(cc: int) -> CudaTarget:
    """The target for compute capability `cc`; one object each, since intrinsics are memoised by target."""
    return CudaTarget(cc)


class CudaTarget:
    """Numba CUDA for compute capability `cc` (75 ... 120)."""

    name = "cuda"
    u32, f32, u64 = np.uint32, np.float32, np.uint64

    def __init__(self, cc: int):
        from . import loop_hints, numba_bridge, ptx

        self.cc = cc
        self.memory_spaces = numba_bridge.cuda  # `memory_spaces.local.array(n, dtype)` inside a device function
        self.map_fragment = ptx.map_fragment
        self.unroll_full = loop_hints.unroll_full
        self.unroll_by_2 = loop_hints.unroll_by_2

    def device(self, function: Callable) -> Callable:
        from .numba_bridge import cuda

        # inlined even where the code grows large: a call would cost registers, and the ladder of plans its point
        return cuda.jit(device=True, fastmath=True, forceinline=True)(function)

    scalar = scalar_part = device

    def intrinsic(self, arguments: Sequence, result) -> Callable:
        """Decorator for a body `body(e, *arguments)`; kinds as in `ptx.make_intrinsic`."""
        from . import ptx

        return functools.partial(ptx.make_intrinsic, self.cc, tuple(arguments), result)

    def constant(self, values: np.ndarray) -> Callable:
        """A device function `get(i)` that reads a table from constant memory."""
        from .numba_bridge import cuda

        def get(i):
            return cuda.const.array_like(values)[i]

        return self.device(get)

    def dynamic_shared_base(self) -> Callable:
        """A device function that gives the address of the block's dynamic shared memory."""
        from . import ptx
        from .numba_bridge import cuda

        address_of_shared, element = ptx.address_of_shared, np.uint32

        def base():
            return address_of_shared(cuda.shared.array(0, dtype=element))

        return self.device(base)


class EmulatorTarget:
    """NumPy over the threads of one emulated block. The block is set before a kernel body is run."""

    name = "emulator"

    def __init__(self, cc: int = 90):
        self.cc = cc
        self.block: emulator.Block | None = None
        self.memory_spaces = SimpleNamespace(local=SimpleNamespace(array=lambda n, dtype: [None] * n))

    @functools.cached_property
    def _cpu(self) -> NjitTarget:
        """For scalar functions; imports Numba."""
        return NjitTarget()

    @staticmethod
    def u32(value):
        return np.asarray(value).astype(np.uint32) if np.ndim(value) else np.uint32(int(value) & 0xFFFFFFFF)

    @staticmethod
    def f32(value):
        return np.asarray(value).astype(np.float32) if np.ndim(value) else np.float32(value)

    @staticmethod
    def u64(value):
        return np.asarray(value).astype(np.uint64)

    @staticmethod
    def map_fragment(function, *operands):
        count = next(len(o) for o in operands if isinstance(o, tuple | list))
        columns = [o if isinstance(o, tuple | list) else [o] * count for o in operands]
        outcomes = [function(*elements) for elements in zip(*columns, strict=True)]
        if isinstance(outcomes[0], tuple):
            return tuple(tuple(column) for column in zip(*outcomes, strict=True))
        return tuple(outcomes)

    @staticmethod
    def unroll_full():
        """Loops need no hint here."""

    unroll_by_2 = unroll_full

    def device(self, function: Callable) -> Callable:
        return function

    def scalar_part(self, function: Callable) -> Callable:
        return self._cpu.device(function)

    def scalar(self, function: Callable) -> Callable:
        """Element by element through njit, so that its branches may depend on data."""
        compiled = self._cpu.scalar(function)

        def elementwise(*operands):
            arrays = np.broadcast_arrays(*[np.asarray(o) for o in operands])
            shape = arrays[0].shape
            outcomes = [compiled(*values) for values in zip(*[a.reshape(-1) for a in arrays], strict=True)]

            def gather(values):
                kind = np.float32 if isinstance(values[0], float | np.floating) else np.uint32
                return np.array(values, kind).reshape(shape)

            if isinstance(outcomes[0], tuple):
                return tuple(gather(column) for column in zip(*outcomes, strict=True))
            return gather(outcomes)

        return elementwise

    def intrinsic(self, arguments: Sequence, result) -> Callable:
        def decorate(body):
            def call(*values):
                returned = body(emulator.Emitter(self.block, self.cc), *values)
                return tuple(returned) if isinstance(result, tuple) else returned

            return call

        return decorate

    def constant(self, values: np.ndarray) -> Callable:
        return lambda i: values[np.asarray(i).astype(np.int64)]

    def dynamic_shared_base(self) -> Callable:
        return lambda: np.uint32(0)


class OutlineTarget(EmulatorTarget):
    """For bodies that are never run: what a kernel is called and which parameters it has. Compiles nothing."""

    name = "outline"

    def scalar(self, function: Callable) -> Callable:
        return function

    scalar_part = scalar


class NjitTarget:
    """`numba.njit` on the CPU."""

    name = "njit"
    u32, f32, u64 = np.uint32, np.float32, np.uint64

    def __init__(self):
        import numba

        self._njit = numba.njit(error_model="numpy")
        self.memory_spaces = SimpleNamespace()

        def unroll_full():
            """Loops need no hint here."""

        self.unroll_full = self.unroll_by_2 = self._njit(unroll_full)

    def device(self, function: Callable) -> Callable:
        return self._njit(function)

    scalar = scalar_part = device
