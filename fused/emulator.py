"""A GPU block in NumPy: the emitter of `ptx.py` with every instruction carried out at once on arrays over the threads.

Kernel bodies have block-uniform control flow, so the whole block can run in step: a register is an array of shape
[threads], a fragment a tuple of them. What the machine leaves to the programmer is checked rather than imitated:

- accesses to memory that could overtake one another, or go astray, raise (`emulated_memory.py`);
- wgmma finds its operands by their descriptors;
- asynchronous copies take effect at the wait, as late as allowed, and count as reads and writes from their issue on.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np

from .emulated_memory import READ, READ_AS_CONSTANT, WARP, WRITTEN, GlobalMemory, MemoryFault, RaceError, SharedMemory
from .formats import bfloat16_bits
from .wgmma import WARPGROUP, Chain, SharedOperand, element_addresses


class Block:
    """One block of threads: its place in the grid, its shared memory, and the global memory it sees."""

    def __init__(
        self,
        memory: GlobalMemory,
        n_threads: int,
        shared_bytes: int,
        *,
        block: int = 0,
        n_blocks: int = 1,
        block_row: int = 0,
        shared_start: int = 0,
    ):
        self.memory = memory
        self.n_threads = n_threads
        self.block_index, self.n_blocks, self.block_row = block, n_blocks, block_row
        self.shared = SharedMemory(shared_bytes, n_threads, shared_start)
        self.threads = np.arange(n_threads)
        self.pending_copies: list[tuple] = []
        self.pending_groups: list[list[tuple]] = []
        self.mask = np.ones(n_threads, bool)


class Emitter:
    """The instructions of `ptx.Emitter`, carried out on a `Block`. Shapes: every value is [n_threads] or a scalar."""

    def __init__(self, block: Block, cc: int = 90):
        self.block_state = block
        self.cc = cc

    def _wide(self, value, dtype):
        return np.broadcast_to(np.asarray(value).astype(dtype), (self.block_state.n_threads,))

    # constants, integers
    def u32(self, value):
        if isinstance(value, int):
            return np.uint32(value & 0xFFFFFFFF)
        return np.asarray(value).astype(np.uint32)

    def f32(self, value):
        return np.float32(value)

    def _integer(self, operation, a, b):
        with np.errstate(over="ignore"):
            return operation(np.atleast_1d(self.u32(a)), self.u32(b)).astype(np.uint32)

    def add(self, a, b):
        return self._integer(np.add, a, b)

    def sub(self, a, b):
        return self._integer(np.subtract, a, b)

    def mul(self, a, b):
        return self._integer(np.multiply, a, b)

    def and_(self, a, b):
        return self._integer(np.bitwise_and, a, b)

    def or_(self, a, b):
        return self._integer(np.bitwise_or, a, b)

    def xor(self, a, b):
        return self._integer(np.bitwise_xor, a, b)

    def shl(self, a, n):
        return self._integer(np.left_shift, a, n)

    def shr(self, a, n):
        return self._integer(np.right_shift, a, n)

    def div(self, a, n):
        return self._integer(np.floor_divide, a, n)

    def mod(self, a, n):
        return self._integer(np.mod, a, n)

    def remainders(self, values, divisor):
        return [self.mod(value, divisor) for value in values]

    def minimum(self, a, b):
        return np.minimum(self.u32(a), self.u32(b))

    def maximum(self, a, b):
        return np.maximum(self.u32(a), self.u32(b))

    def address(self, base, index, stride, offset=0):
        index = np.asarray(self.u32(index)).astype(np.uint64)
        return np.asarray(base).astype(np.uint64) + index * np.uint64(stride) + np.uint64(offset)

    def address_by(self, base, index, stride):
        return np.asarray(base).astype(np.uint64) + np.asarray(self.u32(index)).astype(np.uint64) * np.uint64(stride)

    @staticmethod
    def low_word(a):
        return np.asarray(a, np.uint64).astype(np.uint32)

    # predicates, choice
    def less(self, a, b):
        return self.u32(a) < self.u32(b)

    def equal(self, a, b):
        return self.u32(a) == self.u32(b)

    def both(self, p, q):
        return p & q

    def select(self, p, a, b):
        return np.where(p, a, b)

    @contextmanager
    def when(self, predicate):
        outer = self.block_state.mask
        self.block_state.mask = outer & np.broadcast_to(predicate, outer.shape)
        yield
        self.block_state.mask = outer

    # floats
    @staticmethod
    def _float(*operands):
        """As arrays of one dtype, float64 where one is."""
        kind = np.float64 if any(np.asarray(o).dtype == np.float64 for o in operands) else np.float32
        return [np.asarray(o, kind) for o in operands]

    def fadd(self, a, b):
        return np.add(*self._float(a, b))

    def fsub(self, a, b):
        with np.errstate(invalid="ignore"):
            return (np.asarray(a, np.float32) - np.asarray(b, np.float32)).astype(np.float32)

    def fmul(self, a, b):
        return np.multiply(*self._float(a, b))

    def fdiv(self, a, b):
        return np.divide(*self._float(a, b))

    def fma(self, a, b, c):
        """float64 operands: with two roundings."""
        a, b, c = self._float(a, b, c)
        return (a.astype(np.float64) * b + c).astype(a.dtype)

    def f64(self, value):
        return np.float64(value)

    def widen(self, a):
        return np.asarray(a, np.float32).astype(np.float64)

    def narrow(self, a):
        with np.errstate(over="ignore"):
            return np.asarray(a, np.float64).astype(np.float32)

    def to_f64(self, a):
        return np.asarray(self.u32(a)).astype(np.float64)

    def square_root(self, a):
        return np.sqrt(np.asarray(a, np.float64))

    def less_than(self, a, b):
        return np.asarray(a) < np.asarray(b)

    def multiply_add(self, a, b, c):
        a, b, c = (np.asarray(v, np.float64) for v in (a, b, c))
        return (a * b + c).astype(np.float32)

    def is_finite(self, a):
        return np.isfinite(a)

    def float_to_bits(self, a):
        return np.asarray(a, np.float32).view(np.uint32)

    def pack_bfloat2(self, low, high):
        low, high = (bfloat16_bits(self._wide(v, np.float32)).astype(np.uint32) for v in (low, high))
        return low | (high << np.uint32(16))

    def upper_halves(self, low, high):
        low, high = self._wide(low, np.uint32), self._wide(high, np.uint32)
        return (low >> np.uint32(16)) | (high & np.uint32(0xFFFF0000))

    def unpack_bfloat2(self, packed):
        packed = self._wide(packed, np.uint32)
        return (packed << np.uint32(16)).view(np.float32), (packed & np.uint32(0xFFFF0000)).view(np.float32)

    def pack_half2(self, low, high):
        with np.errstate(over="ignore"):
            low, high = (self._wide(v, np.float32).astype(np.float16).view(np.uint16) for v in (low, high))
        return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))

    def pack_positive_half2(self, low, high):
        return self.pack_half2(*(np.where(self._wide(v, np.float32) <= 0, np.float32(0), v) for v in (low, high)))

    def where_positive_half2(self, values, gates):
        products = (
            value * (gate > 0) for value, gate in zip(self.unpack_half2(values), self.unpack_half2(gates), strict=True)
        )
        return self.pack_half2(*(np.float32(product) for product in products))

    def unpack_half2(self, packed):
        packed = self._wide(packed, np.uint32)
        halves = ((packed >> np.uint32(shift)).astype(np.uint16).view(np.float16) for shift in (0, 16))
        return tuple(h.astype(np.float32) for h in halves)

    def float_to_half(self, a):
        with np.errstate(over="ignore"):
            return self._wide(a, np.float32).astype(np.float16).view(np.uint16).astype(np.uint32)

    def half_to_float(self, a):
        return self._wide(a, np.uint32).astype(np.uint16).view(np.float16).astype(np.float32)

    def round_to_int64(self, a):
        with np.errstate(invalid="ignore"):
            return np.rint(self._wide(a, np.float32)).astype(np.int64).view(np.uint64)

    def low_bits_of_floor(self, a):
        whole = np.floor(np.asarray(a, np.float64))
        whole = np.where(np.abs(whole) < 2.0**62, whole, 0.0)
        return whole.astype(np.int64).astype(np.uint32)

    def int64_to_float(self, a):
        return self._wide(a, np.uint64).view(np.int64).astype(np.float32)

    def floor_to_int(self, a):
        a = np.nan_to_num(np.floor(np.asarray(a, np.float64)), nan=0.0, posinf=2.0**31, neginf=-(2.0**31))
        return np.clip(a, -(2.0**31), 2.0**31 - 1).astype(np.int64).astype(np.uint32)

    def round_to_int(self, a):
        a = np.nan_to_num(np.rint(np.asarray(a, np.float64)), nan=0.0, posinf=2.0**31, neginf=-(2.0**31))
        return np.clip(a, -(2.0**31), 2.0**31 - 1).astype(np.int64).astype(np.uint32)

    def int_to_float(self, a):
        return self._wide(a, np.uint32).view(np.int32).astype(np.float32)

    def bits_to_float(self, a):
        return self._wide(a, np.uint32).view(np.float32)

    # identity
    def thread(self):
        return self.block_state.threads.astype(np.uint32)

    def lane(self):
        return (self.block_state.threads % WARP).astype(np.uint32)

    def warp(self):
        return (self.block_state.threads // WARP).astype(np.uint32)

    def warp_of_block(self):
        return self.warp()

    def block(self):
        return np.uint32(self.block_state.block_index)

    def block_row(self):
        return np.uint32(self.block_state.block_row)

    def n_blocks(self):
        return np.uint32(self.block_state.n_blocks)

    def zero_at_run_time(self):
        return np.float32(0.0)

    # warp, barriers
    def settle(self, value):
        return value

    def shuffle_xor(self, value, mask):
        value = np.broadcast_to(value, (self.block_state.n_threads,))
        return value[self.block_state.threads ^ mask]

    def barrier(self):
        self.block_state.shared.barrier()

    def warpgroup(self):
        return (self.block_state.threads // (WARP * WARPGROUP)).astype(np.uint32)

    def warpgroup_barrier(self):
        self.block_state.shared.warpgroup_barrier()

    def fence_async(self):
        self.block_state.shared.fence()

    def warp_barrier(self):
        self.block_state.shared.warp_barrier()

    # tensor cores
    def mma(self, a, b, c, *, bfloat=False):
        """Fragment maps of m16n8k16 with g = lane / 4, t = lane % 4: PTX ISA, "Matrix Fragments for mma.m16n8k16"."""
        if self.cc < 80:
            raise NotImplementedError("mma.m16n8k16 needs sm_80")
        return self._mma(a, b, c, self.unpack_bfloat2 if bfloat else self.unpack_half2)

    def mma_k8(self, a, b, c):
        """m16n8k8 of float16: the first half of the registers and columns of m16n8k16's a, and of rows of its b."""
        return self._mma(a, [b], c, self.unpack_half2)

    def _mma(self, a, b, c, unpack):
        """a (16x8k, 2 k registers), b (8kx8, k registers), c (16x8, 4 registers)."""
        n_warps, depth = self.block_state.n_threads // WARP, 8 * len(b)
        lane = np.arange(WARP)
        g, t = lane // 4, lane % 4
        a_matrix = np.zeros((n_warps, 16, depth), np.float32)
        b_matrix = np.zeros((n_warps, depth, 8), np.float32)
        c_matrix = np.zeros((n_warps, 16, 8), np.float32)
        for i, register in enumerate(a):
            for element, value in enumerate(unpack(register)):
                a_matrix[:, g + 8 * (i & 1), 2 * t + element + 8 * (i >> 1)] = value.reshape(n_warps, WARP)
        for i, register in enumerate(b):
            for element, value in enumerate(unpack(register)):
                b_matrix[:, 2 * t + element + 8 * i, g] = value.reshape(n_warps, WARP)
        for i, value in enumerate(c):
            value = np.broadcast_to(value, (self.block_state.n_threads,))
            c_matrix[:, g + 8 * (i >> 1), 2 * t + (i & 1)] = value.reshape(n_warps, WARP)
        with np.errstate(invalid="ignore", over="ignore"):
            product = a_matrix @ b_matrix + c_matrix
        return [product[:, g + 8 * (i >> 1), 2 * t + (i & 1)].reshape(-1) for i in range(4)]

    def wgmma(self, chains: list[Chain]) -> list[list]:
        """Fragment maps of m64nNk16, those of m16n8k16 for each warp's 16 rows; operands by their descriptors."""
        warp, lane = np.divmod(self.block_state.threads.reshape(-1, WARPGROUP * WARP), WARP)
        row, column, group = 16 * (warp % WARPGROUP) + lane // 4, lane % 4 * 2, warp // WARPGROUP
        results = []
        for chain in chains:
            total = np.zeros((len(group), 64, chain.n), np.float32)

            def place(i):
                return group, row + 8 * (i // 2 % 2), column + 8 * (i // 4) + i % 2

            for i, value in enumerate(chain.sums or ()):
                total[place(i)] = self._wide(value, np.float32).reshape(row.shape)
            for a, b in zip(chain.a, chain.b, strict=True):
                if isinstance(a, SharedOperand):
                    a_matrix = self._wgmma_operand(a, 64)
                else:
                    a_matrix = np.zeros((len(group), 64, 16), np.float32)
                    for i, register in enumerate(a):
                        for element, value in enumerate(self.unpack_half2(register)):
                            where = group, row + 8 * (i & 1), column + element + 8 * (i >> 1)
                            a_matrix[where] = value.reshape(row.shape)
                with np.errstate(invalid="ignore", over="ignore"):
                    total = total + a_matrix @ self._wgmma_operand(b, chain.n).swapaxes(1, 2)
            results.append([total[place(i)].reshape(-1) for i in range(chain.n // 2)])
        return results

    def _wgmma_operand(self, operand: SharedOperand, n_outer: int):
        """[warpgroups, n_outer, 16 along k] as float32; read by all four warps."""
        address = self._wide(operand.address, np.uint32).reshape(-1, WARPGROUP * WARP)
        if (address != address[:, :1]).any() or (address % 16).any():
            raise MemoryFault("a descriptor is not the same in all threads of a warpgroup, or misaligned")
        low, high = operand.words
        addresses = element_addresses((address[:, 0] >> 4) + low, high, operand.transposed, n_outer)
        shared, leaders = self.block_state.shared, self.block_state.threads[::WARP].reshape(-1, WARPGROUP)
        for warp in range(WARPGROUP):
            threads = np.broadcast_to(leaders[:, warp, None, None], addresses.shape).reshape(-1)
            cells = shared.check_asynchronous_read(addresses.reshape(-1), threads)
        return shared.cells[cells].view(np.float16).astype(np.float32).reshape(addresses.shape)

    def _matrix_rows(self, address, offset):
        """Row addresses of the four 8x8 matrices of each warp, [n_warps, 4, 8]."""
        return (self._wide(address, np.int64) + offset).reshape(-1, 4, 8)

    def ldmatrix(self, address, offset=0, *, transposed=False):
        shared, threads = self.block_state.shared, self.block_state.threads
        rows = self._matrix_rows(address, offset)
        data = shared.cells[shared.check_read(rows.reshape(-1), 16, threads)].reshape(-1, 4, 8, 8)
        if transposed:
            data = data.swapaxes(2, 3)
        words = data[..., 0::2].astype(np.uint32) | (data[..., 1::2].astype(np.uint32) << np.uint32(16))
        return [words[:, i].reshape(-1) for i in range(4)]

    def stmatrix(self, address, registers, offset=0):
        shared, threads = self.block_state.shared, self.block_state.threads
        cells = shared.check_write(self._matrix_rows(address, offset).reshape(-1), 16, threads).reshape(-1, 4, 8, 8)
        for i, register in enumerate(registers):
            words = self._wide(register, np.uint32).reshape(-1, 8, 4)
            shared.cells[cells[:, i, :, 0::2]] = (words & np.uint32(0xFFFF)).astype(np.uint16)
            shared.cells[cells[:, i, :, 1::2]] = (words >> np.uint32(16)).astype(np.uint16)

    # memory
    DTYPES = {"u32": np.uint32, "u64": np.uint64, "f32": np.float32, "f64": np.float64, "u16": np.uint16}
    BYTES = {kind: np.dtype(dtype).itemsize for kind, dtype in DTYPES.items()}

    def _from_bytes(self, raw, kind, count):
        values = raw.copy().view(self.DTYPES[kind]).reshape(-1, count)
        if kind == "u16":
            values = values.astype(np.uint32)
        return [values[:, i] for i in range(count)]

    def _to_bytes(self, values, kind):
        return np.stack([self._wide(v, self.DTYPES[kind]) for v in values], axis=1).view(np.uint8)

    def load_shared(self, address, kind, count=1, offset=0):
        shared, active = self.block_state.shared, self.block_state.mask
        n_bytes = self.BYTES[kind] * count
        raw = np.zeros((self.block_state.n_threads, n_bytes), np.uint8)
        addresses = self._wide(address, np.int64) + offset
        cells = shared.check_read(addresses[active], n_bytes, self.block_state.threads[active])
        raw[active] = shared.cells[cells].view(np.uint8)
        return self._from_bytes(raw, kind, count)

    def store_shared(self, address, kind, values, offset=0):
        shared, active = self.block_state.shared, self.block_state.mask
        raw = self._to_bytes(values, kind)
        addresses = self._wide(address, np.int64) + offset
        cells = shared.check_write(addresses[active], raw.shape[1], self.block_state.threads[active])
        shared.cells[cells] = raw[active].view(np.uint16)
        if (shared.cells[cells] != raw[active].view(np.uint16)).any():
            raise RaceError("two threads write different values to the same shared cell in one instruction")

    def add_shared_u32(self, address, value, offset=0):
        shared, active = self.block_state.shared, self.block_state.mask
        addresses = (self._wide(address, np.int64) + offset)[active]
        cells = shared.check_addition(addresses, 4, self.block_state.threads[active])[:, 0] // 2
        np.add.at(shared.cells.view(np.uint32), cells, self._wide(value, np.uint32)[active])

    def _global(self, address, n_bytes, offset, use):
        active = self.block_state.mask
        addresses = self._wide(address, np.uint64) + np.uint64(offset)
        view, offsets = self.block_state.memory.locate(addresses, n_bytes, active, use)
        return view, offsets[:, None] + np.arange(n_bytes), active

    def load_global(self, address, kind, count=1, offset=0, *, constant=True):
        n_bytes = self.BYTES[kind] * count
        view, cells, active = self._global(address, n_bytes, offset, READ_AS_CONSTANT if constant else READ)
        raw = view[cells].copy()
        raw[~active] = 0
        return self._from_bytes(raw, kind, count)

    def prefetch(self, address):
        self._global(address, 1, 0, READ)

    def prefetch_closer(self, shared_address, address):
        self.prefetch(address)
        active = self.block_state.mask
        addresses = self._wide(shared_address, np.int64)[active]
        self.block_state.shared.check_write(addresses, 4, self.block_state.threads[active])

    def load_global_where(self, predicate, address, kind, count=1, offset=0):
        with self.when(predicate):
            return self.load_global(address, kind, count, offset, constant=False)

    def store_global(self, address, kind, values, offset=0):
        raw = self._to_bytes(values, kind)
        view, cells, active = self._global(address, raw.shape[1], offset, WRITTEN)
        view[cells[active]] = raw[active]

    def add_global(self, address, values, offset=0):
        view, cells, active = self._global(address, 4 * len(values), offset, WRITTEN)
        floats = view.view(np.float32)
        for i, value in enumerate(values):
            np.add.at(floats, cells[active, 4 * i] // 4, self._wide(value, np.float32)[active])

    def maximum_global(self, address, value):
        view, cells, active = self._global(address, 4, 0, WRITTEN)
        np.maximum.at(view.view(np.uint32), cells[active, 0] // 4, self._wide(value, np.uint32)[active])

    def add_global_u32(self, address, value):
        view, cells, active = self._global(address, 4, 0, WRITTEN)
        np.add.at(view.view(np.uint32), cells[active, 0] // 4, self._wide(value, np.uint32)[active])

    def add_global_u64(self, address, value):
        view, cells, active = self._global(address, 8, 0, WRITTEN)
        np.add.at(view.view(np.uint64), cells[active, 0] // 8, self._wide(value, np.uint64)[active])

    def copy_async(self, shared_address, global_address, offset=0, *, n_bytes=16, where=None, constant=True):
        reads = np.broadcast_to(True if where is None else where, self.block_state.mask.shape)
        with self.when(reads):
            view, cells, _ = self._global(global_address, n_bytes, 0, READ_AS_CONSTANT if constant else READ)
        active = self.block_state.mask
        addresses = self._wide(shared_address, np.int64) + offset
        threads = self.block_state.threads[active]
        self.block_state.shared.check_write(addresses[active], n_bytes, threads)
        self.block_state.pending_copies.append((view, cells[active], reads[active], addresses[active], threads))

    def copy_async_of(self, shared_address, global_address, offset, *, flip, item, further, stride, n_bytes):
        source = self.address_by(global_address, self.add(item, further), stride)
        self.copy_async(self.xor(shared_address, flip), source, offset, n_bytes=n_bytes)

    def copy_commit(self):
        self.block_state.pending_groups.append(list(self.block_state.pending_copies))
        self.block_state.pending_copies.clear()

    def copy_wait(self, groups_left=None):
        block = self.block_state
        if groups_left is None:
            self.copy_commit()
        groups = block.pending_groups
        while len(groups) > (groups_left or 0):
            for view, source, reads, addresses, threads in groups.pop(0):
                cells = block.shared.check_write(addresses, source.shape[1], threads)
                values = np.zeros(source.shape, np.uint8)
                values[reads] = view[source[reads]]
                block.shared.cells[cells] = values.view(np.uint16)
