"""Where each parameter lives in the flat float32 vector: a pure function of the model's spec.

The order is tiny-cuda-nn's: the network's weight matrices first (each row-major [fan_out, fan_in], padded rows and
columns included), then the encoding's parameters. Biases, which tiny-cuda-nn does not have, stand between them, layer
after layer. A grid stores level after level; entry `i`, feature `f` of a level stands at
`(level.offset + i) * n_features_per_level + f` from the encoding's start.

Every width is padded to 16. tiny-cuda-nn does so for inputs and outputs only; a width of hidden layers that is no
multiple of 16 makes our matrices larger than its, by rows and columns that nothing depends on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .specs import CompositeSpec, EncodingSpec, GridSpec, ModelSpec, round_up

MAX_ENTRIES_PER_LEVEL = (2**32 - 1) // 2
LEVEL_ALIGNMENT = 8


@dataclass(frozen=True)
class GridLevel:
    """Geometry of one grid level.

    scale       float32 value: cells per unit of x (a vertex lies at (p - 0.5) / scale)
    resolution  vertices along each axis
    n_entries   rows of the level's table
    offset      first row of the level in the encoding's table
    hashed      whether a vertex's row is its hash; otherwise it is the dense index, modulo n_entries
    """

    scale: float
    resolution: int
    n_entries: int
    offset: int
    hashed: bool


def level_scale(level: int, log2_per_level_scale: np.float32, base_resolution: int) -> float:
    """exp2(level * log2(b)) * N_min - 1, every operation rounded to float32.

    exp2 and log2 are taken in float64 first: NumPy's own float32 versions are an ulp off here and there, which moves
    a level that ends on a whole number to the next resolution.
    """
    growth = np.float32(2.0 ** float(np.float32(level) * log2_per_level_scale))
    return float(np.float32(np.float32(growth * np.float32(base_resolution)) - np.float32(1)))


def grid_levels(spec: GridSpec) -> tuple[GridLevel, ...]:
    """The level table. tiny-cuda-nn's rule: N^D entries, rounded up to 8, then capped by table or tile size."""
    log2_scale = np.float32(math.log2(np.float32(spec.per_level_scale)))
    levels, offset = [], 0
    for level in range(spec.n_levels):
        scale = level_scale(level, log2_scale, spec.base_resolution)
        resolution = math.ceil(scale) + 1
        n_vertices = resolution**spec.n_input_dims
        n_entries = round_up(min(n_vertices, MAX_ENTRIES_PER_LEVEL), LEVEL_ALIGNMENT)
        if spec.type == "Tiled":
            n_entries = min(n_entries, spec.base_resolution**spec.n_input_dims)
        elif spec.type == "Hash":
            n_entries = min(n_entries, 1 << spec.log2_hashmap_size)
        hashed = spec.type == "Hash" and n_entries < n_vertices
        levels.append(GridLevel(scale, resolution, n_entries, offset, hashed))
        offset += n_entries
    return tuple(levels)


def n_encoding_params(spec: EncodingSpec) -> int:
    if isinstance(spec, GridSpec):
        last = grid_levels(spec)[-1]
        return (last.offset + last.n_entries) * spec.n_features_per_level
    if isinstance(spec, CompositeSpec):
        return sum(n_encoding_params(child.encoding) for child in spec.nested)
    return 0


def n_matrix_params(spec: ModelSpec) -> int:
    """Elements of the weight matrices, which come first: what optimizers call matrix parameters."""
    return sum(fan_out * fan_in for fan_out, fan_in in spec.layer_shapes)


def n_bias_params(spec: ModelSpec) -> int:
    has_biases = spec.network is not None and spec.network.bias
    return sum(fan_out for fan_out, _ in spec.layer_shapes) if has_biases else 0


def n_network_params(spec: ModelSpec) -> int:
    return n_matrix_params(spec) + n_bias_params(spec)


def n_params(spec: ModelSpec) -> int:
    return n_network_params(spec) + n_encoding_params(spec.encoding)


@dataclass(frozen=True)
class ParameterBlock:
    """One named part of the flat vector: `shape` as stored, `logical_shape` without padding (its first corner)."""

    name: str
    offset: int
    shape: tuple[int, ...]
    logical_shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def stored(self, params: np.ndarray) -> np.ndarray:
        """This block of a flat vector, padding included, as a view."""
        return params[self.offset : self.offset + self.size].reshape(self.shape)

    def logical(self, params: np.ndarray) -> np.ndarray:
        """This block of a flat vector without its padding, as a view."""
        return self.stored(params)[tuple(slice(length) for length in self.logical_shape)]


def weight_blocks(spec: ModelSpec) -> list[ParameterBlock]:
    """layer0.weight, layer1.weight, ..., each [fan_out, fan_in]."""
    blocks, offset = [], 0
    for i, (shape, logical_shape) in enumerate(zip(spec.layer_shapes, spec.logical_layer_shapes, strict=True)):
        blocks.append(ParameterBlock(f"layer{i}.weight", offset, shape, logical_shape))
        offset += blocks[-1].size
    return blocks


def bias_blocks(spec: ModelSpec) -> list[ParameterBlock]:
    """layer0.bias, layer1.bias, ..., each [fan_out]; none where the network has no biases."""
    if spec.network is None or not spec.network.bias:
        return []
    blocks, offset = [], n_matrix_params(spec)
    for i, (shape, logical_shape) in enumerate(zip(spec.layer_shapes, spec.logical_layer_shapes, strict=True)):
        blocks.append(ParameterBlock(f"layer{i}.bias", offset, shape[:1], logical_shape[:1]))
        offset += blocks[-1].size
    return blocks


def parameter_blocks(spec: ModelSpec) -> tuple[ParameterBlock, ...]:
    """All blocks in storage order: weights, biases, grid.level0 ... (nested0.grid.level0 ... in a composite)."""
    return (*weight_blocks(spec), *bias_blocks(spec), *_encoding_blocks(spec.encoding, n_network_params(spec), ""))


def _encoding_blocks(spec: EncodingSpec, offset: int, prefix: str) -> list[ParameterBlock]:
    if isinstance(spec, GridSpec):
        n_features = spec.n_features_per_level
        blocks = []
        for i, level in enumerate(grid_levels(spec)):
            shape = (level.n_entries, n_features)
            blocks.append(ParameterBlock(f"{prefix}grid.level{i}", offset + level.offset * n_features, shape, shape))
        return blocks
    if isinstance(spec, CompositeSpec):
        blocks = []
        for i, child in enumerate(spec.nested):
            blocks.extend(_encoding_blocks(child.encoding, offset, f"{prefix}nested{i}."))
            offset += n_encoding_params(child.encoding)
        return blocks
    return []
