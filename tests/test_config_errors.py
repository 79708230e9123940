"""Whatever can't become a spec is a one-line `ConfigError` that names the key."""

import pytest

from numba_tcnn.config import ConfigError, config_parts, parse_encoding, parse_loss, parse_model, parse_optimizer


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
