"""Configs become specs with tiny-cuda-nn's names and defaults, and are read from dicts, text and files."""

import numpy as np
import pytest
from optimizer_formulas import ADAM_DEFAULTS, NOVOGRAD_DEFAULTS, SGD_DEFAULTS, SHAMPOO_DEFAULTS

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
        ({"otype": "SGD"}, {"otype": "SGD", **SGD_DEFAULTS}),
        ({"otype": "Novograd"}, {"otype": "Novograd", **NOVOGRAD_DEFAULTS}),
        ({"otype": "Shampoo"}, {"otype": "Shampoo", **SHAMPOO_DEFAULTS}),
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
                    {"otype": "SGD", **SGD_DEFAULTS, "n_params_to_optimize": 0},
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
