"""What the stages of a second-order kernel share beyond those of a gradient kernel (`stage_io.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from .stage_io import IO, IO_PARAMETERS, GradientOptions

SECOND_ORDER_IO_PARAMETERS = (
    *IO_PARAMETERS,
    ("directions", "u64"),  # v [batch, n_input_dims]
    ("directions_stride", "u32"),  # bytes a row
    ("derivative", "u64"),  # where y', the derivative of y along v, goes: float32 [batch, n_output_dims]
    ("derivative_stride", "u32"),
)
DIRECTIONS, DIRECTIONS_STRIDE, DERIVATIVE, DERIVATIVE_STRIDE = range(len(IO), len(IO) + 4)

GRADIENT_SCALE, RESULT_SCALE, DIRECTIONS_SCALE, DERIVATIVE_SCALE = range(4)
"""Elements of `scales`: powers of two for u = dL/dy, for what is proportional to u v, for v, and for what is to v."""


@dataclass(frozen=True)
class SecondOrderOptions(GradientOptions):
    """`loss` is None and `target_dtype` that of dL/dy; `directions_dtype` is that of v."""

    loss: None = None
    input_gradient: bool = True
    directions_dtype: str = "float32"
