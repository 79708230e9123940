"""The encodings this engine has, by the type of their spec. A new encoding is a file with a class as
`encoding_contract.Encoding` says and a line in `ENCODINGS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from numba_tcnn.specs import (
    CompositeSpec,
    EmptySpec,
    EncodingSpec,
    FrequencySpec,
    GridSpec,
    IdentitySpec,
    OneBlobSpec,
    SphericalHarmonicsSpec,
    TriangleWaveSpec,
)

from .composite import Composite
from .empty import Empty
from .encoding_contract import WHOLE_BATCH, Encoding, Samples, write_features
from .frequency import Frequency
from .grid import Grid
from .identity import Identity
from .oneblob import OneBlob
from .precision import Precision
from .spherical_harmonics import SphericalHarmonics
from .triangle_wave import TriangleWave


def make_encoding(spec: EncodingSpec, precision: Precision) -> Encoding:
    return ENCODINGS[type(spec)](spec, precision)


def make_composite(spec: CompositeSpec, precision: Precision) -> Composite:
    return Composite(spec, [make_encoding(child.encoding, precision) for child in spec.nested])


ENCODINGS: dict[type, Callable[[Any, Precision], Encoding]] = {
    CompositeSpec: make_composite,
    EmptySpec: Empty,
    FrequencySpec: Frequency,
    GridSpec: Grid,
    IdentitySpec: Identity,
    OneBlobSpec: OneBlob,
    SphericalHarmonicsSpec: SphericalHarmonics,
    TriangleWaveSpec: TriangleWave,
}


def encode_padded(
    encoding: Encoding, x: np.ndarray, params: np.ndarray, width: int, samples: Samples = WHOLE_BATCH
) -> tuple[np.ndarray, Any]:
    """Features [batch, width] with the encoding's padding in the columns past its own, and its context.

    The array is stored feature by feature (column-major): encodings write columns, and BLAS reads either order.
    """
    features = np.empty((width, len(x)), x.dtype).T
    return features, write_features(encoding, x, params, features, samples)
