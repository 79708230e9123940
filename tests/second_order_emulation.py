"""Second derivatives in the emulator, and how close they come to the reference."""

from __future__ import annotations

import numpy as np
from emulation import EmulatedModel

from numba_tcnn.fused import gradient_scale_kernels, optimizer_kernels, second_order_kernels
from numba_tcnn.fused.second_order_io import SecondOrderOptions
from numba_tcnn.fused.second_order_kernels import LARGEST_TANGENT_PLAN
from numba_tcnn.fused.second_order_plan import SecondOrderPlan
from numba_tcnn.reference.model import SecondOrderGradients


class SecondOrderModel(EmulatedModel):
    """The kernels of `SecondOrderProgram` one after the other; every result starts as NaN."""

    def second_order_scales(
        self, given: dict, dL_dy: np.ndarray, batch: int, options: SecondOrderOptions, n_blocks: int
    ) -> np.ndarray:
        maxima, scales = np.zeros(2, np.uint32), np.full(4, np.nan, np.float32)
        place = self.place(maxima)
        self.run(
            lambda target: gradient_scale_kernels.make_largest_gradient_kernel(target, dL_dy.dtype.name),
            None, n_blocks, n_columns=dL_dy.shape[1], maximum=place, **given,
        )  # fmt: skip
        self.run(
            lambda target: second_order_kernels.make_largest_tangent_kernel(
                target, self.spec, options, self.dtype
            ),
            Bare, n_blocks, n_tiles=-(-batch // LARGEST_TANGENT_PLAN.tile_rows), maximum=place + 4, **given,
        )  # fmt: skip
        kernel = second_order_kernels.make_write_second_order_scales_kernel
        self.run(kernel, None, 1, maxima=place, scales=self.place(scales))
        return scales

    def second_order(
        self, x: np.ndarray, v: np.ndarray, dL_dy: np.ndarray, plan: SecondOrderPlan, *, n_blocks: int = 2
    ) -> SecondOrderGradients:
        aligned = not self.misaligned and x.strides[0] % 16 == 0
        options = SecondOrderOptions(
            x.dtype.name, aligned, dL_dy.dtype.name, table_gradient=self.n_params > self.n_network,
            directions_dtype=v.dtype.name,
        )  # fmt: skip
        dx = np.full(x.shape, np.nan, np.float32)
        derivative = np.full(dL_dy.shape, np.nan, np.float32)
        partial = np.full((n_blocks, max(self.n_network, 4)), np.nan, np.float32)
        self.bad[:] = 0
        given = self.matrix("x", x, misaligned=self.misaligned) | self.matrix("y", dL_dy) | {"batch": len(x)}
        given |= self.matrix("directions", v, misaligned=self.misaligned)
        scales = self.second_order_scales(given, dL_dy, len(x), options, n_blocks)
        given |= self.matrix("dx", dx) | self.matrix("derivative", derivative)
        given |= {"scales": self.place(scales), "partial_sums": self.place(partial), "row_bytes": partial.strides[0]}
        self.run(
            lambda target: second_order_kernels.make_second_order_kernel(target, self.spec, plan, options),
            plan, n_blocks, n_tiles=-(-len(x) // plan.tile_rows), **given,
        )  # fmt: skip
        gradients, loss = np.full(self.n_params, np.nan, np.float32), np.full(1, np.nan, np.float32)
        self.run(
            optimizer_kernels.make_collect_kernel, None, optimizer_kernels.n_blocks(self.n_network, self.n_params),
            n_partials=0 if self.spec.network is None else n_blocks, partial_sums=given["partial_sums"],
            row_bytes=given["row_bytes"], loss=self.place(loss), gradients=self.place(gradients), gradient_scale=1.0,
            scales=given["scales"],
        )  # fmt: skip
        return SecondOrderGradients(derivative, gradients, dx)


class Bare:
    """What the emulator must know of the kernel that finds the largest tangent."""

    threads, shared_bytes = LARGEST_TANGENT_PLAN.threads, 4 * LARGEST_TANGENT_PLAN.threads
