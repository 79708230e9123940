"""Kernels compile beside one another, and are taken once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from numba_tcnn.fused import programs
from numba_tcnn.fused.ahead import AheadOfCalls
from numba_tcnn.fused.cache import CompiledKernel
from numba_tcnn.fused.compiler import CompileError
from numba_tcnn.fused.jobs import KernelSource, choose
from numba_tcnn.fused.mlp import WeightGradient
from numba_tcnn.fused.plan import KernelPlan, PlanError, architecture
from numba_tcnn.fused.programs import Toolbox
from numba_tcnn.fused.tiles import Tile

DW = WeightGradient(Tile("d", 128, 16, 0), Tile("h", 128, 16, 0), 0, 1, 1, 8)
SECONDS = 20  # to wait for a thread before something must be wrong


def kernel(name: str, spill_bytes: int = 0) -> CompiledKernel:
    return CompiledKernel(name.encode(), name, 32, spill_bytes, 0.1, 0, 0, 0, 0)


def toolbox() -> Toolbox:
    return Toolbox(SimpleNamespace(properties=SimpleNamespace(capability=(9, 0))))


@dataclass(frozen=True)
class FakeJob:
    """Candidates are lists of the names of their kernels."""

    candidates: tuple[tuple[str, ...], ...]

    def plans(self, chip) -> list:
        if not self.candidates:
            raise PlanError("nothing fits")
        return list(self.candidates)

    def sources(self, plan) -> list[KernelSource]:
        return [KernelSource(None, name, None) for name in plan]

    def describe(self) -> str:
        return "fake"


def test_what_was_started_is_taken_once() -> None:
    ahead, made = AheadOfCalls(), []

    def compile_it() -> CompiledKernel:
        made.append(threading.current_thread())
        return kernel("a")

    assert ahead.take("a") is None
    ahead.start("a", compile_it)
    ahead.start("a", compile_it)
    assert ahead.take("a") == kernel("a")
    assert ahead.take("a") is None
    assert len(made) == 1
    assert made[0] is not threading.current_thread()


def test_errors_come_to_who_takes() -> None:
    ahead = AheadOfCalls()

    def fail() -> CompiledKernel:
        raise CompileError("no")

    ahead.start("a", fail)
    with pytest.raises(CompileError, match="no"):
        ahead.take("a")


def test_kernels_of_a_plan_compile_together(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)

    def compile_kernel(make_body, description: str, capability, *, threads: int, min_blocks: int) -> CompiledKernel:
        together.wait(SECONDS)  # breaks, and raises, unless all three are here at once
        return kernel(description)

    monkeypatch.setattr(programs, "compile_kernel", compile_kernel)
    tools, job, other = toolbox(), FakeJob((("a", "b"),)), FakeJob((("c",),))
    for begun in (job, other):
        tools.start(begun)
    assert [made.entry for _, made in choose(job, tools.chip, tools.compile)[1]] == ["a", "b"]
    assert [made.entry for _, made in choose(other, tools.chip, tools.compile)[1]] == ["c"]


def test_further_candidates_compile_only_when_the_first_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile_kernel(make_body, description: str, capability, *, threads: int, min_blocks: int) -> CompiledKernel:
        made.append(description)
        return kernel(description, spill_bytes=1000 if description.startswith("spills") else 0)

    monkeypatch.setattr(programs, "compile_kernel", compile_kernel)
    tools = toolbox()
    job = FakeJob((("spills",), ("fits",), ("never asked for",)))
    tools.start(job)
    plan, _ = choose(job, tools.chip, tools.compile)
    assert plan == ("fits",)
    assert made == ["spills", "fits"]


@pytest.mark.parametrize(
    ("registers", "layers", "expected"),
    [
        (255, (), ["8 warps of 16", "8 warps of 32"]),
        (128, (), ["8 warps of 16", "4 warps of 16", "8 warps of 32"]),  # with fewer blocks there are more registers
        (255, (DW,), ["8 warps of 16", "4 warps of 16", "8 warps of 32"]),  # what a warp sums depends on their number
    ],
)
def test_more_or_fewer_warps_that_do_the_same_are_not_tried(registers: int, layers: tuple, expected: list[str]) -> None:
    made = []

    def planned(warps: int, rows: int) -> KernelSource:
        plan = KernelPlan("propagate", warps, rows, 1, x=Tile("x", warps * rows, 16, 0), layers=layers)
        return KernelSource.planned(lambda target: None, f"{warps} warps of {rows}", plan)

    class Job(FakeJob):
        def sources(self, plan: tuple[int, int]) -> list[KernelSource]:
            return [planned(*plan)]

    def compile_source(source: KernelSource) -> CompiledKernel:
        made.append(source.description.split(" KernelPlan")[0])
        spills = source.plan.rows == 16
        return replace(kernel("any", spill_bytes=1000 if spills else 0), registers=registers)

    plan, _ = choose(Job(((8, 16), (4, 16), (8, 32))), architecture((9, 0)), compile_source)
    assert plan == (8, 32) and made == expected


def test_a_job_without_plans_is_told_of_when_it_is_loaded() -> None:
    tools = toolbox()
    tools.start(FakeJob(()))
    with pytest.raises(PlanError, match="nothing fits"):
        tools.load_first_that_fits(FakeJob(()))
