"""The `numba-tcnn` command: options in, one line out for everything that can be wrong with them."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from .command_line import ArgumentParser, CommandError, path_of, whole_number
from .config_encodings import MAX_WIDTH
from .config_keys import ConfigError, did_you_mean
from .engine_selection import DTYPES, ENGINES, JitFusionWarning
from .engines import EngineUnavailable

PROGRAM = "numba-tcnn"
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_UNREAD = 141  # 128 + SIGPIPE

OVERVIEW = f"""usage: {PROGRAM} COMMAND [options]

commands:
  image [PHOTO]   learn a photo and show how well it went
  compile CONFIG  compile a configuration's kernels into the cache, on a machine with or without a GPU
  doctor          say what this machine has, what fused kernels need, and what to do about the rest

{PROGRAM} COMMAND --help tells more; {PROGRAM} --version tells the version.
"""

IMAGE_EPILOG = """
Colours are compared as stored, value / 255 without undoing gamma. PSNR is that of the whole learned picture, clipped
to [0, 1], against the photo. ms/step is the mean over all training steps but the first; drawing batches, the progress
bar and its PSNR don't count. Compile seconds are those of all kernels that were not in the cache.
"""


COMPILE_EPILOG = """
Compiled is what first calls need: training steps on float32 and float16 inputs (other dtypes become float32) and
float32 targets, backward of parameters and inputs, inference to float32 and float16, the optimizer. sm_90 is what an
H100 or H200 runs; there are sm_75, sm_80, sm_86, sm_87, sm_89, sm_90, sm_100, sm_103, sm_110, sm_120, sm_121. A bare
Network is a config with the encoding Identity. NUMBA_TCNN_CACHE_DIR names the cache's folder. Counts of mma
instructions, vector loads and reductions are those written in the PTX. --json also lists kernels that were passed over
because they, or others of their plan, spill ("taken": false).
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for what the user can put right, 130 for Ctrl-C,
    141 where the reader of the output has gone (`numba-tcnn doctor | head -1`)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = f"{PROGRAM} {arguments[0]}" if arguments and arguments[0] in COMMANDS else PROGRAM
    try:
        with warnings.catch_warnings():
            warnings.showwarning = one_line_warnings(command)
            warnings.simplefilter("always", JitFusionWarning)
            exit_code = dispatch(arguments)
            sys.stdout.flush()
            return exit_code
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
    except BrokenPipeError:
        drop_buffered_output()
        return EXIT_UNREAD
    except OSError as error:  # a disk that is full, for one
        print(f"{command}: {' '.join(str(error).split())}", file=sys.stderr)
        drop_buffered_output()
        return EXIT_USER_ERROR


def drop_buffered_output() -> None:
    """What is still to be written would raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_environment() -> None:
    """Raises CommandError for variables that say what can't be, before anything is compiled."""
    fused = importlib.import_module("numba_tcnn.fused.compile_processes")
    try:
        fused.n_processes()
    except ValueError as error:
        raise CommandError(str(error)) from error
    try:
        fused.cache.cache_directory()
    except RuntimeError as error:
        raise CommandError(f"the cache of kernels: {error}; name a folder for it by {fused.cache.VARIABLE}") from error


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
    add(
        "photo",
        nargs="?",
        type=path_of("a picture"),
        metavar="PHOTO",
        help="picture file or .npy array; default: a portrait",
    )
    add(
        "--config",
        type=path_of("a JSON file"),
        metavar="FILE",
        help="model as tiny-cuda-nn's JSON; default: a hash grid of 2^15 entries",
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
    add(
        "--out",
        type=path_of("a folder"),
        default=Path("numba-tcnn-image"),
        metavar="DIR",
        help="folder to write (numba-tcnn-image)",
    )
    add("--compare", action="store_true", help="also draw the error between the two engines")
    options = parser.parse(arguments)
    check_environment()

    from .image import ImageJob, run

    print(run(ImageJob(**vars(options))))
    return 0


def compile_command(arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog=f"{PROGRAM} compile",
        description="Compiles a configuration's kernels into the disk cache, for GPUs that need not be here.",
        epilog=COMPILE_EPILOG,
    )
    add = parser.add_argument
    add("config", type=path_of("a JSON file"), metavar="CONFIG", help="model as tiny-cuda-nn's JSON")
    add("--inputs", type=whole_number(1, MAX_WIDTH), required=True, metavar="N", help="input dimensions")
    add("--outputs", type=whole_number(1, MAX_WIDTH), required=True, metavar="M", help="output dimensions")
    add("--arch", type=architecture_name, action="append", metavar="ARCH", help="architecture, can be repeated (sm_90)")
    add("--dtype", choices=DTYPES, default="float16", help="that layers compute in (float16)")
    add("--json", action="store_true", help="one JSON object a kernel and line")
    add("--processes", type=whole_number(1, 1024), metavar="N", help="that compile at a time (a core each, at most 8)")
    options = parser.parse(arguments)
    check_environment()

    from .compile_command import CompileJob, run

    run(CompileJob(**vars(options) | {"arch": tuple(options.arch or ("sm_90",))}))
    return 0


def architecture_name(text: str) -> str:
    """An option's type: the name of an architecture that kernels can be compiled for."""
    known = importlib.import_module("numba_tcnn.fused.offline").CAPABILITIES
    if text not in known:
        hint = did_you_mean(text, known) or f"; there are {', '.join(known)}"
        raise argparse.ArgumentTypeError(f"{text!r} is no architecture{hint}")
    return text


def doctor_command(arguments: list[str]) -> int:
    parser = ArgumentParser(
        prog=f"{PROGRAM} doctor",
        description="Reports versions, device and cache, tests the engines, and advises on what is missing.",
    )
    parser.add_argument("--device", type=whole_number(0, 1023), default=0, metavar="N", help="CUDA device number (0)")
    options = parser.parse(arguments)
    check_environment()

    from .doctor import run

    return run(options.device)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "image": image_command,
    "compile": compile_command,
    "doctor": doctor_command,
}


def one_line_warnings(command: str) -> Callable[..., None]:
    """A `warnings.showwarning` that prints the message alone, on one line, as this command's."""

    def show(message, category, filename, lineno, file: TextIO | None = None, line: str | None = None) -> None:
        print(f"{command}: warning: {' '.join(str(message).split())}", file=file or sys.stderr)

    return show
