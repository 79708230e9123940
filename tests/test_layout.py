"""Parameter layout against tables that tiny-cuda-nn's own host code gives, and its golden cases."""

from __future__ import annotations

import numpy as np
import pytest
from golden_case import GoldenCase, names

from numba_tcnn.layout import grid_levels, n_encoding_params, n_network_params, n_params, parameter_blocks
from numba_tcnn.specs import (
    CompositeSpec,
    GridSpec,
    IdentitySpec,
    ModelSpec,
    NestedEncoding,
    NetworkSpec,
)

IMAGE_GRID = GridSpec(2, log2_hashmap_size=15, per_level_scale=1.5)
IMAGE_SCALES = (
    "15 23 35 53 80 120.499985 181.249985 272.375 409.062469 614.093628 "
    "921.640381 1382.96094 2074.94116 3112.91138 4669.86816 7005.29932"
)
IMAGE_RESOLUTIONS = "16 24 36 54 81 122 183 274 411 616 923 1384 2076 3114 4671 7007"


def test_levels_of_the_image_grid() -> None:
    levels = grid_levels(IMAGE_GRID)
    assert [np.float32(level.scale) for level in levels] == [np.float32(word) for word in IMAGE_SCALES.split()]
    assert [level.resolution for level in levels] == [int(word) for word in IMAGE_RESOLUTIONS.split()]
    assert [level.n_entries for level in levels] == [256, 576, 1296, 2920, 6568, 14888] + [32768] * 10
    assert [level.hashed for level in levels] == [False] * 6 + [True] * 10
    assert n_encoding_params(IMAGE_GRID) == 708368


def test_levels_that_double() -> None:
    levels = grid_levels(GridSpec(3))
    assert [level.resolution for level in levels] == [16 << i for i in range(16)]
    assert [level.n_entries for level in levels] == [4096, 32768, 262144] + [524288] * 13
    assert [level.hashed for level in levels] == [False] * 3 + [True] * 13
    assert n_encoding_params(GridSpec(3)) == 14229504


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (GridSpec(3, n_levels=20, base_resolution=32, per_level_scale=1.5, log2_hashmap_size=16), 2555904),
        (GridSpec(2, type="Dense", n_levels=8, per_level_scale=float(np.exp(np.log(256 / 16) / 7))), 240240),
        (GridSpec(3, type="Tiled", base_resolution=5), 4000),
    ],
)
def test_sizes_of_tables(spec: GridSpec, size: int) -> None:
    assert n_encoding_params(spec) == size


def test_sizes_of_models() -> None:
    image = ModelSpec(2, 3, IMAGE_GRID, NetworkSpec("FullyFusedMLP", 64, 2), 32)
    assert image.layer_shapes == ((64, 32), (64, 64), (16, 64))
    assert (n_network_params(image), n_params(image)) == (7168, 715536)
    narrow = ModelSpec(3, 3, IdentitySpec(3), NetworkSpec("FullyFusedMLP", 16, 2), 16)
    assert n_params(narrow) == 768
    linear = ModelSpec(3, 20, IdentitySpec(3), NetworkSpec("CutlassMLP", 128, 0), 16)
    assert linear.layer_shapes == ((32, 16),)


@pytest.mark.parametrize("name", names("enc_*") + names("nwie_*") + names("mlp_*"))
def test_golden_layouts(name: str) -> None:
    case = GoldenCase(name)
    spec = case.model_spec()
    assert n_params(spec) == case.meta["n_params"]
    if "layer_sizes" in case.meta:
        assert [list(shape) for shape in spec.layer_shapes] == case.meta["layer_sizes"]
    for level, expected in zip(
        grid_levels(spec.encoding) if isinstance(spec.encoding, GridSpec) else (),
        case.meta.get("grid_levels", ()),
        strict=True,
    ):
        assert level.offset == expected["offset_in_entries"]
        assert {key: getattr(level, key) for key in ("scale", "resolution", "n_entries")} == {
            key: expected[key] for key in ("scale", "resolution", "n_entries")
        }


def test_blocks_tile_the_vector() -> None:
    """Named blocks follow each other without gap or overlap, also in a composite."""
    grid = GridSpec(2, n_levels=3, base_resolution=5)
    children = (NestedEncoding(IdentitySpec(1), 0, 0, 2), NestedEncoding(grid, 1, 2, 6))
    spec = ModelSpec(3, 5, CompositeSpec(3, children), NetworkSpec("CutlassMLP", 20, 1), 16)
    blocks = parameter_blocks(spec)
    end = 0
    for block in blocks:
        assert block.offset == end
        end += block.size
    assert end == n_params(spec)
    assert [block.name for block in blocks] == [
        "layer0.weight",
        "layer1.weight",
        *(f"nested1.grid.level{i}" for i in range(3)),
    ]
    assert (blocks[0].shape, blocks[0].logical_shape) == ((32, 16), (20, 16))
    assert (blocks[1].shape, blocks[1].logical_shape) == ((16, 32), (5, 20))
