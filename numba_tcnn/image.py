"""The job behind `numba-tcnn image`: a network learns a photo, colour as a function of position.

Each training step sees random points of [0, 1]² and the photo's colours there, interpolated bilinearly. Nothing of
the photo is stored but the network's parameters; the learned picture is the network's answer at all pixel centres.

On a GPU the points of a batch must not come from the host one by one: `BatchSource` draws a pool of batches (4 million
points, several a pixel), keeps it in device memory and hands its batches out in turn.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .array_kinds import device_array
from .command_line import CommandError, read_config
from .config import config_parts, parse_loss, parse_model, parse_optimizer
from .config_keys import ConfigError
from .fit import DEFAULT_BATCH_SIZE
from .image_report import output_names, write_report
from .model import Model, create_from_config
from .photo import N_CHANNELS, bilinear, default_photo, load_photo, pixel_centres, psnr

DEFAULT_CONFIG = Path(__file__).parent / "configs" / "image_hash.json"
POOL_BATCHES = 16
POOL_ROWS = 1 << 22
PREDICTED_ROWS = 1 << 20
PROBE_PIXELS = 1 << 13
"""Pixels on which the PSNR of the progress bar is measured; the final one is that of all pixels."""

SECONDS_BETWEEN_READINGS = 0.2
SECONDS_BETWEEN_PROBES = 1.0


@dataclass(frozen=True)
class ImageJob:
    """What to do, as given on the command line. None: the default, which for `batch` depends on the engine."""

    photo: Path | None = None
    config: Path | None = None
    steps: int = 1000
    batch: int | None = None
    engine: str = "auto"
    seed: int = 1337
    out: Path = Path("numba-tcnn-image")
    compare: bool = False


@dataclass
class Training:
    """What happened: loss of every step, seconds of training alone, without the first step, and the first step's."""

    losses: list[float] = field(default_factory=list)
    first_step_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def ms_per_step(self) -> float:
        timed_steps = len(self.losses) - 1
        return 1000 * (self.seconds / timed_steps if timed_steps > 0 else self.first_step_seconds)


def run(job: ImageJob) -> str:
    """Do the job and return its last line.

    Raises CommandError or ConfigError, before anything is compiled unless training diverges: then before a file is
    written.
    """
    path = job.photo if job.photo is not None else default_photo()
    config = read_config(job.config if job.config is not None else DEFAULT_CONFIG)
    check_config(config)
    photo = load_photo(path)
    make_folder(job.out)
    check_names(job.out, output_names(compare=job.compare))
    started = time.perf_counter()
    model = create_from_config(2, N_CHANNELS, config, engine=job.engine, seed=job.seed)
    explanation = model.explain()
    height, width, _ = photo.shape
    print(f"{path.name}, {width} x {height} pixels; {explanation.engine} engine: {explanation.reason}")

    batch = job.batch if job.batch is not None else DEFAULT_BATCH_SIZE[explanation.engine]
    training = train(model, photo, steps=job.steps, batch=batch, seed=job.seed)
    learned = learned_picture(model, photo.shape)
    result = {
        "psnr_db": psnr(learned, photo),
        "ms_per_step": training.ms_per_step,
        "first_step_seconds": training.first_step_seconds,
        "seconds": time.perf_counter() - started,
        "samples_per_second": 1000 * batch / training.ms_per_step,
        "losses": training.losses,
    }
    settings = {"photo": str(path), "pixels": [width, height], "steps": job.steps, "batch": batch, "seed": job.seed}
    record = write_report(job.out, model, photo, learned, settings, result, compare=job.compare)
    print(f"wrote {', '.join(record['files'])} to {job.out}")
    return (
        f"{record['engine']}: {result['psnr_db']:.1f} dB, {result['ms_per_step']:.3g} ms/step, "
        f"{record['compile_seconds']:.2f} s compiling"
    )


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a config that can't become a model of a picture, at no cost."""
    parts = config_parts(config)
    if parts.network is None:
        width = parse_model(2, None, parts.encoding, None).n_output_dims
        if width != N_CHANNELS:
            raise ConfigError(f"network: null leaves an encoding of width {width}; the image command needs a network")
    parse_model(2, N_CHANNELS, parts.encoding, parts.network)
    parse_loss(parts.loss)
    parse_optimizer(parts.optimizer)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror
        raise CommandError(f"--out {folder} can't be made a folder: {reason}; choose another") from error
    try:
        with tempfile.TemporaryFile(dir=folder):  # what permissions alone don't tell: a full or strange file system
            pass
    except OSError as error:
        raise CommandError(f"--out {folder} can't be written to: {error.strerror}; choose another") from error


def check_names(folder: Path, names: list[str]) -> None:
    for path in (folder / name for name in names):
        if path.is_dir() and not path.is_symlink():  # a link is replaced, whatever it leads to
            raise CommandError(f"{path} is a folder, but a file of that name is to be written; choose another --out")


def diverged(sign: str) -> CommandError:
    return CommandError(f"training diverged, {sign}; lower the optimizer's learning_rate")


class BatchSource:
    """Random points and their colours, as batches ready for `training_step`: (x [batch, 2], y [batch, 3])."""

    def __init__(self, photo: np.ndarray, batch: int, seed: int):
        self.photo = photo
        self.batch = batch
        self.random = np.random.default_rng(seed)
        self.pool: list[tuple[Any, Any]] = []
        self.next_to_use = 0

    def draw(self) -> tuple[np.ndarray, np.ndarray]:
        points = self.random.random((self.batch, 2), np.float32)
        return points, bilinear(self.photo, points)

    def take(self, n: int, *, on_device: bool) -> list[tuple[Any, Any]]:
        """The next n batches: fresh ones on the host, or from the pool in device memory."""
        if not on_device:
            return [self.draw() for _ in range(n)]
        if not self.pool:
            self.pool = [self.draw_on_device() for _ in range(max(1, min(POOL_BATCHES, POOL_ROWS // self.batch)))]
        taken = [self.pool[(self.next_to_use + i) % len(self.pool)] for i in range(n)]
        self.next_to_use = (self.next_to_use + n) % len(self.pool)
        return taken

    def draw_on_device(self) -> tuple[Any, Any]:
        points, colours = self.draw()
        return device_array(points), device_array(colours)


def train(model: Model, photo: np.ndarray, *, steps: int, batch: int, seed: int) -> Training:
    """Train in stretches of about SECONDS_BETWEEN_READINGS, whose end reads the loss and so waits for the GPU.

    Only the stretches are timed; drawing batches, probing the PSNR and drawing the progress bar are not. Raises
    CommandError where the loss at the end of a stretch is not finite.
    """
    from tqdm import tqdm

    source = BatchSource(photo, batch, seed)
    probe = Probe(photo, seed)
    training = Training()
    interactive = sys.stderr.isatty()
    with tqdm(total=steps, unit="step", mininterval=0.1 if interactive else 5.0, file=sys.stderr) as bar:
        stretch = 1
        while len(training.losses) < steps:
            batches = source.take(min(stretch, steps - len(training.losses)), on_device=model.jit_fusion)
            start = time.perf_counter()
            losses = [model.trainer.training_step(x, y) for x, y in batches]
            float(losses[-1])
            seconds = time.perf_counter() - start
            if not training.losses:
                training.first_step_seconds = seconds
            else:
                training.seconds += seconds
                stretch = max(1, int(SECONDS_BETWEEN_READINGS * len(losses) / seconds))
            training.losses += [float(loss) for loss in losses]
            if not np.isfinite(training.losses[-1]):
                step = int(np.argmin(np.isfinite(training.losses))) + 1
                raise diverged(f"the loss of step {step} is {training.losses[step - 1]}")
            rate = batch * len(losses) / seconds
            quality = probe.psnr(model, last=len(training.losses) == steps)
            bar.set_postfix_str(f"loss {losses[-1]:.3g}, {quality:.1f} dB, {rate:.2g} samples/s", refresh=False)
            bar.update(len(losses))
    return training


class Probe:
    """PSNR on some of the pixels, measured once in a while."""

    def __init__(self, photo: np.ndarray, seed: int):
        height, width, _ = photo.shape
        chosen = np.random.default_rng(seed).integers(0, height * width, min(PROBE_PIXELS, height * width))
        extent = np.array([width, height], np.float32)
        self.points = (np.stack([chosen % width, chosen // width], axis=1) + np.float32(0.5)).astype(
            np.float32
        ) / extent
        self.colours = photo.reshape(-1, N_CHANNELS)[chosen]
        self.measured_at = -np.inf
        self.value = float("nan")

    def psnr(self, model: Model, *, last: bool) -> float:
        now = time.perf_counter()
        if last or now - self.measured_at > SECONDS_BETWEEN_PROBES:
            self.value = psnr(model.network.inference(self.points), self.colours)
            self.measured_at = now
        return self.value


def learned_picture(model: Model, shape: tuple[int, int, int]) -> np.ndarray:
    """The network's colours at all pixel centres, float32 [height, width, 3], clipped to [0, 1].

    Raises CommandError where one is not finite, as after a last step that was too long.
    """
    height, width, _ = shape
    learned = np.empty(shape, np.float32)
    rows_at_once = max(1, PREDICTED_ROWS // width)
    for first in range(0, height, rows_at_once):
        rows = slice(first, min(first + rows_at_once, height))
        colours = model.network.inference(pixel_centres(height, width, rows))
        if not np.isfinite(colours).all():
            raise diverged("the learned colours are not finite")
        learned[rows] = np.clip(colours, 0, 1).reshape(learned[rows].shape)
    return learned
