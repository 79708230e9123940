"""Which of a model's parameters are matrices, and what of that a slice of the parameters sees: for optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .specs import round_up


@dataclass(frozen=True)
class ParameterSizes:
    """Which of `n_params` parameters are matrices: the first ones, row-major, (rows, columns) each."""

    n_params: int
    layer_sizes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.n_matrix_params > self.n_params:
            raise ValueError(
                f"layer_sizes hold {self.n_matrix_params} parameters, more than n_params = {self.n_params}"
            )

    @cached_property
    def n_matrix_params(self) -> int:
        return sum(rows * columns for rows, columns in self.layer_sizes)

    def layers(self) -> list[slice]:
        """Where each matrix stands."""
        slices, offset = [], 0
        for rows, columns in self.layer_sizes:
            slices.append(slice(offset, offset + rows * columns))
            offset += rows * columns
        return slices

    def part(self, start: int, stop: int) -> ParameterSizes:
        """The sizes of the parameters start ... stop - 1 alone; see `pieces_of_matrix` for a matrix that is cut."""
        pieces = []
        for layer, (_, columns) in zip(self.layers(), self.layer_sizes, strict=True):
            first, last = max(start, layer.start), min(stop, layer.stop)
            if first < last:
                pieces.extend(pieces_of_matrix(columns, first - layer.start, last - layer.start))
        return ParameterSizes(stop - start, tuple(pieces))


def pieces_of_matrix(columns: int, first: int, last: int) -> list[tuple[int, int]]:
    """(rows, columns) of what the elements first ... last - 1 of a row-major matrix consist of.

    That is the end of a row, whole rows and the beginning of a row, as far as they are there.
    """
    first_whole, last_whole = round_up(first, columns), last // columns * columns
    if first_whole > last_whole:
        return [(1, last - first)]
    n_rows = (last_whole - first_whole) // columns
    pieces = [(1, first_whole - first), (n_rows, columns), (1, last - last_whole)]
    return [(rows, width) for rows, width in pieces if rows * width > 0]
