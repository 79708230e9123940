"""What the stages of a kernel share: their common arguments, and the options a kernel is made for.

Arguments travel through all stages as one tuple `io`; its fields are named in `IO` and found by the indices below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

IO = (
    "parameters",  # u64  the parameter vector, as kernels read it (formats.py)
    "table",  # u64  the encoding's part of it
    "x",  # u64  inputs
    "x_stride",  # u32  bytes a row
    "batch",  # u32  rows of x
    "y",  # u64  targets, or given output gradients
    "y_stride",  # u32
    "density",  # u64  sampling density of each target element
    "density_stride",  # u32
    "table_gradient",  # u64  float32, or fixed point
    "dx",  # u64  float32 [batch, n_input_dims]
    "dx_stride",  # u32
    "scales",  # u64  float32 [2]: factor of given output gradients, factor of results
    "saved",  # u64  fragments of a chunk (staged plans)
    "n_slots",  # u32  fragments of each kind in it
    "bad",  # u64  a word that becomes at least `mark` where a gradient is not finite
    "mark",  # u32
    "first_row",  # u32  row of x[0] in the whole batch
    "batch_size",  # u32  rows of the whole batch
    "max_levels",  # u64  float32, the fraction of a grid's levels that each sample uses
    "max_level_stride",  # u32  bytes a sample; 0: one fraction for all
    "fine_scale",  # f32  factors of table gradients in fixed point (fixed_point.py)
    "coarse_scale",  # f32
)
IO_TYPES = {
    "parameters": "u64", "table": "u64", "x": "u64", "x_stride": "u32", "batch": "u32", "y": "u64", "y_stride": "u32",
    "density": "u64", "density_stride": "u32", "table_gradient": "u64", "dx": "u64", "dx_stride": "u32",
    "scales": "u64", "saved": "u64", "n_slots": "u32", "bad": "u64", "mark": "u32",
    "first_row": "u32", "batch_size": "u32", "max_levels": "u64", "max_level_stride": "u32",
    "fine_scale": "f32", "coarse_scale": "f32",
}  # fmt: skip
PARAMETERS, TABLE, X, X_STRIDE, BATCH, Y, Y_STRIDE, DENSITY, DENSITY_STRIDE = range(9)
TABLE_GRADIENT, DX, DX_STRIDE, SCALES, SAVED, N_SLOTS, BAD, MARK = range(9, 17)
FIRST_ROW, BATCH_SIZE, MAX_LEVELS, MAX_LEVEL_STRIDE, FINE_SCALE, COARSE_SCALE = range(17, 23)


@dataclass(frozen=True)
class GradientOptions:
    """What a gradient kernel reads and computes beyond its model.

    loss             name of the loss, or None where the output gradient is given
    density_dtype    dtype of the targets' sampling density, or None where there is none; given gradients are divided
                     by it too
    table_gradient, input_gradient   which gradients the encoding's backward pass computes
    fixed_point      whether the table's gradient is summed in fixed point, the same in any order
    max_level        whether samples use a fraction of a grid's levels
    """

    input_dtype: str = "float32"
    aligned_input: bool = True
    target_dtype: str = "float32"
    loss: str | None = "L2"
    density_dtype: str | None = None
    table_gradient: bool = True
    input_gradient: bool = False
    fixed_point: bool = False
    max_level: bool = False

    @property
    def encoding_gradient(self) -> bool:
        return self.table_gradient or self.input_gradient


@dataclass(frozen=True)
class InferenceOptions:
    """What an inference kernel reads and writes; `max_level` as in `GradientOptions`."""

    input_dtype: str = "float32"
    aligned_input: bool = True
    output_dtype: str = "float32"
    max_level: bool = False


@dataclass(frozen=True)
class KernelBody:
    """`function(*own, bundle)`, or `function(*own)` where there is no bundle: parameters that stages pass on as one
    tuple. Both are (name, kind) with kind u32, f32 or u64; a launch gives them flat, in this order."""

    name: str
    function: Callable
    own: tuple[tuple[str, str], ...]
    bundle: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> tuple[tuple[str, str], ...]:
        return (*self.own, *self.bundle)


IO_PARAMETERS = tuple((name, IO_TYPES[name]) for name in IO)
