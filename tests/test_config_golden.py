"""Our reading of a config is tiny-cuda-nn's: sizes, level tables and the hyperparameters it reports of itself."""

import numpy as np
import pytest
from golden_case import GoldenCase, names

from numba_tcnn.config import parse_network, to_config
from numba_tcnn.layout import grid_levels, n_encoding_params, n_params

MODELS = [*names("enc_*"), *names("nwie_*"), *names("train_*")]


def in_float32(config):
    """`config` with every float as the nearest float32, which is what tiny-cuda-nn keeps and reports."""
    if isinstance(config, dict):
        return {key: in_float32(value) for key, value in config.items()}
    if isinstance(config, list):
        return [in_float32(value) for value in config]
    return float(np.float32(config)) if isinstance(config, float) else config


def assert_reported(ours, theirs):
    """Everything that `theirs` reports stands in `ours`, which says more where tiny-cuda-nn keeps silent."""
    if isinstance(theirs, dict):
        assert set(theirs) <= set(ours)
        for key, value in theirs.items():
            assert_reported(ours[key], value)
    elif isinstance(theirs, list):
        for our_item, their_item in zip(ours, theirs, strict=True):
            assert_reported(our_item, their_item)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", MODELS)
def test_sizes(name):
    case = GoldenCase(name)
    spec, meta = case.model_spec(), case.meta
    assert n_params(spec) == meta["n_params"]
    assert spec.encoding_width == meta.get("encoded_width_padded", meta.get("padded_out"))
    if "network" in meta["config"]:
        assert n_encoding_params(spec.encoding) == meta["n_encoding_params"]
        assert [list(shape) for shape in spec.layer_shapes] == meta["layer_sizes"]


@pytest.mark.parametrize("name", [name for name in MODELS if "grid_levels" in GoldenCase(name).meta])
def test_level_tables(name):
    """Bit for bit: a scale that is off in its last digit may move a level to another resolution."""
    case = GoldenCase(name)
    ours = [
        (level.scale, level.resolution, level.n_entries, level.offset)
        for level in grid_levels(case.model_spec().encoding)
    ]
    keys = ("scale", "resolution", "n_entries", "offset_in_entries")
    assert ours == [tuple(level[key] for key in keys) for level in case.meta["grid_levels"]]


@pytest.mark.parametrize("name", [*names("enc_*"), *names("nwie_*")])
def test_hyperparams_of_encodings(name):
    case = GoldenCase(name)
    theirs = case.meta["hyperparams"]
    ours = to_config(case.model_spec())
    if "network" in ours:
        assert_reported(in_float32(ours), {part: theirs[part] for part in ("encoding", "network")})
    else:
        assert_reported(in_float32(ours["encoding"]), theirs)


@pytest.mark.parametrize("name", names("mlp_*"))
def test_hyperparams_of_networks(name):
    case = GoldenCase(name)
    assert_reported(to_config(parse_network(case.meta["config"])), case.meta["hyperparams"])


@pytest.mark.parametrize("name", names("opt_*"))
def test_hyperparams_of_optimizers(name):
    case = GoldenCase(name)
    assert_reported(in_float32(to_config(case.optimizer_spec())), case.meta["hyperparams"])
