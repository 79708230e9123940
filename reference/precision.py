"""Number formats: what the arithmetic runs in, and where a value is rounded to the storage format.

`float64` and `float32` compute exactly in their own format. `float16` is the model of the fused kernels, which keep
their tensors in half precision and accumulate in float32: all arithmetic runs in float32, and a value is rounded to
float16 exactly where a kernel stores it. `bfloat16` is the same with that format. Those points are

- parameters, before any use (the float32 masters stay as they are);
- features: an encoding's sum over corners, bins, ... accumulates in float32 and is rounded once;
- hidden outputs h = φ(z); z itself is a float32 accumulator and never rounded;
- D_out = dL/dz of the output layer, without 1/(n_output_dims·batch); z_out, the output activation, its derivative
  and the returned prediction stay float32;
- hidden D = (D_next W) φ', rounded after the product. φ' comes from the stored h where the activation has such a
  formula; otherwise φ'(z) is evaluated in float32 in the forward pass and rounded ("gate");
- dL/dfeatures, before the encoding's backward.

Weight and table gradients accumulate in float32 or better from the rounded factors and are not rounded. An external
dL/dy has an arbitrary magnitude, so it is multiplied by a power of two that brings its largest element into [8, 16)
before it is rounded, and the results are divided by the same power.

`Precision.store` is the only place that rounds; the other files call it at the points above.
"""

from __future__ import annotations

import numpy as np

from numba_tcnn.engines import EngineUnavailable

COMPUTE_DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float32, "bfloat16": np.float32}

SMALLEST_HALF_OVERFLOW = 65520.0  # halfway between the largest float16, 65504, and 2^16: rounds to infinity
SMALLEST_NORMAL_HALF_EXPONENT = np.uint32((127 - 14) << 23)  # of 2^-14, as it stands in a float32


class Precision:
    """dtype: one of `COMPUTE_DTYPES`. `compute` is the format of every array between two stores."""

    def __init__(self, dtype: str):
        if dtype not in COMPUTE_DTYPES:
            raise EngineUnavailable(f"the reference engine computes in {', '.join(COMPUTE_DTYPES)}, not in {dtype}")
        self.name = dtype
        self.compute = np.dtype(COMPUTE_DTYPES[dtype])
        self.round = {"float16": round_to_half, "bfloat16": round_to_bfloat16}.get(dtype)

    def array(self, values: np.ndarray) -> np.ndarray:
        """`values` in the compute format; the same array where it is in it already."""
        return np.asarray(values, self.compute)

    def store(self, values: np.ndarray) -> np.ndarray:
        """`values` as a later read finds them: rounded, but held in float32; untouched in exact formats."""
        return values if self.round is None else self.round(values)

    def multiply_add(self, factor: float, values: np.ndarray, addend: float) -> np.ndarray:
        """factor·values + addend with one rounding, as the GPU's fused multiply-add.

        A product of two float32 numbers is exact in float64. In float64 the product itself rounds.
        """
        return (np.multiply(values, factor, dtype=np.float64) + addend).astype(self.compute, copy=False)

    def gradient_scale(self, dL_dy: np.ndarray) -> float:
        """The power of two that brings max|dL_dy| into [8, 16); 1 in exact formats and for zero or non-finite input."""
        largest = 0.0 if self.round is None else float(np.max(np.abs(dL_dy), initial=0.0))
        if largest == 0.0 or not np.isfinite(largest):
            return 1.0
        _, exponent = np.frexp(largest)  # largest in [2^(exponent-1), 2^exponent)
        return float(2.0 ** np.clip(4 - int(exponent), -126, 126))  # the scale and its inverse are normal in float32


def round_to_half(values: np.ndarray) -> np.ndarray:
    """float32 values rounded to the nearest float16, ties to even; the result is float32.

    A float16 with exponent e is a multiple of 2^(max(e, -14) - 10). Adding 1.5·2^(max(e, -14) + 13) makes exactly
    that the last place of the float32 sum, so the addition rounds and the subtraction recovers the value. Six
    vectorised passes: ten times faster than NumPy's own conversion, which is used where a value overflows or is NaN.
    """
    if not np.max(np.abs(values), initial=0.0) < SMALLEST_HALF_OVERFLOW:
        with np.errstate(over="ignore", invalid="ignore"):
            return values.astype(np.float16).astype(np.float32)
    values = np.asarray(values, np.float32)
    shift = values.view(np.uint32) & np.uint32(0xFF << 23)
    np.maximum(shift, SMALLEST_NORMAL_HALF_EXPONENT, out=shift)
    shift += np.uint32((13 << 23) | 0x400000)
    shift = shift.view(np.float32)
    rounded = values + shift
    rounded -= shift
    return rounded


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 values rounded to the upper half of their 32 bits, ties to even; the result is float32."""
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded &= np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, rounded.view(np.float32))
