"""tiny-cuda-nn's snapshots: those that it wrote (tests/golden/*.snapshot*, *.state.msgpack), and those that we write.

Tolerances are relative L2 errors unless they are exact. What tiny-cuda-nn stores in float32 is read exactly; a step
after that agrees to 1e-4 of the distance moved, as in test_reference_optimizers_golden.py. Outputs of a network that
computes in half precision agree to 1e-3, two roundings of 2^-11.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from golden_case import FOLDER, GoldenCase, agree, names, relative_error
from test_snapshots import ADAM, EMA, OPTIMIZERS, assert_same, assert_same_state, make, train, with_optimizer

import numba_tcnn as tcnn
from numba_tcnn import snapshot_files
from numba_tcnn.layout import parameter_blocks
from numba_tcnn.reference import make_optimizer
from numba_tcnn.tcnn_layout import FlatLayout, flat_layout
from numba_tcnn.tcnn_optimizer_states import FLOAT, HALF, Entries, Target, state_from_tcnn, state_to_tcnn
from numba_tcnn.tcnn_snapshots import decode, encode

SNAPSHOT_CASES = names("snapshot_*")
SUFFIXES = ("snapshot.json", "snapshot.msgpack", "snapshot_with_optimizer.json", "snapshot_with_optimizer.msgpack")
STATE_CASES = [name for name in names("opt_*") if (FOLDER / f"{name}.state.msgpack").exists()]
STEP_TOLERANCE = 1e-4
OUTPUT_TOLERANCE = 1e-3


def model_of(case: GoldenCase, **options: Any) -> tcnn.Model:
    return tcnn.create_from_config(
        case.meta["n_in"], case.meta["n_out"], case.meta["config"], engine="reference", **options
    )


# ------------------------------------------------------------------------- what tiny-cuda-nn wrote, whole models


@pytest.mark.golden
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", SNAPSHOT_CASES)
def test_parameters_and_outputs(name, suffix):
    case = GoldenCase(name)
    model = model_of(case)
    model.load_tcnn(FOLDER / f"{name}.{suffix}")
    np.testing.assert_array_equal(model.params, case["imported_params_full_precision"])
    y = model.network.inference(case["probe_input"])
    error = relative_error(y, case["imported_probe_output"])
    agree(name, f"outputs, {suffix.partition('.')[2]}", error, OUTPUT_TOLERANCE, "sums in half precision there")
    has_optimizer = "with_optimizer" in suffix
    assert model.trainer.step == (case.meta["n_steps"] if has_optimizer else 0)


@pytest.mark.parametrize("name", SNAPSHOT_CASES)
def test_json_and_messagepack_say_the_same(name):
    case, models = GoldenCase(name), []
    for suffix in SUFFIXES[2:]:
        models.append(model_of(case))
        models[-1].load_tcnn((FOLDER / f"{name}.{suffix}").read_bytes())
    assert_same(*models)


@pytest.mark.golden
@pytest.mark.parametrize("name", SNAPSHOT_CASES)
def test_one_more_step(name):
    case = GoldenCase(name)
    model = model_of(case)
    model.load_tcnn(FOLDER / f"{name}.{SUFFIXES[3]}")
    optimizer = tcnn.create_optimizer(case.meta["config"]["optimizer"])
    optimizer.allocate(model.n_params, model.layer_sizes)
    optimizer.load_state_dict(model.optimizer.state_dict())
    start = model.params
    params = start.copy()
    optimizer.step(params, case["step_gradients"], loss_scale=128.0)
    expected = case["imported_params_after_step"]
    error = relative_error(params - start, expected - start)
    agree(name, "distance moved, one more step", error, STEP_TOLERANCE, "fast-math powers of β there")


@pytest.mark.parametrize("name", SNAPSHOT_CASES)
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_written_again_it_is_the_same_but_for_the_type(name, suffix, tmp_path):
    """We write float32 parameters where tiny-cuda-nn wrote them in half precision; everything else byte by byte."""
    case, format = GoldenCase(name), suffix.rpartition(".")[2]
    original = (FOLDER / f"{name}.{suffix}").read_bytes()
    model = model_of(case)
    model.load_tcnn(original)
    model.save_tcnn(tmp_path / "file", format, optimizer="with_optimizer" in suffix)
    document = decode((tmp_path / "file").read_bytes())
    assert document["params_type"] == "float"
    params = np.frombuffer(as_bytes(document["params_binary"]), np.float32)
    document["params_type"] = "__half"
    document["params_binary"] = params.astype(np.float16).tobytes()
    assert encode(document, format) == original


def as_bytes(blob: Any) -> bytes:
    return blob if isinstance(blob, bytes) else bytes(blob["bytes"])


# --------------------------------------------------------------------- what tiny-cuda-nn wrote, optimizers alone


class StateCase:
    """An optimizer after 12 steps of tiny-cuda-nn and its state, ours after the same steps, and what both have kept."""

    def __init__(self, name: str):
        self.case = GoldenCase(name)
        self.spec = self.case.optimizer_spec()
        self.content = (FOLDER / f"{name}.state.msgpack").read_bytes()
        self.document = msgpack.unpackb(self.content)
        self.compute_type = HALF if self.case.meta["weight_type"] == "float16" else FLOAT
        n, n_matrix = self.case.meta["n_weights"], self.case.meta["n_matrix_weights"]
        self.layout = FlatLayout(n, n_matrix)
        self.trained = self.case["weights_full_precision_after_12"]
        self.inference_params = self.case.arrays.get("custom_weights_after_12", self.trained)

    def optimizer(self) -> Any:
        return make_optimizer(self.spec, self.layout.n_params, self.case.meta["layer_sizes"])

    @functools.cached_property
    def ours(self) -> Any:
        """Our own optimizer after the same 12 steps."""
        optimizer, params = self.optimizer(), self.case["weights_initial"].copy()
        for gradient in self.case["gradients"]:
            optimizer.step(params, gradient, self.case.meta["loss_scale"])
        return optimizer

    def imported(self, document: Any = None) -> dict[str, Any]:
        entries = Entries(self.document if document is None else document, "optimizer", self.layout)
        return state_from_tcnn(self.spec, entries, self.optimizer().state(), self.inference_params)

    def written(self, state: dict[str, Any]) -> dict[str, Any]:
        return state_to_tcnn(self.spec, state, self.trained, Target(self.layout, self.compute_type))


def assert_states_agree(actual: Any, expected: Any, tolerance: float, path: str = "") -> None:
    """Numbers to float32's rounding, arrays by their relative error."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for name in expected:
            assert_states_agree(actual[name], expected[name], tolerance, f"{path}.{name}")
    elif isinstance(expected, np.ndarray):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), path
        assert relative_error(actual, expected) <= tolerance, path
    else:
        assert actual == pytest.approx(expected, rel=1e-6), path


@pytest.mark.parametrize("name", [name for name in STATE_CASES if "novograd" not in name])
def test_states_are_those_of_our_own_optimizers(name):
    """1e-3 where tiny-cuda-nn stored halves. (Its Novograd accumulates norms: nothing to compare with.)"""
    state = StateCase(name)
    assert_states_agree(state.imported(), state.ours.state(), 1e-3 if state.compute_type == HALF else STEP_TOLERANCE)


@pytest.mark.parametrize("name", STATE_CASES)
def test_optimizers_go_on_from_states(name, rng):
    """The next step is that of our own optimizer, which made the first 12 itself."""
    state = StateCase(name)
    optimizer = state.optimizer()
    optimizer.load_state(state.imported())
    assert optimizer.current_step == state.case.meta["step_after"]["12"]
    n_steps = 3  # Batched takes three to move
    gradients = (128 * rng.standard_normal((n_steps, state.layout.n_params))).astype(np.float32)
    moved = []
    for own in (optimizer, state.ours):
        params = state.trained.copy()
        for gradient in gradients:
            own.step(params, gradient, 128.0)
        moved.append(params - state.trained)
    assert np.isfinite(moved[0]).all() and np.any(moved[0] != 0)
    if "novograd" not in name:
        tolerance = 1e-3 if state.compute_type == HALF else STEP_TOLERANCE
        assert relative_error(*moved) <= tolerance
    if optimizer.inference_params is not None:
        assert relative_error(optimizer.inference_params, state.ours.inference_params) <= 1e-3


NOT_BYTE_BY_BYTE = {
    "average": {"weights_average_binary"},  # a running sum of halves there, the mean itself here
    "batched": {"averaged_gradients_binary", "averaged_gradients_half_binary"},  # what a finished batch left behind
}


@pytest.mark.parametrize("name", STATE_CASES)
def test_states_written_again(name):
    state = StateCase(name)
    document = state.written(state.imported())
    for part, keys in NOT_BYTE_BY_BYTE.items():
        for key in keys if part in name else ():
            assert len(document[key]) == len(state.document[key])
            document[key] = state.document[key]
    assert encode(document, "msgpack") == state.content


def test_the_average_that_is_written_is_the_mean_of_the_samples():
    state = StateCase("opt_average_float")
    document = state.written(state.imported())
    theirs, ours = (np.frombuffer(d["weights_average_binary"], np.float32) for d in (state.document, document))
    assert relative_error(ours, theirs) <= 1e-6  # a few roundings of float32


def test_unfinished_batches_hold_scaled_mean_gradients():
    """After 2 of 3 gradients: the pool there is (g1 + g2)/3 with the loss scale, ours is their sum without."""
    spec = tcnn.create_optimizer({"otype": "Batched", "batch_size_multiplier": 3, "nested": ADAM}).spec
    gradients = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    optimizer, params = make_optimizer(spec, 6), np.zeros(6, np.float32)
    for gradient in gradients:
        optimizer.step(params, gradient)
    for compute_type, scale in ((HALF, 128), (FLOAT, 1)):
        document = state_to_tcnn(spec, optimizer.state(), params, Target(FlatLayout(6, 0), compute_type))
        pool = np.frombuffer(document["averaged_gradients_binary"], np.float32)
        np.testing.assert_allclose(pool, gradients.sum(axis=0) * scale / 3, rtol=1e-6)  # float32
        assert len(document["averaged_gradients_half_binary"]) == 6 * compute_type.itemsize
        back = state_from_tcnn(spec, Entries(document, "", FlatLayout(6, 0)), optimizer.state(), params)
        assert_states_agree(back, optimizer.state(), 1e-6)


def test_adam_without_counters_of_parameters_begins_them_at_0():
    state = StateCase("opt_adam_default_half")
    document = {key: value for key, value in state.document.items() if key != "param_steps_binary"}
    assert not state.imported(document)["param_steps"].any()


def test_decay_without_a_factor_begins_it_at_1():
    state = StateCase("opt_exponential_decay_half")
    document = {key: value for key, value in state.document.items() if key != "learning_rate_factor"}
    assert state.imported(document)["learning_rate_factor"] == 1


def test_novograd_of_encodings_begins_again():
    """tiny-cuda-nn has no moment for them. Taken for an old one, 0 would make the first update (1 - β₁)/√(1 - β₂) = 3.2
    times as long as it should be; ours has length 1."""
    state = StateCase("opt_novograd_float")
    state.spec = replace(state.spec, beta1=0.9, beta2=0.999)
    optimizer = state.optimizer()
    optimizer.load_state(state.imported())
    optimizer.step(np.zeros(state.layout.n_params, np.float32), np.ones(state.layout.n_params, np.float32))
    encoding = optimizer.first_moments[state.layout.n_matrix_params :]
    assert np.linalg.norm(encoding) == pytest.approx(1, rel=1e-5)  # float32


# ------------------------------------------------------------------------------------- what we write ourselves


def trained(name: str, n_steps: int, **options: Any) -> tcnn.Model:
    model = make(with_optimizer(name), **options)
    train(model, range(n_steps))
    return model


@pytest.mark.parametrize("format", ["json", "msgpack"])
@pytest.mark.parametrize("n_steps", [0, 2, 7])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("Shampoo", "Novograd")])
def test_a_float32_model_comes_back(name, n_steps, format, tmp_path):
    """Nothing is rounded but numbers that are float64 here: learning rates, Average's sum, Batched's scale."""
    model = trained(name, n_steps, dtype="float32")
    model.save_tcnn(tmp_path / "file", format)
    loaded = make(with_optimizer(name), dtype="float32")
    loaded.load_tcnn(tmp_path / "file")
    np.testing.assert_array_equal(loaded.params, model.params)
    if n_steps:
        assert_states_agree(loaded.optimizer.state_dict(), model.optimizer.state_dict(), 1e-6)
    x = np.random.default_rng(0).random((20, 2), np.float32)
    np.testing.assert_allclose(loaded.network.inference(x), model.network.inference(x), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(train(loaded, range(7, 12)), train(model, range(7, 12)), rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("Shampoo", "Novograd")])
def test_a_float16_model_comes_back(name, tmp_path):
    """Averages are rounded to half precision, the trained parameters are not."""
    model = trained(name, 7)
    model.save_tcnn(tmp_path / "file", "msgpack")
    loaded = make(with_optimizer(name))
    loaded.load_tcnn(tmp_path / "file")
    np.testing.assert_array_equal(loaded.params, model.params)
    assert_states_agree(loaded.optimizer.state_dict(), model.optimizer.state_dict(), 1e-3)


def test_parameters_are_those_of_inference_and_the_trained_ones_stand_beside(tmp_path):
    model = trained("EMA", 7)
    model.save_tcnn(tmp_path / "file", "msgpack")
    document = msgpack.unpackb((tmp_path / "file").read_bytes())
    assert set(document) == {
        "n_params",
        "params_type",
        "params_binary",
        "params_full_precision_binary",
        "optimizer",
    }
    own = np.frombuffer(document["params_binary"], np.float32)
    np.testing.assert_array_equal(own, model.optimizer.inference_params)
    np.testing.assert_array_equal(np.frombuffer(document["params_full_precision_binary"], np.float32), model.params)


def test_from_averaged_parameters_alone_training_goes_on_from_the_average(tmp_path):
    """As tiny-cuda-nn writes them: there is nothing else to go on from (defect 17: only inference weights are kept)."""
    model = trained("EMA", 7)
    model.save_tcnn(tmp_path / "file", "msgpack")
    document = msgpack.unpackb((tmp_path / "file").read_bytes())
    del document["params_full_precision_binary"]
    loaded = make(with_optimizer("EMA"))
    loaded.load_tcnn(msgpack.packb(document))
    np.testing.assert_array_equal(loaded.params, model.optimizer.inference_params)
    assert relative_error(loaded.optimizer.inference_params, model.optimizer.inference_params) <= 1e-3  # halves
    assert loaded.trainer.step == 7


def test_without_the_optimizer_its_moments_stay_and_averages_start_again(tmp_path):
    source = trained("EMA", 3)
    source.save_tcnn(tmp_path / "file", optimizer=False)
    model = trained("EMA", 5, seed=3)
    moments = model.optimizer.state_dict()["nested"]
    model.load_tcnn(tmp_path / "file")
    np.testing.assert_array_equal(model.params, source.params)
    assert_same_state(model.optimizer.state_dict()["nested"], moments)
    assert model.optimizer.inference_params is None


def test_skipped_steps_belong_to_the_training_that_is_left(tmp_path):
    """tiny-cuda-nn counts none; with its state there is a training of which none is known to be skipped."""
    source, model = trained("Adam", 3), trained("Adam", 2)
    source.save_tcnn(tmp_path / "file")
    model.trainer.training_step(np.zeros((4, 2), np.float32), np.full((4, 3), np.inf, np.float32))
    assert model.trainer.skipped_steps == 1
    model.load_tcnn(tmp_path / "file")
    assert model.trainer.skipped_steps == 0 and model.trainer.step == 3


def test_format_is_checked(tmp_path):
    with pytest.raises(ValueError, match="format: 'xml' is none of json, msgpack"):
        make().save_tcnn(tmp_path / "file", "xml")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")

    def refuse(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot_files.os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        make().save_tcnn(tmp_path / "file")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


# ---------------------------------------------------------------------------------- widths that only we pad


NARROW = {"otype": "CutlassMLP", "n_neurons": 20, "n_hidden_layers": 2}
GRID = {"otype": "HashGrid", "n_levels": 3, "n_features_per_level": 2, "log2_hashmap_size": 5, "base_resolution": 3}


def narrow(optimizer: dict[str, Any], **options: Any) -> tcnn.Model:
    config = {"loss": {"otype": "L2"}, "encoding": GRID, "network": NARROW, "optimizer": optimizer}
    return tcnn.create_from_config(2, 3, config, engine="reference", dtype="float32", **options)


def test_padding_is_ours_alone(tmp_path):
    """What is written are the matrices as tiny-cuda-nn has them, [20, 16], [20, 20], [16, 20], and the grid."""
    model = narrow(ADAM)
    train(model, range(4))
    model.save_tcnn(tmp_path / "file", "msgpack")
    document = msgpack.unpackb((tmp_path / "file").read_bytes())
    blocks = {block.name: block.stored(model.params) for block in parameter_blocks(model.network.spec)}
    expected = [
        blocks["layer0.weight"][:20, :16],
        blocks["layer1.weight"][:20, :20],
        blocks["layer2.weight"][:16, :20],
        *(blocks[f"grid.level{i}"] for i in range(3)),
    ]
    assert blocks["layer1.weight"].shape == (32, 32)
    flat = np.concatenate([block.reshape(-1) for block in expected])
    assert document["n_params"] == len(flat)
    np.testing.assert_array_equal(np.frombuffer(document["params_binary"], np.float32), flat)
    assert len(document["optimizer"]["first_moments_binary"]) == 4 * len(flat)


def padded_optimizers() -> dict[str, dict[str, Any]]:
    n_grid = 2 * sum(entries for entries in (16, 32, 32))
    n_network = narrow(ADAM).n_params - n_grid
    sliced = [{**EMA, "n_params_to_optimize": n_network - 100}, {**ADAM, "n_params_to_optimize": n_grid + 100}]
    return {**OPTIMIZERS, "Composite": {"otype": "Composite", "nested": sliced}}


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in ("Shampoo", "Novograd")])
def test_padded_models_come_back(name, tmp_path):
    optimizer = padded_optimizers()[name]
    model = narrow(optimizer)
    train(model, range(7))
    model.save_tcnn(tmp_path / "file", "msgpack")
    loaded = narrow(optimizer, seed=3)
    loaded.load_tcnn(tmp_path / "file")
    np.testing.assert_array_equal(loaded.params, model.params)
    np.testing.assert_allclose(train(loaded, range(7, 12)), train(model, range(7, 12)), rtol=1e-4)
    for name, block in loaded.blocks().items():
        np.testing.assert_allclose(block, model.blocks()[name], rtol=1e-3, atol=1e-5)


def test_slices_of_the_padded_vector():
    positions = np.array([0, 1, 4, 5, 8, 9, 10])
    layout = FlatLayout(11, 8, positions)
    part = layout.part(4, 9)
    assert (part.n_params, part.n_matrix_params, part.n_tcnn_params) == (5, 4, 3)
    np.testing.assert_array_equal(part.to_ours(np.array([1, 2, 3])), [1, 2, 0, 0, 3])
    np.testing.assert_array_equal(part.to_tcnn(np.arange(5)), [0, 1, 4])


def test_an_encoding_alone(tmp_path):
    network = tcnn.Encoding(2, GRID, engine="reference", dtype="float32")
    model = tcnn.Model(network, tcnn.Trainer(network, ADAM, "L2"))
    train(model, range(3))
    model.save_tcnn(tmp_path / "file", "msgpack")
    assert flat_layout(network.spec) == FlatLayout(network.n_params, 0)
    twin = tcnn.Encoding(2, GRID, engine="reference", dtype="float32")
    loaded = tcnn.Model(twin, tcnn.Trainer(twin, ADAM, "L2", seed=3))
    loaded.load_tcnn(tmp_path / "file")
    np.testing.assert_array_equal(loaded.params, model.params)


@pytest.mark.parametrize("keys", [{"hidden": [16, 32]}, {"bias": True}])
def test_networks_that_tcnn_does_not_have(keys, tmp_path):
    network = tcnn.Network(2, 3, keys, engine="reference")
    model = tcnn.Model(network, tcnn.Trainer(network, ADAM, "L2"))
    with pytest.raises(tcnn.SnapshotError, match="tiny-cuda-nn's networks have"):
        model.save_tcnn(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_shampoo_has_no_state_there(tmp_path):
    model = trained("Shampoo", 2)
    with pytest.raises(tcnn.SnapshotError, match="optimizer=False leaves it out"):
        model.save_tcnn(tmp_path / "file")
    model.save_tcnn(tmp_path / "file", optimizer=False)
    loaded = make(with_optimizer("Shampoo"))
    loaded.load_tcnn(tmp_path / "file")
    np.testing.assert_array_equal(loaded.params, model.params)


# -------------------------------------------------------------------------------------------------- errors


@pytest.fixture
def document() -> dict[str, Any]:
    return msgpack.unpackb((FOLDER / "snapshot_adam.snapshot_with_optimizer.msgpack").read_bytes())


@pytest.fixture
def model() -> tcnn.Model:
    model = model_of(GoldenCase("snapshot_adam"))
    train(model, range(2))
    return model


def refused(model: tcnn.Model, content: Any) -> str:
    """The one-line error for a document or raw content, which leaves the model as it was."""
    params, state = model.params, model.optimizer.state_dict()
    version = model.network.engine.parameters_version
    with pytest.raises(tcnn.SnapshotError) as caught:
        model.load_tcnn(content if isinstance(content, bytes) else msgpack.packb(content))
    np.testing.assert_array_equal(model.params, params)
    assert_same_state(model.optimizer.state_dict(), state)
    assert model.network.engine.parameters_version == version
    message = str(caught.value)
    assert message.startswith("snapshot of ") and "\n" not in message
    return message


def test_a_missing_file(model, tmp_path):
    with pytest.raises(FileNotFoundError):
        model.load_tcnn(tmp_path / "none")


def test_messages_name_the_file(model, tmp_path):
    (tmp_path / "file").write_bytes(b"{}")
    with pytest.raises(tcnn.SnapshotError, match=r'^snapshot ".*/file": n_params is missing; there is nothing$'):
        model.load_tcnn(tmp_path / "file")


NO_SNAPSHOTS = [b"", b"{", b"[1]", b'{"n_params": 1', b"\xc1", b"\x81", b"\xff\xfe", b"not at all", b"\x90"]


@pytest.mark.parametrize("content", [*NO_SNAPSHOTS, b'{"a": ' + b"[" * 100_000, b"\x91" * 100_000])
def test_no_snapshot_at_all(model, content):
    assert " is n" in refused(model, content)  # no JSON, no MessagePack, neither


@pytest.mark.parametrize("key", ["n_params", "params_binary"])
def test_missing_keys(model, document, key):
    del document[key]
    assert f"{key} is missing" in refused(model, document)


@pytest.mark.parametrize("key", ["current_step", "base_learning_rate", "first_moments_binary", "second_moments_binary"])
def test_missing_keys_of_the_optimizer(model, document, key):
    del document["optimizer"][key]
    assert f"optimizer.{key} is missing" in refused(model, document)


@pytest.mark.parametrize(
    "key, value, problem",
    [
        ("n_params", 3649, "holds 3,649 parameters, tiny-cuda-nn's for this model are 3,648"),
        ("n_params", -1, "n_params is no count"),
        ("n_params", "3648", "n_params is no count"),
        ("params_type", "double", 'neither "__half" nor "float"'),
        ("params_type", ["float"], 'neither "__half" nor "float"'),
        ("params_type", "float", "params_binary has 7,296 bytes"),
        ("params_binary", b"\x00" * 7294, "params_binary has 7,294 bytes"),
        ("params_binary", "text", "params_binary holds no bytes"),
        ("params_binary", {"bytes": 7296}, "params_binary holds no bytes"),
        ("params_binary", {"bytes": [0.5] * 7296}, "params_binary.bytes"),
        ("params_binary", {"bytes": [256] * 7296}, "params_binary.bytes"),
        ("optimizer", None, "optimizer is not an object"),
        ("optimizer", {}, "optimizer.current_step is missing"),
    ],
)
def test_wrong_values(model, document, key, value, problem):
    assert problem in refused(model, {**document, key: value})


@pytest.mark.parametrize(
    "key, value",
    [
        ("current_step", 1.5),
        ("current_step", True),
        ("current_step", 2**32),
        ("base_learning_rate", float("nan")),
        ("base_learning_rate", -0.1),
        ("base_learning_rate", "fast"),
        ("first_moments_binary", b"\x00" * 7296),
        ("param_steps_binary", b""),
    ],
)
def test_wrong_values_of_the_optimizer(model, document, key, value):
    document["optimizer"][key] = value
    assert f"optimizer.{key}" in refused(model, document)


def test_a_type_that_is_not_named_follows_from_the_length(model, document):
    expected = GoldenCase("snapshot_adam")["imported_params_full_precision"]
    del document["params_type"]
    model.load_tcnn(msgpack.packb(document))
    np.testing.assert_array_equal(model.params, expected)
    document["params_binary"] = expected.tobytes()
    model.load_tcnn(msgpack.packb(document))
    np.testing.assert_array_equal(model.params, expected)


@pytest.mark.parametrize("theirs, ours", [("Adam", "EMA"), ("EMA", "Adam"), ("EMA", "Average"), ("SGD", "Adam")])
def test_states_of_other_optimizers(theirs, ours, tmp_path):
    trained(theirs, 3).save_tcnn(tmp_path / "file", "msgpack")
    assert "is missing; there is" in refused(make(with_optimizer(ours)), (tmp_path / "file").read_bytes())


def test_another_number_of_samples(tmp_path):
    trained("Average", 3).save_tcnn(tmp_path / "file", "msgpack")
    other = make({**with_optimizer("Average"), "optimizer": {**OPTIMIZERS["Average"], "n_samples": 5}})
    assert "optimizer.weights_samples_binary has" in refused(other, (tmp_path / "file").read_bytes())


@pytest.mark.parametrize("suffix", SUFFIXES[2:])
def test_damaged_content_is_refused_or_read_as_numbers(suffix):
    """These formats have no checksum: a flipped bit of a number is another number. Anything else is SnapshotError."""
    content = (FOLDER / f"snapshot_adam.{suffix}").read_bytes()
    model = model_of(GoldenCase("snapshot_adam"))
    rng, outcomes = np.random.default_rng(5), {"read": 0, "refused": 0}
    structure = [position for position in range(len(content)) if position < 300 or content[position] in b'"{}:']
    positions = [*rng.choice(structure, 60), *rng.integers(0, len(content), 20)]
    damaged = [content[: int(cut)] for cut in rng.integers(0, len(content), 25)]
    for position in positions:
        changed = bytearray(content)
        changed[position] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(changed))
    for candidate in damaged:
        params, state = model.params, model.optimizer.state_dict()
        try:
            model.load_tcnn(candidate)
        except tcnn.SnapshotError:
            outcomes["refused"] += 1
            np.testing.assert_array_equal(model.params, params)
            assert_same_state(model.optimizer.state_dict(), state)
        else:
            outcomes["read"] += 1
            assert len(candidate) == len(content)
    assert min(outcomes.values()) >= 10


def test_a_path_is_a_path(model, tmp_path, document):
    """A string names a file, bytes are content."""
    (tmp_path / "file").write_bytes(json.dumps({"n_params": 0}).encode())
    with pytest.raises(tcnn.SnapshotError, match="holds 0 parameters"):
        model.load_tcnn(str(Path(tmp_path / "file")))
    model.load_tcnn(memoryview(msgpack.packb(document)))
    assert model.trainer.step == 60
