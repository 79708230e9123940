"""CUDA streams as users have them: a handle, or an object of the library that made it."""

from __future__ import annotations

import numbers
from typing import Any

NAMES_OF_HANDLES = ("cuda_stream", "ptr")  # PyTorch's; CuPy's


def stream_handle(stream: Any, default: int | None) -> int | None:
    """The handle of a stream, `default` for None. Raises TypeError for anything that is no stream.

    stream   a handle, as an int; an object with `__cuda_stream__` (cuda.core, Numba and others: NVIDIA's protocol, a
             method that gives (0, handle)); or a stream of PyTorch or CuPy
    """
    if stream is None:
        return default
    if isinstance(stream, numbers.Integral) and not isinstance(stream, bool) and stream >= 0:
        return int(stream)
    protocol = getattr(stream, "__cuda_stream__", None)
    if callable(protocol):
        _, handle = protocol()
        return int(handle)
    for name in NAMES_OF_HANDLES:
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    raise TypeError(f"stream must be the handle of a CUDA stream, or a library's stream object, not {stream!r}")
