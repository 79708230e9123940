"""Matrix products of a warpgroup (wgmma, sm_90a): operands, their descriptors, the PTX of a batch of products.

A warpgroup, 4 consecutive warps, multiplies A [64, k] by B [k, n], 16 of k an instruction. A warp w holds rows
16 w .. 16 w + 15 of A in packed form and of the result in accumulator form (`fragments.py`); or A lies in shared memory
as B always does. An operand in shared memory is a part of a swizzled tile, as wide along k as the instruction, seen in
one of two ways (PTX ISA, "Asynchronous warpgroup level matrix shared memory layout"; "outer" is m or n):

    k along the tile's columns       outer index = row: groups of 8 rows are `8 row_bytes` apart
    k along its rows (transposed)    outer index = column: groups of 8 rows along k are `8 row_bytes` apart, panels of
                                     row_bytes / 2 columns along the outer index `panel_bytes`

The instruction finds them by a descriptor of 64 bits: start address / 16 (bits 0-13), distance of panels / 16 (16-29),
distance of groups / 16 (32-45), and the swizzle (62-63: 1, 2, 3 for rows of 128, 64, 32 bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WARPGROUP = 4
"""Warps."""

SWIZZLE_CODES = {128: 1, 64: 2, 32: 3}


@dataclass(frozen=True)
class SharedOperand:
    """16 along k of an operand.

    address   where the tile's memory begins: a u32 register, the same in all threads of a warpgroup
    offset    bytes from there to the operand's first element
    row_bytes, panel_bytes, transposed   see above
    """

    address: object
    offset: int
    row_bytes: int
    panel_bytes: int
    transposed: bool

    def __post_init__(self):
        if self.offset % 16 or self.panel_bytes % 16:
            raise ValueError(f"{self} is not made of 16-byte chunks")

    @property
    def words(self) -> tuple[int, int]:
        """What the descriptor's lower word has besides `address` / 16, and its upper word."""
        low = (self.offset >> 4) + (self.panel_bytes >> 4 << 16)
        return low, (8 * self.row_bytes >> 4) | SWIZZLE_CODES[self.row_bytes] << 30


@dataclass(frozen=True)
class Chain:
    """sums + A B over all of k: one product a 16 of it.

    n      columns of B, a multiple of 8
    a      for each 16 of k: 4 packed registers, or a `SharedOperand`
    b      for each 16 of k: a `SharedOperand`
    sums   n / 2 float32 registers to add to, or None for 0
    """

    n: int
    a: tuple
    b: tuple[SharedOperand, ...]
    sums: tuple | None = None


def batch_text(chains: list[Chain]) -> tuple[str, list[str], list]:
    """PTX of a batch that is issued, committed and waited for as a whole; constraints and values of its inputs.

    Outputs $0, $1, ...: all chains' results, "=&f" each. Descriptors are put together in the text: left to LLVM, their
    constants would be moved out of loops, into dozens of registers.
    """
    n_outputs = sum(chain.n // 2 for chain in chains)
    constraints, inputs, known, lines = [], [], {}, []

    def place_of(value, constraint: str) -> str:
        constraints.append(constraint)
        inputs.append(value)
        return f"${n_outputs + len(inputs) - 1}"

    def descriptor(operand: SharedOperand) -> str:
        address = id(operand.address)
        if address not in known:
            known[address] = place_of(operand.address, "r")
        key = (address, operand.words)
        if key not in known:
            known[key] = name = f"d{len(known)}"
            low, high = operand.words
            lines.append(f".reg .b64 {name}; shr.u32 lo, {known[address]}, 4; add.u32 lo, lo, {low};")
            lines.append(f"mov.b32 hi, {high}; mov.b64 {name}, {{lo, hi}};")
        return known[key]

    products, first = [], 0
    for chain in chains:
        outputs = ",".join(f"${first + i}" for i in range(chain.n // 2))
        if chain.sums is not None:
            for i, value in enumerate(chain.sums):
                place_of(value, str(first + i))
        for step, (a, b) in enumerate(zip(chain.a, chain.b, strict=True)):
            adds = "yes" if step or chain.sums is not None else "no"
            if isinstance(a, SharedOperand):
                operand, transposed = descriptor(a), f"{int(a.transposed)}, {int(b.transposed)}"
            else:
                operand, transposed = "{" + ",".join(place_of(r, "r") for r in a) + "}", f"{int(b.transposed)}"
            products.append(
                f"wgmma.mma_async.sync.aligned.m64n{chain.n}k16.f32.f16.f16 "
                f"{{{outputs}}}, {operand}, {descriptor(b)}, {adds}, 1, 1, {transposed};"
            )
        first += chain.n // 2
    head = [
        "{ .reg .pred yes, no; .reg .b32 lo, hi; setp.eq.u32 yes, 0, 0; setp.ne.u32 no, 0, 0;",
        *lines,
        "wgmma.fence.sync.aligned;",
    ]
    tail = ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"]
    return "\n".join([*head, *products, *tail]), constraints, inputs


def element_addresses(low: np.ndarray, high: int, transposed: bool, n_outer: int) -> np.ndarray:
    """Shared addresses of an operand's elements, [..., n_outer, 16 along k], from its descriptor's two words."""
    start = (low.astype(np.int64) & 0x3FFF) << 4
    panel_bytes = (low.astype(np.int64) >> 16 & 0x3FFF) << 4
    group_bytes, code = (high & 0x3FFF) << 4, high >> 30
    row_bytes = {code: n for n, code in SWIZZLE_CODES.items()}[code]
    outer, k = np.arange(n_outer)[:, None], np.arange(16)
    if transposed:
        panel, column, row = outer // (row_bytes // 2), outer % (row_bytes // 2), k
    else:
        panel, column, row = 0 * outer, k, outer
    within = row // 8 * group_bytes + row % 8 * row_bytes + 2 * column
    address = start[..., None, None] + panel * panel_bytes[..., None, None] + within
    return address ^ ((address >> 7 & (row_bytes // 16 - 1)) << 4)
