"""The `numba-tcnn` command: options in, one line out for everything that can be wrong with them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from .command_line import ArgumentParser, CommandError, whole_number
from .config_keys import ConfigError, did_you_mean
from .engine_selection import ENGINES, JitFusionWarning
from .engines import EngineUnavailable

PROGRAM = "numba-tcnn"
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

OVERVIEW = f"""usage: {PROGRAM} COMMAND [options]

commands:
  image [PHOTO]   learn a photo and show how well it went
  doctor          say what this machine has, what fused kernels need, and what to do about the rest

{PROGRAM} COMMAND --help tells more; {PROGRAM} --version tells the version.
"""

IMAGE_EPILOG = """
Colours are compared as stored, value / 255 without undoing gamma. PSNR is that of the whole learned picture, clipped
to [0, 1], against the photo. ms/step is the mean over all training steps but the first; drawing batches, the progress
bar and its PSNR don't count. Compile seconds are those of all kernels that were not in the cache.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for what the user can put right, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = f"{PROGRAM} {arguments[0]}" if arguments and arguments[0] in COMMANDS else PROGRAM
    try:
        with warnings.catch_warnings():
            warnings.showwarning = one_line_warnings(command)
            warnings.simplefilter("always", JitFusionWarning)
            return dispatch(arguments)
    except (CommandError, ConfigError) as error:
        print(f"{command}: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except EngineUnavailable as error:
        advice = f"--engine auto or reference runs without it, {PROGRAM} doctor says more"
        print(f"{command}: {' '.join(str(error).split())}; {advice}", file=sys.stderr)
        return EXIT_USER_ERROR
    except MemoryError as error:
        print(f"{command}: out of memory: {error}; use a smaller --batch or a smaller model", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print(f"{command}: stopped", file=sys.stderr)
        return EXIT_INTERRUPTED


def dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(OVERVIEW, end="")
        return 0
    if arguments[0] == "--version":
        from . import __version__

        print(f"{PROGRAM} {__version__}")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        hint = did_you_mean(name, COMMANDS) or f"; there are {', '.join(COMMANDS)}"
        raise CommandError(f"unknown {kind} {name}{hint}")
    try:
        return COMMANDS[name](rest)
    except SystemExit as leaving:  # argparse after --help
        return int(leaving.code or 0)


def image_command(arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog=f"{PROGRAM} image",
        description="A neural network learns a photo: colour as a function of position.",
        epilog=IMAGE_EPILOG,
    )
    add = parser.add_argument
    add("photo", nargs="?", type=Path, metavar="PHOTO", help="picture file or .npy array; default: a portrait")
    add(
        "--config", type=Path, metavar="FILE", help="model as tiny-cuda-nn's JSON; default: a hash grid of 2^15 entries"
    )
    add("--steps", type=whole_number(1, 10**9), default=1000, metavar="N", help="training steps (1000)")
    add(
        "--batch",
        type=whole_number(1, 1 << 26),
        metavar="N",
        help="samples of a step (fused: 262144, reference: 4096)",
    )
    add("--engine", choices=ENGINES, default="auto", help="auto takes fused where a GPU is usable (auto)")
    add("--seed", type=whole_number(0, 2**32 - 1), default=1337, metavar="N", help="of parameters and samples (1337)")
    add("--out", type=Path, default=Path("numba-tcnn-image"), metavar="DIR", help="folder to write (numba-tcnn-image)")
    add("--compare", action="store_true", help="also draw the error between the two engines")
    options = parser.parse(arguments)

    from .image import ImageJob, run

    print(run(ImageJob(**vars(options))))
    return 0


def doctor_command(arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog=f"{PROGRAM} doctor",
        description="Reports versions, device and cache, tests the engines, and advises on what is missing.",
    )
    parser.add_argument("--device", type=whole_number(0, 1023), default=0, metavar="N", help="CUDA device number (0)")
    options = parser.parse(arguments)

    from .doctor import run

    return run(options.device)


COMMANDS: dict[str, Callable[[list[str]], int]] = {"image": image_command, "doctor": doctor_command}


def one_line_warnings(command: str) -> Callable[..., None]:
    """A `warnings.showwarning` that prints the message alone, on one line, as this command's."""

    def show(message, category, filename, lineno, file: TextIO | None = None, line: str | None = None) -> None:
        print(f"{command}: warning: {' '.join(str(message).split())}", file=file or sys.stderr)

    return show
