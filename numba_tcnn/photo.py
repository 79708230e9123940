"""Photos as arrays [height, width, 3] of float32 in [0, 1], and colours at points between their pixels.

Stored 8- and 16-bit values are divided by 255 and 65535 and used as they are: no gamma is undone, so errors and PSNR
are those of the picture as it is shown. Grey becomes three equal channels, transparent pixels are laid on white.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import numpy as np

from .command_line import CommandError

N_CHANNELS = 3
INTEGER_SCALES = {"bool": 1, "uint8": 255, "uint16": 65535}
ARRAY_SUFFIXES = (".npy", ".npz")


def default_photo() -> Path:
    """The portrait of Grace Hopper that matplotlib ships."""
    import matplotlib.cbook

    return Path(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))


def load_photo(path: Path) -> np.ndarray:
    """The photo at `path`, float32 [height, width, 3]. Raises CommandError with one line on what is wrong with it."""
    if not os.path.exists(path):  # Path.exists raises for some names
        raise CommandError(f"no photo at {path}; give the path of a picture, or none for the portrait that is built in")
    if path.is_dir():
        raise CommandError(f"{path} is a folder; give the path of one picture in it")
    array = _read_array(path) if path.suffix.lower() in ARRAY_SUFFIXES else _read_picture(path)
    return _three_channels(_unit_range(array, path), path)


def _read_array(path: Path) -> np.ndarray:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            if len(loaded.files) != 1:
                raise CommandError(f"{path} holds {len(loaded.files)} arrays; save the picture alone, as one array")
            return loaded[loaded.files[0]]
    except CommandError:
        raise
    except Exception as error:  # zipfile, zlib and NumPy each have errors of their own for a damaged file
        raise CommandError(f"{path} can't be read as a NumPy array: {_one_line(error)}") from error


def _read_picture(path: Path) -> np.ndarray:
    from PIL import Image, ImageOps

    try:
        with (
            warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning),
            Image.open(path) as image,
        ):
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I") or image.mode == "F":
                return np.asarray(image)
            transparent = image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
            return np.asarray(image.convert("RGBA" if transparent else "RGB"))
    except Image.DecompressionBombError as error:
        most = 2 * Image.MAX_IMAGE_PIXELS  # Pillow warns from half of that on
        raise CommandError(f"{path} is too large, a photo may have {most:,} pixels; scale it down") from error
    except Exception as error:  # every file format of Pillow has errors of its own for a damaged file
        raise CommandError(f"{path} can't be read as a picture: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _unit_range(array: np.ndarray, path: Path) -> np.ndarray:
    """Pixel values in [0, 1] as float32."""
    if array.size == 0:
        raise CommandError(f"{path} has no pixels, its shape is {list(array.shape)}")
    if array.dtype == np.int32 and 0 <= array.min() and array.max() <= 65535:
        array = array.astype(np.uint16)  # how Pillow gives some 16-bit files
    if array.dtype.name in INTEGER_SCALES:
        return array.astype(np.float32) / np.float32(INTEGER_SCALES[array.dtype.name])
    if array.dtype.kind != "f":
        raise CommandError(f"{path} has pixels of dtype {array.dtype}; use uint8, uint16 or floats in [0, 1]")
    bad = ~np.isfinite(array)
    if bad.any():
        where = ", ".join(str(index) for index in np.argwhere(bad)[0])
        raise CommandError(
            f"{path} has {bad.sum()} NaN or infinite pixel values, the first at [{where}]; replace them before training"
        )
    low, high = float(array.min()), float(array.max())
    if low < 0 or high > 1:
        raise CommandError(f"{path} has pixel values from {low:g} to {high:g}; scale floats to [0, 1]")
    return array.astype(np.float32)


def _three_channels(pixels: np.ndarray, path: Path) -> np.ndarray:
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3, 4):
        shape = list(pixels.shape)
        raise CommandError(f"{path} has shape {shape}; a picture is [height, width] or [height, width, 1, 3 or 4]")
    if pixels.shape[2] == 4:
        alpha = pixels[:, :, 3:]
        pixels = pixels[:, :, :3] * alpha + (1 - alpha)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], N_CHANNELS)))


def pixel_centres(height: int, width: int, rows: slice = slice(None)) -> np.ndarray:
    """(horizontal, vertical) coordinates in [0, 1] of the pixels of some rows, row by row; float32 [n, 2]."""
    vertical = (np.arange(height, dtype=np.float32)[rows] + np.float32(0.5)) / np.float32(height)
    horizontal = (np.arange(width, dtype=np.float32) + np.float32(0.5)) / np.float32(width)
    grid = np.meshgrid(horizontal, vertical)
    return np.stack([axis.reshape(-1) for axis in grid], axis=1)


def bilinear(photo: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Colours [n, 3] of a photo [height, width, 3] at points [n, 2] in [0, 1], interpolated between pixel centres;
    all float32.

    Points less than half a pixel from the border take the border's colour.
    """
    height, width, _ = photo.shape
    pixels = photo.reshape(-1, N_CHANNELS)
    extent = np.array([width, height], np.float32)
    position = np.clip(points * extent - np.float32(0.5), 0, extent - 1)
    corner = np.minimum(position.astype(np.int32), np.maximum(extent - 2, 0).astype(np.int32))
    fraction = position - corner.astype(np.float32)
    column, row = corner[:, 0], corner[:, 1]
    right = np.minimum(column + 1, width - 1)
    upper, lower = row * width, np.minimum(row + 1, height - 1) * width
    u, v = fraction[:, :1], fraction[:, 1:]
    top = pixels.take(upper + column, axis=0) * (1 - u) + pixels.take(upper + right, axis=0) * u
    bottom = pixels.take(lower + column, axis=0) * (1 - u) + pixels.take(lower + right, axis=0) * u
    return top * (1 - v) + bottom * v


def psnr(learned: np.ndarray, photo: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB, -10 log10(mean squared error), of values with peak 1, clipped to [0, 1]."""
    difference = np.clip(learned, 0, 1).astype(np.float64) - photo
    mean_squared_error = float(np.mean(np.square(difference)))
    return float("inf") if mean_squared_error == 0 else -10 * float(np.log10(mean_squared_error))
