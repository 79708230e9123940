"""The benchmark's kernels on sm_90 are what is on record: registers, spills, memory, and instructions in the PTX. They
compile without a device. What else is looked for in the PTX: see test_fused_compile.py.

Where it fails, `python -m benchmarks.kernel_record` tells what changed, and records it where that is meant.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_fused_compile import check, needs_toolkit, ptx_of  # noqa: F401

from benchmarks import kernel_record
from benchmarks.cases import Case, load_cases
from benchmarks.kernel_record import ARCH, COMMAND, RECORD, Line, compare, lines_of, parse, render
from benchmarks.timed_jobs import timed_jobs
from numba_tcnn.fused import cache, offline

RECORDED, TOOLCHAIN = parse(RECORD.read_text())

GRADIENT = Line("a", "train", "gradient", 168, 24, 24, 144368, 31, 24, 38, 0, "single, 12 warps x 16 samples, wgmma")
ADAM = Line("a", "optimizer", "adam", 46, 0, 0, 1024, 0, 5, 1, 0, "element-wise")

needs_the_record_s_compilers = pytest.mark.skipif(
    "CI" not in os.environ and cache.toolchain_versions() != TOOLCHAIN,
    reason=f"the record is of {', '.join(TOOLCHAIN)}; here are {', '.join(cache.toolchain_versions())}",
)


# ------------------------------------------------------------------------------------------ real kernels


@pytest.mark.slow
@needs_toolkit
@needs_the_record_s_compilers
@pytest.mark.parametrize("case", load_cases(), ids=lambda case: case.name)
def test_kernels_are_those_on_record(case: Case, ptx_of) -> None:  # noqa: F811
    assert cache.toolchain_versions() == TOOLCHAIN, f"these are not the compilers of the record: {COMMAND}"
    narrow = min(case.specs()[0].network.hidden_widths) < 64  # such layers' dW is summed by mma.sync
    lines = []
    for call, job in timed_jobs(case, ARCH).items():
        record = offline.compile_job(job, ARCH)
        lines += lines_of(case.name, call, record)
        for made in record.taken:
            kernel = cache.load(made.key)
            check(kernel, ptx_of)
            assert not kernel.serialized, f"{call} {made.kernel}: each wgmma waits for the one before"
            if "wgmma" in made.plan:
                text = ptx_of[kernel.cubin]
                assert re.search(r"^\.target sm_90a", text, re.M) and "wgmma.mma_async" in text
                assert narrow or not re.search(r"(?<![\w.])mma\.sync", text), f"{call} {made.kernel}: mma.sync"
    changes = compare([line for line in RECORDED if line.config == case.name], lines)
    assert not changes, "\n".join([*map(str, changes), f"where that is meant, record it: {COMMAND}"])


@pytest.mark.parametrize("case", load_cases(), ids=lambda case: case.name)
def test_the_calls_on_record_are_those_that_are_timed(case: Case) -> None:
    """And their kernels those that `numba-tcnn compile` makes, which are the engine's."""
    jobs = timed_jobs(case, ARCH)
    assert set(jobs) == {line.call for line in RECORDED if line.config == case.name}
    model, loss, optimizer = case.specs()
    assert set(jobs.values()) <= set(offline.first_calls(model, optimizer, loss))
    assert ("train-large" in jobs) == ("infer-large" in jobs) == (case.name in ("image_hash", "nerf_density", "sdf"))


# ------------------------------------------------------------------------------------------ the file


def test_the_file_is_as_the_command_writes_it() -> None:
    assert render(RECORDED, TOOLCHAIN) == RECORD.read_text()
    assert {line.config for line in RECORDED} == {case.name for case in load_cases()}
    assert len({line.which for line in RECORDED}) == len(RECORDED)


def test_a_change_of_one_kernel_is_a_change_of_one_line() -> None:
    before, after = (
        render([GRADIENT, line], ["numba 1.0"]).splitlines()
        for line in (ADAM, replace(ADAM, registers=200, shared=100_000, plan="of another kind"))
    )
    assert sum(one != other for one, other in zip(before, after, strict=True)) == 1


# ---------------------------------------------------------------------------------------- comparing


@pytest.mark.parametrize(
    ("figure", "new", "told", "needs_consent"),
    [
        ("registers", 160, "168 -> 160 (better)", False),
        ("registers", 176, "168 -> 176 (worse)", False),
        ("registers", 177, "168 -> 177 (worse)", True),
        ("spill", 25, "24 -> 25 (worse)", True),
        ("spill", 0, "24 -> 0 (better)", False),
        ("local", 32, "24 -> 32 (worse)", True),
        ("reductions", 39, "38 -> 39 (worse)", False),
        ("vector_loads", 12, "24 -> 12 (different)", False),
        ("plan", "staged", "single, 12 warps x 16 samples, wgmma -> staged (different)", False),
    ],
)
def test_a_change_is_told_with_its_direction(figure: str, new: object, told: str, needs_consent: bool) -> None:
    (change,) = compare([GRADIENT, ADAM], [ADAM, replace(GRADIENT, **{figure: new})])
    assert str(change) == f"a train gradient: {figure}: {told}" and change.needs_consent == needs_consent


def test_kernels_that_come_and_go_are_told() -> None:
    other = replace(GRADIENT, kernel="phased_gradient", spill=1000)
    assert compare([ADAM, GRADIENT], [ADAM, GRADIENT]) == []
    changes = compare([ADAM, GRADIENT], [other, ADAM])
    assert [str(change) for change in changes] == [
        "a train gradient: the kernel (gone)",
        "a train phased_gradient: the kernel (new)",
    ]
    assert not any(change.needs_consent for change in changes)


def record_of(*names: str, taken: bool = True, problem: str = "") -> offline.JobRecord:
    kernels = tuple(
        offline.KernelRecord(
            arch=ARCH, call="a call", kernel=name, plan="a plan", seconds=1.0, from_cache=False, registers=i,
            spill_bytes=0, local_bytes=8, shared_bytes=64, threads=128, mma_instructions=3, vector_loads=2,
            reductions=1, taken=taken or i > 0, key=str(i),
        )
        for i, name in enumerate(names)
    )  # fmt: skip
    return offline.JobRecord(ARCH, "a call", 1.0, kernels, problem)


def test_kernels_of_one_name_are_told_apart_and_those_in_vain_are_counted() -> None:
    lines = lines_of("a", "train", record_of("encode", "gradient", "encode"))
    assert [line.kernel for line in lines] == ["encode", "gradient", "encode.2"]
    assert lines[2] == Line("a", "train", "encode.2", 2, 0, 8, 64, 3, 2, 1, 0, "a plan")
    (line,) = lines_of("a", "train", record_of("gradient", "gradient", taken=False))
    assert (line.registers, line.passed) == (1, 1)
    with pytest.raises(RuntimeError, match="a train: no kernel plan can be used"):
        lines_of("a", "train", record_of(problem="no kernel plan can be used"))


# --------------------------------------------------------------------------------------- the command


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kernels.txt"
    path.write_text(render([GRADIENT, ADAM], TOOLCHAIN))
    monkeypatch.setattr(kernel_record, "RECORD", path)
    monkeypatch.setattr(kernel_record, "toolchain_problem", lambda capabilities: None)
    return path


def run(made: list[Line], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(kernel_record, "compile_cases", lambda cases, processes: made)
    monkeypatch.setattr(kernel_record, "toolchain_versions", lambda: TOOLCHAIN)
    return kernel_record.main(list(arguments))


def test_the_command_tells_what_changed_and_writes_it(file, monkeypatch, capsys) -> None:
    made = [replace(GRADIENT, registers=160, mma=32), ADAM]
    assert run(made, monkeypatch) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a train gradient: registers: 168 -> 160 (better)",
        "a train gradient: mma: 31 -> 32 (different)",
        "2 kernels: 1 better, 1 different",
    ]
    assert parse(file.read_text()) == ([ADAM, made[0]], TOOLCHAIN)
    assert run(made, monkeypatch) == 0
    assert capsys.readouterr().out == "2 kernels: nothing changed\n"


def test_the_command_writes_more_spills_only_if_that_is_accepted(file, monkeypatch, capsys) -> None:
    before, made = file.read_text(), [replace(GRADIENT, spill=32), ADAM]
    assert run(made, monkeypatch) == 1
    out, err = capsys.readouterr()
    assert "spill: 24 -> 32 (worse)" in out and "is left as it was: --accept-worse" in err
    assert file.read_text() == before
    assert run(made, monkeypatch, "--accept-worse") == 0 and "32" in file.read_text()


def test_the_command_says_when_compilers_changed_and_when_there_are_none(file, monkeypatch, capsys) -> None:
    file.write_text(render([ADAM], ["numba 0.1"]))
    assert run([ADAM], monkeypatch) == 0
    assert capsys.readouterr().out.startswith("recorded with numba 0.1; this is ")
    monkeypatch.setattr(kernel_record, "toolchain_problem", lambda capabilities: "no compiler")
    assert kernel_record.main([]) == 2 and capsys.readouterr().err == "no compiler\n"
