"""Photos of every format as float32 [height, width, 3], and the colours between their pixels."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from numba_tcnn.command_line import CommandError
from numba_tcnn.photo import bilinear, default_photo, load_photo, pixel_centres, psnr

GREY = np.arange(20, dtype=np.uint8).reshape(4, 5) * 12
RGB = np.stack([GREY, GREY[::-1], 255 - GREY], axis=2)


def save(tmp_path, array, name, mode=None):
    path = tmp_path / name
    Image.fromarray(array, mode).save(path) if mode else Image.fromarray(array).save(path)
    return path


def test_the_default_photo_is_there():
    photo = load_photo(default_photo())
    assert photo.shape == (600, 512, 3) and photo.dtype == np.float32
    assert 0 <= photo.min() < 0.1 and 0.9 < photo.max() <= 1


def test_eight_bits_are_divided_by_255(tmp_path):
    np.testing.assert_array_equal(load_photo(save(tmp_path, RGB, "rgb.png")), RGB.astype(np.float32) / 255)
    np.testing.assert_array_equal(load_photo(save(tmp_path, RGB, "rgb.bmp")), RGB.astype(np.float32) / 255)


def test_grey_becomes_three_channels(tmp_path):
    photo = load_photo(save(tmp_path, GREY, "grey.png"))
    np.testing.assert_array_equal(photo, np.repeat(GREY[:, :, None], 3, axis=2).astype(np.float32) / 255)


def test_palettes_become_colours(tmp_path):
    path = tmp_path / "palette.gif"
    Image.fromarray(RGB).convert("P", palette=Image.Palette.ADAPTIVE, colors=256).save(path)
    # 20 colours fit a palette of 256, chosen to within a few steps of 1/255
    np.testing.assert_allclose(load_photo(path), RGB / 255, atol=0.05)


@pytest.mark.parametrize("alpha", [0, 51, 255])
def test_transparent_pixels_lie_on_white(tmp_path, alpha):
    rgba = np.concatenate([RGB, np.full((4, 5, 1), alpha, np.uint8)], axis=2)
    opacity = alpha / 255
    # float32 arithmetic
    np.testing.assert_allclose(
        load_photo(save(tmp_path, rgba, "rgba.png")), RGB / 255 * opacity + (1 - opacity), atol=1e-6
    )


def test_sixteen_bits_are_divided_by_65535(tmp_path):
    deep = GREY.astype(np.uint16) * 257 + 3
    photo = load_photo(save(tmp_path, deep, "deep.png"))
    np.testing.assert_array_equal(photo[:, :, 0], deep.astype(np.float32) / 65535)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "uint8", "uint16", "bool"])
def test_arrays_of_every_dtype(tmp_path, dtype):
    path = tmp_path / "photo.npy"
    array = (RGB / 255).astype(dtype) if dtype.startswith("float") else RGB.astype(dtype)
    np.save(path, array)
    scale = {"uint8": 255, "uint16": 65535}.get(dtype, 1)
    photo = load_photo(path)
    assert photo.dtype == np.float32
    np.testing.assert_array_equal(photo, array.astype(np.float32) / np.float32(scale))


def test_float_pictures_are_read_in_full(tmp_path):
    values = np.linspace(0, 1, 20, dtype=np.float32).reshape(4, 5)
    np.testing.assert_array_equal(load_photo(save(tmp_path, values, "photo.tiff"))[:, :, 1], values)


def test_the_camera_s_orientation_is_applied(tmp_path):
    path = tmp_path / "turned.png"
    exif = Image.Exif()
    exif[0x0112] = 6  # shown after a quarter turn clockwise
    Image.fromarray(RGB).save(path, exif=exif)
    np.testing.assert_array_equal(load_photo(path), np.rot90(RGB, -1).astype(np.float32) / 255)


@pytest.mark.filterwarnings("error")
def test_how_large_a_photo_may_be(tmp_path, monkeypatch):
    """20 pixels: Pillow warns above its limit, which is no one's concern here, and refuses above twice that."""
    path = save(tmp_path, RGB, "rgb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert load_photo(path).shape == (4, 5, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)
    with pytest.raises(CommandError, match="rgb.png is too large, a photo may have 18 pixels; scale it down$"):
        load_photo(path)


def test_bilinear_at_pixel_centres_is_the_photo(rng):
    photo = rng.random((7, 4, 3), np.float32)
    colours = bilinear(photo, pixel_centres(7, 4))
    # a centre's coordinate is rounded to float32, so up to 1e-6 of its neighbour is mixed in
    np.testing.assert_allclose(colours.reshape(photo.shape), photo, atol=3e-6)


def test_bilinear_between_and_beyond_centres():
    photo = np.zeros((2, 2, 3), np.float32)
    photo[0, 1], photo[1, 0], photo[1, 1] = 1, 2, 3
    points = np.array([[0.5, 0.5], [0.25, 0.5], [0, 0], [1, 0], [0, 1], [1, 1], [0.375, 0.25]], np.float32)
    np.testing.assert_allclose(bilinear(photo, points)[:, 0], [1.5, 1, 0, 1, 2, 3, 0.25])


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 5, 3), (6, 1, 3)])
def test_bilinear_of_thin_photos(rng, shape):
    photo = rng.random(shape, np.float32)
    colours = bilinear(photo, rng.random((100, 2), np.float32))
    assert colours.dtype == np.float32  # anything wider would be converted again at every training step
    assert (colours >= photo.min(axis=(0, 1)) - 1e-6).all() and (colours <= photo.max(axis=(0, 1)) + 1e-6).all()


def test_pixel_centres_run_row_by_row():
    centres = pixel_centres(2, 4)
    assert centres.shape == (8, 2) and centres.dtype == np.float32
    np.testing.assert_allclose(centres[[0, 3, 4]], [[0.125, 0.25], [0.875, 0.25], [0.125, 0.75]])
    np.testing.assert_array_equal(pixel_centres(6, 3, slice(2, 4)), pixel_centres(6, 3)[6:12])


def test_psnr():
    photo = np.full((2, 2, 3), 0.5)
    assert psnr(photo + 0.1, photo) == pytest.approx(20)
    assert psnr(photo + 7, photo) == pytest.approx(-10 * np.log10(0.25))  # clipped to 1
    assert psnr(photo, photo) == float("inf")
