"""The example `examples/sdf_eikonal.py`: what it prints, that it learns, and that both engines take the same steps."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

PATH = Path(__file__).parent.parent / "examples" / "sdf_eikonal.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("sdf_eikonal", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("shape", ["sphere", "torus"])
def test_distances_have_slope_one(example, shape, rng):
    """Differences of the analytic distance along each axis, in float64, away from where it has kinks."""
    distance = example.SHAPES[shape]
    x = 0.3 + 0.4 * rng.random((200, 3))
    x = x[np.hypot(x[:, 0] - 0.5, x[:, 2] - 0.5) > 0.05]
    steps = 1e-6 * np.eye(3)
    slope = np.stack([(distance(x + s) - distance(x - s)) / 2e-6 for s in steps], axis=1)
    np.testing.assert_allclose(np.linalg.norm(slope, axis=1), 1, atol=1e-6)
    assert distance(np.full((1, 3), 0.5))[0] * {"sphere": -1, "torus": 1}[shape] > 0.1


@pytest.mark.parametrize("activation", ["Softplus", "Sine"])
def test_it_learns_in_numpy(example, activation, capsys):
    """From slopes of almost 0: after 60 steps |df/dx| is near 1 and distances closer than what was shown (measured: an
    error of 0.013 where the noise's mean magnitude is 0.016)."""
    arguments = ["--engine", "reference", "--steps", "60", "--batch", "512", "--shape", "sphere"]
    report = example.main([*arguments, "--activation", activation])
    lines = capsys.readouterr().out.splitlines()
    first = next(line for line in lines if line.startswith("step     0"))
    assert float(first.split()[-1]) < 0.5
    assert 0.9 < report.slope < 1.1
    assert report.distance_error < 0.02
    assert sum(line.startswith("step") for line in lines) == 11 and "engine: reference" in "\n".join(lines)


def test_the_eikonal_term_is_what_brings_the_slope_to_one(example):
    """Without it the network learns the noise, which is steeper than a distance (measured: 1.17 against 0.96)."""
    with_term, without = (example.Training("sphere", engine="reference", weight=weight) for weight in (0.01, 0.0))
    for _ in range(60):
        reports = with_term.step(512), without.step(512)
    assert abs(reports[0].slope - 1) < 0.08 and reports[1].slope > 1.12


def test_no_steps_at_all(example):
    assert np.isnan(example.main(["--engine", "reference", "--steps", "0"]).loss)


@pytest.mark.slow
def test_fused_steps_are_those_of_the_reference(example, gpu):
    """On the emulated driver; Adam moves a weight by at most its learning rate, so errors can't hide in sizes."""
    fused, reference = (example.Training("torus", engine=engine) for engine in ("fused", "reference"))
    start = reference.params.copy()
    for _ in range(2):
        pair = fused.step(48), reference.step(48)
    assert fused.network.explain().engine == "fused" and not fused.network.explain().notes
    way = np.linalg.norm(reference.params - start)
    assert np.linalg.norm(fused.params - reference.params) <= 0.05 * way
    assert pair[0].loss == pytest.approx(pair[1].loss, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("no_reference")
def test_it_learns_on_a_device(example):
    """200 steps of 2^14 points."""
    report = example.main(["--engine", "fused", "--steps", "200", "--batch", "16384"])
    assert 0.95 < report.slope < 1.05 and report.distance_error < 0.01
