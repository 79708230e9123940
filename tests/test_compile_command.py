"""`numba-tcnn compile`: what it says, and that the engine then finds every kernel.

Most tests put a stand-in for the compiler below the disk cache (`compiler._compile`), so keys, cache files and the
choice of plans are real. The engine that comes afterwards runs on an emulated device of the same compute capability.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from emulated_driver import EmulatedDriver, installed
from test_fused_cache import KERNEL
from test_fused_compile import needs_toolkit

import numba_tcnn as tcnn
from benchmarks import compile_sweep
from numba_tcnn import cli, compile_command, specs
from numba_tcnn.config import parse_model
from numba_tcnn.config_encodings import ENCODINGS
from numba_tcnn.config_optimizers import OPTIMIZERS
from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused import cache, compiler, offline
from numba_tcnn.fused.jobs import InferenceJob
from numba_tcnn.fused.stage_io import InferenceOptions
from numba_tcnn.specs import AdamSpec, LossSpec

GRID = {
    "encoding": {"otype": "HashGrid", "n_levels": 3, "log2_hashmap_size": 6, "base_resolution": 3},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
}
NEVER_SPILL = ("OptimizerJob.", "CollectJob.", "GradientJob.sources.<locals>.make_body")
IDENTITY = GRID | {"encoding": {"otype": "Identity"}}
CONSTANT = GRID | {"loss": {"otype": "ConstantGradient", "gradient": [1.0, -2.0, 0.5]}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_TCNN_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


@pytest.fixture
def made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Threads of each kernel that was compiled; the code is that of no kernel.

    Planned kernels, but those of staged dW, spill unless a multiprocessor shall hold only one block of them, so that
    plans are passed over.
    """
    made: list[int] = []

    def stand_in(make_body: Callable, capability, threads: int, min_blocks: int) -> cache.CompiledKernel:
        made.append(threads)
        spills = min_blocks > 1 and not make_body.__qualname__.startswith(NEVER_SPILL)
        return replace(KERNEL, spill_bytes=1000 if spills else 0)

    monkeypatch.setattr(compiler, "_compile", stand_in)
    monkeypatch.setattr(compiler, "toolchain_problem", lambda capabilities: None)
    return made


@pytest.fixture
def nothing_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr(compiler, "_compile", refuse)


def write(folder: Path, config: dict, name: str = "config.json") -> str:
    path = folder / name
    path.write_text(json.dumps(config))
    return str(path)


def compile_config(path: str, *more: str, inputs: int = 2, outputs: int = 3) -> int:
    arguments = ["compile", path, "--inputs", str(inputs), "--outputs", str(outputs), "--processes", "1", *more]
    return cli.main(arguments)


# ------------------------------------------------------------------------------------------------- the cache


def use_everything(model: tcnn.Model, n_in: int, n_out: int) -> None:
    """All calls that `first_calls` names, on arrays of NumPy."""
    rng = np.random.default_rng(0)
    for dtype in ("float64", "float16"):
        x, y = rng.random((40, n_in)).astype(dtype), rng.random((40, n_out))
        model.trainer.training_step(x, y)
        for out in ("float32", "float16"):
            model.network.inference(x, dtype=out)
    model.trainer.training_step(x, y, run_optimizer=False)
    _, context = model.network.forward(x.astype(np.float32))
    model.network.backward(context, np.ones((40, n_out), np.float32))


@pytest.mark.parametrize(("config", "n_in"), [(GRID, 2), (GRID, 4), (IDENTITY, 3), (IDENTITY, 8), (CONSTANT, 2)])
@pytest.mark.parametrize("capability", [(9, 0), (8, 6)])
def test_the_engine_compiles_nothing_afterwards(config, n_in, capability, made, tmp_path, monkeypatch) -> None:
    """Four dims of float32 and eight of float16 are aligned rows, two and three are not."""
    path = write(tmp_path, config)
    assert compile_config(path, "--arch", f"sm_{capability[0]}{capability[1]}", inputs=n_in) == 0
    assert made
    made.clear()
    emulated = EmulatedDriver(capability)

    def through_the_cache(make_body, description: str, capability, *, threads: int, min_blocks: int):
        found = compiler.compile_kernel(make_body, description, capability, threads=threads, min_blocks=min_blocks)
        assert found.from_cache, f"not in the cache: {description}"
        emulated.compiler.spills = lambda description: found.spill_bytes
        return emulated.compiler(make_body, description, capability, threads=threads, min_blocks=min_blocks)

    with installed(emulated, monkeypatch), monkeypatch.context() as patch:
        patch.setattr("numba_tcnn.fused.programs.compile_kernel", through_the_cache)
        model = tcnn.create_from_config(n_in, 3, config, engine="fused", strict=True)
        use_everything(model, n_in, 3)
        patch.setattr("numba_tcnn.fused.level_plan.LEVEL_SPLIT_BATCH", 1)  # as large batches are
        use_everything(model, n_in, 3)
        assert model.explain().engine == "fused" and len(model.explain().kernels) >= 11
        del model
    assert made == []


def test_another_architecture_is_not_in_the_cache(made, tmp_path) -> None:
    path = write(tmp_path, GRID)
    assert compile_config(path) == 0
    first = len(made)
    assert compile_config(path) == 0
    assert len(made) == first, "the second time all is cached"
    assert compile_config(path, "--arch", "sm_90", "--arch", "sm_86") == 0
    assert len(made) >= first + 11


# ------------------------------------------------------------------------------------------------ what is said


def lines_of(capsys: pytest.CaptureFixture) -> tuple[list[str], list[str]]:
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err.splitlines()


def test_the_table(made, tmp_path, capsys) -> None:
    assert compile_config(write(tmp_path, GRID), "--arch", "sm_75", "--arch", "sm_120", "--arch", "sm_75") == 0
    out, err = lines_of(capsys)
    headings, *rows, last = out
    assert headings.split()[:4] == ["arch", "kernel", "seconds", "registers"]
    assert "plan" in headings and headings.endswith("for")
    assert len(rows) == 50 and sum(row.startswith("sm_75 ") for row in rows) == 25
    (adam,) = [row for row in rows if row.startswith("sm_120") and " adam " in row]
    numbers = [KERNEL.registers, 0, KERNEL.local_bytes, 1024, 120, 33, 9]
    assert adam.split()[2:10] == ["1.25", *map(str, numbers)] and re.search(r"element-wise +optimizer$", adam)
    assert re.match(r"36 kernels for sm_75, sm_120 in \d+\.\d s \(\d+ compiled now, \d+ more passed over", last)
    assert last.endswith(f"in {cache.cache_directory()}")
    assert len(err) == 32 and err[0].startswith("[1/32] sm_75, gradients, float32 and float32 targets, L2: ")


def test_json_lines_hold_kernels_that_were_passed_over_and_cached_ones_say_the_same(made, tmp_path, capsys) -> None:
    path = write(tmp_path, GRID)
    runs = []
    for _ in range(2):
        assert compile_config(path, "--json") == 0
        runs.append([json.loads(line) for line in lines_of(capsys)[0]])
    first, second = runs
    assert not first[0]["from_cache"] and all(kernel["from_cache"] for kernel in second)
    assert [k | {"from_cache": True} for k in first] == second
    taken = [kernel for kernel in first if kernel["taken"]]
    assert len(taken) == 25 and len(first) > 25
    spilled = [kernel["spill_bytes"] == 1000 for kernel in first if not kernel["taken"]]
    assert any(spilled) and not all(spilled)  # a kernel that doesn't spill goes with its plan's others
    assert {k["kernel"] for k in taken} == {
        "gradient", "inference", "adam", "collect", "largest_gradient", "write_scales", "encode_levels",
        "level_gradients",
    }  # fmt: skip
    for kernel in taken:
        assert (kernel["mma_instructions"], kernel["vector_loads"], kernel["reductions"]) == (120, 33, 9)
        assert (kernel["local_bytes"], kernel["registers"], kernel["arch"]) == (16, 72, "sm_90")


def test_without_a_cache_it_says_so(made, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("NUMBA_TCNN_CACHE_DIR", "")
    assert compile_config(write(tmp_path, GRID)) == 0
    assert lines_of(capsys)[0][-1].endswith("kept nowhere, NUMBA_TCNN_CACHE_DIR turns the cache off")


def test_a_kernel_that_does_not_compile_is_named_and_the_others_are_kept(made, tmp_path, capsys, monkeypatch) -> None:
    stand_in = compiler._compile

    def some_fail(make_body, *arguments):
        if "OptimizerJob" in make_body.__qualname__:
            raise ValueError("not today")
        return stand_in(make_body, *arguments)

    monkeypatch.setattr(compiler, "_compile", some_fail)
    assert compile_config(write(tmp_path, GRID)) == 2
    out, err = lines_of(capsys)
    assert out[-1].startswith("17 kernels for sm_90")
    assert err[-1].startswith("numba-tcnn compile: sm_90, optimizer: no kernel plan can be used: element-wise: ")
    assert "did not compile (ValueError: not today)" in err[-1]


# ------------------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({}, ["--arch", "sm_91"], "--arch: 'sm_91' is no architecture, did you mean sm_90?"),
        ({}, ["--arch", "sm_90a"], "--arch: 'sm_90a' is no architecture, did you mean sm_90?"),
        ({}, ["--arch", "hopper"], "--arch: 'hopper' is no architecture; there are sm_75, sm_80"),
        ({}, ["--arch"], "--arch: expected one argument"),
        ({}, ["--inputs", "0"], "--inputs: '0' is not a whole number from 1 to 65536"),
        ({}, ["--outputs", "many"], "--outputs: 'many' is not a whole number"),
        ({}, ["--inputs", "8"], "encoding: a grid has 1 to 7 input dims, not 8"),
        ({}, ["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        ({}, ["--dtype", "float64"], "float64 has none yet"),
        ({}, ["--jason"], "unknown option --jason, did you mean --json?"),
        ({}, ["second.json"], "unknown argument second.json"),
        ({"loss": {"otype": "L3"}}, [], 'loss.otype: "L3" is not a loss'),
        ({"encoding": {"otype": "Identity"}}, ["--inputs", "20000"], "sm_90: no fused kernel fits layers of 16x20000"),
    ],
)
def test_wrong_input_is_one_line(change, more, message, nothing_compiles, tmp_path, capsys) -> None:
    assert compile_config(write(tmp_path, GRID | change), *more) == 2
    out, err = lines_of(capsys)
    assert out == [] and len(err) == 1, err
    assert err[0].startswith("numba-tcnn compile: ") and message in err[0]


def test_an_unreadable_config_and_missing_arguments_are_one_line(nothing_compiles, tmp_path, capsys) -> None:
    for path, message in (
        (str(tmp_path / "missing.json"), "can't be read: No such file or directory"),
        (str(tmp_path), "can't be read"),
        (write(tmp_path, {}, "a.json")[:-6] + "b.json", "can't be read"),
    ):
        assert compile_config(path) == 2
        out, err = lines_of(capsys)
        assert out == [] and len(err) == 1 and message in err[0], err
    (tmp_path / "c.json").write_text('{"loss": ')
    assert compile_config(str(tmp_path / "c.json")) == 2
    assert "not valid JSON" in lines_of(capsys)[1][0]
    assert cli.main(["compile", str(tmp_path / "c.json"), "--inputs", "2"]) == 2
    assert lines_of(capsys)[1] == ["numba-tcnn compile: the following arguments are required: --outputs"]


def test_missing_compilers_are_one_line_with_advice(nothing_compiles, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "numba_tcnn.fused.numba_bridge", None)  # importing it fails
    monkeypatch.delattr("numba_tcnn.fused.numba_bridge", raising=False)
    assert compile_config(write(tmp_path, GRID)) == 2
    (line,) = lines_of(capsys)[1]
    assert line.startswith("numba-tcnn compile: numba-cuda and NVVM can't be used: ")
    assert "pip install 'numba-tcnn[cuda13]'" in line and "need no GPU" in line


def test_a_folder_that_cannot_be_written_is_one_line(nothing_compiles, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(compiler, "toolchain_problem", lambda capabilities: None)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NUMBA_TCNN_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    assert compile_config(write(tmp_path, GRID)) == 2
    (line,) = lines_of(capsys)[1]
    assert "can't be written" in line and "name another folder in NUMBA_TCNN_CACHE_DIR" in line


# ----------------------------------------------------------------------------------------------- real kernels


def test_instructions_are_counted() -> None:
    text = """
    // mma.sync.aligned in a comment
    { @p ld.global.v4.f32 {%f1,%f2,%f3,%f4}, [%rd1]; } ld.global.nc.v2.b32 {%r1,%r2}, [%rd2];
    ld.global.f32 %f5, [%rd3]; ld.shared.v4.f32 {%f1,%f2,%f3,%f4}, [%r3]; ldmatrix.sync.aligned.m8n8.x4.shared.b16
    red.global.add.v2.f32 [%rd1], {%f1,%f2}; atom.global.add.u32 %r1, [%rd1], 1; red.relaxed.gpu.global.add.f32
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {}; wgmma.mma_async.sync.aligned.m64n8k16 {}; wgmma.fence.sync;
    """
    assert compiler.count_instructions(text) == {"mma_instructions": 2, "vector_loads": 2, "reductions": 3}


@needs_toolkit
def test_the_toolchain_of_this_machine_is_usable() -> None:
    assert compiler.toolchain_problem([(7, 5), (9, 0), (12, 0)]) is None
    assert "sm_130" in compiler.toolchain_problem([(13, 0)])


@needs_toolkit
@pytest.mark.slow
def test_real_kernels_tell_of_themselves(folder, tmp_path) -> None:
    """Inference of the grid's model on sm_80 and sm_75, whose products of 16 are two instructions of 8."""
    spec = parse_model(2, 3, GRID["encoding"], GRID["network"])
    job = InferenceJob(spec, InferenceOptions())
    records = [offline.compile_job(job, arch) for arch in ("sm_80", "sm_75", "sm_80")]
    (new,), (old,), (again,) = (record.kernels for record in records)
    assert again == replace(new, from_cache=True)
    assert (new.kernel, new.taken, new.spill_bytes, new.local_bytes) == ("inference", True, 0, 0)
    assert old.mma_instructions == 2 * new.mma_instructions > 0
    assert new.reductions == 0 and new.seconds > 0 and new.registers >= 32


@needs_toolkit
@pytest.mark.slow
def test_a_pool_of_processes_gives_the_same_kernels_in_order(folder) -> None:
    spec = parse_model(2, 3, IDENTITY["encoding"], IDENTITY["network"])
    jobs = [job for job in offline.first_calls(spec, AdamSpec(), LossSpec()) if not isinstance(job, InferenceJob)][-2:]
    records = list(offline.compile_jobs(jobs, ["sm_90"], processes=2))
    assert [record.call for record in records] == [job.describe() for job in jobs]
    assert all(not kernel.from_cache for record in records for kernel in record.kernels)
    again = list(offline.compile_jobs(jobs, ["sm_90"], processes=1))
    assert [[replace(k, from_cache=True) for k in r.kernels] for r in records] == [list(r.kernels) for r in again]


@needs_toolkit
@pytest.mark.exhaustive  # beside other tests the clock runs out
@pytest.mark.skipif(sys.platform == "win32", reason="signals to a process are POSIX's")
def test_ctrl_c_ends_all_processes_at_once(folder, tmp_path) -> None:
    """Five seconds in, processes compile kernels that take seconds each; none is waited for."""
    command = [sys.executable, "-m", "numba_tcnn", "compile", write(tmp_path, GRID), "--inputs", "3", "--outputs", "3"]
    archs = [word for arch in offline.CAPABILITIES for word in ("--arch", arch)]
    with subprocess.Popen(
        [*command, *archs, "--processes", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)  # ends when all processes have closed their ends
    assert process.returncode == 130 and out == ""
    assert err.splitlines()[-1] == "numba-tcnn compile: stopped" and "Traceback" not in err


def test_the_sweep(made, tmp_path, capsys, monkeypatch) -> None:
    """Kernels that calls share count once: before sm_90 the wide network is staged; its dW kernels serve three jobs."""
    refuse = compile_sweep.refuse_training

    def refuse_one(loss):
        if loss.otype == "Mape":
            raise EngineUnavailable("the loss Mape has no fused kernel yet")
        refuse(loss)

    monkeypatch.setattr(compile_sweep, "toolchain_problem", lambda capabilities: None)
    monkeypatch.setattr(compile_sweep, "refuse_training", refuse_one)
    arguments = ["--configs", "sdf,mlp_only_w16_h2,mlp_only_w128_h4", "--archs", "sm_75,sm_90", "--processes", "1"]
    assert compile_sweep.main([*arguments, "--out", str(tmp_path / "sweep.md")]) == 0
    out, _ = lines_of(capsys)
    assert (tmp_path / "sweep.md").read_text().splitlines() == out
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out[2:]]
    assert rows[0][:3] == ["sdf", "all", "none: the loss Mape has no fused kernel yet"]
    assert [row[:2] for row in rows[1:]] == [
        [name, arch] for name in ("mlp_only_w16_h2", "mlp_only_w128_h4") for arch in ("sm_75", "sm_90")
    ]
    assert rows[1][2].startswith("11 (") and rows[1][4:] == ["72, 72", "0", "16"]
    assert rows[3][2].split()[0] == "13"  # 3 propagate and 2 dW kernels instead of 3 single
    assert rows[4][2].split()[0] == "11"
    assert made and compile_sweep.main(["--archs", "sm_91"]) == compile_sweep.main(["--configs", "none"]) == 2


def test_the_sweep_of_components(folder, capsys, monkeypatch) -> None:
    """Every component there is, on two architectures; jobs that models share are compiled once."""
    monkeypatch.setattr(compiler, "_compile", lambda *arguments: KERNEL)
    monkeypatch.setattr(compile_sweep, "toolchain_problem", lambda capabilities: None)
    assert compile_sweep.main(["--components", "--archs", "sm_75,sm_90", "--processes", "1"]) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines_of(capsys)[0][2:]]
    names = [f"activation {name}" for name in specs.ACTIVATIONS]
    names += [f"loss {name}" for name in (*specs.LOSSES, "ConstantGradient")]
    names += [f"optimizer {component.name}" for component in OPTIMIZERS.components]
    encodings = [component.name for component in ENCODINGS.components]
    names += [f"encoding {name}" for name in encodings if name != "Empty"]
    names += [f"encoding {name} in a Composite" for name in encodings]
    found = {(name, arch) for name, arch, kernels, *_ in rows if kernels.split()[0].isdigit()}
    assert {(name, arch) for name in names for arch in ("sm_75", "sm_90")} <= found
    grid = {arch: kernels for name, arch, kernels, *_ in rows if name == "encoding HashGrid"}
    assert int(grid["sm_90"].split()[0]) >= 7  # in one kernel, and level by level


def test_every_example_is_either_compiled_for_every_architecture_or_refused_by_name() -> None:
    inputs = {"image_hash": 2, "image_oneblob": 2, "nerf_rgb": 19, "radiance_caching": 14}
    compiled = set()
    for path in (Path(__file__).parent.parent / "examples" / "configs").glob("*.json"):
        job = compile_command.CompileJob(path, inputs.get(path.stem, 3), 3, tuple(offline.CAPABILITIES))
        try:
            assert len(compile_command.kernels_of_config(job)) >= 10
            compiled.add(path.stem)
        except compile_command.CommandError as error:
            assert re.search("ha(s|ve) no fused kernel", str(error))
    assert compiled >= {"image_hash", "mlp", "nerf_density", "sdf"}
