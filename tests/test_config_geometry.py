"""What follows from a config: widths, padding, input dims of a composite's children, counts of parameters."""

from pathlib import Path

import pytest

from numba_tcnn import specs
from numba_tcnn.config import config_parts, parse_encoding, parse_model
from numba_tcnn.layout import grid_levels, n_params

ROOT = Path(__file__).parent.parent


def test_sizes_that_tiny_cuda_nn_reports():
    """Counts from the original: they depend on every rounding in the level table."""
    dense = parse_model(2, None, {"otype": "DenseGrid", "n_levels": 8}, None)
    assert dense.encoding.per_level_scale == pytest.approx(1.4859943, abs=5e-8)  # the printed digits
    assert n_params(dense) == 240240
    assert n_params(parse_model(3, None, {"otype": "TiledGrid", "base_resolution": 5}, None)) == 4000
    assert n_params(parse_model(3, None, {"otype": "HashGrid"}, None)) == 14229504
    hashed = {"otype": "HashGrid", "n_levels": 20, "base_resolution": 32, "per_level_scale": 1.5}
    assert n_params(parse_model(3, None, {**hashed, "log2_hashmap_size": 16}, None)) == 2555904
    image = config_parts(ROOT / "examples/configs/image_hash.json")
    assert n_params(parse_model(2, 3, image.encoding, image.network)) == 715536


def test_network_pads_the_encoding_to_16():
    model = parse_model(3, 4, {"otype": "Frequency", "n_frequencies": 10}, {"n_neurons": 24, "n_hidden_layers": 1})
    assert (model.encoding.n_output_dims, model.encoding_width) == (60, 64)
    assert model.layer_shapes == ((32, 64), (16, 32))


@pytest.mark.parametrize(("alignment", "width"), [(0, 6), (1, 6), (4, 8), (8, 8), (16, 16)])
def test_encoding_alone_is_padded_to_its_alignment(alignment, width):
    model = parse_model(3, None, {"otype": "Frequency", "n_frequencies": 1}, None, alignment=alignment)
    assert (model.encoding_width, model.n_output_dims, model.network) == (width, width, None)


def columns(spec):
    return [
        (c.first_input_dim, c.encoding.n_input_dims, c.first_output_dim, c.n_padded_output_dims) for c in spec.nested
    ]


def test_concatenation_aligns_each_grid_and_pads_the_last_child():
    config = {
        "otype": "Composite",
        "nested": [
            {"otype": "Identity", "n_dims_to_encode": 3},
            {"otype": "HashGrid", "n_features_per_level": 4, "n_levels": 2},
        ],
    }
    assert columns(parse_encoding(config, 6)) == [(0, 3, 0, 4), (3, 3, 4, 8)]
    aligned = parse_encoding(config, 6, alignment=16)
    assert columns(aligned) == [(0, 3, 0, 4), (3, 3, 4, 12)]
    assert aligned.n_output_dims == 16


def test_padding_reaches_the_innermost_last_child():
    inner = {"otype": "Composite", "nested": [{"otype": "Identity"}]}
    outer = parse_encoding({"otype": "Composite", "nested": [inner]}, 3, alignment=16)
    assert columns(outer) == [(0, 3, 0, 16)]
    assert columns(outer.nested[0].encoding) == [(0, 3, 0, 16)]


@pytest.mark.parametrize("reduction", ["Sum", "product"])
def test_reductions_pad_every_child(reduction):
    children = [
        {"otype": "Identity", "n_dims_to_encode": 4},
        {"otype": "HashGrid", "n_levels": 2, "n_dims_to_encode": 2},
    ]
    spec = parse_encoding({"otype": "Composite", "reduction": reduction, "nested": children}, 6, alignment=16)
    assert spec.reduction == reduction.capitalize()
    assert columns(spec) == [(0, 4, 0, 16), (4, 2, 0, 16)]
    assert spec.n_output_dims == 16


def test_composite_deals_out_input_dims():
    def ranges(n_input_dims, *nested):
        spec = parse_encoding(
            {"otype": "Composite", "nested": [{"otype": "Identity", **keys} for keys in nested]}, n_input_dims
        )
        return [(c.first_input_dim, c.encoding.n_input_dims) for c in spec.nested]

    two = {"n_dims_to_encode": 2}
    assert ranges(7, two, {}, two) == [(0, 2), (2, 3), (5, 2)]
    assert ranges(4, two, {}, two) == [(0, 2), (2, 2)]  # nothing is left for the second: it is dropped
    assert ranges(7, two, two) == [(0, 2), (2, 2)]  # dims 4 to 6 are read by nobody
    overlapping = [{**two, "dims_to_encode_begin": 3}, two, {**two, "dims_to_encode_begin": 0}]
    assert ranges(7, *overlapping) == [(3, 2), (5, 2), (0, 2)]


@pytest.mark.parametrize("otype", ["NRC", "OneBlobFrequency"])
def test_radiance_caching_encoding(otype):
    spec = parse_encoding({"otype": otype}, 14)
    children = [child.encoding for child in spec.nested]
    assert children == [specs.TriangleWaveSpec(3, 12), specs.OneBlobSpec(5, 4), specs.IdentitySpec(6)]
    assert columns(spec) == [(0, 3, 0, 36), (3, 5, 36, 20), (8, 6, 56, 6)]
    assert len(parse_encoding({"otype": otype, "n_bins": 8}, 8).nested) == 2


def test_configs_may_repeat_the_dims_if_they_agree():
    encoding = {"otype": "Identity", "n_dims_to_encode": 3, "dims_to_encode_begin": 0}
    for n_input_dims in (3, 16):  # the model's, or the padded width that the network itself sees
        network = {"n_input_dims": n_input_dims, "n_output_dims": 2}
        assert parse_model(3, 2, encoding, network) == parse_model(3, 2, {"otype": "Identity"}, {})


def test_every_level_has_a_vertex_even_where_the_scale_shrinks():
    levels = grid_levels(parse_encoding({"otype": "Grid", "n_levels": 3, "per_level_scale": 0.25}, 2))
    assert [level.resolution for level in levels] == [16, 4, 1]
