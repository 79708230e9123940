"""What every encoding of this engine is: the three passes, which samples they are given, and padded features.

An encoding maps x [batch, D] to features y [batch, W] (D = spec.n_input_dims, W = spec.n_output_dims). It keeps no
parameters: `params` is its part of the model's flat vector. Every array is in the compute format of the precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from numba_tcnn.specs import EncodingSpec


@dataclass(frozen=True)
class Samples:
    """Which rows of a whole batch an x holds, and which grid levels they use.

    first_row   row of x[0] in the batch; random numbers of a sample depend on its row
    batch_size  rows of the whole batch; None where x is all of it
    max_level   fraction of all grid levels that are in use, or an array of one fraction per row of x; None for all
    """

    first_row: int = 0
    batch_size: int | None = None
    max_level: float | np.ndarray | None = None

    def part(self, rows: slice) -> Samples:
        """Rows of these samples."""
        max_level = self.max_level[rows] if np.ndim(self.max_level) else self.max_level
        return Samples(self.first_row + rows.start, self.batch_size, max_level)


WHOLE_BATCH = Samples()


class Encoding(Protocol):
    spec: EncodingSpec
    padding_value: float
    """What columns past the encoding's own hold."""

    def forward(self, x: np.ndarray, params: np.ndarray, out: np.ndarray, samples: Samples = WHOLE_BATCH) -> Any:
        """Writes y into `out` [batch, W]; returns what `backward` needs."""

    def backward(
        self,
        context: Any,
        params: np.ndarray,
        dL_dout: np.ndarray,
        dL_dparams: np.ndarray | None,
        dL_dx: np.ndarray | None,
    ) -> None:
        """Adds to dL/dparams (as `params`) and dL/dx [batch, D] where they are given; dL_dout is [batch, W]."""

    def backward_backward_input(
        self,
        x: np.ndarray,
        dL_dy: np.ndarray,
        dL_ddx: np.ndarray,
        params: np.ndarray,
        samples: Samples = WHOLE_BATCH,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The gradients (dL_ddLdy [batch, W], dL_dparams as `params`, dL_dx [batch, D]) of

            S = Σ dL_ddx · dL_dx(x, dL_dy, params),

        the input gradient that `backward` gives, weighted by dL_ddx [batch, D]: with respect to the output gradient
        dL_dy [batch, W], the parameters and x. S is the derivative of Σ dL_dy · y along dL_ddx.
        """


def write_features(
    encoding: Encoding, x: np.ndarray, params: np.ndarray, out: np.ndarray, samples: Samples = WHOLE_BATCH
) -> Any:
    """Features into the first columns of `out` and the encoding's padding into the others; returns its context."""
    n_own = encoding.spec.n_output_dims
    out[:, n_own:] = encoding.padding_value
    return encoding.forward(x, params, out[:, :n_own], samples)
