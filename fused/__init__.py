"""The fused engine: encodings, network, loss and backpropagation as single CUDA kernels, compiled at run time.

Importing this package needs neither a GPU nor a CUDA toolkit, and imports no part of Numba; both are looked for when
a runtime is created, and Numba only where a kernel must be compiled.
"""

from __future__ import annotations

from .cache import cache_directory, cache_size
from .device_array import DeviceArray, strided_to_host, to_device
from .device_status import DeviceStatus, device_status
from .engine import FusedRuntime, create_runtime
from .plan import dtypes_of

__all__ = [
    "DeviceArray",
    "DeviceStatus",
    "FusedRuntime",
    "cache_directory",
    "cache_size",
    "create_runtime",
    "device_status",
    "dtypes_of",
    "strided_to_host",
    "to_device",
]
