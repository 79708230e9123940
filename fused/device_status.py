"""Whether a device can run fused kernels and if not, why: a sentence for warnings, facts for `numba-tcnn doctor`."""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import dataclass, field

from ..engines import EngineUnavailable
from .driver import device, driver_version
from .plan import architecture

MIN_DRIVER = (12, 0)

TOOLKIT_PACKAGES = (
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvrtc",
    "cuda-core",
    "cuda-bindings",
    "cuda-toolkit",
)


@dataclass(frozen=True)
class DeviceStatus:
    """usable, or the reason why not; `no_device` where there simply is no NVIDIA device."""

    usable: bool
    reason: str
    no_device: bool = False
    name: str = ""
    compute_capability: tuple[int, int] | None = None
    driver_version: tuple[int, int] | None = None
    total_memory: int = 0  # bytes
    toolkit: dict[str, str] = field(default_factory=dict)  # versions of the packages that compile kernels


def toolkit_versions() -> dict[str, str]:
    """Versions of the installed packages that kernels are compiled with; missing ones are left out."""
    versions = {}
    for name in TOOLKIT_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def device_status(index: int = 0) -> DeviceStatus:
    """Look at CUDA device number `index`. Compiles nothing."""
    toolkit = toolkit_versions()
    try:
        opened = device(index)
        properties, version = opened.properties, driver_version()
    except EngineUnavailable as error:
        return DeviceStatus(False, str(error), error.no_device, toolkit=toolkit)
    facts = {
        "name": properties.name,
        "compute_capability": properties.capability,
        "driver_version": version,
        "total_memory": properties.total_memory,
        "toolkit": toolkit,
    }
    if version < MIN_DRIVER:
        found, needed = ("{}.{}".format(*v) for v in (version, MIN_DRIVER))
        return DeviceStatus(False, f"the NVIDIA driver supports CUDA {found}; {needed} is needed", **facts)
    try:
        architecture(properties.capability)
    except EngineUnavailable as error:
        return DeviceStatus(False, str(error), **facts)
    return DeviceStatus(True, f"{properties.name} can run fused kernels", **facts)
