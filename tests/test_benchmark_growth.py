"""The points at which growth is measured, and the pictures of measured ones; no GPU is needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import growth, ledger_rows
from benchmarks.cases import Case, load_cases
from benchmarks.floors import DEVICE, training_floor
from benchmarks.timed_jobs import timed_jobs
from numba_tcnn.fused.jobs import Job
from numba_tcnn.fused.offline import JobRecord

H200 = {"info": {"device": DEVICE}}


def of(axis: str) -> dict[str, list[growth.Point]]:
    series: dict[str, list[growth.Point]] = {}
    for point in growth.points([axis]):
        series.setdefault(point.series, []).append(point)
    return series


# ---------------------------------------------------------------------------------------------- points


def test_every_axis_goes_from_end_to_end() -> None:
    for some in of("batch").values():
        assert [point.value for point in some] == [1 << k for k in range(12, 23)]
        assert all(point.value == 1 << point.log2_batch for point in some)
        assert len({id(point.case) for point in some}) == 1
    for some in of("width").values():
        assert [point.value for point in some] == [16, 32, 48, 64, 96, 128]
        assert all(point.value == point.case.n_input_dims == point.case.specs()[0].network.n_neurons for point in some)
    for some in of("levels").values():
        assert [point.value for point in some] == [point.case.specs()[0].encoding.n_levels for point in some]
        assert (some[0].value, some[-1].value) == (4, 24)
    (some,) = of("table").values()
    assert [point.value for point in some] == [1 << k for k in range(14, 25, 2)]
    assert all(point.value == 1 << point.case.specs()[0].encoding.log2_hashmap_size for point in some)
    assert {len(of(axis)) for axis in ("batch", "width", "levels")} == {2}


def test_points_of_a_series_differ_in_nothing_else() -> None:
    for axis, part in (("width", "network"), ("levels", "encoding"), ("table", "encoding")):
        for some in of(axis).values():
            others = [{key: value for key, value in point.case.config.items() if key != part} for point in some]
            assert all(other == others[0] for other in others)
            assert {point.log2_batch for point in some} == {18}


def test_a_name_is_one_case_everywhere() -> None:
    """Also those of the configurations themselves, whose kernels are then in the cache already."""
    cases = [*load_cases(), *(point.case for point in growth.points(growth.AXES))]
    assert all(one == other for one in cases for other in cases if one.name == other.name)
    assert len({case.name for case in cases}) == 16 + 4 + 12 + 6


def test_an_unknown_axis_is_named() -> None:
    with pytest.raises(ValueError, match="no axis depth; there are batch, width, levels, table"):
        growth.points(["batch", "depth"])


# ------------------------------------------------------------------------------------------- measuring


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """What was asked of the ledger's rows: (case, batches). Cases of 96 neurons have no kernels."""
    asked = []

    def case_rows(case: Case, log2_batches: list[int]):
        asked.append((case.name, log2_batches))
        if "w96" in case.name:
            yield {"config": case.name, "skipped": "no kernel"}
            return
        for k in log2_batches:
            yield {"config": case.name, "batch": 1 << k, "train_ms": 1e-6 * (1 << k), "infer_ms": 0.01}

    monkeypatch.setattr(growth, "case_rows", case_rows)
    monkeypatch.setattr(growth, "info", lambda: H200["info"])
    monkeypatch.setattr(growth, "device_status", lambda i: SimpleNamespace(usable=True, compute_capability=(9, 0)))
    return asked


def test_points_are_measured_as_rows_of_the_ledger() -> None:
    assert growth.case_rows is ledger_rows.case_rows


def test_a_line_a_point(measured, tmp_path, capsys) -> None:
    out = tmp_path / "growth.jsonl"
    assert growth.main(["--axes", "batch,width", "--out", str(out)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [json.loads(line) for line in out.read_text().splitlines()]
    info, *rows = lines
    assert info == H200 and len(rows) == 22 + 12
    assert rows[3] == {
        "axis": "batch", "series": "image_hash", "value": 1 << 15, "config": "image_hash", "batch": 1 << 15,
        "train_ms": pytest.approx(0.032768), "infer_ms": 0.01,
    }  # fmt: skip
    assert measured[0] == ("image_hash", list(range(12, 23)))  # one trainer for all of them
    (wide, *_) = [row for row in rows if row["config"] == "mlp_only_w96_h2"]
    assert (wide["axis"], wide["value"], wide["skipped"]) == ("width", 96, "no kernel")


def test_a_point_that_failed_fails_the_run(measured, monkeypatch, capsys) -> None:
    monkeypatch.setattr(growth, "case_rows", lambda case, batches: iter([{"config": case.name, "failed": "wrong"}]))
    assert growth.main(["--axes", "table"]) == 1


def test_without_a_gpu_it_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setattr(growth, "device_status", lambda i: SimpleNamespace(usable=False, reason="no GPU here"))
    assert growth.main([]) == 2
    assert capsys.readouterr() == ("", "no point can be measured: no GPU here\n")


# ------------------------------------------------------------------------------------------- compiling


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were given to the compiler; inference has no kernels."""
    given = []

    def compile_jobs(jobs: list[Job], archs: list[str], *, processes: int):
        given.extend(jobs)
        for job in jobs:
            problem = "it spills" if "inference" in job.describe() else ""
            yield JobRecord(archs[0], job.describe(), 0.25, (), problem)

    monkeypatch.setattr(growth, "compile_jobs", compile_jobs)
    monkeypatch.setattr(growth, "toolchain_problem", lambda capabilities: None)
    monkeypatch.setattr(growth, "device_status", lambda i: SimpleNamespace(usable=False, compute_capability=None))
    return given


def test_all_kernels_of_all_points_are_compiled_once(compiled, capsys) -> None:
    assert growth.main(["--compile"]) == 1
    needed = {job for point in growth.points(growth.AXES) for job in timed_jobs(point.case, "sm_90").values()}
    assert set(compiled) == needed and len(compiled) == len(needed) > 100
    out = capsys.readouterr().out.splitlines()
    assert len(out) == len(needed)
    assert out[0] == f"[1/{len(needed)}] image_hash, gradients, float32 and float32 targets, RelativeL2: 0.2 s"
    assert out[1].endswith("image_hash, inference, float32 to float32: failed: it spills")


def test_another_architecture_can_be_compiled_for(compiled, monkeypatch, capsys) -> None:
    growth.main(["--compile", "--axes", "width", "--arch", "sm_80"])
    assert set(compiled) == {job for p in growth.points(["width"]) for job in timed_jobs(p.case, "sm_80").values()}
    assert growth.own_arch((8, 9)) == "sm_89" and growth.own_arch(None) == "sm_90"
    monkeypatch.setattr(growth, "toolchain_problem", lambda capabilities: "no compiler")
    assert growth.main(["--compile"]) == 2 and capsys.readouterr().err == "no compiler\n"


# -------------------------------------------------------------------------------------------- pictures


def lines_of(axis: str) -> list[dict]:
    rows = [
        {"axis": axis, "series": point.series, "value": point.value, "config": point.case.name,
         "batch": 1 << point.log2_batch, "train_ms": 0.001 * (i + 1), "infer_ms": 0.0005 * (i + 1)}
        for i, point in enumerate(growth.points([axis]))
    ]  # fmt: skip
    return rows[::-1]  # in any order


@pytest.mark.parametrize("axis", growth.AXES)
def test_a_picture_has_a_line_a_series_and_its_floor(axis: str) -> None:
    rows = lines_of(axis)
    figure = growth.figure(axis, rows, floors=True)
    train, infer = figure.axes
    series = of(axis)
    assert len(train.lines) == len(infer.lines) == 2 * len(series)
    drawn = {line.get_label(): line for line in train.lines}
    for name, some in series.items():
        own = sorted((row for row in rows if row["series"] == name), key=lambda row: row["value"])
        values = [point.value for point in some]
        np.testing.assert_allclose(drawn[name].get_xydata(), [(row["value"], 1e3 * row["train_ms"]) for row in own])
        floors = [training_floor(point.case, 1 << point.log2_batch).microseconds for point in some]
        np.testing.assert_allclose(drawn[f"{name}, floor"].get_xydata(), list(zip(values, floors, strict=True)))
    assert list(train.get_xticks()) == sorted({point.value for some in series.values() for point in some})
    without = growth.figure(axis, rows, floors=False)
    assert len(without.axes[0].lines) == len(series)


def test_pictures_are_drawn_of_lines_measured_before(tmp_path, capsys) -> None:
    path, folder = tmp_path / "growth.jsonl", tmp_path / "plots"
    failed = {"axis": "table", "series": "nerf_density", "value": 1 << 14, "failed": "wrong"}
    path.write_text(
        "".join(f"{json.dumps(line)}\n" for line in (H200, *lines_of("levels"), *lines_of("batch"), failed))
    )
    growth.main(["--read", str(path), "--plots", str(folder)])
    assert sorted(path.name for path in folder.iterdir()) == ["growth_batch.png", "growth_levels.png"]
    assert growth.main(["--read", str(tmp_path / "none"), "--plots", str(folder)]) == 2
