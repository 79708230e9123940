"""The benchmarks' own logic, without a GPU: what they time, which lines they write, that wrong kernels are caught."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

import numba_tcnn as tcnn
from benchmarks import cases, device_timing, host_time, ledger_rows, plans, stages, verify
from benchmarks.null_driver import no_device
from numba_tcnn.config import config_parts, parse_loss, parse_model, parse_optimizer
from numba_tcnn.fused.native_launches import LaunchList

NAME = "mlp_only_w16_h2"
LEDGER_FIELDS = {"config", "batch", "train_ms", "infer_ms", "infer_half_ms", "first_train_s"}


class HostArray(np.ndarray):
    """Stands for an array on the device."""

    def numpy(self) -> np.ndarray:
        return np.array(self)


def to_host(values: np.ndarray) -> HostArray:
    return values.view(HostArray)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference in the fused engine's place, and a device whose every call takes a quarter of a millisecond."""

    def make_trainer(case: cases.Case) -> tcnn.Trainer:
        options = {"engine": "reference", "dtype": "float16"}
        if case.bare:
            network = tcnn.Network(case.n_input_dims, case.n_output_dims, case.config["network"], **options)
            return tcnn.Trainer(network, case.config["optimizer"], case.config["loss"])
        return tcnn.create_from_config(case.n_input_dims, case.n_output_dims, case.config, **options).trainer

    def time_groups(call, *, groups: int, calls: int) -> device_timing.Timing:
        call(0)
        return device_timing.Timing((0.25,) * groups)

    monkeypatch.setattr(cases.Case, "make_trainer", make_trainer)
    monkeypatch.setattr(cases, "to_device", to_host)
    monkeypatch.setattr(verify, "to_device", to_host)
    monkeypatch.setattr(ledger_rows, "time_groups", time_groups)
    monkeypatch.setattr(ledger_rows, "host_microseconds", lambda call: 17.0)
    status = SimpleNamespace(usable=True, name="a device", compute_capability=(9, 0), driver_version=(13, 0))
    monkeypatch.setattr(ledger_rows, "device_status", lambda index: status)


def run(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, list[dict]]:
    status = ledger_rows.main(list(arguments))
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


# ------------------------------------------------------------------------------------------------ cases


def test_every_configuration_is_valid():
    for case in cases.load_cases():
        parts = config_parts(case.config)
        encoding = {"otype": "Identity"} if case.bare else parts.encoding
        parse_model(case.n_input_dims, case.n_output_dims, encoding, parts.network)
        parse_loss(parts.loss)
        parse_optimizer(parts.optimizer)


def test_cases_are_chosen_by_name_in_the_order_of_the_file():
    names = [case.name for case in cases.load_cases(["sdf", "image_hash"])]
    assert names == ["image_hash", "sdf"]
    with pytest.raises(ValueError, match="no configuration sdff; there are image_hash, "):
        cases.load_cases(["sdff"])


def test_inputs_differ_between_sets_and_targets_stay_in_range():
    sets = cases.host_inputs(1000, 3, "float16")
    assert len(sets) == 4 and all(x.dtype == np.float16 and x.shape == (1000, 3) for x in sets)
    assert not any(np.array_equal(a, b) for i, a in enumerate(sets) for b in sets[:i])
    y = cases.targets(sets[0], 16)
    assert y.dtype == np.float32 and y.shape == (1000, 16)
    assert 0.0999 < y.min() < 0.3 and 0.7 < y.max() < 0.9001


# ----------------------------------------------------------------------------------------------- timing


class FakeEvent:
    """The device's clock advances by a millisecond each time a call is made."""

    now = 0.0

    def record(self, stream: int = 0) -> None:
        self.time = FakeEvent.now

    def milliseconds_since(self, earlier: FakeEvent) -> float:
        return self.time - earlier.time


def test_groups_of_calls_lie_between_events(monkeypatch):
    monkeypatch.setattr(device_timing, "Event", FakeEvent)
    device = SimpleNamespace(use=lambda: None, synchronize=lambda: None)
    counts = []

    def call(i: int) -> None:
        counts.append(i)
        FakeEvent.now += 1.0 if i < 150 else 3.0

    timing = device_timing.time_groups(call, groups=5, calls=50, owner=device)
    assert counts == list(range(250))
    assert timing.groups == (1.0, 1.0, 1.0, 3.0, 3.0) and timing.median == 1.0


def test_host_time_is_the_least_of_its_repeats(monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 12.0, 20.0, 23.0])
    monkeypatch.setattr(device_timing.time, "perf_counter", lambda: next(clock))
    device = SimpleNamespace(use=lambda: None, synchronize=lambda: None)
    assert device_timing.host_microseconds(lambda i: None, calls=4, repeats=3, owner=device) == 0.5e6


def test_groups_have_at_least_fifty_calls():
    assert min(ledger_rows.calls_a_group(log2_batch) for log2_batch in cases.BATCHES) >= 50
    assert ledger_rows.GROUPS == 9 and ledger_rows.WARM_UP >= 20


# ------------------------------------------------------------------------------------------------- rows


def test_rows_hold_what_the_ledger_reads(on_host, capsys, tmp_path):
    out = tmp_path / "rows.jsonl"
    status, rows = run(capsys, "--configs", f"{NAME},image_hash", "--batches", "8,9", "--out", str(out))
    assert status == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    info, *rows = rows
    assert info["info"]["device"] == "a device" and info["info"]["driver"] == "13.0"
    assert {"date", "versions", "python", "n_input_sets"} <= set(info["info"])
    assert [(row["config"], row["batch"]) for row in rows] == [
        ("image_hash", 256), ("image_hash", 512), (NAME, 256), (NAME, 512)
    ]  # fmt: skip
    for row in rows:
        assert row["train_ms"] == row["infer_ms"] == row["train_ms_min"] == 0.25 and row["host_us"] == 17.0
        assert ("infer_half_ms" in row) == (row["config"] == NAME)
        assert row["loss_last"] < row["loss_first"] and row["steps"] > 20
        assert "failed" not in row
    # NumPy compiles nothing, so there is no cold first step to report; and only a configuration's first row has one
    assert "first_train_cached_s" in rows[0] and not any("first_train_cached_s" in row for row in (rows[1], rows[3]))
    assert {field for row in rows for field in row} >= LEDGER_FIELDS - {"first_train_s"}


def test_a_configuration_without_fused_kernels_is_skipped_with_its_reason(on_host, capsys, monkeypatch):
    make_trainer = cases.Case.make_trainer

    def without_oneblob(case: cases.Case) -> tcnn.Trainer:
        if case.name == "image_oneblob":
            raise tcnn.EngineUnavailable("the encoding OneBlob has no fused kernel yet")
        return make_trainer(case)

    monkeypatch.setattr(cases.Case, "make_trainer", without_oneblob)
    status, rows = run(capsys, "--configs", f"image_oneblob,{NAME}", "--batches", "8")
    assert status == 0
    assert rows[1] == {"config": "image_oneblob", "skipped": "the encoding OneBlob has no fused kernel yet"}
    assert rows[2]["config"] == NAME and "train_ms" in rows[2]


def test_a_kernel_that_does_not_compile_fails_its_row_and_the_run(on_host, capsys, monkeypatch):
    def first_step(trainer, data):
        raise tcnn.EngineUnavailable("every kernel plan spills registers")

    monkeypatch.setattr(ledger_rows, "first_step", first_step)
    status, rows = run(capsys, "--configs", NAME, "--batches", "8,9")
    assert status == 1
    assert rows[1] == {"config": NAME, "batch": 256, "failed": "every kernel plan spills registers"}
    assert "train_ms" in rows[2]


def test_wrong_kernels_are_not_timed(on_host, capsys, monkeypatch):
    checks = verify.Checks(inference=1e-4, inference_half=1e-4, gradient=0.5, loss=1e-5)
    monkeypatch.setattr(ledger_rows, "check_kernels", lambda *arguments: checks)
    status, rows = run(capsys, "--configs", NAME, "--batches", "8")
    assert status == 1
    assert rows[1]["failed"] == "gradient error 5.0e-01 > 0.02" and not LEDGER_FIELDS & {"train_ms"} & set(rows[1])


def test_cold_and_cached_first_steps_have_fields_of_their_own():
    kernels = [SimpleNamespace(name="gradient", from_cache=False), SimpleNamespace(name="adam", from_cache=True)]
    trainer = SimpleNamespace(training_step=lambda x, y: 0.0, explain=lambda: SimpleNamespace(kernels=kernels))
    data = SimpleNamespace(x=[None], y=[None])
    cold = ledger_rows.first_step(trainer, data)
    assert cold["first_train_s"] >= 0 and cold["first_train_compiled"] == ["gradient"]
    kernels[0].from_cache = True
    assert set(ledger_rows.first_step(trainer, data)) == {"first_train_cached_s", "first_train_compiled"}


def test_bad_arguments_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(ledger_rows, "device_status", lambda i: SimpleNamespace(usable=False, reason="no GPU here"))
    assert ledger_rows.main([]) == 2
    assert capsys.readouterr().err == "no row can be measured: no GPU here\n"


# ------------------------------------------------------------------------------------- proving kernels


@pytest.fixture
def trainer(on_host) -> tuple[cases.Case, tcnn.Trainer]:
    (case,) = cases.load_cases([NAME])
    return case, case.make_trainer()


@pytest.mark.parametrize("name", [NAME, "image_hash"])
@pytest.mark.parametrize("batch", [256, 8192, 3 * 4096])  # fewer than the distinct samples, or a multiple of them
def test_right_kernels_pass_and_the_trainer_stays_fresh(on_host, name, batch):
    (case,) = cases.load_cases([name])
    trainer = case.make_trainer()
    before = trainer.network.params
    checks = verify.check_kernels(case, trainer, batch)
    # the reference against itself: NumPy's sums over repeated samples, and float16 outputs
    assert checks.problem is None and checks.gradient < 1e-3 and checks.inference < 1e-5
    np.testing.assert_array_equal(trainer.network.params, before)
    assert trainer.step == 0 and not trainer.optimizer.state_dict()["first_moments"].any()


def test_an_output_that_is_not_written_is_found(trainer, monkeypatch):
    case, trainer = trainer
    original = trainer.network.inference

    def inference(x, *, out):
        original(x[:-1], out=out[:-1])

    monkeypatch.setattr(trainer.network, "inference", inference)
    assert "inference error nan" in verify.check_kernels(case, trainer, 8192).problem


def test_a_wrong_gradient_is_found(trainer, monkeypatch):
    case, trainer = trainer
    original = trainer.training_step

    def half_of_it(x, y):
        """The gradient of a launch that leaves every other sample out."""
        _, dL_dy = trainer.loss.evaluate(trainer.network.inference(x), y)
        dL_dy[::2] = 0
        return original(x, y, external_gradient=dL_dy)

    monkeypatch.setattr(trainer, "training_step", half_of_it)
    assert "gradient error" in verify.check_kernels(case, trainer, 8192).problem


# ------------------------------------------------------------------------------------------------ plans


def test_the_planner_is_compared_with_the_best():
    summary = plans.summary("a", 1024, 9, [(3.0, 1), (2.0, 4), (5.0, 7)])
    assert summary["chosen_rank"] == 1 and summary["best_rank"] == 4 and summary["slower_by"] == 0.5
    assert plans.summary("a", 1024, 9, []) == {"config": "a", "batch": 1024, "candidates": 9, "run": 0}


@pytest.mark.parametrize("kind", plans.KINDS)
def test_one_candidate_is_offered_at_a_time(kind):
    place = plans.KINDS[kind]
    original = getattr(place.module, place.name)
    with plans.only("a plan", place):
        assert getattr(place.module, place.name)("spec", "chip", encoding_gradient=True) == ["a plan"]
    assert getattr(place.module, place.name) is original


# ------------------------------------------------------------------------------------------------ stages


def test_stages_are_told_and_written(on_host, capsys, monkeypatch, tmp_path):
    """A call of two kernels; a third is of a call of another kind."""
    kernels = [
        SimpleNamespace(name=name, plan="a plan", registers=40, shared_bytes=64, blocks=132)
        for name in ("gradient", "adam", "inference")
    ]
    stage_times = {0: [("gradient", 7.126), ("adam", 3.0)], 1: [("inference", 4.0)]}
    make_trainer, counts = cases.Case.make_trainer, iter(range(9))

    def explaining(case: cases.Case) -> tcnn.Trainer:
        trainer = make_trainer(case)
        trainer.explain = lambda: SimpleNamespace(kernels=kernels)
        return trainer

    def timed(trainer, call):
        call(5)
        return stage_times[next(counts)]

    monkeypatch.setattr(cases.Case, "make_trainer", explaining)
    monkeypatch.setattr(stages, "stage_times", timed)
    monkeypatch.setattr(stages, "time_groups", ledger_rows.time_groups)
    monkeypatch.setattr(stages, "device_status", ledger_rows.device_status)
    out = tmp_path / "stages.jsonl"
    assert stages.main([NAME, "--batches", "8", "--out", str(out)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{NAME} 2^8 train: 250.0 us; gradient 7.1, adam 3.0"
    assert told[1] == "    gradient: a plan, 40 registers, 64 bytes shared, 132 blocks" and len(told) == 5
    info, train, infer = (json.loads(line) for line in out.read_text().splitlines())
    assert info["info"]["device"] == "a device"
    assert train["stages"] == [{"kernel": "gradient", "us": 7.13}, {"kernel": "adam", "us": 3.0}]
    assert (train["config"], train["batch"], train["call"], train["us"]) == (NAME, 256, "train", 250.0)
    assert [kernel["kernel"] for kernel in infer["kernels"]] == ["inference"] and infer["call"] == "infer"
    assert stages.main(["none"]) == 2 and "no configuration none" in capsys.readouterr().err


def test_launches_of_recorded_calls_are_noted(monkeypatch):
    """While they are made one by one; before and after, calls are recorded to be launched by a native function."""
    with no_device():
        (case,) = cases.load_cases(["image_hash"])
        trainer, data = case.make_trainer(), cases.DeviceData.of(case, 1024)
        x, y = data.x[0], data.y[0]

        def record() -> LaunchList:
            for _ in range(3):
                trainer.training_step(x, y)
            return trainer._repeated.find(x, y).launches

        def is_native(launches: LaunchList) -> bool:
            return launches.run != launches.through_bindings

        names: list[str] = []
        assert is_native(record())
        with stages.one_by_one(trainer):
            assert not is_native(record())
            with stages.every_launch(names.append):
                trainer.training_step(x, y)
        assert names == ["gradient", "adam"] and is_native(record())


# --------------------------------------------------------------------------------------------- host time


def test_the_parts_of_a_call_are_told_without_a_device(capsys, monkeypatch):
    monkeypatch.setattr(host_time, "device_status", lambda index: SimpleNamespace(usable=False))
    monkeypatch.setattr(host_time, "REPEATS", 2)
    assert host_time.main(["--configs", "mlp_only_w64_h2"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "microseconds a call; no device, launches do nothing"
    number = r"(-?\d+\.\d\d)"  # what is subtracted is measured too
    for line, (call, n) in zip(lines, (("training", 2), ("inference", 1)), strict=True):
        told = re.fullmatch(
            rf"mlp_only_w64_h2 {call}: whole call {number}, {n} launches {number}, own Python {number}", line
        )
        whole, native, own = (float(part) for part in told.groups())
        assert own == pytest.approx(whole - native, abs=0.02) and own > 0
    assert host_time.main(["--configs", "none"]) == 2 and "no configuration none" in capsys.readouterr().err
