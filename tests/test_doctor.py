"""The doctor's report: what it says of machines with and without a device, and of a broken installation."""

from __future__ import annotations

import types

import numpy as np
import pytest
from fake_engine import FakeFusedEngine

import numba_tcnn.fused
import numba_tcnn.reference
from numba_tcnn import cli, doctor


@pytest.fixture
def machine(monkeypatch):
    """A machine to be described: set the attributes of what it returns."""
    status = types.SimpleNamespace(
        usable=False,
        reason="no NVIDIA device was found",
        no_device=True,
        name="",
        compute_capability=None,
        driver_version=None,
    )
    monkeypatch.setattr(numba_tcnn.fused, "device_status", lambda device: status)
    monkeypatch.setattr(numba_tcnn.fused, "cache_directory", lambda: "/home/someone/.cache/numba-tcnn")
    monkeypatch.setattr(numba_tcnn.fused, "cache_size", lambda: 2_500_000)
    monkeypatch.setattr(numba_tcnn.fused.cache, "check_writable", lambda: None)
    return status


def with_device(status):
    status.__dict__.update(
        usable=True, reason="", no_device=False, name="NVIDIA H200", compute_capability=(9, 0), driver_version=(13, 0)
    )


def report(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_without_a_device(machine, capsys):
    assert cli.main(["doctor"]) == 0
    lines = report(capsys)
    assert lines[0].startswith(f"numba-tcnn {numba_tcnn.__version__}, Python 3.")
    assert any(line.startswith(f"packages: numpy {np.__version__}, numba ") for line in lines)
    assert "driver: none found" in lines and "device 0: none" in lines
    assert "fused engine: not usable: no NVIDIA device was found" in lines
    assert "kernel cache: /home/someone/.cache/numba-tcnn, 2.5 MB" in lines
    assert any("the reference engine learns" in line for line in lines)
    assert any(line.startswith("self-test: no fused engine here: the reference in float16") for line in lines)
    assert sum(line.endswith("  ok") for line in lines) == 9  # outputs, input gradient, 3 layers, 4 levels
    assert any(line.startswith("advice: no NVIDIA GPU was found, so models run in NumPy") for line in lines)


def test_with_a_device(machine, capsys, monkeypatch):
    with_device(machine)
    engine = FakeFusedEngine()
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", engine.create_runtime)
    assert cli.main(["doctor", "--device", "0"]) == 0
    lines = report(capsys)
    assert "driver: for CUDA 13.0 and older" in lines and "device 0: NVIDIA H200, compute capability 9.0" in lines
    assert "fused engine: usable" in lines
    assert "fused kernels compute in: float16, bfloat16, float32" in lines
    assert any(line.startswith("self-test: fused against reference, both in float16, 1,000 samples") for line in lines)
    assert lines[-1] == "advice: none, everything is in place"


def test_what_an_older_device_computes_in(machine, capsys, monkeypatch):
    with_device(machine)
    machine.compute_capability = (7, 5)
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", FakeFusedEngine().create_runtime)
    assert cli.main(["doctor"]) == 0
    assert "fused kernels compute in: float16" in report(capsys)


def test_a_device_that_cannot_be_used(machine, capsys):
    machine.__dict__.update(no_device=False, reason="the driver is 450.80, CUDA 12 needs 525.60 or newer", name="GTX")
    assert cli.main(["doctor"]) == 0
    assert any(line.startswith("advice: the GPU can't be used: the driver is 450.80") for line in report(capsys))


def test_kernels_that_fail_are_reported(machine, capsys, monkeypatch):
    with_device(machine)
    engine = FakeFusedEngine("backward", "ptxas said no")
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", engine.create_runtime)
    assert cli.main(["doctor"]) == 0
    lines = report(capsys)
    assert "self-test: the fused engine fails: EngineUnavailable: ptxas said no" in lines
    assert any(line.startswith("advice: the fused engine fails on this device (EngineUnavailable)") for line in lines)


def test_kernels_that_compute_something_else_are_reported(machine, capsys, monkeypatch):
    with_device(machine)
    engine = FakeFusedEngine()

    def create_runtime(spec, params, **options):
        return engine.create_runtime(spec, params * 1.1, **options)

    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", create_runtime)
    assert cli.main(["doctor"]) == 0
    lines = report(capsys)
    assert any(line.startswith("  outputs") and line.endswith("more than 0.005") for line in lines)
    assert any(line.startswith("advice: ") and "differ too much between the engines" in line for line in lines)


def test_a_cache_that_cannot_be_written_gets_advice(machine, capsys, monkeypatch):
    def refuse():
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(numba_tcnn.fused.cache, "check_writable", refuse)
    monkeypatch.setattr(numba_tcnn.fused, "cache_size", refuse)  # a folder that is closed can't be counted either
    assert cli.main(["doctor"]) == 0
    lines = report(capsys)
    assert "kernel cache: /home/someone/.cache/numba-tcnn, can't be written: Permission denied" in lines
    assert lines[-1].startswith("advice: kernels can't be kept in /home/someone/.cache/numba-tcnn, so each process")
    assert lines[-1].endswith("name a folder that can be written in NUMBA_TCNN_CACHE_DIR")


def test_the_cache_folder_is_tried(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    for name, advised in (("file", True), ("kernels", False), ("", False)):
        monkeypatch.setenv("NUMBA_TCNN_CACHE_DIR", name and str(tmp_path / name))
        assert (doctor.print_cache() is not None) == advised
    refused, made, off = report(capsys)
    assert refused.startswith(f"kernel cache: {tmp_path / 'file'}, can't be written: ")
    assert made == f"kernel cache: {tmp_path / 'kernels'}, 0.0 MB"
    assert off == "kernel cache: off"


def test_a_broken_reference_is_exit_code_1(machine, capsys, monkeypatch):
    def broken(*args, **kwargs):
        raise FloatingPointError("this NumPy can't multiply")

    monkeypatch.setattr(numba_tcnn.reference, "create_runtime", broken)
    assert cli.main(["doctor"]) == 1
    lines = report(capsys)
    assert "self-test: the reference engine fails: FloatingPointError: this NumPy can't multiply" in lines
    assert any("reinstall" in line for line in lines)


def test_a_missing_numba_cuda_gets_a_command(machine, capsys, monkeypatch):
    installed = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda package: None if package == "numba-cuda" else installed(package))
    assert cli.main(["doctor"]) == 0
    lines = report(capsys)
    assert any("numba-cuda missing" in line for line in lines)
    assert lines[-1].startswith("advice: fused kernels need numba-cuda: pip install 'numba-tcnn[cuda13]'")


@pytest.mark.parametrize("works", [True, False])
def test_missing_compiler_libraries_matter_where_kernels_fail(machine, capsys, monkeypatch, works):
    with_device(machine)
    engine = FakeFusedEngine(None if works else "inference", "libnvvm.so was not found")
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", engine.create_runtime)
    monkeypatch.setattr(doctor, "version_of", lambda package: "1.0" if package == "numba-cuda" else None)
    assert cli.main(["doctor"]) == 0
    last = report(capsys)[-1]
    needed = "advice: fused kernels need NVVM, nvJitLink, NVRTC, CUDA runtime: pip install"
    assert last.startswith("advice: none" if works else needed)
