"""The command line: what a wrong input gets (one line, exit code 2, before anything is made) and what a run writes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import FakeFusedEngine
from PIL import Image

import numba_tcnn
import numba_tcnn.fused
from numba_tcnn import cli, compile_command, image
from numba_tcnn.photo import bilinear
from numba_tcnn.trainer import LossValue

SMALL_CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
    "encoding": {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 10, "base_resolution": 4},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 16, "n_hidden_layers": 1},
}


def gradient_picture(height: int = 24, width: int = 32) -> np.ndarray:
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([255 * rows / height, 255 * columns / width, 128 + 0 * rows], axis=2).astype(np.uint8)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    Image.fromarray(gradient_picture()).save(path)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL_CONFIG))
    return path


@pytest.fixture
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad input is found before a model exists, so before anything could be compiled."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was made")

    monkeypatch.setattr(image, "create_from_config", refuse)


def one_line(capsys: pytest.CaptureFixture) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n"), captured.err
    assert "usage:" not in captured.err and "Traceback" not in captured.err
    return captured.err.rstrip("\n")


# ------------------------------------------------------------------------------------------- wrong input


COMMANDS = [["image"], ["doctor"], ["compile", "c.json", "--inputs", "2", "--outputs", "1"]]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_an_environment_that_says_what_can_not_be(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, nothing_is_made: None
) -> None:
    monkeypatch.setenv("NUMBA_TCNN_COMPILE_PROCESSES", "-1")
    assert cli.main(arguments) == 2
    assert "NUMBA_TCNN_COMPILE_PROCESSES is '-1'" in one_line(capsys)


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: arguments[0])
def test_a_user_without_a_home_is_told_to_name_a_cache(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, nothing_is_made: None
) -> None:
    def no_home(*_: object) -> None:
        raise RuntimeError("Could not determine home directory.")

    for name in ("NUMBA_TCNN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr(Path, "home", no_home)
    assert cli.main(arguments) == 2
    assert "name a folder for it by NUMBA_TCNN_CACHE_DIR" in one_line(capsys)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_can_not_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "numba_tcnn", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "No space left" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["imagine"], "numba-tcnn: unknown command imagine, did you mean image?"),
        (["train"], "numba-tcnn: unknown command train; there are image, compile, doctor"),
        (["--stepz"], "numba-tcnn: unknown option --stepz; there are image, compile, doctor"),
        (["image", "--stepz", "3"], "numba-tcnn image: unknown option --stepz, did you mean --steps?"),
        (["image", "--step", "3"], "numba-tcnn image: unknown option --step, did you mean --steps?"),
        (["image", "a.png", "b.png"], "numba-tcnn image: unknown argument b.png; numba-tcnn image --help lists"),
        (["image", "--steps"], "numba-tcnn image: --steps: expected one argument"),
        (["image", "--steps", "-1"], "numba-tcnn image: --steps: '-1' is not a whole number from 1 to 1000000000"),
        (["image", "--steps", "0"], "--steps: '0' is not a whole number"),
        (["image", "--steps", "1e3"], "--steps: '1e3' is not a whole number"),
        (["image", "--batch", "abc"], "numba-tcnn image: --batch: 'abc' is not a whole number from 1 to 67108864"),
        (["image", "--batch", "0"], "--batch: '0' is not a whole number"),
        (["image", "--seed", "x"], "numba-tcnn image: --seed: 'x' is not a whole number from 0 to 4294967295"),
        (["image", "--engine", "gpu"], "numba-tcnn image: --engine: invalid choice: 'gpu'"),
        (["image", "--config", "missing.json"], "No such file or directory; give the path of a JSON file"),
        (["image", "--config", "."], 'numba-tcnn image: config ".": can\'t be read: '),
        (["image", "--config", ""], "numba-tcnn image: --config: '' is no path; give the path of a JSON file"),
        (["image", "--out", ""], "numba-tcnn image: --out: '' is no path; give the path of a folder"),
        (["image", ""], "numba-tcnn image: PHOTO: '' is no path; give the path of a picture"),
        (["compile", ""], "numba-tcnn compile: CONFIG: '' is no path; give the path of a JSON file"),
        (
            ["compile", "missing.json", "--inputs", "2", "--outputs", "3"],
            "No such file or directory; give the path of a JSON file",
        ),
        (["image", "missing.png"], "numba-tcnn image: no photo at missing.png; give the path of a picture"),
        (["image", "."], "numba-tcnn image: . is a folder; give the path of one picture in it"),
        (["doctor", "--device", "-3"], "numba-tcnn doctor: --device: '-3' is not a whole number from 0 to 1023"),
        (["doctor", "now"], "numba-tcnn doctor: unknown argument now; numba-tcnn doctor --help lists what there is"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments, message, capsys, nothing_is_made):
    assert cli.main(arguments) == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoding": {"otype": "HashGrid", "n_levls": 4}}, "encoding.n_levls: unknown key, did you mean n_levels?"),
        (
            {"network": {"otype": "FullyFusedMLP", "n_neurons": 80}},
            "network.n_neurons: 80 is not one of 16, 32, 64, 128",
        ),
        ({"optimiser": {}}, "optimiser: unknown key, did you mean optimizer?"),
        ({"loss": {"otype": "L3"}}, 'loss.otype: "L3" is not a loss'),
        ({"optimizer": {"otype": "Adam", "learning_rate": -1}}, "optimizer.learning_rate: -1 is not a number from 0"),
        ({"network": None}, "network: null leaves an encoding of width 8; the image command needs a network"),
    ],
)
def test_a_wrong_config_is_one_line(change, message, tmp_path, capsys, nothing_is_made):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL_CONFIG, **change}))
    assert cli.main(["image", "--config", str(path)]) == 2
    assert one_line(capsys).startswith(f"numba-tcnn image: {message}")


def test_a_config_that_is_no_json_is_one_line(tmp_path, capsys, nothing_is_made):
    path = tmp_path / "config.json"
    path.write_text('{"loss": ')
    assert cli.main(["image", "--config", str(path)]) == 2
    assert "not valid JSON" in one_line(capsys)


def write_array(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (np.full((4, 5, 3), np.nan), r"has 60 NaN or infinite pixel values, the first at [0, 0, 0]; replace them"),
        (np.array([[0.5, np.inf]]), r"has 1 NaN or infinite pixel values, the first at [0, 1]"),
        (np.full((4, 5), 200.0), "has pixel values from 200 to 200; scale floats to [0, 1]"),
        (np.zeros((4, 5, 2), np.uint8), "has shape [4, 5, 2]; a picture is [height, width]"),
        (np.zeros((0, 5, 3), np.uint8), "has no pixels, its shape is [0, 5, 3]"),
        (np.zeros((4, 5), complex), "has pixels of dtype complex128; use uint8, uint16 or floats in [0, 1]"),
    ],
)
def test_wrong_pixels_are_one_line(pixels, message, tmp_path, capsys, nothing_is_made):
    path = write_array(tmp_path / "photo.npy", pixels)
    assert cli.main(["image", str(path)]) == 2
    assert one_line(capsys).startswith(f"numba-tcnn image: {path} {message}")


def test_nan_in_a_float_picture_file_is_found(tmp_path, capsys, nothing_is_made):
    pixels = np.full((6, 7), 0.5, np.float32)
    pixels[2, 3] = np.nan
    path = tmp_path / "photo.tiff"
    Image.fromarray(pixels).save(path)
    assert cli.main(["image", str(path)]) == 2
    assert "has 1 NaN or infinite pixel values, the first at [2, 3]" in one_line(capsys)


@pytest.mark.parametrize("name", ["photo.png", "photo.jpg", "photo.npy", "photo.npz", "photo"])
@pytest.mark.parametrize(
    "content", [b"", b"this is no picture\n" * 10, b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", b"PK\x03\x04rubbish"]
)
def test_unreadable_photos_are_one_line(name, content, tmp_path, capsys, nothing_is_made):
    path = tmp_path / name
    path.write_bytes(content)
    assert cli.main(["image", str(path)]) == 2
    assert one_line(capsys).startswith(f"numba-tcnn image: {path} can't be read as a ")


def test_a_truncated_photo_is_one_line(photo, capsys, nothing_is_made):
    photo.write_bytes(photo.read_bytes()[:-40])
    assert cli.main(["image", str(photo)]) == 2
    assert "can't be read as a picture" in one_line(capsys)


def test_an_archive_of_several_arrays_is_one_line(tmp_path, capsys, nothing_is_made):
    path = tmp_path / "photo.npz"
    np.savez(path, a=np.zeros((2, 2)), b=np.zeros((2, 2)))
    assert cli.main(["image", str(path)]) == 2
    assert "holds 2 arrays; save the picture alone" in one_line(capsys)


def test_an_output_folder_that_is_a_file_is_one_line(photo, capsys, nothing_is_made):
    assert cli.main(["image", str(photo), "--out", str(photo)]) == 2
    assert one_line(capsys) == f"numba-tcnn image: --out {photo} can't be made a folder: it is a file; choose another"


@pytest.mark.parametrize("name", ["learned.png", "comparison.png", "loss.png", "engine_error.png", "record.json"])
def test_a_folder_under_the_name_of_an_output_is_one_line(name, photo, tmp_path, capsys, nothing_is_made):
    (tmp_path / "out" / name).mkdir(parents=True)
    assert cli.main(["image", str(photo), "--out", str(tmp_path / "out"), "--compare"]) == 2
    line = one_line(capsys)
    assert line.startswith(f"numba-tcnn image: {tmp_path / 'out' / name} is a folder, but a file of that name")
    assert line.endswith("choose another --out")


def test_an_output_folder_that_takes_no_files_is_one_line(photo, tmp_path, capsys, nothing_is_made, monkeypatch):
    """Also where its permissions say that it does, as on a file system that is full."""

    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(image.tempfile, "TemporaryFile", no_space)
    assert cli.main(["image", str(photo), "--out", str(tmp_path / "out")]) == 2
    assert one_line(capsys).endswith("can't be written to: No space left on device; choose another")


def test_a_missing_library_is_named_once(config, capsys, monkeypatch):
    """cuda-pathfinder's own words, on several lines."""
    name = "libnvrtc.so.13 or libnvrtc.so.12"
    words = f'Failure finding "{name}": No such file: {name}, No such file: {name}\n'
    problem = f"numba-cuda and NVVM can't be used: {words}"
    monkeypatch.setattr(compile_command.compiler, "toolchain_problem", lambda capabilities: problem)
    assert cli.main(["compile", str(config), "--inputs", "2", "--outputs", "3"]) == 2
    line = one_line(capsys)
    assert line.startswith(f"numba-tcnn compile: numba-cuda and NVVM can't be used: {name} was not found; pip install")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [1, 300])
def test_training_that_diverges_is_one_line(steps, photo, tmp_path, capsys):
    """Also where no loss tells of it: that of one step is the loss before the step."""
    path, out = tmp_path / "config.json", tmp_path / "out"
    network = SMALL_CONFIG["network"] | {"n_hidden_layers": 8}
    optimizer = {"otype": "Adam", "learning_rate": 1e6}
    path.write_text(json.dumps(SMALL_CONFIG | {"network": network, "optimizer": optimizer}))
    arguments = ["image", str(photo), "--config", str(path), "--engine", "reference", "--steps", str(steps)]
    assert cli.main([*arguments, "--batch", "64", "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1  # what was begun
    assert "warning" not in captured.err
    sign = "the learned colours are not finite" if steps == 1 else r"the loss of step \d+ is (nan|inf)"
    assert re.fullmatch(
        f"numba-tcnn image: training diverged, {sign}; lower the optimizer's learning_rate",
        captured.err.splitlines()[-1],
    )
    assert not any(out.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_output_that_nobody_reads_is_no_traceback():
    """One line that is still buffered when the command ends."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "numba_tcnn", "--version"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_asking_for_fused_without_a_gpu_is_one_line(photo, config, tmp_path, capsys, monkeypatch):
    engine = FakeFusedEngine("create_runtime", "no NVIDIA device was found", no_device=True)
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", engine.create_runtime)
    arguments = ["image", str(photo), "--config", str(config), "--engine", "fused", "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert one_line(capsys).startswith("numba-tcnn image: no NVIDIA device was found; --engine auto or reference runs")


def test_ctrl_c_is_one_line(photo, capsys, monkeypatch):
    def interrupted(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(image, "run", interrupted)
    assert cli.main(["image", str(photo)]) == 130
    assert one_line(capsys) == "numba-tcnn image: stopped"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals to a process are POSIX's")
def test_ctrl_c_in_mid_training_is_one_line(tmp_path):
    command = [sys.executable, "-m", "numba_tcnn", "image", "--engine", "reference", "--steps", "100000"]
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore Ctrl-C
    ) as process:
        os.read(process.stdout.fileno(), 1)  # the first line is printed when training begins
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "numba-tcnn image: stopped"
    assert b"Traceback" not in err


# ------------------------------------------------------------------------------------------- right input


def test_overview_help_and_version(capsys):
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        assert cli.main(arguments) == 0
        assert "image [PHOTO]" in capsys.readouterr().out
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"numba-tcnn {numba_tcnn.__version__}\n"
    assert cli.main(["image", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for told in (
        "--config",
        "--compare",
        "fused: 262144, reference: 4096",
        "mean over all training steps but the first",
    ):
        assert told in text


def test_the_image_job_writes_what_it_says(photo, config, tmp_path, capsys):
    out = tmp_path / "results"
    arguments = ["image", str(photo), "--config", str(config), "--engine", "reference", "--steps", "120"]
    assert cli.main([*arguments, "--batch", "512", "--seed", "7", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    first, *_, last = captured.out.splitlines()
    assert first == "photo.png, 32 x 24 pixels; reference engine: engine='reference' was asked for"
    assert "120/120" in captured.err and "dB" in captured.err and "samples/s" in captured.err

    record = json.loads((out / "record.json").read_text())
    ms = record["ms_per_step"]
    assert last == f"reference: {record['psnr_db']:.1f} dB, {ms:.3g} ms/step, 0.00 s compiling"
    assert record["files"] == ["learned.png", "comparison.png", "loss.png", "record.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted(record["files"])  # no temporary file stays
    assert (record["steps"], record["batch"], record["seed"], record["pixels"]) == (120, 512, 7, [32, 24])
    assert record["config"] == SMALL_CONFIG and len(record["losses"]) == 120
    assert record["samples_per_second"] == pytest.approx(512 * 1000 / ms)

    learned = np.asarray(Image.open(out / "learned.png")).astype(np.float64)
    assert learned.shape == (24, 32, 3)
    from_file = -10 * np.log10(np.mean((learned / 255 - gradient_picture() / 255) ** 2))
    # the file holds 8 bits: at most half a step of 1/255 per value, which moves 30 dB by less than 0.1
    assert from_file == pytest.approx(record["psnr_db"], abs=0.3)
    assert record["psnr_db"] > 25


def test_the_same_seed_learns_the_same_picture(photo, config, tmp_path):
    pictures = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        arguments = ["image", str(photo), "--config", str(config), "--engine", "reference", "--steps", "20"]
        assert cli.main([*arguments, "--batch", "64", "--seed", str(seed), "--out", str(tmp_path / name)]) == 0
        pictures.append((tmp_path / name / "learned.png").read_bytes())
    assert pictures[0] == pictures[1] != pictures[2]


def test_the_seed_is_that_of_the_parameters_too(photo, config, tmp_path, monkeypatch):
    made = []

    def recorded(*args, **kwargs):
        model = numba_tcnn.create_from_config(*args, **kwargs)
        made.append(model.params)
        return model

    monkeypatch.setattr(image, "create_from_config", recorded)
    for seed in (7, 8):
        arguments = ["image", str(photo), "--config", str(config), "--engine", "reference", "--steps", "1"]
        assert cli.main([*arguments, "--batch", "64", "--seed", str(seed), "--out", str(tmp_path / "out")]) == 0
        expected = numba_tcnn.create_from_config(2, 3, SMALL_CONFIG, engine="reference", seed=seed).params
        np.testing.assert_array_equal(made[-1], expected)
    assert not np.array_equal(*made)


class SlowDevice:
    """A model whose steps run one behind the other, `step` seconds each, while the host goes on after `launch`."""

    jit_fusion = False
    step = 2.0**-7
    launch = 2.0**-16

    def __init__(self):
        self.now = self.idle_from = 0.0
        self.trainer = self.network = self

    def perf_counter(self) -> float:
        return self.now

    def training_step(self, x, y) -> LossValue:
        self.now += self.launch
        self.idle_from = done = max(self.now, self.idle_from) + self.step

        class Waiting(LossValue):
            def __float__(loss) -> float:
                self.now = max(self.now, done)
                return 0.5

        return Waiting(0.5)

    def inference(self, x):
        return np.zeros((len(x), 3), np.float32)


def test_the_clock_is_read_when_the_device_is_done_and_seldom(rng, monkeypatch):
    """Stretches get as long as the time between readings; what a step takes is the device's time, not the host's."""
    device = SlowDevice()
    monkeypatch.setattr(image, "time", device)
    stretches = []
    take = image.BatchSource.take

    def recorded(self, n, **kwargs):
        stretches.append(n)
        return take(self, n, **kwargs)

    monkeypatch.setattr(image.BatchSource, "take", recorded)
    training = image.train(device, rng.random((8, 9, 3), np.float32), steps=70, batch=4, seed=0)
    assert stretches == [1, 1, 25, 25, 18]  # 0.2 s are 25.6 steps
    assert len(training.losses) == 70
    # one launch a stretch is not hidden behind the device's work: 1/512 of a step
    assert training.ms_per_step == pytest.approx(1000 * device.step, rel=1e-3)
    assert training.first_step_seconds == device.step + device.launch


def test_a_kernel_that_fails_is_one_warning_and_the_job_goes_on(photo, config, tmp_path, capsys, monkeypatch):
    engine = FakeFusedEngine("training_step", "kernel gradient: 300 registers, 255 allowed")
    monkeypatch.setattr(numba_tcnn.fused, "create_runtime", engine.create_runtime)
    monkeypatch.setattr(numba_tcnn.fused, "to_device", lambda values, device: values)
    arguments = ["image", str(photo), "--config", str(config), "--steps", "5", "--batch", "64", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    warned = [line for line in captured.err.splitlines() if "warning" in line]
    assert len(warned) == 1
    assert "numba-tcnn image: warning: JIT fusion is off" in warned[0] and "300 registers" in warned[0]
    assert captured.out.splitlines()[-1].startswith("reference: ")


def test_batches_for_the_gpu_come_from_a_pool_in_turn(monkeypatch, rng):
    monkeypatch.setattr(image, "device_array", lambda values: values)
    source = image.BatchSource(rng.random((8, 9, 3), np.float32), batch=32, seed=0)
    taken = source.take(20, on_device=True)
    assert len(source.pool) == image.POOL_BATCHES
    assert taken[16] is taken[0] and taken[1] is not taken[0]
    assert not np.array_equal(taken[0][0], taken[1][0])
    assert source.take(1, on_device=True)[0] is source.pool[20 % image.POOL_BATCHES]
    on_host = [source.take(1, on_device=False)[0] for _ in range(2)]
    assert not np.array_equal(on_host[0][0], on_host[1][0])


def test_the_progress_bar_measures_at_pixel_centres(rng):
    photo = rng.random((8, 9, 3), np.float32)
    probe = image.Probe(photo, seed=0)
    assert len(np.unique(probe.points, axis=0)) > 20
    np.testing.assert_allclose(bilinear(photo, probe.points), probe.colours, atol=1e-5)  # rounded weights


def test_a_large_picture_is_predicted_in_pieces(monkeypatch):
    """A network whose colours are the position: rows and columns stay where they are."""
    monkeypatch.setattr(image, "PREDICTED_ROWS", 20)
    sizes = []

    class Position:
        def inference(self, x):
            sizes.append(len(x))
            return np.concatenate([x, x[:, :1]], axis=1)

    learned = image.learned_picture(SimpleNamespace(network=Position()), (7, 9, 3))
    assert sizes == [18, 18, 18, 9]
    np.testing.assert_array_equal(learned[3, :, 0], (np.arange(9, dtype=np.float32) + 0.5) / np.float32(9))
    np.testing.assert_array_equal(learned[:, 3, 1], (np.arange(7, dtype=np.float32) + 0.5) / np.float32(7))


@pytest.mark.slow
def test_python_dash_m_is_the_same_command(photo, config, tmp_path):
    command = [sys.executable, "-m", "numba_tcnn", "image", str(photo), "--config", str(config)]
    run = subprocess.run(
        [*command, "--engine", "reference", "--steps", "3", "--batch", "64", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith("reference: ")
