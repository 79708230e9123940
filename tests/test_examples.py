"""The scripts in examples/: what they say without a GPU and of a misuse, and that they agree with themselves on one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
RAY_MARCH = EXAMPLES / "fused_ray_march.py"


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=600)


def test_every_script_is_tested() -> None:
    """`sdf_eikonal.py` in test_sdf_eikonal.py."""
    assert {script.name for script in EXAMPLES.glob("*.py")} == {RAY_MARCH.name, "sdf_eikonal.py"}


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run(RAY_MARCH)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("fused_ray_march: nothing to do without a GPU") and done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("--size", "3"), ("--steps", "x"), ("--block-size", "100"), ("--train", "-1"), ("--unknown",)]
)
def test_misuse_is_an_error_before_anything_else(arguments: tuple[str, ...]) -> None:
    done = run(RAY_MARCH, *arguments)
    assert done.returncode == 2 and f"{arguments[0]}" in done.stderr and done.stdout == ""


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("block_size", [64, 256])
def test_the_ray_march_agrees_with_inference_once_a_step(block_size: int, tmp_path: Path) -> None:
    picture = tmp_path / "torus.png"
    options = ("--size", "256", "--train", "300", "--block-size", str(block_size), "--out", str(picture))
    done = run(RAY_MARCH, *options)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    (share,) = re.findall(r"(\d+)% meet the torus", done.stdout)
    assert 10 <= int(share) <= 30 and picture.stat().st_size > 1000
