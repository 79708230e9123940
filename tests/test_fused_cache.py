"""The disk cache of compiled kernels: what a key depends on, damaged files, shared folders, and what it imports."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from numba_tcnn.config import parse_model
from numba_tcnn.fused import cache, compiler
from numba_tcnn.fused.cache import CompiledKernel, cache_directory, cache_size, kernel_key, load, store
from numba_tcnn.fused.jobs import GradientJob
from numba_tcnn.fused.network_plans import single_plans
from numba_tcnn.fused.plan import architecture
from numba_tcnn.fused.stage_io import GradientOptions

KERNEL = CompiledKernel(
    cubin=b"\x7fELF machine code" * 40, entry="entry_name", registers=72, spill_bytes=8, compile_seconds=1.25,
    local_bytes=16, mma_instructions=120, vector_loads=33, reductions=9,
)  # fmt: skip
KEY = "ab" + 62 * "7"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_TCNN_CACHE_DIR", str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def kernel_file(folder: Path) -> Path:
    (path,) = folder.glob("*/*.kernel")
    return path


def test_what_is_stored_is_found(folder: Path) -> None:
    assert load(KEY) is None and cache_size() == 0
    store(KEY, KERNEL)
    assert load(KEY) == replace(KERNEL, from_cache=True)
    assert load("cd" + KEY[2:]) is None
    assert cache_size() == kernel_file(folder).stat().st_size > len(KERNEL.cubin)
    assert [path.name for path in folder.iterdir()] == [KEY[:2]]
    assert len(list(kernel_file(folder).parent.iterdir())) == 1, "temporary files are left behind"


# ------------------------------------------------------------------------------------------------- keys


def description(width: int = 32, loss: str = "L2", dtype: str = "float32", candidate: int = 0) -> str:
    spec = parse_model(2, 3, {"otype": "HashGrid"}, {"otype": "FullyFusedMLP", "n_neurons": width})
    plans = single_plans(spec, architecture((9, 0)), encoding_gradient=True)
    options = GradientOptions(loss=loss, input_dtype=dtype)
    (source,) = GradientJob(spec, options).sources(plans[candidate])
    return source.description


def test_keys_are_stable() -> None:
    assert kernel_key(description(), (9, 0)) == kernel_key(description(), (9, 0))
    assert len(kernel_key("x", (9, 0))) == 64


def test_keys_depend_on_everything_that_changes_code(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        kernel_key(description(), (9, 0)),
        kernel_key(description(width=16), (9, 0)),  # spec
        kernel_key(description(candidate=-1), (9, 0)),  # plan
        kernel_key(description(loss="L1"), (9, 0)),  # options
        kernel_key(description(dtype="float16"), (9, 0)),
        kernel_key(description(), (8, 0)),  # capability
        kernel_key(description(), (9, 0, "a")),
    ]
    monkeypatch.setattr(cache, "toolchain_versions", lambda: ("numba-cuda 99",))
    keys.append(kernel_key(description(), (9, 0)))
    monkeypatch.setattr(cache, "source_hash", lambda: "another source")
    keys.append(kernel_key(description(), (9, 0)))
    assert len(set(keys)) == len(keys)


def test_launch_bounds_are_part_of_the_key(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def compile_for_real(make_body, capability, threads, min_blocks):
        made.append((threads, min_blocks))
        return replace(KERNEL, registers=len(made))

    monkeypatch.setattr(compiler, "_compile", compile_for_real)

    def registers(threads: int, min_blocks: int) -> int:
        return compiler.compile_kernel(None, "kernel", (9, 0), threads=threads, min_blocks=min_blocks).registers

    assert [registers(128, 1), registers(128, 2), registers(256, 1)] == [1, 2, 3]
    assert [registers(128, 1), registers(128, 2), registers(256, 1)] == [1, 2, 3]
    assert len(made) == 3


def test_the_hash_of_the_source_sees_every_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files of the package in a copy: a changed, a renamed and an additional one each give another hash."""
    package = Path(cache.__file__).parent
    for path in package.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "cache.py"))

    def hash_now() -> str:
        return cache.source_hash.__wrapped__()

    hashes = [hash_now()]
    assert hashes[0] == cache.source_hash()
    changed = tmp_path / "grid.py"
    changed.write_bytes(changed.read_bytes() + b"\n")
    hashes.append(hash_now())
    changed.rename(tmp_path / "grid_2.py")
    hashes.append(hash_now())
    (tmp_path / "new.py").write_text("")
    hashes.append(hash_now())
    assert len(set(hashes)) == 4


def test_the_toolchain_is_named() -> None:
    names = {entry.split()[0] for entry in cache.toolchain_versions()}
    assert {"numba", "llvmlite"} <= names


# ------------------------------------------------------------------------------------------ damaged files


def damage_magic(content: bytes) -> bytes:
    return b"x" + content[1:]


DAMAGE = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "magic only": lambda content: cache.MAGIC,
    "one byte short": lambda content: content[:-1],
    "one byte more": lambda content: content + b"x",
    "garbage": lambda content: bytes(range(256)) * 8,
    "wrong magic": damage_magic,
    "an older format": lambda content: content.replace(b"kernel 3", b"kernel 2"),
    "flipped bit of the code": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "header is no JSON": lambda content: content.replace(b'{"', b'["'),
    "header is a list": lambda content: cache.MAGIC + b"\x02\0\0\0[]" + KERNEL.cubin,
    "header lacks a field": lambda content: content.replace(b'"registers"', b'"registerz"'),
    "header length is huge": lambda content: cache.MAGIC + b"\xff\xff\xff\xff" + content[len(cache.MAGIC) + 4 :],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_count_as_missing_and_are_written_anew(folder: Path, name: str, monkeypatch) -> None:
    monkeypatch.setattr(compiler, "_compile", lambda *arguments: KERNEL)

    def compile_kernel() -> CompiledKernel:
        return compiler.compile_kernel(None, "kernel", (9, 0), threads=128, min_blocks=1)

    assert not compile_kernel().from_cache and compile_kernel().from_cache
    path = kernel_file(folder)
    content = path.read_bytes()
    path.write_bytes(DAMAGE[name](content))
    assert path.read_bytes() != content
    assert not compile_kernel().from_cache
    assert path.read_bytes() == content
    assert compile_kernel().from_cache


def test_a_kernel_that_does_not_compile_is_not_stored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments):
        raise ZeroDivisionError("ptxas gave\nup")

    monkeypatch.setattr(compiler, "_compile", fail)
    with pytest.raises(compiler.CompileError, match=r"did not compile \(ZeroDivisionError: ptxas gave up\)") as caught:
        compiler.compile_kernel(None, "kernel", (9, 0), threads=128, min_blocks=1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert cache_size() == 0


# ------------------------------------------------------------------------------------------------ folders


@pytest.mark.skipif(os.name == "nt", reason="permissions of folders are not POSIX's")
def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o500)
    try:
        store(KEY, KERNEL)
        if os.geteuid() != 0:  # root writes anywhere
            assert load(KEY) is None
    finally:
        folder.chmod(0o700)


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NUMBA_TCNN_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    store(KEY, KERNEL)
    assert load(KEY) is None and cache_size() == 0


def test_a_full_disk_leaves_no_temporary_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    store(KEY, KERNEL)
    assert load(KEY) is None and list((folder / KEY[:2]).iterdir()) == []


def test_writers_do_not_disturb_each_other(folder: Path) -> None:
    """Many threads write and read one entry: a reader sees a whole kernel, one of those written."""
    kernels = [replace(KERNEL, cubin=bytes([i]) * 20_000, registers=i) for i in range(8)]
    store(KEY, kernels[0])

    def work(i: int) -> list[CompiledKernel | None]:
        seen = []
        for _ in range(25):
            store(KEY, kernels[i])
            seen.append(load(KEY))
        return seen

    with ThreadPoolExecutor(8) as pool:
        seen = [kernel for result in pool.map(work, range(8)) for kernel in result]
    assert None not in seen
    assert all(replace(kernel, from_cache=False) in kernels for kernel in seen)
    assert [path.name for path in (folder / KEY[:2]).iterdir()] == [f"{KEY[2:]}.kernel"]


def test_the_folder_is_the_environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NUMBA_TCNN_CACHE_DIR", "~/mine")
    assert cache_directory() == tmp_path / "mine"
    monkeypatch.setenv("NUMBA_TCNN_CACHE_DIR", "")
    assert cache_directory() is None
    store(KEY, KERNEL)
    assert load(KEY) is None and cache_size() == 0 and list(tmp_path.iterdir()) == []
    monkeypatch.delenv("NUMBA_TCNN_CACHE_DIR")
    monkeypatch.setattr(cache.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "numba-tcnn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == tmp_path / ".cache" / "numba-tcnn"
    monkeypatch.setattr(cache.sys, "platform", "darwin")
    assert cache_directory() == tmp_path / "Library" / "Caches" / "numba-tcnn"
    monkeypatch.setattr(cache.sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_directory() == tmp_path / "local" / "numba-tcnn"


# ------------------------------------------------------------------------------------------------ imports

PROGRAM = """
import sys
from test_fused_cache import KERNEL
from numba_tcnn.config import parse_model
from numba_tcnn.fused import cache, compiler, optimizer_chains, programs
from numba_tcnn.fused.jobs import GradientJob
from numba_tcnn.fused.plan import architecture
from numba_tcnn.fused.network_plans import gradient_plans
from numba_tcnn.fused.stage_io import GradientOptions
from numba_tcnn.specs import AdamSpec

spec = parse_model(3, 3, {"otype": "HashGrid"}, {"otype": "FullyFusedMLP", "activation": "SiLU"})
for plan in gradient_plans(spec, architecture((9, 0)), encoding_gradient=True)[::40]:
    for source in GradientJob(spec, GradientOptions(input_gradient=True)).sources(plan):
        text = f"{source.description} threads={source.threads} min_blocks={source.min_blocks}"
        cache.store(cache.kernel_key(text, (9, 0)), KERNEL)
        found = compiler.compile_kernel(
            source.make_body, source.description, (9, 0), threads=source.threads, min_blocks=source.min_blocks
        )
        assert found.from_cache
        assert len(source.make_body(programs.OUTLINE).parameters) > 5
optimizer_chains.make_chain_kernel(programs.OUTLINE, optimizer_chains.Chain((AdamSpec(),)))
loaded = {name.partition(".")[0] for name in sys.modules} & {"numba", "llvmlite", "numba_cuda", "cuda"}
assert not loaded, loaded
"""


def test_finding_a_kernel_imports_no_compiler(folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
