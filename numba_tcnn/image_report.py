"""What `numba-tcnn image` writes: the learned picture, a panel, a loss curve, a JSON record, and the engines' error."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ._version import __version__
from .command_line import CommandError
from .model import Model
from .photo import bilinear
from .plot import compare_engines, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPARED_SAMPLES = 1 << 12
PANEL_HEIGHT = 4.0  # inches


def output_names(*, compare: bool) -> list[str]:
    """The files that `write_report` writes, in its order."""
    return ["learned.png", "comparison.png", "loss.png", *(["engine_error.png"] if compare else []), "record.json"]


def write_report(
    folder: Path,
    model: Model,
    photo: np.ndarray,
    learned: np.ndarray,
    settings: dict[str, Any],
    result: dict[str, Any],
    *,
    compare: bool,
) -> dict[str, Any]:
    """Write all files and return the record that is also written."""
    explanation = model.explain()
    record = {
        "version": __version__,
        "engine": explanation.engine,
        "reason": explanation.reason,
        "device": explanation.device,
        "dtype": explanation.dtype,
        "python": platform.python_version(),
        "numpy": np.__version__,
        **settings,
        "config": model.config,
        "n_params": model.n_params,
        "compile_seconds": sum(k.compile_seconds for k in explanation.kernels if not k.from_cache),
        "kernels": [asdict(kernel) for kernel in explanation.kernels],
        **result,
    }
    writers: dict[str, Callable[[Path], None]] = {
        "learned.png": lambda path: save_picture(path, learned),
        "comparison.png": lambda path: save_figure(path, panel(photo, learned, result["psnr_db"])),
        "loss.png": lambda path: save_figure(path, loss_curve(result["losses"])),
    }
    if compare:
        points = np.random.default_rng(settings["seed"]).random((COMPARED_SAMPLES, 2), np.float32)
        comparison = compare_engines(model, points, bilinear(photo, points))
        record["engine_errors"] = {"title": comparison.title, **comparison.errors}
        writers["engine_error.png"] = lambda path: save_figure(path, draw(comparison))
    record["files"] = output_names(compare=compare)
    writers["record.json"] = lambda path: path.write_text(json.dumps(json_safe(record), indent=1) + "\n")
    for name in record["files"]:
        write_and_rename(folder / name, writers[name])
    return record


def write_and_rename(path: Path, write: Callable[[Path], None]) -> None:
    """Write under a temporary name in the same folder, then rename: a reader never sees half a file."""
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise CommandError(f"{path} can't be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def json_safe(value: Any) -> Any:
    """NaN and infinity, which JSON does not know, as null."""
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    return [json_safe(item) for item in value] if isinstance(value, list | tuple) else value


def save_picture(path: Path, picture: np.ndarray) -> None:
    from PIL import Image

    Image.fromarray(np.rint(picture * 255).astype(np.uint8)).save(path, format="PNG")


def save_figure(path: Path, figure: Figure) -> None:
    figure.savefig(path, format="png", dpi=120)


def panel(photo: np.ndarray, learned: np.ndarray, psnr_db: float) -> Figure:
    """Reference, learned picture, and the mean absolute error of the three channels, side by side."""
    from matplotlib.figure import Figure

    height, width, _ = photo.shape
    picture_width = float(np.clip(PANEL_HEIGHT * width / height, 1.5, 3 * PANEL_HEIGHT))
    figure = Figure(figsize=(3 * picture_width + 1, PANEL_HEIGHT + 0.5), layout="constrained")
    reference_axes, learned_axes, error_axes = figure.subplots(1, 3)
    error = np.abs(learned - photo).mean(axis=2)
    reference_axes.imshow(photo)
    reference_axes.set_title("reference")
    learned_axes.imshow(learned)
    learned_axes.set_title(f"learned, {psnr_db:.1f} dB")
    shown = error_axes.imshow(error, cmap="magma", vmin=0, vmax=max(float(np.quantile(error, 0.999)), 1e-6))
    error_axes.set_title("absolute error")
    figure.colorbar(shown, ax=error_axes, shrink=0.8)
    for axes in (reference_axes, learned_axes, error_axes):
        axes.set_axis_off()
    return figure


def loss_curve(losses: list[float]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(np.arange(1, len(losses) + 1), losses, linewidth=1)
    axes.set(xlabel="step", ylabel="loss of the step's batch")
    if min(losses) > 0:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    return figure
