"""What installing the project brings, and what importing it costs."""

import configparser
import importlib.metadata
import json
import shutil
import statistics
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = {"numba_tcnn": "numba_tcnn", "fused": "numba_tcnn/fused", "reference": "numba_tcnn/reference"}
"""Folder in the tree: folder in the installed package."""

NOT_ON_IMPORT = {
    *("numba", "llvmlite", "cuda", "numba_cuda"),  # seconds of import, and useless without a device
    *("cupy", "torch", "jax", "tensorflow", "pandas", "scipy"),  # array libraries that the user may not have
    *("matplotlib", "PIL", "tqdm", "IPython", "safetensors", "msgpack"),
}

MEASURE_IMPORT = """
import json, sys, time
before = set(sys.modules)
start = time.process_time()  # not the clock on the wall: other tests may run beside this one
import numba_tcnn
seconds = time.process_time() - start
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""


@pytest.fixture(scope="module")
def imports():
    """[seconds, top-level modules] of importing numba_tcnn in each of three fresh processes."""
    command = [sys.executable, "-c", MEASURE_IMPORT]
    return [json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout) for _ in range(3)]


def test_import_is_fast(imports):
    assert statistics.median(seconds for seconds, _ in imports) < 0.5


def test_import_brings_no_other_array_library_and_no_compiler(imports):
    _, modules = imports[0]
    assert {"numba_tcnn", "numpy"} <= set(modules)
    assert not NOT_ON_IMPORT & set(modules)


def test_every_folder_with_code_is_a_package():
    """A sub-package missing from setup.cfg would be missing from the wheel."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    folders = {path.parent.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    expected = {ROOMS[folder.parts[0]] + "/".join(["", *folder.parts[1:]]) for folder in folders}
    assert set(setup["options"]["packages"].split()) == {name.replace("/", ".") for name in expected}


def test_extras():
    metadata = importlib.metadata.metadata("numba-tcnn")
    assert set(metadata.get_all("Provides-Extra")) == {"cuda12", "cuda13", "test"}


@pytest.mark.slow
def test_the_wheel_holds_the_tree_and_nothing_else(tmp_path):
    source = tmp_path / "source"
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr

    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    installed = {name for name in names if ".dist-info/" not in name}
    tree = {
        f"{package}/{path.relative_to(ROOT / room).as_posix()}"
        for room, package in ROOMS.items()
        for pattern in ("*.py", "py.typed", "configs/*.json")
        for path in (ROOT / room).rglob(pattern)
    }
    assert installed == tree
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
