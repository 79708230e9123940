"""Snapshots: training goes on bit for bit, and whatever is wrong with a file is one SnapshotError.

Comparisons are exact: nothing that is saved is rounded.
"""

from __future__ import annotations

import json
import os
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeFusedEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_draws import draws
from optimizer_draws import LEAF, NESTED
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import numba_tcnn as tcnn
import numba_tcnn.fused
from numba_tcnn import snapshot_files, snapshots
from numba_tcnn.config import parse_model
from numba_tcnn.layout import n_encoding_params, n_network_params

CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
    "encoding": {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 6, "base_resolution": 4},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
}
SPEC = parse_model(2, 3, CONFIG["encoding"], CONFIG["network"])

ADAM = {"otype": "Adam", "learning_rate": 1e-2}
EMA = {"otype": "EMA", "decay": 0.9, "nested": ADAM}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {**ADAM, "l2_reg": 1e-4, "relative_decay": 0.01},
    "AdaBound": {**ADAM, "adabound": True},
    "SGD": {"otype": "SGD", "learning_rate": 0.1, "l2_reg": 1e-3},
    "Novograd": {"otype": "Novograd", "learning_rate": 1e-2},
    "Shampoo": {"otype": "Shampoo", "learning_rate": 1e-2},
    "Average": {"otype": "Average", "n_samples": 4, "nested": ADAM},
    "Batched": {"otype": "Batched", "batch_size_multiplier": 3, "nested": ADAM},
    "EMA": EMA,
    "ExponentialDecay": {"otype": "ExponentialDecay", "decay_start": 2, "decay_interval": 3, "nested": ADAM},
    "Lookahead": {"otype": "Lookahead", "n_steps": 5, "nested": ADAM},
    "EMA of ExponentialDecay": {
        **EMA,
        "nested": {"otype": "ExponentialDecay", "decay_start": 3, "decay_interval": 2, "nested": ADAM},
    },
    "Composite": {
        "otype": "Composite",
        "nested": [
            {**EMA, "n_params_to_optimize": n_network_params(SPEC)},
            {"otype": "SGD", "learning_rate": 0.5, "n_params_to_optimize": n_encoding_params(SPEC.encoding)},
        ],
    },
}


def make(config: dict[str, Any] = CONFIG, *, engine: str = "reference", **options: Any) -> tcnn.Model:
    return tcnn.create_from_config(2, 3, config, engine=engine, **options)


def with_optimizer(name: str) -> dict[str, Any]:
    return {**CONFIG, "optimizer": OPTIMIZERS[name]}


def train(model: tcnn.Model, steps: range) -> list[float]:
    """Steps on data that only their numbers decide; the losses."""
    losses = []
    for step in steps:
        rng = np.random.default_rng(step)
        x = rng.random((40, model.n_input_dims), np.float32)
        y = rng.random((40, model.n_output_dims), np.float32)
        losses.append(float(model.trainer.training_step(x, y)))
    return losses


def assert_same_state(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_same_state(actual[name], expected[name])
    elif isinstance(expected, np.ndarray):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
    else:
        assert actual == expected


def assert_same(actual: tcnn.Model, expected: tcnn.Model) -> None:
    np.testing.assert_array_equal(actual.params, expected.params)
    assert_same_state(actual.optimizer.state_dict(), expected.optimizer.state_dict())
    for name in ("step", "learning_rate", "skipped_steps", "perturbation_sigma"):
        assert getattr(actual.trainer, name) == getattr(expected.trainer, name), name
    assert actual.network.spec == expected.network.spec
    assert type(actual.network) is type(expected.network)
    assert (actual.loss.spec, actual.optimizer.spec) == (expected.loss.spec, expected.optimizer.spec)
    for name in ("dtype", "seed", "deterministic"):
        assert getattr(actual.network.options, name) == getattr(expected.network.options, name), name
    x = np.random.default_rng(99).random((30, expected.n_input_dims), np.float32)
    np.testing.assert_array_equal(actual.network.inference(x), expected.network.inference(x))


# -------------------------------------------------------------------------------------------- going on


def assert_goes_on(model, path, n_steps, **options):
    """So many steps, then as many again, by the model and by what is loaded."""
    train(model, range(n_steps))
    model.save(path)
    loaded = tcnn.load(path, **options)
    assert_same(loaded, model)
    following = range(n_steps, 2 * n_steps)
    assert train(loaded, following) == train(model, following)
    assert_same(loaded, model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(name, tmp_path):
    assert_goes_on(make(with_optimizer(name)), tmp_path / "model.safetensors", 7, engine="reference")


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=draws(), optimizer=st.one_of(LEAF, NESTED), dtype=st.sampled_from(["float16", "bfloat16", "float32"]))
def test_any_model_goes_on_bit_for_bit(draw, optimizer, dtype, tmp_path):
    if draw.spec.network.n_neurons > 64:  # Shampoo's roots of wide matrices take seconds
        optimizer = ADAM
    config = {**draw.config, "optimizer": optimizer}
    model = tcnn.create_from_config(draw.n_input_dims, draw.n_output_dims, config, engine="reference", dtype=dtype)
    with np.errstate(all="ignore"):  # random rates may diverge; what is not finite is saved as it is
        train(model, range(2))
        model.save(tmp_path / "model")
        loaded = tcnn.load(tmp_path / "model", engine="reference")
        assert_same(loaded, model)
        np.testing.assert_array_equal(train(loaded, range(2, 4)), train(model, range(2, 4)))
        assert_same(loaded, model)


def test_before_the_first_step(tmp_path):
    model = make(with_optimizer("EMA"), seed=7)
    model.save(tmp_path / "model")
    loaded = tcnn.load(tmp_path / "model", engine="reference")
    assert_same(loaded, model)
    assert loaded.network.seed == 7


def test_a_learning_rate_that_was_set_and_skipped_steps(tmp_path):
    model = make()
    train(model, range(2))
    model.trainer.learning_rate = 0.003
    model.trainer.training_step(np.full((4, 2), 0.5), None, external_gradient=np.full((4, 3), np.nan))
    model.save(tmp_path / "model")
    loaded = tcnn.load(tmp_path / "model", engine="reference")
    assert (loaded.trainer.step, loaded.trainer.skipped_steps, loaded.trainer.learning_rate) == (3, 1, 0.003)
    loaded.trainer.training_step(np.full((4, 2), 0.5), None, external_gradient=np.full((4, 3), np.nan))
    assert loaded.trainer.skipped_steps == 2


@pytest.mark.parametrize("level", [0.5, [0.5, 1.0] * 20])
def test_max_level(level, tmp_path):
    model = make()
    model.network.max_level = level
    model.save(tmp_path / "model")
    loaded = tcnn.load(tmp_path / "model", engine="reference")
    np.testing.assert_array_equal(loaded.network.max_level, np.float32(level))
    assert train(loaded, range(3)) == train(model, range(3))


def test_noise_goes_on_where_it_was(tmp_path):
    network = tcnn.NetworkWithInputEncoding(2, 3, CONFIG["encoding"], CONFIG["network"], engine="reference")
    model = tcnn.Model(network, tcnn.Trainer(network, ADAM, "L2", seed=5, perturbation_sigma=0.2))
    train(model, range(3))
    model.save(tmp_path / "model")
    loaded = tcnn.load(tmp_path / "model", engine="reference")
    assert train(loaded, range(3, 6)) == train(model, range(3, 6))
    assert_same(loaded, model)


COMPOSITE = {
    "otype": "Composite",
    "nested": [
        {"otype": "HashGrid", "n_dims_to_encode": 2, "n_levels": 2, "log2_hashmap_size": 5, "base_resolution": 3},
        {"otype": "Frequency", "n_frequencies": 3},
    ],
}
WIDE = {"otype": "DenseGrid", "n_levels": 2, "n_features_per_level": 8, "base_resolution": 2, "per_level_scale": 1.2}
MLP = {"otype": "CutlassMLP", "n_neurons": 24, "n_hidden_layers": 2}
MODULES = {
    "Network": lambda **o: tcnn.Network(5, 2, MLP, **o),
    "Network of per-layer widths with biases": lambda **o: tcnn.Network(5, 2, {"hidden": [20, 8], "bias": True}, **o),
    "NetworkWithInputEncoding": lambda **o: tcnn.NetworkWithInputEncoding(5, 2, COMPOSITE, MLP, **o),
    "Encoding": lambda **o: tcnn.Encoding(5, COMPOSITE, **o),
    "Encoding aligned to 16": lambda **o: tcnn.Encoding(5, COMPOSITE, alignment=16, **o),
    "Encoding aligned to 12": lambda **o: tcnn.Encoding(5, WIDE, alignment=12, **o),
}


@pytest.mark.parametrize("name", MODULES)
def test_every_kind_of_module(name, tmp_path):
    network = MODULES[name](engine="reference", dtype="float32")
    model = tcnn.Model(network, tcnn.Trainer(network, EMA, "Mape"))
    train(model, range(3))
    model.save(tmp_path / "model")
    loaded = tcnn.load(tmp_path / "model", engine="reference")
    assert_same(loaded, model)
    assert train(loaded, range(3, 6)) == train(model, range(3, 6))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtype_and_determinism(dtype, tmp_path):
    model = make(dtype=dtype, deterministic=True)
    train(model, range(2))
    model.save(tmp_path / "model")
    assert_same(tcnn.load(tmp_path / "model", engine="reference"), model)


def test_a_loss_with_numbers(tmp_path):
    model = make({**CONFIG, "loss": {"otype": "ConstantGradient", "gradient": [0.1, 0.2, 0.3]}})
    model.save(tmp_path / "model")
    assert tcnn.load(tmp_path / "model", engine="reference").loss.spec == model.loss.spec


def test_a_model_of_another_trainer_is_refused():
    network = tcnn.Network(2, 3, CONFIG["network"], engine="reference")
    with pytest.raises(ValueError, match="another network"):
        tcnn.Model(network, make().trainer)


def test_from_one_engine_to_the_other(monkeypatch, tmp_path):
    fused = FakeFusedEngine()
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", fused.create_runtime)
    model = make(engine="fused")
    train(model, range(3))
    model.save(tmp_path / "model")
    there, here = tcnn.load(tmp_path / "model"), tcnn.load(tmp_path / "model", engine="reference")
    assert there.jit_fusion and not here.jit_fusion
    for loaded in (there, here):
        assert_same(loaded, model)
    assert train(here, range(3, 6)) == train(there, range(3, 6)) == train(model, range(3, 6))


def test_the_fused_engine_goes_on_from_device_memory(gpu, no_reference, tmp_path):
    """The emulated driver computes a step the same way every time."""
    assert_goes_on(make(engine="fused"), tmp_path / "model", 2, engine="fused")


@pytest.mark.gpu
def test_everything_comes_back_from_a_gpu(no_reference, tmp_path):
    """Exactly what was saved. Later steps add up gradients in any order, which float32 rounds: 1e-4 of the loss."""
    model = make(engine="fused")
    train(model, range(20))
    model.save(tmp_path / "model")
    loaded = tcnn.load(tmp_path / "model", engine="fused")
    assert_same(loaded, model)
    np.testing.assert_allclose(train(loaded, range(20, 25)), train(model, range(20, 25)), rtol=1e-4)


# -------------------------------------------------------------------------------------------- the file


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = make(with_optimizer("EMA"))
    train(model, range(3))
    model.save(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        return file.metadata()


def test_other_programs_can_read_it(saved):
    tensors, metadata = load_file(saved), metadata_of(saved)
    model = tcnn.load(saved, engine="reference")
    np.testing.assert_array_equal(tensors["params"], model.params)
    np.testing.assert_array_equal(tensors["inference_params"], model.optimizer.inference_params)
    assert set(tensors) == {
        "params",
        "inference_params",
        "optimizer.average",
        *(f"optimizer.nested.{name}" for name in ("first_moments", "second_moments", "param_steps")),
    }
    assert metadata["library_version"] == tcnn.__version__
    assert json.loads(metadata["training"])["step"] == 3
    assert tcnn.create_from_config(2, 3, json.loads(metadata["config"])).network.spec == model.network.spec
    assert model.config == json.loads(metadata["config"])


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()
    model = tcnn.load(saved, engine="reference")
    train(model, range(2))

    def no_space(*args):
        raise OSError(28, "No space left on device")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(snapshot_files, "os", types.SimpleNamespace(**{**vars(os), step: no_space}))
            with pytest.raises(OSError, match="No space"):
                model.save(saved)
        assert saved.read_bytes() == before
        assert os.listdir(saved.parent) == [saved.name]
    model.save(saved)
    assert_same(tcnn.load(saved, engine="reference"), model)
    assert os.listdir(saved.parent) == [saved.name]


def test_saving_into_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        make().save(tmp_path / "none" / "model")


def test_a_link_stays_a_link(saved, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(saved)
    model = make()
    model.save(link)
    assert link.is_symlink()
    assert_same(tcnn.load(saved, engine="reference"), model)


# -------------------------------------------------------------------------------------------- errors


def error_of(path: Path) -> str:
    """The message of the one error that a bad file may raise: one line that begins with the file's name."""
    with pytest.raises(tcnn.SnapshotError) as caught:
        tcnn.load(path, engine="reference")
    message = str(caught.value)
    assert message.startswith(f'snapshot "{path}": ') and "\n" not in message
    return message


def rewrite(path: Path, *, sign: bool = True, drop: str = "", **metadata: str) -> None:
    """The same file with other metadata, under a hash that fits unless `sign` is False."""
    tensors = load_file(path)
    tensors.pop(drop, None)
    metadata = {key: text for key, text in {**metadata_of(path), **metadata}.items() if key != drop}
    if sign and drop != "sha256":
        metadata["sha256"] = snapshots.checksum(metadata, tensors)
    save_file(tensors, path, metadata)


def test_snapshot_error_is_a_value_error():
    assert issubclass(tcnn.SnapshotError, ValueError)


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        tcnn.load(tmp_path / "none")
    with pytest.raises(OSError):
        tcnn.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 100, b"\xff" * 100, b"PK\x03\x04 something else"])
def test_no_snapshot_at_all(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    assert "is no safetensors file" in error_of(tmp_path / "file")


def test_safetensors_of_somebody_else(tmp_path):
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "file")
    assert "not of numba-tcnn" in error_of(tmp_path / "file")


def test_a_later_version(saved):
    rewrite(saved, sign=False, format_version="2", library_version="9.1")
    assert "format version '2' (written by numba-tcnn 9.1)" in error_of(saved)


@pytest.mark.parametrize("key", ["config", "model", "training", "optimizer", "library_version"])
def test_changed_metadata(saved, key):
    rewrite(saved, sign=False, **{key: metadata_of(saved)[key] + " "})
    assert "is damaged" in error_of(saved)


def test_changed_types_of_tensors(saved):
    """The same bytes as integers: the header says so, and nothing but the hash knows better."""
    content = saved.read_bytes()
    saved.write_bytes(content.replace(b'"dtype":"F32"', b'"dtype":"I32"'))
    assert saved.read_bytes() != content
    assert "is damaged" in error_of(saved)


@pytest.mark.parametrize("key", ["sha256", "config", "model", "training", "optimizer"])
def test_missing_metadata(saved, key):
    rewrite(saved, drop=key)
    assert ("is damaged" if key == "sha256" else f"{key} is missing") in error_of(saved)


@pytest.mark.parametrize("name", ["params", "optimizer.average", "optimizer.nested.param_steps"])
def test_missing_tensors(saved, name):
    rewrite(saved, drop=name)
    assert f"tensor '{name}' is missing" in error_of(saved)


@pytest.mark.parametrize(
    "key, change, problem",
    [
        ("model", {"n_input_dims": 3}, "tensor 'params' is float32"),
        ("model", {"n_output_dims": 17}, "tensor 'params' is float32"),
        ("model", {"n_output_dims": "3"}, "model.n_output_dims is '3', not of type int"),
        ("model", {"kind": "Transformer"}, "'Transformer' is none of"),
        ("model", {"dtype": "float8"}, "'float8' is none of"),
        ("config", {"optimizer": {"otype": "Adam"}}, "optimizer.step is missing"),
        ("config", {"loss": {"otype": "Loss"}}, "loss.otype"),
        ("config", {"optimizer": {"otype": "Lookahead"}}, "tensor 'optimizer.slow_params' is missing"),
        ("config", {"optimizer": {"otype": "Adamant"}}, "optimizer.otype"),
        ("config", {"encoding": {"otype": "HashGrid", "log2_hashmap_size": 7}}, "tensor 'params' is float32"),
        ("training", {"skipped_steps": 1.5}, "training.skipped_steps is 1.5"),
        ("optimizer", {"n_averaged": None}, "optimizer.n_averaged is None"),
        ("optimizer", {"momentum": 1}, "optimizer.momentum has no place"),
    ],
)  # fmt: skip
def test_content_that_does_not_fit_together(saved, key, change, problem):
    rewrite(saved, **{key: json.dumps({**json.loads(metadata_of(saved)[key]), **change})})
    assert problem in error_of(saved)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
def test_metadata_that_is_no_json_object(saved, text):
    rewrite(saved, config=text)
    assert "config is not" in error_of(saved)


def test_a_wrong_engine_is_not_the_files_fault(saved):
    with pytest.raises(tcnn.ConfigError, match="engine") as caught:
        tcnn.load(saved, engine="steam")
    assert not isinstance(caught.value, tcnn.SnapshotError)


def test_damaged_files_are_refused_or_loaded_intact(saved):
    """Every byte flip and truncation that was drawn: an error, or the very model. (Spaces pad the file's header, so
    a few flips are harmless.)"""
    content, intact = saved.read_bytes(), tcnn.load(saved, engine="reference")
    rng = np.random.default_rng(3)
    header = 8 + int.from_bytes(content[:8], "little")
    flips = [*range(8), *rng.integers(8, header, 1200), *rng.integers(header, len(content), 300)]
    cuts = [*range(10), header - 1, header, header + 1, *rng.integers(0, len(content), 200), len(content) - 1]
    damaged = [content[:cut] for cut in cuts] + [content + b"\x00"]
    for position in flips:
        changed = bytearray(content)
        changed[position] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(changed))
    n_refused = 0
    for candidate in damaged:
        saved.write_bytes(candidate)
        try:
            loaded = tcnn.load(saved, engine="reference")
        except tcnn.SnapshotError:
            n_refused += 1
        else:
            assert_same(loaded, intact)
    assert n_refused > 0.95 * len(damaged)
