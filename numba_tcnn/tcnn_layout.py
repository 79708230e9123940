"""Where tiny-cuda-nn's flat parameter vector lies in ours, for widths of hidden layers that only we pad.

Both hold the weight matrices, then the encoding, and both pad the first matrix's columns and the last one's rows to a
multiple of 16. A hidden width that is no multiple of 16 stays as it is there; here rows and columns of zeros fill up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .layout import n_bias_params, n_matrix_params, n_params, weight_blocks
from .snapshot_files import SnapshotError
from .specs import ModelSpec


@dataclass(frozen=True)
class FlatLayout:
    """A model's parameters, or a slice of them.

    n_params         length of our vector
    n_matrix_params  how many of these, the first ones, belong to matrices
    positions        where each element of tiny-cuda-nn's vector stands in ours, ascending; None: they are the same
    """

    n_params: int
    n_matrix_params: int
    positions: np.ndarray | None = None

    @property
    def n_tcnn_params(self) -> int:
        return self.n_params if self.positions is None else len(self.positions)

    def to_ours(self, values: np.ndarray) -> np.ndarray:
        """[..., n_params] from [..., n_tcnn_params], 0 where only we have padding."""
        if self.positions is None:
            return values
        ours = np.zeros((*values.shape[:-1], self.n_params), values.dtype)
        ours[..., self.positions] = values
        return ours

    def to_tcnn(self, values: np.ndarray) -> np.ndarray:
        """[..., n_tcnn_params] from [..., n_params]."""
        return values if self.positions is None else values[..., self.positions]

    def part(self, start: int, stop: int) -> FlatLayout:
        """The layout of the elements start ... stop - 1 of our vector alone."""
        n_matrix_params = min(max(self.n_matrix_params - start, 0), stop - start)
        if self.positions is None:
            return FlatLayout(stop - start, n_matrix_params)
        first, last = np.searchsorted(self.positions, [start, stop])
        return FlatLayout(stop - start, n_matrix_params, self.positions[first:last] - start)


def flat_layout(spec: ModelSpec) -> FlatLayout:
    """Raises SnapshotError for a network that tiny-cuda-nn does not have."""
    if n_bias_params(spec):
        raise SnapshotError("tiny-cuda-nn's networks have no biases")
    if spec.network is not None and len(set(spec.network.hidden_widths)) > 1:
        raise SnapshotError("tiny-cuda-nn's networks have hidden layers of one width")
    if spec.layer_shapes == _tcnn_shapes(spec):
        return FlatLayout(n_params(spec), n_matrix_params(spec))
    encoding = np.arange(n_matrix_params(spec), n_params(spec))
    return FlatLayout(n_params(spec), n_matrix_params(spec), np.concatenate([*_matrix_positions(spec), encoding]))


def _tcnn_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(fan_out, fan_in) of each weight matrix there."""
    *hidden, (_, fan_in) = spec.logical_layer_shapes or ((0, 0),)
    return (*hidden, (spec.padded_output_width, fan_in)) if spec.layer_shapes else ()


def _matrix_positions(spec: ModelSpec) -> list[np.ndarray]:
    positions = []
    for block, (fan_out, fan_in) in zip(weight_blocks(spec), _tcnn_shapes(spec), strict=True):
        rows = block.offset + block.shape[1] * np.arange(fan_out)
        positions.append((rows[:, None] + np.arange(fan_in)).reshape(-1))
    return positions
