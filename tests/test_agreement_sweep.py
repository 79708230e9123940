"""`python -m benchmarks.agreement` without a GPU: its draws, that it survives harm, that it finds a wrong kernel."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulated_driver import CTYPES, EmulatedDriver, installed
from risky_work import harm, slow

from benchmarks.agreement import __main__ as command
from benchmarks.agreement import examine
from benchmarks.agreement.components import components_of, coverage
from benchmarks.agreement.deck import Deck
from benchmarks.agreement.draws import Draw
from benchmarks.agreement.examine import Scale
from benchmarks.agreement.jobs import jobs_of
from benchmarks.agreement.processes import LAST_CHARACTERS, outcomes
from benchmarks.agreement.random_draws import random_draw, random_optimizer_of
from numba_tcnn.fused.plan import architecture

GRID = {"otype": "HashGrid", "n_levels": 2, "log2_hashmap_size": 4, "base_resolution": 3}
NETWORK = {"otype": "CutlassMLP", "n_neurons": 16, "n_hidden_layers": 1, "bias": False}
SGD = {"otype": "EMA", "decay": 0.5, "nested": {"otype": "SGD"}}
TINY = [
    Draw(
        2, 2, {"otype": "Identity"}, NETWORK | {"activation": "ReLU", "output_activation": "None"}, "L2", optimizer=SGD
    ),
    Draw(2, 4, GRID, None, "L1", "float64", dtype="float32", layout="columns on the host", optimizer={"otype": "Adam"}),
]
SCALE = Scale((3, 20, 40), 24, 2, 2)


# ------------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize("seed", [0, 1, 20261201])
def test_every_component_occurs_in_300_draws(seed: int) -> None:
    draws = [random_draw(Deck(seed, number)) for number in range(300)]
    counts = coverage(draws)
    names = {kind for kind, _ in counts}
    assert names >= {"dtype", "layout", "encoding", "hash", "width", "activation", "loss", "optimizer", "levels in use"}
    assert len(counts) == 126, "as many values as all kinds of component have"
    assert min(counts.values()) >= 3, counts.most_common()[-5:]


def test_draws_are_the_same_again_and_each_has_its_own_place() -> None:
    again = [random_draw(Deck(5, number)) for number in (0, 7, 7, 8)]
    assert again[1] == again[2] != again[3] and again[0] == random_draw(Deck(5, 0)) != random_draw(Deck(6, 0))
    turns = ["".join(Deck(3, number + i).deal("a name", "abc") for i in range(3)) for number in range(0, 30, 3)]
    assert all(set(turn) == set("abc") for turn in turns) and len(set(turns)) > 1


def test_every_draw_has_plans_on_hopper() -> None:
    for number in range(300):
        draw = random_draw(Deck(1, number))
        assert not examine.missing_plan(draw, (9, 0)), f"draw {number}: {draw}"


def test_a_draw_goes_to_json_and_back() -> None:
    for number in range(50):
        draw = random_draw(Deck(2, number))
        record = examine.Record(2, number, vars(draw) | {"spec": None})
        assert record.draw.pop("spec") is None
        assert Draw(**json.loads(json.dumps(record.draw))) == draw
        assert components_of(draw)


# --------------------------------------------------------------------------------------------- processes


def test_harm_to_one_process_is_told_and_the_others_go_on() -> None:
    found = {o.number: o for o in outcomes([10, 11, 1, 12, 13, 2, 14, 3], harm, processes=2, seconds_each=2)}
    assert {number: outcome.result for number, outcome in found.items() if outcome.result} == {
        1: 2, 2: 4, 3: 6, 14: "what was found before"
    }  # fmt: skip
    assert "raised ValueError: not this one" in found[10].problem and "in harm" in found[10].problem
    assert found[11].problem.startswith("took more than 2 s\nTimeout (") and "in harm" in found[11].problem
    assert "in sleep_below" in found[11].problem
    assert len(found[11].problem) < LAST_CHARACTERS + 100, "of stacks of any depth"
    assert found[12].problem.startswith("its process died (exit status 3)")
    assert found[13].problem.startswith("its process died (SIGSEGV)") and "Segmentation fault" in found[13].problem
    assert len(found) == 8


def test_time_that_is_over_leaves_what_is_done() -> None:
    start = time.monotonic()
    found = list(outcomes(range(9), slow, processes=2, seconds_each=100, until=start + 4))
    assert sorted(outcome.number for outcome in found) == [0, 1, 2] and time.monotonic() - start < 8


# ------------------------------------------------------------------------------------------- the command


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small draws in place of random ones."""
    for module in (command, examine):
        monkeypatch.setattr(module, "random_draw", lambda deck: TINY[deck.number])


class WrongDriver(EmulatedDriver):
    """One output of one kernel is off by 2 %, in the last row."""

    def cuLaunchKernel(self, function, *launch):
        returned = super().cuLaunchKernel(function, *launch)
        arguments, stream = launch[8], launch[7]
        if function.body.name == "inference":
            pointers = (CTYPES["u64"] * len(function.parameters)).from_address(int(arguments))
            given = {
                name: CTYPES[kind].from_address(pointer).value
                for pointer, (name, kind) in zip(pointers, function.parameters, strict=True)
            }

            def spoil() -> None:
                last = given["y"] + (given["batch"] - 1) * given["y_stride"]
                self.memory.bytes_at(last, 4).view(np.float32)[0] *= 1.02

            self._queue(stream, spoil)
        return returned


def run(tmp_path: Path, *arguments: str) -> tuple[int, list[dict]]:
    out = tmp_path / "found.jsonl"
    options = ("--seed", "3", "--draws", "2", "--processes", "1", "--out", str(out))
    status = command.main([*options, *arguments], scale=SCALE)
    return status, [json.loads(line) for line in out.read_text().splitlines()]


def test_draws_agree_on_the_emulated_device(tiny, gpu, no_reference, tmp_path, capsys) -> None:
    """And what is done is not done again."""
    status, records = run(tmp_path, "--table", str(tmp_path / "table.md"))
    assert status == 0 and [record["status"] for record in records] == ["agrees", "agrees"], records
    for record, draw in zip(records, TINY, strict=True):
        assert set(record["figures"]) == set(examine.FIGURES)
        assert Draw(**record["draw"]) == draw and record["plans"]
    out, err = capsys.readouterr()
    assert (tmp_path / "table.md").read_text() == out and "2 agree, 0 fail" in out
    assert "| activation ReLU | 1 |" in out and "| encoding HashGrid | 1 |" in out and "Worst errors in float32" in out
    assert "seed 3: 0 draws done before, 2 to do" in err
    whole = (tmp_path / "found.jsonl").read_text()
    (tmp_path / "found.jsonl").write_text(whole + whole[:100])  # a run that was cut while it wrote
    status, _ = command.main(["--draws", "2", "--out", str(tmp_path / "found.jsonl"), "--resume"]), None
    assert status == 0 and "seed 3: 2 draws done before, 0 to do" in capsys.readouterr().err


def test_a_wrong_kernel_is_reported(tiny, no_reference, monkeypatch, tmp_path, capsys) -> None:
    with installed(WrongDriver(), monkeypatch):
        status, records = run(tmp_path, "--draws", "1")
    assert status == 1 and records[0]["status"] == "fails"
    assert any(failure.startswith("outputs: ") for failure in records[0]["failures"])
    assert not records[0]["figures"]["outputs"]["error"] <= 5e-3 and records[0]["figures"]["dL/dx"]["error"] <= 5e-3
    out, _ = capsys.readouterr()
    assert "0 agree, 1 fail" in out and "draw 0 of seed 3: 2 -> Identity" in out


def test_only_running_compares_nothing(tiny, monkeypatch, no_reference, tmp_path) -> None:
    monkeypatch.setattr(command, "ONLY_RUN", replace(SCALE, batches=(1, 2, 3)))
    with installed(WrongDriver(), monkeypatch):
        status, records = run(tmp_path, "--draws", "1", "--only-run")
    assert status == 0 and not records[0]["figures"] and records[0]["plans"]


def test_without_a_device_it_says_so_in_a_line(capsys) -> None:
    assert command.main(["--draws", "1"]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("nothing can be compared: ") and err.count("\n") == 1
    assert command.main(["--compile", "sm_1"]) == 2


def test_a_draw_compiles_what_its_jobs_say(tiny, monkeypatch, no_reference) -> None:
    """All but optimizers with SGD inside, whose rate depends on the gradient."""
    first = replace(TINY[0], optimizer={"otype": "Adam", "beta1": 0.5}, layout="columns", output_dtype="float16")
    for draw in (first, replace(TINY[1], input_dtype="float16", max_level=0.6)):
        foreseen = {
            source.description
            for job in jobs_of(draw, (9, 0), max(SCALE.sizes(draw)))
            for source in job.sources(job.plans(architecture((9, 0)))[0])
        }
        with installed(EmulatedDriver(), monkeypatch) as gpu:
            record = examine.examine(draw, examine.Record(0, 0, {}), SCALE, compare=False)
            assert record.status == "agrees", record.failures
            assert set(gpu.compiler.descriptions) <= foreseen
            made = jobs_of(draw, (9, 0), 40)
            assert len(made) == len(set(made))


# ------------------------------------------------------------------------------------------ many of them

SEED = int(os.environ.get("NUMBA_TCNN_TEST_SEED") or 0)
N_PARTS = 12
N_DRAWS = int(os.environ.get("NUMBA_TCNN_TEST_DRAWS") or 24)


def shrunk(draw: Draw) -> Draw:
    """With a network that the emulator computes in a second: at most 48 wide, 3 layers deep, of 20 outputs."""
    if draw.network is None:
        return draw
    network = dict(draw.network)
    if "hidden" in network:
        network["hidden"] = [min(width, 48) for width in network["hidden"][:3]]
    else:
        network["n_neurons"] = min(network["n_neurons"], 32 if network["otype"] == "FullyFusedMLP" else 48)
        network["n_hidden_layers"] = min(network["n_hidden_layers"], 3)
    return replace(draw, network=network, n_output_dims=min(draw.n_output_dims, 20))


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(N_PARTS))
def test_random_draws_agree_on_the_emulated_device(part: int, gpu, no_reference) -> None:
    """NUMBA_TCNN_TEST_SEED and NUMBA_TCNN_TEST_DRAWS choose them; about half a minute each."""
    for number in range(part, N_DRAWS, N_PARTS):
        deck = Deck(SEED, number)
        draw = shrunk(random_draw(deck))
        draw = replace(draw, optimizer=random_optimizer_of(deck, draw.spec))
        record = examine.examine(draw, examine.Record(SEED, number, {}), Scale((2, 33, 50), 35, 2, 3))
        assert record.status == "agrees", f"draw {number} of seed {SEED}: {draw!r}: {record.failures}"
