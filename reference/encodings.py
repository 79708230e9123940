"""The encodings this engine has, by the type of their spec, and what they have in common.

An encoding is a class with

    padding_value                                             what extra output columns hold
    __init__(spec, precision)
    forward(x, params, out) -> context                        writes `out` [batch, spec.n_output_dims]
    backward(context, params, dL_dout, dL_dparams, dL_dx)     adds to the last two where they are not None

x is [batch, spec.n_input_dims]; params is the encoding's part of the flat parameter vector; every array is in the
compute format of the precision. A new encoding is a file with such a class and a line in `ENCODINGS`.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.specs import EncodingSpec, GridSpec, IdentitySpec

from .grid import Grid
from .identity import Identity
from .precision import Precision


class Encoding(Protocol):
    padding_value: float
    spec: EncodingSpec

    def forward(self, x: np.ndarray, params: np.ndarray, out: np.ndarray) -> Any: ...

    def backward(
        self,
        context: Any,
        params: np.ndarray,
        dL_dout: np.ndarray,
        dL_dparams: np.ndarray | None,
        dL_dx: np.ndarray | None,
    ) -> None: ...


ENCODINGS: dict[type, type[Encoding]] = {
    GridSpec: Grid,
    IdentitySpec: Identity,
}


def make_encoding(spec: EncodingSpec, precision: Precision) -> Encoding:
    """Raises EngineUnavailable, naming the encoding, if this engine does not have it."""
    if type(spec) not in ENCODINGS:
        name = type(spec).__name__.removesuffix("Spec")
        raise EngineUnavailable(f"the encoding {name} is not implemented in the reference engine")
    return ENCODINGS[type(spec)](spec, precision)


def encode_padded(encoding: Encoding, x: np.ndarray, params: np.ndarray, width: int) -> tuple[np.ndarray, Any]:
    """Features [batch, width] with the encoding's padding in the columns past its own, and its context.

    The array is stored feature by feature (column-major): encodings write columns, and BLAS reads either order.
    """
    n_own = encoding.spec.n_output_dims
    features = np.empty((width, len(x)), x.dtype).T
    features[:, n_own:] = encoding.padding_value
    return features, encoding.forward(x, params, features[:, :n_own])
