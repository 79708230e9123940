"""The world a device function runs in. Every factory is `make_x(target, spec, ...)`: it writes plain Python functions
that capture what they need, and decorates them last, with `target.device(f)` or `target.scalar(f)`.

- `CudaTarget(cc, dtype)`: Numba CUDA device functions for one compute capability;
- `EmulatorTarget(cc)`: the same functions on NumPy arrays over the threads of one block (`emulator.py`), for whole
  kernels without a GPU;
- `NjitTarget()`: `numba.njit`, for scalar functions at C speed on the CPU: in tests, and inside of the emulator;
- `OutlineTarget()`: nothing but a body's name and parameters.

A target also says in what number format values are stored (`target.format`, see `formats.py`), for the few factories
that ask; `target.storing(dtype)` is the same target with another format, and a kernel's plan says which it needs.

Nothing else in `fused/` names `cuda.jit` or `njit`.

`device(f)` may call other device functions and intrinsics, and its control flow is the same in all threads; it may
depend on a value from memory through `target.uniform(value)`, which says that all threads of the block have the same.
`scalar(f)` works on single float32 or uint32 values, with Python's `math`; only here may a branch depend on data. It
may call scalar functions made with `scalar_part(f)`, and casts with NumPy's types; device functions cast with the
target's.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from . import emulator
from .formats import number_format

TURNS_SINCE = (9, 0)
"""The first compute capability on which kernels take turns (`intrinsics.make_take_turn`), so that they may be launched
to start while the one before still runs."""


@functools.cache
def _cuda_target(cc: int, dtype: str) -> CudaTarget:
    return CudaTarget(cc, dtype)


def cuda_target(cc: int, dtype: str = "float16") -> CudaTarget:
    """The target for compute capability `cc`; one object each, since intrinsics are memoised by target."""
    return _cuda_target(cc, dtype)


class CudaTarget:
    """Numba CUDA for compute capability `cc` (75 ... 120)."""

    name = "cuda"
    u32, f32, u64 = np.uint32, np.float32, np.uint64

    def __init__(self, cc: int, dtype: str = "float16"):
        from . import intrinsics, loop_hints, numba_bridge

        self.cc, self.format = cc, number_format(dtype)
        self.memory_spaces = numba_bridge.cuda  # `memory_spaces.local.array(n, dtype)` inside a device function
        self.map_fragment = intrinsics.map_fragment

        def uniform(value):
            return value

        self.uniform = self.device(uniform)
        self.unroll_full = loop_hints.unroll_full
        self.unroll_by_2 = loop_hints.unroll_by_2

    def storing(self, dtype: str) -> CudaTarget:
        return cuda_target(self.cc, dtype)

    def device(self, function: Callable) -> Callable:
        from .numba_bridge import cuda

        # inlined even where the code grows large: a call would cost registers, and the ladder of plans its point
        return cuda.jit(device=True, fastmath=True, forceinline=True)(function)

    scalar = scalar_part = device

    def intrinsic(self, arguments: Sequence, result) -> Callable:
        """Decorator for a body `body(e, *arguments)`; kinds as in `intrinsics.make_intrinsic`."""
        from . import intrinsics

        return functools.partial(intrinsics.make_intrinsic, self.cc, tuple(arguments), result)

    def constant(self, values: np.ndarray) -> Callable:
        """A device function `get(i)` that reads a table from constant memory."""
        from .numba_bridge import cuda

        def get(i):
            return cuda.const.array_like(values)[i]

        return self.device(get)

    def dynamic_shared_base(self) -> Callable:
        """A device function that gives the address of the block's dynamic shared memory."""
        from . import intrinsics
        from .numba_bridge import cuda

        address_of_shared, element = intrinsics.address_of_shared, np.uint32

        def base():
            return address_of_shared(cuda.shared.array(0, dtype=element))

        return self.device(base)

    def static_shared_base(self, n_bytes: int) -> Callable:
        """A device function that gives the address of `n_bytes` of shared memory of its own, a multiple of 16."""
        from . import intrinsics
        from .numba_bridge import cuda

        address_of_shared, element, n_words = intrinsics.address_of_shared, np.uint32, -(-n_bytes // 4)

        def base():
            return address_of_shared(cuda.shared.array(n_words, dtype=element, alignment=16))

        return self.device(base)


class EmulatorTarget:
    """NumPy over the threads of one emulated block. The block is set before a kernel body is run."""

    name = "emulator"

    def __init__(self, cc: int = 90):
        self.cc, self.format = cc, number_format("float16")
        self._running = SimpleNamespace(block=None)
        self._variants = {"float16": self}
        self.memory_spaces = SimpleNamespace(local=SimpleNamespace(array=lambda n, dtype: [None] * n))

    @property
    def block(self) -> emulator.Block | None:
        """The block that is run now, the same for all formats."""
        return self._running.block

    @block.setter
    def block(self, block: emulator.Block) -> None:
        self._running.block = block

    def storing(self, dtype: str) -> EmulatorTarget:
        if dtype not in self._variants:
            twin = self._variants[dtype] = copy.copy(self)
            twin.format = number_format(dtype)
        return self._variants[dtype]

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
    def uniform(value):
        values = np.unique(value)
        if values.size != 1:
            raise AssertionError(f"threads of a block go different ways: {values[:4]}")
        return values[0]

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
        return lambda: np.uint32(self.block.shared.start)

    def static_shared_base(self, n_bytes: int) -> Callable:
        return self.dynamic_shared_base()


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

        self._njit, self.format = numba.njit(error_model="numpy"), number_format("float16")
        self.memory_spaces = SimpleNamespace()

        def unroll_full():
            """Loops need no hint here."""

        self.unroll_full = self.unroll_by_2 = self._njit(unroll_full)

    def device(self, function: Callable) -> Callable:
        return self._njit(function)

    scalar = scalar_part = device
