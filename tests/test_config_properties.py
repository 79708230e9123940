"""What holds for every config: a spec survives the way to JSON and back, and nonsense never raises anything but a
one-line `ConfigError`. Also: every key's range is really enforced, and the ready configs parse."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

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
from numba_tcnn.config_encodings import ENCODINGS
from numba_tcnn.config_keys import Array, Choice, Flag, Integer, IntegerOf, Number
from numba_tcnn.config_losses import LOSS_FAMILY
from numba_tcnn.config_networks import NETWORKS
from numba_tcnn.config_optimizers import OPTIMIZERS
from numba_tcnn.layout import n_params

ROOT = Path(__file__).parent.parent

# ---------------------------------------------------------------------------------------- valid configs


def values(key, high=None):
    """Values that a key allows, small enough for the model to stay within the limits on sizes."""
    match key:
        case Integer():
            return st.integers(key.low, min(key.high, high or key.high))
        case IntegerOf():
            return st.sampled_from(key.values)
        case Number():
            return st.floats(key.low, key.high)
        case Choice():
            return st.sampled_from([*key.choices, *key.aliases]).map(str.swapcase)
        case Flag():
            return st.booleans()
        case Array():
            return st.lists(values(key.item, high), min_size=key.shortest, max_size=4)


def component(family, name):
    return next(c for c in family.components if c.name == name)


def configs(family, name, **given_values):
    """Configs of one component: any subset of its keys, but what `given_values` names stands there (None: never)."""
    keys = {key.name: values(key) for key in component(family, name).keys if key.name not in given_values}
    required = {key: value for key, value in given_values.items() if value is not None}
    return st.fixed_dictionaries({"otype": st.just(name), **required}, optional=keys)


GRID_SIZES = {
    "n_levels": st.integers(1, 16),
    "n_features": None,
    "n_grid_features": None,
    "log2_hashmap_size": st.integers(0, 19),
    "base_resolution": st.integers(1, 32),
    "per_level_scale": st.floats(0.8, 1.2),  # finest level below 32 * 1.2^15 = 493: a dense 3-D one stays below 2^27
}
LEAVES = st.one_of(
    *(configs(ENCODINGS, name, **GRID_SIZES) for name in ("Grid", "HashGrid", "DenseGrid", "TiledGrid")),
    *(configs(ENCODINGS, name) for name in ("Identity", "Frequency", "TriangleWave", "OneBlob", "SphericalHarmonics")),
    configs(ENCODINGS, "Empty"),
)


def composite(children, **keys):
    """(config, input dims) of a composite from those of its children."""
    nested = [{**config, "n_dims_to_encode": n_dims} for config, n_dims in children]
    return {"otype": "Composite", "nested": nested, **keys}, sum(n_dims for _, n_dims in children)


def composites(inner):
    repeated = st.tuples(inner, st.integers(1, 3), st.sampled_from(["Sum", "Product"]))  # one width, as these need
    return st.lists(inner, min_size=1, max_size=3).map(composite) | repeated.map(
        lambda drawn: composite([drawn[0]] * drawn[1], reduction=drawn[2])
    )


ENCODINGS_AND_DIMS = st.recursive(LEAVES.map(lambda config: (config, 3)), composites, max_leaves=4)

OPTIMIZER_CONFIGS = st.recursive(
    st.one_of(*(configs(OPTIMIZERS, name) for name in ("Adam", "SGD", "Novograd", "Shampoo"))),
    lambda inner: st.one_of(
        *(configs(OPTIMIZERS, name, nested=inner) for name in ("Average", "Batched", "EMA", "Lookahead")),
        configs(OPTIMIZERS, "ExponentialDecay", nested=inner),
        st.lists(inner.map(lambda config: {**config, "n_params_to_optimize": 5}), min_size=1, max_size=3).map(
            lambda nested: {"otype": "Composite", "nested": nested}
        ),
    ),
    max_leaves=4,
)
FUSED_WIDTHS = st.sampled_from([16, 32, 64, 128])
NETWORK_CONFIGS = st.one_of(
    configs(NETWORKS, "CutlassMLP", n_neurons=st.integers(1, 300), n_hidden_layers=st.integers(0, 8), hidden=None),
    configs(NETWORKS, "FullyFusedMLP", n_neurons=FUSED_WIDTHS, n_hidden_layers=st.integers(1, 8), hidden=None),
    configs(
        NETWORKS,
        "CutlassMLP",
        n_neurons=None,
        n_hidden_layers=None,
        hidden=st.lists(st.integers(1, 300), max_size=8),
    ),
    configs(
        NETWORKS,
        "FullyFusedMLP",
        n_neurons=None,
        n_hidden_layers=None,
        hidden=st.lists(FUSED_WIDTHS, min_size=1, max_size=8),
    ),
)


def through_json(spec):
    return load_config(json.dumps(to_config(spec)))


@given(ENCODINGS_AND_DIMS, NETWORK_CONFIGS, st.integers(1, 300))
def test_models_survive_the_round_trip(encoding_and_dims, network_config, n_output_dims):
    encoding_config, n_input_dims = encoding_and_dims
    assume(parse_encoding(encoding_config, n_input_dims).n_output_dims > 0)
    model = parse_model(n_input_dims, n_output_dims, encoding_config, network_config)
    assert hash(model) is not None
    again = through_json(model)
    assert parse_model(n_input_dims, n_output_dims, again["encoding"], again["network"]) == model


@given(ENCODINGS_AND_DIMS, st.sampled_from([0, 1, 4, 8, 16]))
def test_encodings_survive_the_round_trip(encoding_and_dims, alignment):
    encoding_config, n_input_dims = encoding_and_dims
    spec = parse_encoding(encoding_config, n_input_dims, alignment=alignment)
    assert parse_encoding(through_json(spec), n_input_dims, alignment=alignment) == spec
    if alignment and isinstance(spec, specs.CompositeSpec):
        assert spec.n_output_dims % alignment == 0


@given(ENCODINGS_AND_DIMS, st.sampled_from([0, 16]))
def test_children_of_a_composite_tile_its_columns(encoding_and_dims, alignment):
    spec = parse_encoding(*encoding_and_dims, alignment=alignment)
    assume(isinstance(spec, specs.CompositeSpec))
    column = 0
    for child in spec.nested:
        assert child.first_output_dim == column
        assert child.n_padded_output_dims >= child.encoding.n_output_dims
        if isinstance(child.encoding, specs.CompositeSpec):
            assert child.n_padded_output_dims == child.encoding.n_output_dims
        if isinstance(child.encoding, specs.GridSpec):
            assert column % child.encoding.n_features_per_level == 0
        column += child.n_padded_output_dims if spec.reduction == "Concatenation" else 0


@given(OPTIMIZER_CONFIGS)
def test_optimizers_survive_the_round_trip(config):
    spec = parse_optimizer(config)
    assert parse_optimizer(through_json(spec)) == spec


def test_losses_and_networks_survive_the_round_trip():
    for name in specs.LOSSES:
        assert parse_loss(through_json(parse_loss(name))) == specs.LossSpec(name)
    assert parse_network(through_json(specs.NetworkSpec())) == specs.NetworkSpec()
    constant = specs.LossSpec("ConstantGradient", (0.5, -2.0))
    assert parse_loss(through_json(constant)) == constant


# --------------------------------------------------------------------------------------------- nonsense

FAMILIES = (ENCODINGS, NETWORKS, OPTIMIZERS, LOSS_FAMILY)
OTYPES = sorted({c.name for family in FAMILIES for c in family.components})
KEYS = sorted({key.name for f in FAMILIES for c in f.components for key in (*c.keys, *f.common)})
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.integers(0, 40) | st.floats() | st.text() | st.sampled_from(OTYPES)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), inner, max_size=4)
        | st.fixed_dictionaries({"otype": st.sampled_from(OTYPES), "nested": st.lists(inner, max_size=3) | inner})
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    "parse",
    [
        lambda config: parse_encoding(config, 3),
        lambda config: parse_model(8, 3, config, config),
        lambda config: parse_optimizer(config, n_params=1000),
        lambda config: parse_loss(config),
        lambda config: config_parts(config),
    ],
    ids=["encoding", "model", "optimizer", "loss", "parts"],
)
@given(data=st.data())
def test_nonsense_is_a_config_error(parse, data):
    config = data.draw(TREES | st.dictionaries(st.sampled_from([*KEYS, "otype"]), TREES, max_size=5))
    try:
        parse(config)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000


@given(st.text(alphabet='{}[]",:/*\\ \n0truefalsn"', max_size=60))
def test_any_text_is_json_or_a_config_error(text):
    try:
        assert isinstance(load_config("{" + text), dict)
    except ConfigError as error:
        assert "\n" not in str(error)


# ----------------------------------------------------------------------------------------------- ranges

ALL_KEYS = [
    pytest.param(key, id=f"{c.name}.{key.name}")
    for family in FAMILIES
    for c in family.components
    for key in (*c.keys, *family.common)
    if isinstance(key, Integer | IntegerOf | Number | Flag | Choice | Array)
]


@pytest.mark.parametrize("key", ALL_KEYS)
def test_a_key_takes_its_range_and_nothing_else(key):
    match key:
        case Integer():
            good = [key.low, key.high, float(key.low)]
            bad = [key.low - 1, key.high + 1, key.low + 0.5, True, "1", None, [], float("nan"), float("inf")]
        case IntegerOf():
            good, bad = list(key.values), [min(key.values) - 1, max(key.values) + 1, True, "1", None, 1.5]
        case Number():
            good = [key.low, key.high, (key.low + key.high) / 2]
            bad = [key.low - abs(key.low) - 1, key.high * 2, -1e39, 1e39, 10**400, True, "1", None, {}]
            bad += [float("nan"), float("inf"), -float("inf")]
        case Flag():
            good, bad = [True, False], [0, 1, "true", None]
        case Array():
            low, high = key.item.low, key.item.high
            good = [[low] * max(key.shortest, 1), (low, high), [high] * key.longest]
            bad = [[low] * (key.longest + 1), [low, high * 2], [low, None], "1", 1, None, {}]
            bad += [[]] if key.shortest > 0 else []
        case Choice():
            good, bad = [*key.choices, *map(str.upper, key.choices), *key.aliases], ["", "no", 0, None, True, []]
    for value in good:
        key.read(value, "path")
    for value in bad:
        with pytest.raises(ConfigError, match="^path: .* is not .*$"):
            key.read(value, "path")


# ---------------------------------------------------------------------------------------- ready configs

READY = {  # file: input and output dims, parameters
    "image_hash.json": (2, 3, 715536),
    "image_oneblob.json": (2, 3, 83968),
    "nerf_density.json": (3, 16, 13030064),
    "nerf_rgb.json": (19, 3, 7168),
    "sdf.json": (3, 1, 12203408),
    "radiance_caching.json": (14, 3, 17408),
    "mlp.json": (64, 16, 9216),
}


def test_every_ready_config_is_listed():
    assert {path.name for path in (ROOT / "examples/configs").iterdir()} == set(READY)


@pytest.mark.parametrize("name", READY)
def test_ready_configs_parse(name):
    n_input_dims, n_output_dims, expected = READY[name]
    parts = config_parts(ROOT / "examples/configs" / name)
    model = parse_model(n_input_dims, n_output_dims, parts.encoding, parts.network)
    assert n_params(model) == expected
    parse_loss(parts.loss)
    parse_optimizer(parts.optimizer, n_params=expected)


def test_the_packaged_default_is_the_example():
    packaged = ROOT / "numba_tcnn/configs/image_hash.json"
    assert packaged.read_bytes() == (ROOT / "examples/configs/image_hash.json").read_bytes()
