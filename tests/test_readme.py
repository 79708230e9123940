"""The README's example runs as it stands, and the commands and files it names exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest

from numba_tcnn import cli, image

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_example_is_short_and_learns_what_it_says():
    example, _ = code_blocks("python")
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    printed, names = io.StringIO(), {}
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), names)
    assert re.search(r"^loss 0\.\d{5}$", printed.getvalue(), re.MULTILINE)
    assert float(names["loss"]) < 1e-3  # the mean of the squared target is 0.4
    prediction = names["model"].network.inference(np.array([[0.5, 0.5]]))
    assert prediction[0, 0] == pytest.approx(np.sin(5), abs=0.1)  # a thousandth of squared error is 0.03


@pytest.mark.gpu
@pytest.mark.slow
def test_the_kernel_around_the_example_s_model():
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for number, block in enumerate(code_blocks("python")):
            exec(compile(block, f"README.md, block {number}", "exec"), names)
    x = np.stack(np.meshgrid(np.arange(1000) / 1000, np.arange(64) / 64, indexing="ij"), axis=-1).astype(np.float32)
    y = names["model"].network.inference(x.reshape(-1, 2)).reshape(1000, 64)
    np.testing.assert_allclose(names["out"].copy_to_host(), y.mean(axis=1), atol=1e-3)


def test_the_two_commands_are_there():
    first, second = code_blocks("sh")
    assert first.strip().endswith("/numba-tcnn image")
    assert second.strip().endswith("/python -m pytest")


def test_every_image_command_is_one_that_the_program_takes(monkeypatch):
    jobs = []
    monkeypatch.setattr(image, "run", lambda job: jobs.append(job) or "")
    commands = re.findall(r"`numba-tcnn (image[^`]*)`", README)
    assert len(commands) >= 3
    for command in commands:
        assert cli.main(command.split()) == 0, command
    assert len(jobs) == len(commands)


def test_every_linked_file_exists():
    text = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    assert len(links) >= 5
    for link in [*links, "examples/configs", "examples/notebooks"]:
        assert (ROOT / link).exists(), link
