"""`numba-tcnn doctor`: what this machine has, what fused kernels need, a self-test, and advice in plain words."""

from __future__ import annotations

import importlib
import platform
import sys
from importlib import metadata
from typing import Any

import numpy as np

from ._version import __version__
from .model import create_from_config
from .plot import compare_engines

PACKAGES = ("numpy", "numba", "llvmlite", "matplotlib")
CUDA_PACKAGES = ("numba-cuda", "cuda-core", "cuda-bindings", "cuda-toolkit")
TOOLKIT_WHEELS = {
    "NVVM": ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"),
    "nvJitLink": ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12"),
    "NVRTC": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "CUDA runtime": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
}
"""Component: the wheel that holds it for CUDA 13, and for CUDA 12. A system-wide toolkit may stand in for them."""

SELF_TEST_CONFIG = {
    "loss": {"otype": "L2"},
    "encoding": {"otype": "HashGrid", "n_levels": 4, "log2_hashmap_size": 10, "base_resolution": 8},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 32, "n_hidden_layers": 2},
}
SELF_TEST_SAMPLES = 1000
HALF_PRECISION_TOLERANCE = 0.1
"""What storing in float16 may change: 11 bits a value, and ReLU units near zero that switch, a per mille of them."""


def run(device: int = 0) -> int:
    """Print the report. 0 if the reference engine works here, which every machine should manage; else 1."""
    print_versions()
    status = importlib.import_module("numba_tcnn.fused").device_status(device)
    print_device(status, device)
    cache_problem = print_cache()
    reference_works, self_test_problem = self_test(device)
    print_advice(status, self_test_problem, cache_problem)
    return 0 if reference_works else 1


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def print_versions() -> None:
    print(f"numba-tcnn {__version__}, Python {platform.python_version()}, {platform.platform()}")
    print("packages: " + ", ".join(f"{name} {version_of(name) or 'missing'}" for name in PACKAGES))
    print("for CUDA: " + ", ".join(f"{name} {version_of(name) or 'missing'}" for name in CUDA_PACKAGES))
    toolkit = []
    for component, wheels in TOOLKIT_WHEELS.items():
        found = next((f"{version_of(wheel)}" for wheel in wheels if version_of(wheel)), "no wheel")
        toolkit.append(f"{component} {found}")
    print("toolkit: " + ", ".join(toolkit))


def print_device(status: Any, device: int) -> None:
    driver = dotted(status.driver_version)
    print(f"driver: {f'for CUDA {driver} and older' if driver else 'none found'}")
    if status.name:
        print(f"device {device}: {status.name}, compute capability {dotted(status.compute_capability)}")
    else:
        print(f"device {device}: none")
    print(f"fused engine: {'usable' if status.usable else f'not usable: {status.reason}'}")
    if status.usable:
        dtypes = importlib.import_module("numba_tcnn.fused").dtypes_of(status.compute_capability)
        print(f"fused kernels compute in: {', '.join(dtypes)}")


def dotted(version: tuple[int, ...] | None) -> str:
    """(9, 0) as 9.0."""
    return ".".join(map(str, version or ()))


def print_cache() -> str | None:
    """Prints where kernels are kept. Returns what to do where they can't be, or None."""
    fused = importlib.import_module("numba_tcnn.fused")
    folder = fused.cache_directory()
    if folder is None:
        print("kernel cache: off")
        return None
    try:
        importlib.import_module("numba_tcnn.fused.cache").check_writable()
    except OSError as error:
        print(f"kernel cache: {folder}, can't be written: {error.strerror}")
        return (
            f"kernels can't be kept in {folder}, so each process compiles them again; name a folder that can be "
            "written in NUMBA_TCNN_CACHE_DIR"
        )
    print(f"kernel cache: {folder}, {fused.cache_size() / 1e6:.1f} MB")
    return None


def self_test(device: int) -> tuple[bool, str | None]:
    """(whether the reference works, what went wrong with the comparison or None); prints relative errors."""
    points = np.random.default_rng(0).random((SELF_TEST_SAMPLES, 2), np.float32)
    colours = np.stack([points[:, 0], points[:, 1], np.sin(7 * points[:, 0])], axis=1)
    try:
        model = create_from_config(2, 3, SELF_TEST_CONFIG, engine="reference", device=device)
        first = float(model.trainer.training_step(points, colours))
        last = model.fit(points, colours, steps=100).loss[-1]
    except Exception as error:  # whatever it is belongs in the report
        print(f"self-test: the reference engine fails: {type(error).__name__}: {error}")
        return False, "the reference engine fails, so this installation is broken; reinstall numba-tcnn and numpy"
    if not last < 0.5 * first:
        print(f"self-test: the reference engine does not learn, its loss went from {first:.3g} to {last:.3g}")
        return False, "the reference engine does not learn; reinstall numba-tcnn and numpy"
    print(f"self-test: the reference engine learns, its loss went from {first:.3g} to {last:.3g} in 100 steps")
    try:
        comparison = compare_engines(model, points, colours)
    except Exception as error:
        print(f"self-test: the fused engine fails: {type(error).__name__}: {error}")
        return True, f"the fused engine fails on this device ({type(error).__name__}); please report the line above"
    tolerance = HALF_PRECISION_TOLERANCE if comparison.tolerance is None else comparison.tolerance
    print(f"self-test: {comparison.title[0].lower()}{comparison.title[1:]}, relative L2 error:")
    wrong = []
    for name, error in comparison.errors.items():
        verdict = "ok" if error <= tolerance else f"more than {tolerance:g}"
        print(f"  {name:16} {error:.1e}  {verdict}")
        if not error <= tolerance:
            wrong.append(name)
    return (
        True,
        f"{', '.join(wrong)} differ too much between the engines; please report the lines above" if wrong else None,
    )


def print_advice(status: Any, self_test_problem: str | None, cache_problem: str | None) -> None:
    advice = [self_test_problem] if self_test_problem else []
    if not status.usable:
        if status.no_device:
            advice.append(
                "no NVIDIA GPU was found, so models run in NumPy, slower and with the same results. If this machine "
                "has one, `nvidia-smi` must list it: install NVIDIA's driver (in a container, pass the GPU through)"
            )
        else:
            advice.append(f"the GPU can't be used: {status.reason}. Models run in NumPy until that is put right")
    missing = [] if version_of("numba-cuda") else ["numba-cuda"]
    if self_test_problem:  # a CUDA toolkit of the system may well replace the wheels
        missing += [part for part, wheels in TOOLKIT_WHEELS.items() if not any(map(version_of, wheels))]
    if missing and sys.platform != "darwin":
        advice.append(
            f"fused kernels need {', '.join(missing)}: pip install 'numba-tcnn[cuda13]' (driver 580 or newer), "
            "or 'numba-tcnn[cuda12]' for an older driver"
        )
    if cache_problem:
        advice.append(cache_problem)
    for line in advice:
        print(f"advice: {line}")
    if not advice:
        print("advice: none, everything is in place")
