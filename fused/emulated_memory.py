"""The emulator's memory: arrays at addresses, and a block's shared memory, which finds races.

Shared memory starts as NaN patterns, and each 2-byte cell remembers who wrote and read it since which barrier: a read
or write that another warp's write or read could overtake raises `RaceError`. Within a warp a `warp_barrier` (or any
collective instruction that orders memory) must stand between the lanes, within a warpgroup its own barrier. What wgmma
reads must have been fenced by its writer, and a barrier must stand behind the fence.

Global memory is a set of arrays at made-up addresses; an access outside them, misaligned, or a write to memory that was
also read as constant, raises `MemoryFault`.
"""

from __future__ import annotations

import numpy as np

from .wgmma import WARPGROUP

WARP = 32
ADDRESS_BITS = 40  # each global array gets an address range of its own
FIRST_BYTE = 0x7F00
"""Where in its range an array starts: as aligned as a device's memory, and no more."""
POISON = 0xFFFF  # float16 and float32 NaN
READ, READ_AS_CONSTANT, WRITTEN = 0, 1, 2  # uses of global memory
NOBODY, SEVERAL_WARPS = -1, -2  # in place of a thread; -3 - w stands for several lanes of warp w
FIRST_GROUP = -100  # FIRST_GROUP - g stands for several warps of warpgroup g
ANY_ADDER = -(2**31)  # threads that add, in any order
SHARED_START = 2048 + 16
"""Where a launch's shared memory starts: no more aligned than a device promises, and what is aligned within it
has bits of its address set, as there."""


class RaceError(AssertionError):
    """Two threads may touch the same shared memory in either order."""


class MemoryFault(AssertionError):
    """An access outside the memory it belongs to, or misaligned."""


def address_of(key: int) -> int:
    """Of the first byte of the array with this number."""
    return (key << ADDRESS_BITS) + FIRST_BYTE


class GlobalMemory:
    """Arrays at addresses. All accesses go through views of their bytes."""

    def __init__(self):
        self._arrays: dict[int, np.ndarray] = {}
        self._uses: dict[int, np.ndarray] = {}  # a byte's uses in this launch, READ_AS_CONSTANT | WRITTEN

    def begin_launch(self) -> None:
        """From here on, memory may be read as constant that was written before, and the other way round."""
        self._uses.clear()

    def place(self, array: np.ndarray) -> int:
        """Give a C-contiguous array an address; kernels then read and write it in place."""
        if not array.flags.c_contiguous:
            raise ValueError("only C-contiguous arrays can be placed in the emulated memory")
        key = len(self._arrays) + 1
        self._arrays[key] = array
        return address_of(key)

    def locate(
        self, addresses: np.ndarray, n_bytes: int, active: np.ndarray, use: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of the array that all active addresses lie in, and each thread's offset (0 where inactive).

        use   READ, READ_AS_CONSTANT or WRITTEN
        """
        keys = addresses >> np.uint64(ADDRESS_BITS)
        used = np.unique(keys[active])
        if used.size == 0:
            return np.zeros(n_bytes, np.uint8), np.zeros(addresses.shape, np.int64)
        if used.size > 1 or int(used[0]) not in self._arrays:
            raise MemoryFault(f"addresses {[hex(int(a)) for a in addresses[active][:4]]} belong to no single array")
        view = self._arrays[int(used[0])].reshape(-1).view(np.uint8)
        offsets = (addresses & np.uint64((1 << ADDRESS_BITS) - 1)).astype(np.int64) - FIRST_BYTE
        offsets = np.where(active, offsets, 0)
        bad = active & ((offsets < 0) | (offsets + n_bytes > view.size) | (offsets % n_bytes != 0))
        if bad.any():
            raise MemoryFault(f"offset {offsets[bad][0]} (+{n_bytes} bytes) in an array of {view.size} bytes")
        if use != READ:
            self._note_use(int(used[0]), offsets[active][:, None] + np.arange(n_bytes), use)
        return view, offsets

    def _note_use(self, key: int, cells: np.ndarray, use: int) -> None:
        uses = self._uses.setdefault(key, np.zeros(self._arrays[key].nbytes, np.uint8))
        if (uses[cells] == (READ_AS_CONSTANT | WRITTEN) - use).any():
            raise MemoryFault("one launch both writes a byte of global memory and reads it as constant")
        uses[cells] = use


def _warp_of(owner: np.ndarray) -> np.ndarray:
    """The warp that a reader or writer belongs to, -1 where there is not just one."""
    return np.where(owner >= 0, owner // WARP, np.where(owner > FIRST_GROUP, np.maximum(-3 - owner, -1), -1))


def _group_of(owner: np.ndarray) -> np.ndarray:
    """The warpgroup that a reader or writer belongs to, -1 where there is not just one."""
    warp = _warp_of(owner)
    several_warps = (owner <= FIRST_GROUP) & (owner != ANY_ADDER)
    return np.where(warp >= 0, warp // WARPGROUP, np.where(several_warps, FIRST_GROUP - owner, -1))


def _name_of(owner: int) -> str:
    if owner == ANY_ADDER:
        return "an adding thread"
    if owner <= FIRST_GROUP:
        return f"several warps of warpgroup {FIRST_GROUP - owner}"
    if owner == SEVERAL_WARPS:
        return "several warps"
    return f"thread {owner}" if owner >= 0 else f"several lanes of warp {-3 - owner}"


class SharedMemory:
    """A block's shared memory in 2-byte cells from address `start` on, with the bookkeeping that finds races."""

    def __init__(self, n_bytes: int, n_threads: int, start: int = 0):
        self.start = start
        self.cells = np.full((start + n_bytes) // 2, POISON, np.uint16)
        self.n_threads = n_threads
        self.block_epoch = self.group_epoch = 1
        self.warp_epoch = np.ones(n_threads // WARP, np.int64)
        n = self.cells.size
        self._write_epoch, self._write_warp_epoch = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._write_group_epoch, self._read_group_epoch = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._fenced, self._fence_epoch, self._fence_group_epoch = np.ones(n, bool), np.zeros(n, int), np.zeros(n, int)
        self._writer = np.full(n, NOBODY, np.int64)
        self._read_epoch, self._read_warp_epoch = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self._reader = np.full(n, NOBODY, np.int64)

    def _indices(self, addresses: np.ndarray, n_bytes: int) -> np.ndarray:
        first = addresses.astype(np.int64)
        end = 2 * self.cells.size
        if (first % n_bytes != 0).any() or (first < self.start).any() or (first + n_bytes > end).any():
            raise MemoryFault(
                f"shared addresses {first.min()} to {first.max()} (+{n_bytes} bytes) of {self.start} to {end}"
            )
        return first[:, None] // 2 + np.arange(n_bytes // 2)

    @property
    def _uses(self):
        """(owner, epochs of block, warpgroup and warp, what was done) of the last writes and reads."""
        return (
            (self._writer, self._write_epoch, self._write_group_epoch, self._write_warp_epoch, "wrote"),
            (self._reader, self._read_epoch, self._read_group_epoch, self._read_warp_epoch, "read"),
        )

    def _conflicts(self, owner, epoch, group_epoch, warp_epoch, against, cells, threads, warps, doing):
        other = owner[cells]
        recent = (epoch[cells] == self.block_epoch) & (other != threads[:, None]) & (other != NOBODY)
        same_warp = _warp_of(other) == warps[:, None]
        ordered = same_warp & (warp_epoch[cells] < self.warp_epoch[warps][:, None])
        same_group = _group_of(other) == warps[:, None] // WARPGROUP
        ordered |= same_group & (group_epoch[cells] < self.group_epoch)
        if (recent & ~ordered).any():
            where = np.argwhere(recent & ~ordered)[0]
            raise RaceError(
                f"thread {threads[where[0]]} {doing} shared byte {2 * cells[tuple(where)]}, which "
                f"{_name_of(int(other[tuple(where)]))} {against} with no barrier between"
            )

    def check_read(self, addresses, n_bytes, threads):
        cells = self._indices(addresses, n_bytes)
        warps = threads // WARP
        self._conflicts(*self._uses[0], cells, threads, warps, "reads")
        self._note_readers(cells, threads, warps)
        self._read_epoch[cells], self._read_group_epoch[cells] = self.block_epoch, self.group_epoch
        self._read_warp_epoch[cells] = self.warp_epoch[warps][:, None]
        return cells

    def _note_readers(self, cells, threads, warps):
        """Whom a later write must wait for: all who read since the last barrier between them and the writer."""
        threads = np.broadcast_to(threads[:, None], cells.shape)
        warps = np.broadcast_to(warps[:, None], cells.shape)
        groups = warps // WARPGROUP
        before, several_lanes, several_warps = self._reader[cells], -3 - warps, FIRST_GROUP - groups
        recent = (self._read_epoch[cells] == self.block_epoch) & (before != NOBODY)
        same_warp, same_group = _warp_of(before) == warps, _group_of(before) == groups
        unordered = (self._read_warp_epoch[cells] == self.warp_epoch[warps]) & (before != threads)
        readers = np.where(recent & same_warp & unordered, several_lanes, threads)
        unordered = self._read_group_epoch[cells] == self.group_epoch
        readers = np.where(recent & ~same_warp & same_group & unordered, several_warps, readers)
        readers = np.where(recent & ~same_group, SEVERAL_WARPS, readers)
        self._reader[cells] = readers
        kept = self._reader[cells]  # of threads that read a cell in the same instruction, the last
        clash = kept != readers
        if clash.any():
            self._reader[cells[clash]] = several_lanes[clash]
            clash &= _warp_of(kept) != warps
            self._reader[cells[clash]] = several_warps[clash]
            clash &= _group_of(kept) != groups
            self._reader[cells[clash]] = SEVERAL_WARPS

    def check_write(self, addresses, n_bytes, threads):
        cells = self._indices(addresses, n_bytes)
        warps = threads // WARP
        for use in self._uses:
            self._conflicts(*use, cells, threads, warps, "writes")
        self._writer[cells] = threads[:, None]
        self._write_epoch[cells], self._write_group_epoch[cells] = self.block_epoch, self.group_epoch
        self._write_warp_epoch[cells] = self.warp_epoch[warps][:, None]
        self._fenced[cells] = False
        return cells

    def check_addition(self, addresses, n_bytes, threads):
        """Additions may overtake one another, but no other access."""
        cells = self._indices(addresses, n_bytes)
        warps = threads // WARP
        adding = (self._writer[cells] == ANY_ADDER) & (self._write_epoch[cells] == self.block_epoch)
        others = ~adding.all(axis=1)
        for use in self._uses:
            picked = others if use[-1] == "wrote" else slice(None)
            self._conflicts(*use, cells[picked], threads[picked], warps[picked], "adds to")
        self._writer[cells] = ANY_ADDER
        self._write_epoch[cells] = self.block_epoch
        self._fenced[cells] = False
        return cells

    def check_asynchronous_read(self, addresses, threads):
        """By wgmma: the writer's fence, then a barrier between it and the reader, must have come before."""
        cells = self.check_read(addresses, 2, threads)
        if not self._fenced[cells].all():
            raise RaceError("wgmma reads what was written to shared memory with no fence behind")
        writer, warps = self._writer[cells], (threads // WARP)[:, None]
        recent = (self._fence_epoch[cells] == self.block_epoch) & (_warp_of(writer) != warps)
        same_group = _group_of(writer) == warps // WARPGROUP
        if (recent & ~(same_group & (self._fence_group_epoch[cells] < self.group_epoch))).any():
            raise RaceError("wgmma reads what another warp has fenced with no barrier behind the fence")
        return cells

    def fence(self):
        """By all threads."""
        new = ~self._fenced
        self._fence_epoch[new], self._fence_group_epoch[new] = self.block_epoch, self.group_epoch
        self._fenced[:] = True

    def barrier(self):
        self.block_epoch += 1

    def warpgroup_barrier(self):
        self.group_epoch += 1
        self.warp_epoch += 1

    def warp_barrier(self):
        self.warp_epoch += 1
