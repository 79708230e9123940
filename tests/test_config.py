"""Configs become specs with tiny-cuda-nn's names and defaults; whatever can't is a one-line `ConfigError`."""

from pathlib import Path

import numpy as np
import pytest

from numba_tcnn import specs
from numba_tcnn.config import (
    ConfigError,
    config_parts,
    load_config,
    parse_encoding,
    parse_loss,
    parse_model,
    parse_network,
    parse_optimizer,
    to_config,
)
from numba_tcnn.config_losses import check_loss
from numba_tcnn.layout import grid_levels, n_params

ROOT = Path(__file__).parent.parent

# ------------------------------------------------------------------------------------- names and defaults

GRID_DEFAULTS = {
    "type": "Hash",
    "n_levels": 16,
    "n_features_per_level": 2,
    "log2_hashmap_size": 19,
    "base_resolution": 16,
    "per_level_scale": 2.0,
    "interpolation": "Linear",
    "hash": "CoherentPrime",
    "stochastic_interpolation": False,
    "fixed_point_pos": False,
}
ADAM_DEFAULTS = {
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-8,
    "l2_reg": 1e-8,
    "non_matrix_l2_reg": 0.0,
    "non_matrix_learning_rate_factor": 1.0,
    "relative_decay": 0.0,
    "absolute_decay": 0.0,
    "clipping_magnitude": 0.0,
    "gradient_clipping_magnitude": 0.0,
    "adabound": False,
    "optimize_matrix_params": True,
    "optimize_non_matrix_params": True,
    "skip_zero_grad_non_matrix_params": True,
}
ADAM = {"otype": "Adam", **ADAM_DEFAULTS}
NO_LEVELS = {key: value for key, value in GRID_DEFAULTS.items() if key != "log2_hashmap_size"}


@pytest.mark.parametrize(
    ("otype", "n_input_dims", "expected"),
    [
        ("Grid", 3, {"otype": "Grid", **GRID_DEFAULTS}),
        ("HashGrid", 2, {"otype": "Grid", **GRID_DEFAULTS}),
        ("hashgrid", 4, {"otype": "Grid", **GRID_DEFAULTS}),
        ("TiledGrid", 3, {"otype": "Grid", **NO_LEVELS, "type": "Tiled"}),
        (
            "DenseGrid",
            2,
            {"otype": "Grid", **NO_LEVELS, "type": "Dense", "per_level_scale": float(np.float32(1.2030250))},
        ),
        ("Identity", 5, {"otype": "Identity", "scale": 1.0, "offset": 0.0}),
        ("Frequency", 3, {"otype": "Frequency", "n_frequencies": 12}),
        ("TRIANGLEWAVE", 3, {"otype": "TriangleWave", "n_frequencies": 12}),
        ("OneBlob", 3, {"otype": "OneBlob", "n_bins": 16}),
        ("SphericalHarmonics", 3, {"otype": "SphericalHarmonics", "degree": 4}),
        ("Empty", 3, {"otype": "Empty"}),
        (None, 3, {"otype": "OneBlob", "n_bins": 16}),
    ],
)
def test_encoding_defaults(otype, n_input_dims, expected):
    assert to_config(parse_encoding({"otype": otype} if otype else {}, n_input_dims)) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ADAM),
        ({"otype": "adam"}, ADAM),
        ({"otype": "SGD"}, {"otype": "SGD", "learning_rate": 1e-3, "l2_reg": 1e-8}),
        (
            {"otype": "Novograd"},
            {
                "otype": "Novograd",
                "learning_rate": 1e-3,
                "beta1": 0.9,
                "beta2": 0.999,
                "epsilon": 1e-8,
                "relative_decay": 0.0,
                "absolute_decay": 0.0,
            },
        ),
        (
            {"otype": "Shampoo"},
            {
                "otype": "Shampoo",
                "learning_rate": 1e-3,
                "beta1": 0.9,
                "beta2": 0.99,
                "beta3": 0.9,
                "beta_shampoo": 0.9,
                "epsilon": 1e-8,
                "identity": 0.01,
                "cg_on_momentum": True,
                "l2_reg": 1e-5,
                "relative_decay": 0.0,
                "absolute_decay": 0.0,
                "frobenius_normalization": True,
            },
        ),
        ({"otype": "Average"}, {"otype": "Average", "n_samples": 128, "nested": ADAM}),
        ({"otype": "Batched"}, {"otype": "Batched", "batch_size_multiplier": 16, "nested": ADAM}),
        ({"otype": "Ema"}, {"otype": "EMA", "decay": 0.99, "full_precision": False, "nested": ADAM}),
        ({"otype": "Lookahead", "nested": {}}, {"otype": "Lookahead", "alpha": 0.5, "n_steps": 16, "nested": ADAM}),
        (
            {"otype": "ExponentialDecay", "nested": {"otype": "SGD", "learning_rate": 1}},
            {
                "otype": "ExponentialDecay",
                "decay_base": 0.1,
                "decay_start": 10_000,
                "decay_end": 10_000_000,
                "decay_interval": 10_000,
                "nested": {"otype": "SGD", "learning_rate": 1.0, "l2_reg": 1e-8},
            },
        ),
        (
            {"otype": "Composite", "nested": [{"n_params_to_optimize": 7}, {"otype": "SGD"}]},
            {
                "otype": "Composite",
                "nested": [
                    {**ADAM, "n_params_to_optimize": 7},
                    {"otype": "SGD", "learning_rate": 1e-3, "l2_reg": 1e-8, "n_params_to_optimize": 0},
                ],
            },
        ),
    ],
)
def test_optimizer_defaults(config, expected):
    assert to_config(parse_optimizer(config)) == expected


@pytest.mark.parametrize(
    ("otype", "expected"),
    [
        (None, "CutlassMLP"),
        ("MLP", "CutlassMLP"),
        ("cutlassmlp", "CutlassMLP"),
        ("FullyFusedMLP", "FullyFusedMLP"),
        ("MegakernelMLP", "FullyFusedMLP"),
    ],
)
def test_network_defaults(otype, expected):
    assert to_config(parse_network({"otype": otype} if otype else {})) == {
        "otype": expected,
        "n_neurons": 128,
        "n_hidden_layers": 5,
        "activation": "ReLU",
        "output_activation": "None",
    }


def test_loss_names():
    assert parse_loss({}) == specs.LossSpec("RelativeL2")
    assert parse_loss("mape") == parse_loss({"otype": "MAPE"}) == specs.LossSpec("Mape")
    for name in specs.LOSSES:
        assert to_config(parse_loss({"otype": name.upper()})) == {"otype": name}


def test_a_constant_gradient_is_a_loss():
    spec = parse_loss({"otype": "constantgradient", "gradient": [1, -0.5]})
    assert spec == specs.LossSpec("ConstantGradient", (1.0, -0.5))
    assert to_config(spec) == {"otype": "ConstantGradient", "gradient": [1.0, -0.5]}
    with pytest.raises(ConfigError, match=r"^loss\.gradient: missing, ConstantGradient needs it$"):
        parse_loss("ConstantGradient")
    with pytest.raises(ConfigError, match=r"^loss\.gradient: \[\] is not an array of 1 to 65536 items"):
        parse_loss({"otype": "ConstantGradient", "gradient": []})
    with pytest.raises(ConfigError, match=r"^loss\.gradient: unknown key"):
        parse_loss({"otype": "L2", "gradient": [1]})


def test_losses_fit_the_outputs():
    check_loss(parse_loss("RelativeL2Luminance"), 3)
    check_loss(parse_loss("L2"), 1)
    with pytest.raises(ConfigError, match="^loss: RelativeL2Luminance needs at least 3 outputs .*, not 2$"):
        check_loss(parse_loss("RelativeL2Luminance"), 2)
    constant = parse_loss({"otype": "ConstantGradient", "gradient": [1, 2]})
    check_loss(constant, 2)
    with pytest.raises(ConfigError, match=r"^loss\.gradient: 2 numbers for 3 outputs"):
        check_loss(constant, 3)


def test_per_layer_widths_and_biases_are_options_of_ours():
    """Off they leave no trace in a config, so that what we write is tiny-cuda-nn's own."""
    network = parse_network({"otype": "MLP", "hidden": [64, 32, 16], "bias": True})
    assert network == specs.NetworkSpec("CutlassMLP", hidden=(64, 32, 16), bias=True)
    assert network.hidden_widths == (64, 32, 16)
    assert to_config(network) == {
        "otype": "CutlassMLP",
        "activation": "ReLU",
        "output_activation": "None",
        "hidden": [64, 32, 16],
        "bias": True,
    }
    model = parse_model(3, 4, {}, {"hidden": [64, 32, 16]})
    assert model.layer_shapes == ((64, 48), (32, 64), (16, 32), (16, 16))
    assert parse_model(3, 4, {}, {"hidden": []}).layer_shapes == ((16, 48),)


def test_activation_names_in_any_case():
    for name in specs.ACTIVATIONS:
        network = parse_network({"activation": name.lower(), "output_activation": name.upper()})
        assert (network.activation, network.output_activation) == (name, name)


def test_grid_type_overrides_otype():
    grid = parse_encoding({"otype": "DenseGrid", "type": "tile", "interpolation": "SMOOTHSTEP"}, 3)
    assert (grid.type, grid.per_level_scale, grid.interpolation) == ("Tiled", 2.0, "Smoothstep")


@pytest.mark.parametrize("name", ["n_features", "n_grid_features"])
def test_grid_total_features(name):
    assert parse_encoding({"otype": "Grid", name: 24, "n_features_per_level": 4}, 2).n_levels == 6


@pytest.mark.parametrize(("value", "expected"), [(7, 7), (7.0, 7), (np.int64(7), 7), (np.float32(7), 7)])
def test_integers_may_be_integral_floats(value, expected):
    n_levels = parse_encoding({"otype": "Grid", "n_levels": value}, 2).n_levels
    assert n_levels == expected
    assert type(n_levels) is int


def test_keys_with_underscore_are_comments():
    config = {"otype": "Identity", "_why": {"anything": [1, None]}, "_scale": "x"}
    assert parse_encoding(config, 2) == specs.IdentitySpec(2)
    assert config_parts({"_": 1}) == ({}, {}, {}, {})


# ------------------------------------------------------------------------------------- geometry and padding


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


# --------------------------------------------------------------------------------------------------- errors


def encoding_error(config, n_input_dims=3):
    with pytest.raises(ConfigError) as caught:
        parse_encoding(config, n_input_dims)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"otype": "HashGrid", "n_levls": 4}, "encoding.n_levls: unknown key, did you mean n_levels?"),
        ({"otype": "HashGrid", "N_LEVELS": 4}, "encoding.N_LEVELS: unknown key, did you mean n_levels?"),
        (
            {"otype": "Identity", "qqq": 4},
            "encoding.qqq: unknown key; known are otype, scale, offset, n_dims_to_encode, dims_to_encode_begin",
        ),
        ({"otype": "Identity", "a\nb": 4, "scale": 1}, 'encoding."a\\nb": unknown key; known are '),
        ({"otype": "HashGird"}, 'encoding.otype: "HashGird" is not an encoding, did you mean HashGrid?'),
        ({"otype": "xyz"}, 'encoding.otype: "xyz" is not an encoding; there are Grid, HashGrid, DenseGrid, '),
        ({"otype": 3}, "encoding.otype: 3 is not an encoding"),
        ({"otype": "Grid", "n_levels": True}, "encoding.n_levels: true is not an integer from 1 to 128"),
        ({"otype": "Grid", "n_levels": 2.5}, "encoding.n_levels: 2.5 is not an integer from 1 to 128"),
        ({"otype": "Grid", "n_levels": "8"}, 'encoding.n_levels: "8" is not an integer from 1 to 128'),
        ({"otype": "Grid", "n_levels": 10**5000}, "encoding.n_levels: an integer of 16610 bits is not an integer from"),
        ({"otype": "Grid", "n_levels": None}, "encoding.n_levels: null is not an integer from 1 to 128"),
        ({"otype": "Grid", "per_level_scale": float("nan")}, "encoding.per_level_scale: NaN is not a number from "),
        ({"otype": "Grid", "per_level_scale": float("inf")}, "encoding.per_level_scale: Infinity is not a number"),
        ({"otype": "Grid", "per_level_scale": 10**400}, "encoding.per_level_scale: 1000"),
        ({"otype": "Grid", "fixed_point_pos": 1}, "encoding.fixed_point_pos: 1 is not true or false"),
        (
            {"otype": "Grid", "n_features_per_level": 3},
            "encoding.n_features_per_level: 3 is not one of 1, 2, 4, 8",
        ),
        (
            {"otype": "Grid", "interpolation": "Linaer"},
            'encoding.interpolation: "Linaer" is not one of Nearest, Linear, Smoothstep, did you mean Linear?',
        ),
        (
            {"otype": "Grid", "hash": "BaseConvort"},
            'encoding.hash: "BaseConvort" is not one of Prime, CoherentPrime, ReversedPrime, Rng, BaseConvert, did you',
        ),
        (
            {"otype": "Grid", "n_levels": 4, "n_features": 8},
            "encoding.n_features: stands beside n_levels, only one of them may be given",
        ),
        (
            {"otype": "Grid", "n_grid_features": 9},
            "encoding.n_grid_features: 9 is not a multiple of n_features_per_level, 2",
        ),
        (
            {"otype": "Grid", "n_grid_features": 8, "n_features": 16},
            "encoding.n_grid_features: 8 disagrees with n_features, its other name",
        ),
        (
            {"otype": "Grid", "n_features": 512},
            "encoding.n_features / n_features_per_level: 256 is not an integer from ",
        ),
        (
            {"otype": "DenseGrid", "per_level_scale": 2},
            "encoding: 41,108,971,520 parameters, more than 2^31 = 2,147,483,648",
        ),
        (
            {"otype": "Grid", "per_level_scale": 10},
            "encoding.per_level_scale: 10 over 16 levels from base_resolution 16 makes 2^53.8 vertices an axis, not "
            "fewer than 2^31",
        ),
        (
            {"otype": "Grid", "per_level_scale": 0.001},
            "encoding.per_level_scale: 0.001 over 16 levels leaves the last no vertex",
        ),
        ({"otype": "OneBlob", "n_bins": 12}, "encoding.n_bins: 12 is not one of 1, 2, 4, 8, 16, "),
        ({"otype": "OneBlob", "n_bins": 0}, "encoding.n_bins: 0 is not one of 1, 2, 4, 8, 16, "),
        ({"otype": "SphericalHarmonics", "degree": 9}, "encoding.degree: 9 is not an integer from 1 to 8"),
        ({"otype": "NRC"}, "encoding: OneBlobFrequency has at least 8 input dims, not 3"),
        ({"otype": "Identity", "n_dims_to_encode": 2}, "encoding.n_dims_to_encode: 2 disagrees with the 3 input dims"),
        ({"otype": "Identity", "dims_to_encode_begin": 1}, "encoding.dims_to_encode_begin: 1 is not 0"),
        ({"otype": "Composite"}, "encoding.nested: missing, Composite needs it"),
        ({"otype": "Composite", "nested": []}, "encoding.nested: [] is not a non-empty array of objects"),
        ({"otype": "Composite", "nested": {}}, "encoding.nested: {} is not a non-empty array of objects"),
        ({"otype": "Composite", "nested": [3]}, "encoding.nested: [3] is not a non-empty array of objects"),
        (
            {"otype": "Composite", "nested": [{}, {}]},
            "encoding.nested[1]: n_dims_to_encode is missing, which only one child may leave out",
        ),
        (
            {"otype": "Composite", "nested": [{"n_dims_to_encode": 2, "dims_to_encode_begin": 0}, {}]},
            "encoding.nested[1]: n_dims_to_encode is missing, needed by all if one has dims_to_encode_begin",
        ),
        (
            {"otype": "Composite", "nested": [{"n_dims_to_encode": 2}, {"n_dims_to_encode": 2}]},
            "encoding.nested[1]: reads input dims 2 to 3 of 3",
        ),
        ({"otype": "Composite", "nested": [{"n_dims_to_encode": 0}]}, "encoding.nested: no child has an input dim"),
        (
            {"otype": "Composite", "nested": [{"otype": "Composite", "nested": [{"n_bin": 4}]}]},
            "encoding.nested[0].nested[0].n_bin: unknown key, did you mean n_bins?",
        ),
        (
            {"otype": "Composite", "nested": [{"n_dims_to_encode": 0, "n_bin": 4}, {}]},
            "encoding.nested[0].n_bin: unknown key, did you mean n_bins?",  # dropped, yet not unread
        ),
        (
            {
                "otype": "Composite",
                "reduction": "Sum",
                "nested": [{"otype": "Identity", "n_dims_to_encode": 1}, {"otype": "Identity"}],
            },
            "encoding.nested: Sum needs children of one width, not 1, 2",
        ),
    ],
)
def test_encoding_errors(config, message):
    error = encoding_error(config)
    assert error.startswith(message)
    assert "\n" not in error


@pytest.mark.parametrize(
    ("otype", "n_input_dims", "message"),
    [
        ("HashGrid", 8, "encoding: a grid has 1 to 7 input dims, not 8"),
        ("SphericalHarmonics", 2, "encoding: SphericalHarmonics has 3 input dims, not 2"),
        ("Identity", 0, "n_input_dims: 0 is not an integer from 1 to 65536"),
        ("Identity", True, "n_input_dims: true is not an integer from 1 to 65536"),
        ("Identity", 2**40, "n_input_dims: 1099511627776 is not an integer from 1 to 65536"),
        ("OneBlob", 65536, "encoding: 1,048,576 output columns, more than 65,536"),
    ],
)
def test_input_dim_errors(otype, n_input_dims, message):
    assert encoding_error({"otype": otype}, n_input_dims) == message


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (
            {"otype": "FullyFusedMLP", "n_neurons": 80},
            "network.n_neurons: 80 is not one of 16, 32, 64, 128, the widths of FullyFusedMLP; "
            "otype CutlassMLP takes any",
        ),
        (
            {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 0},
            "network.n_hidden_layers: 0 is not at least 1, which FullyFusedMLP needs; otype CutlassMLP takes 0",
        ),
        ({"n_hidden_layers": -1}, "network.n_hidden_layers: -1 is not an integer from 0 to 1024"),
        ({"activation": "Relu6"}, 'network.activation: "Relu6" is not one of None, ReLU, LeakyReLU, '),
        ({"activation": None}, "network.activation: null is not one of None, ReLU, LeakyReLU, "),
        ({"n_neurons": 65536}, "network: 17,184,063,488 parameters, more than 2^31 = 2,147,483,648"),
        ({"n_output_dims": 3}, "network.n_output_dims: 3 disagrees with the model's 4"),
        ({"n_input_dims": 5}, "network.n_input_dims: 5 disagrees with the model's 3 and the encoding's 48"),
        ([], "network: [] is not an object"),
        ({"hidden": [64], "n_neurons": 64}, "network.hidden: gives the width of every hidden layer; leave n_neurons"),
        ({"n_hidden_layers": 1, "hidden": [64]}, "network.hidden: gives the width of every hidden layer; leave n_hid"),
        ({"hidden": [64, 0]}, "network.hidden: [64, 0] is not an array of 0 to 1024 items, each an integer from 1 to "),
        ({"hidden": 64}, "network.hidden: 64 is not an array of 0 to 1024 items"),
        ({"otype": "FullyFusedMLP", "hidden": [64, 48]}, "network.hidden: 48 is not one of 16, 32, 64, 128"),
        ({"otype": "FullyFusedMLP", "hidden": []}, "network.hidden: [] does not name at least 1, which FullyFused"),
        ({"bias": 1}, "network.bias: 1 is not true or false"),
    ],
)
def test_network_errors(network, message):
    with pytest.raises(ConfigError) as caught:
        parse_model(3, 4, {}, network)
    assert str(caught.value).startswith(message)


def test_encoding_alone_errors():
    with pytest.raises(ConfigError, match="^n_output_dims: 5 is not 6, the width of the encoding$"):
        parse_model(3, 5, {"otype": "Frequency", "n_frequencies": 1}, None)
    with pytest.raises(ConfigError, match="^encoding: has no output columns$"):
        parse_model(3, None, {"otype": "Empty"}, None)
    with pytest.raises(ConfigError, match="^alignment: -1 is not an integer from 0 to 1024$"):
        parse_model(3, None, {}, None, alignment=-1)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"otype": "Adan"}, 'optimizer.otype: "Adan" is not an optimizer, did you mean Adam?'),
        ({"learning_rte": 1}, "optimizer.learning_rte: unknown key, did you mean learning_rate?"),
        ({"beta2": 1}, "optimizer.beta2: 1 is not a number from 0 to 0.99999994"),
        ({"epsilon": 0}, "optimizer.epsilon: 0 is not a number from 1.1754944e-38 to 1"),
        ({"learning_rate": -1e-3}, "optimizer.learning_rate: -0.001 is not a number from 0 to 1000000"),
        ({"n_params_to_optimize": 3}, "optimizer.n_params_to_optimize: unknown key"),
        ({"otype": "Ema", "nested": []}, "optimizer.nested: [] is not an object"),
        (
            {"otype": "Ema", "nested": {"otype": "Lookahead", "nested": {"beta_2": 1}}},
            "optimizer.nested.nested.beta_2: unknown key, did you mean beta2?",
        ),
        (
            {"otype": "ExponentialDecay", "decay_interval": 0},
            "optimizer.decay_interval: 0 is not an integer from 1 to ",
        ),
        ({"otype": "Composite"}, "optimizer.nested: missing, Composite needs it"),
        ({"otype": "Average", "n_samples": 64}, "optimizer.n_samples: 64 copies of 100,000,000 parameters are "),
        (
            {"otype": "Ema", "nested": {"otype": "Composite", "nested": [{"n_params_to_optimize": 3}]}},
            "optimizer.nested.nested: n_params_to_optimize sum to 3, not to all 100,000,000",
        ),
    ],
)
def test_optimizer_errors(optimizer, message):
    with pytest.raises(ConfigError) as caught:
        parse_optimizer(optimizer, n_params=100_000_000)
    assert str(caught.value).startswith(message)


def test_loss_errors():
    with pytest.raises(ConfigError, match='^loss.otype: "MSE" is not a loss; there are L1, L2, RelativeL1, '):
        parse_loss("MSE")
    with pytest.raises(ConfigError, match='^loss.otype: "SMAPPE" is not a loss, did you mean Smape[?]$'):
        parse_loss("SMAPPE")
    with pytest.raises(ConfigError, match="^loss.scale: unknown key; known are otype$"):
        parse_loss({"otype": "L2", "scale": 1})


@pytest.mark.parametrize("parse", [lambda c: parse_encoding(c, 3), parse_optimizer])
def test_configs_nested_without_end(parse):
    endless = {"otype": "Composite"}
    endless["nested"] = [endless]
    with pytest.raises(ConfigError, match="nested more than 16 deep$"):
        parse(endless)


def test_a_full_config_has_four_parts():
    with pytest.raises(ConfigError, match="^optimiser: unknown key, did you mean optimizer\\?$"):
        config_parts({"optimiser": {}})


# ------------------------------------------------------------------------------------------------ reading


def test_load_config_takes_dicts_text_and_paths(tmp_path):
    text = """// A comment "with a quote
    {   /* one over
           two lines */
        "loss": {"otype": "L2"}, // and "another"
        "_about": "no // comment, /* nor this */, \\" nor this //"
    }"""
    expected = {"loss": {"otype": "L2"}, "_about": 'no // comment, /* nor this */, " nor this //'}
    path = tmp_path / "config.json"
    path.write_text("\ufeff" + text, encoding="utf-8")  # as some editors begin a file
    for source in (expected, text, path, str(path)):
        assert load_config(source) == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{", "config: not valid JSON, "),
        ('{"a": 1,}', "config: not valid JSON, "),
        ('{\n"a": 1 /* open', "config: not valid JSON, Expecting ',' delimiter: line 2 column 8"),
        ('{/* two\nlines */\n"a": x}', "config: not valid JSON, Expecting value: line 3 column 6"),
        ('{"a": %s}' % ("9" * 5000), "config: not valid JSON, Exceeds the limit"),
        ('{"a":' * 100_000, "config: nested too deeply"),
        ('{"loss": {"otype": 1, "otype": 2}}', 'config: key "otype" stands twice in one object'),
        ("no_such_file.json", 'config "no_such_file.json": can\'t be read: No such file or directory'),
        ("", 'config "": can\'t be read: '),
        ("a\0b", 'config "a\\u0000b": can\'t be read: '),
        (7, "config: 7 is not a dict, a JSON text or a path"),
        (None, "config: null is not a dict, a JSON text or a path"),
    ],
)
def test_load_config_errors(source, message):
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert str(caught.value).startswith(message)


def test_load_config_names_the_bad_file(tmp_path):
    path = tmp_path / "config.json"
    for content, message in (
        (b"[1]", "[1] is not an object"),
        (b"\xff", "can't be read: 'utf-8' codec"),
        (b"", "not valid"),
    ):
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        assert str(caught.value).startswith(f'config "{path}": {message}')
