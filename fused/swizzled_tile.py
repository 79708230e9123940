"""Swizzled tiles: the layout of float16 matrices in shared memory that wgmma reads, rows without padding.

A tile is cut into panels of 64 columns (of 32 or 16 where it has no more), one behind the other, each with all rows:

    column c of row r    panel * rows * row_bytes + r * row_bytes + 2 (c % panel_columns), its 16-byte chunk exchanged

The chunk's number (address bits 4 to 6, as many as a row has) is xored with address bits 7 to 9. Panels start at
multiples of 1024 bytes, so these are bits of the row: r % 8 for rows of 128 bytes, r / 2 % 4 for 64, r / 4 % 2 for 32.
Eight rows of a chunk lie in different banks, as in a padded tile; and it is one of wgmma's own layouts ("128-byte
swizzle" and so on, PTX ISA, "Matrix descriptor"), so one copy of a matrix serves wgmma, ldmatrix and rows of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

SWIZZLE_ALIGNMENT = 1024


@dataclass(frozen=True)
class SwizzledTile:
    """`rows` x `columns` float16 from byte `offset` of the block's shared memory on, which starts at such a multiple
    of 1024 itself."""

    name: str
    rows: int
    columns: int
    offset: int
    n_planes: ClassVar[int] = 1

    def __post_init__(self):
        if self.columns % 16 or self.rows % 16 or self.rows <= 0 or self.offset % SWIZZLE_ALIGNMENT:
            raise ValueError(f"{self} is not made of aligned 16x16 blocks")
        if self.n_panels > 1 and self.panel_bytes % SWIZZLE_ALIGNMENT:
            raise ValueError(f"panels of {self} are not aligned")

    @property
    def panel_columns(self) -> int:
        return min(64, 1 << (self.columns - 1).bit_length())

    @property
    def n_panels(self) -> int:
        return -(-self.columns // self.panel_columns)

    @property
    def stride(self) -> int:
        """Bytes of a row of a panel."""
        return 2 * self.panel_columns

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.stride

    @property
    def n_bytes(self) -> int:
        return self.n_panels * self.panel_bytes

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes

    def _swizzle(self, e, address):
        """The place of 16 bytes that would stand at `address` without the exchange of chunks."""
        chunks = self.stride // 16
        return e.xor(address, e.shl(e.and_(e.shr(address, 7), chunks - 1), 4))

    def flip(self, place: int) -> int:
        """Its bits xored to what `within_panel` gives for a place without a bit in common give it for both together."""
        return place ^ (((place >> 7) & (self.stride // 16 - 1)) << 4)

    def within_panel(self, e, place, column: int):
        """Bytes from a panel's start on of `column`, a multiple of 16, further than `place`, row * stride + bytes."""
        address = self._swizzle(e, place)
        return e.xor(address, 2 * column) if column else address

    def straight(self, e, base):
        """Address of lane's row for blocks in the order (top, left), (bottom, left), (top, right), (bottom, right)."""
        lane = e.lane()
        place = e.add(e.mul(e.and_(lane, 15), self.stride), e.shl(e.shr(lane, 4), 4))
        return e.add(base, self._swizzle(e, place))

    def crossed(self, e, base):
        """... in the order (top, left), (top, right), (bottom, left), (bottom, right)."""
        lane = e.lane()
        row = e.add(e.and_(lane, 7), e.shl(e.shr(lane, 4), 3))
        place = e.add(e.mul(row, self.stride), e.shl(e.and_(e.shr(lane, 3), 1), 4))
        return e.add(base, self._swizzle(e, place))

    def place(self, e, address, row_block: int, column_block: int, plane: int = 0):
        """(address, immediate) at which a lane, from its `straight` or `crossed` address, finds a 16x16 block; there is
        one plane."""
        panel, block = divmod(column_block, self.panel_columns // 16)
        address = e.xor(address, block << 5) if block else address
        return address, self.offset + panel * self.panel_bytes + row_block * 16 * self.stride

    def divides(self, ways: int) -> bool:
        """Whether warps can take one of so many equal runs of columns each, and find it by `at_column_block`."""
        blocks, rest = divmod(self.columns // 16, ways)
        return rest == 0 and (ways == 1 or blocks.bit_count() == 1)

    def at_column_block(self, e, address, block):
        """A lane's address as far on as the column block where its run begins, of runs as in `divides`."""
        per_panel = self.panel_columns // 16
        if self.n_panels > 1:
            address = e.add(address, e.mul(e.div(block, per_panel), self.panel_bytes))
            block = e.mod(block, per_panel)
        return e.xor(address, e.shl(block, 5))

    def element(self, e, row, column, further: int = 0):
        """(address, immediate) of column `column + further` of a row, from the row's address (`make_row_address`)."""
        column = e.add(column, further) if further else column
        if self.n_panels > 1:
            panel, column = e.div(column, self.panel_columns), e.mod(column, self.panel_columns)
            row = e.add(row, e.mul(panel, self.panel_bytes))
        return self._swizzle(e, e.add(row, e.shl(column, 1))), 0
