"""The compile server: its kernels, errors and end, and that all goes on in this process where it can't help."""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from compile_jobs import SmallJob, die, divide_by_zero, meet, stay
from emulated_driver import EmulatedDriver
from emulated_models import CONFIG, make
from test_fused_cache import KERNEL
from test_fused_compile import needs_toolkit

from numba_tcnn.config import config_parts, parse_loss, parse_model, parse_optimizer
from numba_tcnn.fused import cache, compile_client, compile_processes, driver, programs
from numba_tcnn.fused.cache import CompiledKernel
from numba_tcnn.fused.compile_processes import VARIABLE, CompileProcesses
from numba_tcnn.fused.compiler import CompileError, compile_kernel
from numba_tcnn.fused.element_wise_jobs import GradientScaleJob
from numba_tcnn.fused.jobs import Job, KernelSource, choose, placed_sources
from numba_tcnn.fused.offline import first_calls
from numba_tcnn.fused.programs import Toolbox
from numba_tcnn.layout import n_params

SECONDS = 30  # to wait for something before it must be wrong
CAPABILITY = (9, 0)

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="the compile server forks")


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "kernels"))


@pytest.fixture(scope="module")
def shared() -> Iterator[CompileProcesses]:
    """One server for all tests that leave it as it was."""
    processes = CompileProcesses()
    yield processes
    processes.server.stop_and_wait(SECONDS)
    assert is_gone(processes.server.process_id)


@pytest.fixture
def processes(shared: CompileProcesses, monkeypatch: pytest.MonkeyPatch) -> CompileProcesses:
    monkeypatch.setattr(compile_processes, "_own", shared)
    return shared


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Descriptions of what this process has compiled."""
    made = []

    def compile_here(make_body, description: str, capability, *, threads: int, min_blocks: int) -> CompiledKernel:
        made.append(description)
        return KERNEL

    monkeypatch.setattr(programs, "compile_kernel", compile_here)
    return made


def toolbox() -> Toolbox:
    return Toolbox(SimpleNamespace(properties=SimpleNamespace(capability=CAPABILITY)))


def kernels(job: Job) -> list[CompiledKernel]:
    tools = toolbox()
    return [compiled for _, compiled in choose(job, tools.chip, tools.compile, tools._begin)[1]]


def wait_until(condition) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def is_gone(process: int) -> bool:
    """Whether there is no such process, or one of which nobody has asked yet how it ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


# ---------------------------------------------------------------------------------------------- kernels


@needs_fork
@needs_toolkit
def test_kernels_are_those_of_this_process(processes: CompileProcesses, compiled_here: list[str]) -> None:
    """But for what no two compilations share: names, and with them the code's order."""

    def facts(kernel: CompiledKernel) -> dict[str, object]:
        return asdict(kernel) | {"cubin": kernel.cubin[:4], "entry": "", "compile_seconds": kernel.compile_seconds > 0}

    job = GradientScaleJob("float16")
    made = kernels(job)
    assert compiled_here == [] and not any(kernel.from_cache for kernel in made)
    assert [kernel.from_cache for kernel in kernels(job)] == [True, True], "children fill the disk cache"
    for source, kernel in zip(job.sources(None), made, strict=True):
        stored = cache.load(toolbox()._key(source))
        assert (stored.cubin, stored.entry) == (kernel.cubin, kernel.entry)
        here = compile_kernel(source.make_body, f"another {source.description}", CAPABILITY, threads=source.threads,
                              min_blocks=source.min_blocks)  # fmt: skip
        assert facts(here) == facts(kernel)


@needs_fork
@needs_toolkit
def test_children_work_beside_one_another(processes, compiled_here: list[str], tmp_path: Path) -> None:
    (tmp_path / "met").mkdir()
    assert len(kernels(SmallJob(("a", "b"), meet, str(tmp_path / "met")))) == 2
    assert compiled_here == []


@needs_fork
@needs_toolkit
def test_the_server_waits_for_its_children(processes: CompileProcesses, compiled_here: list[str]) -> None:
    """Else each kernel would leave a process behind that has ended."""
    kernels(GradientScaleJob("float32"))
    server = processes.server.process_id
    children = Path(f"/proc/{server}/task/{server}/children")
    if not children.exists():
        pytest.skip("this kernel does not list a process's children")
    wait_until(lambda: children.read_text() == "")


def test_kernels_of_the_cache_are_not_asked_for(processes, monkeypatch: pytest.MonkeyPatch) -> None:
    job, tools = GradientScaleJob("bfloat16"), toolbox()
    known = CompiledKernel(b"cubin", "entry", 1, 0, 0.0, 0, 0, 0, 0)
    monkeypatch.setattr(processes, "start", lambda: pytest.fail("a server was asked"))
    for source in placed_sources(job, job.plans(tools.chip), 0):
        cache.store(tools._key(source), known)
        future = processes.begin(source.place, tools._key(source), CAPABILITY)
        assert future.result(timeout=0).cubin == b"cubin" and future.result().from_cache


@needs_fork
@needs_toolkit
def test_threads_may_ask_at_once(processes: CompileProcesses, compiled_here: list[str]) -> None:
    made = {}

    def ask(name: str) -> None:
        made[name] = kernels(SmallJob((name, "shared")))

    threads = [threading.Thread(target=ask, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert sorted(made) == list("abcd") and compiled_here == []


# ----------------------------------------------------------------------------------------------- errors


@needs_fork
@needs_toolkit
def test_compile_errors_are_those_of_this_process(processes, compiled_here: list[str], capfd) -> None:
    job = SmallJob(("a",), divide_by_zero)
    with pytest.raises(CompileError) as caught:
        kernels(job)
    assert "a kernel did not compile (ZeroDivisionError: no kernel)" in str(caught.value)
    tools = toolbox()
    with pytest.raises(CompileError) as caught:
        tools.compile(placed_sources(job, [None], 0)[0])
    assert "in divide_by_zero" in str(caught.value.__cause__) and not caught.value.no_device
    assert compiled_here == [] and capfd.readouterr() == ("", "")


@needs_fork
@needs_toolkit
def test_a_child_that_dies_leaves_its_kernel_to_this_process(processes, compiled_here: list[str]) -> None:
    assert kernels(SmallJob(("a",), die)) == [KERNEL]
    assert compiled_here == ["small a"]
    assert not kernels(SmallJob(("b",)))[0].from_cache and compiled_here == ["small a"]


@needs_fork
@needs_toolkit
def test_other_sources_than_the_servers(processes, compiled_here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose key is another one there isn't taken."""
    monkeypatch.setattr(cache, "source_hash", lambda: "changed since")
    assert kernels(SmallJob(("a",))) == [KERNEL]


def test_jobs_that_cannot_be_sent_and_sources_without_a_place(processes, compiled_here: list[str]) -> None:
    job = SmallJob(("a",), lambda folder, name: None)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(job)
    assert kernels(job) == [KERNEL]
    assert toolbox().compile(KernelSource(None, "nowhere", threads=32)) == KERNEL
    assert compiled_here == ["small a", "nowhere"]


@needs_fork
@needs_toolkit
def test_a_server_that_is_killed(compiled_here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it was asked for is compiled here; the next time there is another one."""
    own = CompileProcesses()
    monkeypatch.setattr(compile_processes, "_own", own)
    kernels(SmallJob(("first",)))
    server, tools = own.server, toolbox()
    sources = placed_sources(SmallJob(("a", "b", "c"), stay, str(tmp_path)), [None], 0)
    for source in sources:
        tools._begin(source)
    wait_until(lambda: len(list(tmp_path.glob("[ab] *"))) == 2)
    children = [int(path.name.split()[1]) for path in tmp_path.glob("[ab] *")]
    os.kill(server.process_id, signal.SIGKILL)
    assert [tools.compile(source) for source in sources] == [KERNEL] * 3
    assert compiled_here == ["small a", "small b", "small c"]
    wait_until(lambda: all(map(is_gone, [server.process_id, *children])))
    assert len(kernels(SmallJob(("last",)))) == 1 and len(compiled_here) == 3
    assert own.server is not server
    own.server.stop_and_wait(SECONDS)


@needs_fork
@needs_toolkit
def test_nobody_works_on_what_nobody_waits_for(processes, compiled_here: list[str], tmp_path: Path) -> None:
    """As many kernels as there are processes, and one that waits: all are given up, and the next one is made."""
    tools = toolbox()
    for source in placed_sources(SmallJob(("a", "b", "c"), stay, str(tmp_path)), [None], 0):
        tools._begin(source)
    wait_until(lambda: len(list(tmp_path.glob("[ab] *"))) == 2)
    tools.ahead._give_up(next(iter(tools.ahead._started.values())))
    assert len(kernels(SmallJob(("next",)))) == 1
    assert compiled_here == [] and not list(tmp_path.glob("c *"))


@needs_fork
def test_a_server_that_never_answers_is_given_up(compiled_here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = CompileProcesses()
    monkeypatch.setattr(compile_processes, "_own", own)
    monkeypatch.setattr(compile_client, "LONGEST_SILENCE", 0.1)
    assert kernels(SmallJob(("a",))) == [KERNEL] and compiled_here == ["small a"]
    wait_until(lambda: is_gone(own.server.process_id))


@needs_fork
def test_a_server_that_cannot_start_is_not_tried_again(
    compiled_here: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = CompileProcesses()
    monkeypatch.setattr(compile_processes, "_own", own)
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(broken))
    assert kernels(SmallJob(("a",))) == [KERNEL]
    wait_until(lambda: own.server.has_ended)
    assert kernels(SmallJob(("b",))) == [KERNEL] and own.server is None and not own.may_start
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    other = CompileProcesses()
    assert other.start() is None and not other.may_start


# ------------------------------------------------------------------------------------------ how many, when


def test_how_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def n(chosen: str | None, cores: int) -> int:
        monkeypatch.delenv(VARIABLE, raising=False)
        if chosen is not None:
            monkeypatch.setenv(VARIABLE, chosen)
        monkeypatch.setattr(compile_processes, "usable_cores", lambda: cores)
        return compile_processes.n_processes()

    few = compile_processes.MIN_CORES
    assert [n(None, cores) for cores in (few - 1, few, 64)] == [0, few, compile_processes.MAX_PROCESSES]
    assert [n("", 4), n("0", 64), n("1", 1), n("12", 4)] == [4, 0, 1, 12]
    with pytest.raises(ValueError, match=f"{VARIABLE} is 'many'; it must be a number"):
        n("many", 4)
    monkeypatch.setattr(sys, "executable", "/opt/blender/blender")
    assert n("4", 4) == 0
    monkeypatch.setattr(sys, "executable", None)
    assert n("4", 4) == 0


def test_without_processes_nothing_is_started(compiled_here: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = CompileProcesses()
    monkeypatch.setattr(compile_processes, "_own", own)
    monkeypatch.setenv(VARIABLE, "0")
    assert kernels(SmallJob(("a",))) == [KERNEL]
    assert own.server is None and not own.may_start


def test_when_the_server_starts(gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an empty cache when the device is opened; else where training is set up, unless its kernels are stored."""
    started = []
    monkeypatch.setattr(CompileProcesses, "start", lambda self: started.append("now"))
    cache.store(64 * "0", KERNEL)
    make()
    assert len(started) == 1
    tools, parts = toolbox(), config_parts(CONFIG)
    spec = parse_model(2, 3, parts.encoding, parts.network)
    optimizer, loss = parse_optimizer(parts.optimizer, n_params=n_params(spec)), parse_loss(parts.loss)
    jobs = first_calls(spec, optimizer, loss)
    for wanted in ("optimizer", "gradients, float16"):  # either is not enough
        make()
        (job,) = [job for job in jobs if job.describe().startswith(wanted) and "large" not in job.describe()]
        for source in job.sources(job.plans(tools.chip)[0]):
            cache.store(tools._key(source), KERNEL)
    assert len(started) == 3
    make()
    assert len(started) == 3
    driver.device.cache_clear()
    make()
    assert len(started) == 3
    shutil.rmtree(cache.cache_directory())
    driver.device.cache_clear()
    driver.device(0)
    assert len(started) == 4


@needs_fork
def test_a_server_that_nobody_asks_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba_tcnn.fused import compile_server

    monkeypatch.setattr(compile_server, "IDLE_SECONDS", 0.05)
    here, there = multiprocessing.Pipe()
    compile_server.Server(there, 1).run()
    assert here.recv() == (None, None)


# -------------------------------------------------------------------------------------- programs of users

STEP = """
import os, sys, warnings
warnings.simplefilter("ignore")  # of forking beside other threads, NumPy's too
print("runs", flush=True)
from unittest import mock
import numpy as np
from benchmarks import null_driver
from numba_tcnn.fused import compile_processes, compiler
import numba_tcnn as tcnn
null_driver._nothing_compiled = compiler.compile_kernel
config = {
    "encoding": {"otype": "Identity"}, "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
    "loss": {"otype": "L2"}, "optimizer": {"otype": "Adam"},
}
x = np.zeros((256, 2), np.float32)
with null_driver.no_device():
    os.environ[compile_processes.VARIABLE] = "2"
    model = tcnn.create_from_config(2, 1, config, engine="fused")
    server = compile_processes.compile_processes().server
    model.trainer.training_step(x, x[:, :1])
    assert not {name.partition(".")[0] for name in sys.modules} & {"numba", "numba_cuda"}
    assert [kernel.from_cache for kernel in model.explain().kernels] == [False, False]
    child = os.fork()
    if child == 0:
        assert compile_processes.compile_processes().server is None
        sys.exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    model.predict(x)
    assert compile_processes.compile_processes().server is server and not server.has_ended
    print(server.process_id, flush=True)
"""


def run(code: str, folder: Path, **options) -> subprocess.Popen:
    """A script, without a guard around what it does."""
    (folder / "script.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    return subprocess.Popen([sys.executable, str(folder / "script.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, env=environment, **options)  # fmt: skip


@needs_fork
@needs_toolkit
def test_a_script_takes_its_first_step_without_numba(tmp_path: Path) -> None:
    """It runs once, its forks leave the server alone, and nothing is left of it."""
    done = run(STEP, tmp_path)
    out, errors = done.communicate(timeout=2 * SECONDS)
    assert (done.returncode, errors) == (0, "")
    runs, server = out.split()
    assert runs == "runs" and is_gone(int(server))


WAITS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
from compile_jobs import SmallJob, stay
from test_compile_processes import compile_processes, placed_sources, toolbox

tools = toolbox()
(source,) = placed_sources(SmallJob(("a",), stay, sys.path[0]), [None], 0)
tools._begin(source)
print(compile_processes.compile_processes().server.process_id, flush=True)
try:
    tools.compile(source)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@needs_fork
@needs_toolkit
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_server_ends_with_its_parent(how: signal.Signals, tmp_path: Path) -> None:
    waits = run(WAITS, tmp_path)
    try:
        server = int(waits.stdout.readline())
        wait_until(lambda: list(tmp_path.glob("a *")))
        (child,) = [int(path.name.split()[1]) for path in tmp_path.glob("a *")]
        waits.send_signal(how)
        out, errors = waits.communicate(timeout=SECONDS)
    finally:
        waits.kill()
    assert (out, errors) == ("interrupted\n" if how == signal.SIGINT else "", "")
    wait_until(lambda: is_gone(server) and is_gone(child))
