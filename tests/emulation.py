"""Runs whole fused kernels in the emulator: the same bodies and plans as on a GPU, block after block, in NumPy."""

from __future__ import annotations

import numpy as np

from numba_tcnn.fused import emulator, fuser, optimizer_kernels, stage_io
from numba_tcnn.fused.keepers import saved_units
from numba_tcnn.fused.plan import KernelPlan, StagedPlan
from numba_tcnn.fused.target import EmulatorTarget
from numba_tcnn.layout import n_network_params, n_params
from numba_tcnn.specs import ModelSpec


class EmulatedModel:
    """A model's parameters and buffers in emulated global memory; every buffer starts poisoned with NaN."""

    def __init__(self, spec: ModelSpec, params: np.ndarray):
        self.spec = spec
        self.memory = emulator.GlobalMemory()
        self.n_network, self.n_params = n_network_params(spec), n_params(spec)
        self.weights = params.astype(np.float32)
        self.half_weights = self.weights.astype(np.float16)
        self.table_gradient = np.zeros(max(self.n_params - self.n_network, 4), np.float32)
        self.parameters = self.memory.place(self.half_weights)
        self.table = self.parameters + 2 * self.n_network
        self.bad, self.skipped = np.zeros(1, np.uint32), np.zeros(1, np.uint32)

    def place(self, array: np.ndarray) -> int:
        return self.memory.place(array)

    def io(self, x: np.ndarray, **given) -> tuple:
        fields = dict.fromkeys(stage_io.IO, 0)
        fields |= {"parameters": self.parameters, "table": self.table, "x": self.place(x), "batch": np.uint32(len(x))}
        fields |= {"x_stride": np.uint32(x.strides[0]), "table_gradient": self.place(self.table_gradient)}
        fields |= given
        return tuple(
            np.uint64(fields[name]) if stage_io.IO_TYPES[name] == "u64" else np.uint32(fields[name])
            for name in stage_io.IO
        )

    def run(self, make_body, plan, *arguments, n_blocks: int, n_rows: int = 1, threads: int | None = None):
        """Make a kernel for the emulator and run its blocks. `make_body(target)`; plan None: no tiles."""
        target = EmulatorTarget()
        body = make_body(target)
        shared = plan.shared_bytes if plan else 4096
        for row in range(n_rows):
            for block in range(n_blocks):
                target.block = emulator.Block(
                    self.memory, threads or plan.threads, shared, block=block, n_blocks=n_blocks, block_row=row
                )
                body.function(*arguments)

    # ------------------------------------------------------------------------------------ whole jobs
    def inference(self, x: np.ndarray, plan: KernelPlan, options: stage_io.InferenceOptions, n_blocks: int = 2):
        out = np.full((len(x), self.spec.n_output_dims), np.nan, options.output_dtype)
        n_tiles = -(-len(x) // plan.tile_rows)
        io = self.io(x, y=self.place(out), y_stride=out.strides[0])
        self.run(
            lambda target: fuser.make_inference_kernel(target, self.spec, plan, options),
            plan, np.uint32(n_tiles), io, n_blocks=n_blocks,
        )  # fmt: skip
        return out

    def gradient(
        self,
        x: np.ndarray,
        y: np.ndarray,
        plan: KernelPlan | StagedPlan,
        options: stage_io.GradientOptions,
        *,
        density: np.ndarray | None = None,
        scales: tuple[float, float] | None = None,
        n_blocks: int = 2,
        chunk_rows: int | None = None,
    ):
        """(sum of loss values, dL/dparams, dL/dx), all times scales[1] (default: the loss's 1 / (n_out batch))."""
        mean = 1.0 / (self.spec.n_output_dims * len(x))
        factors = np.array(scales or (1.0, mean), np.float32)
        dx = np.full((len(x), self.spec.n_input_dims), np.nan, np.float32)
        losses = np.full(64, np.nan, np.float32)
        partial = np.full((n_blocks, max(self.n_network, 4)), np.nan, np.float32)
        self.bad[:] = 0
        given = {"y": self.place(y), "y_stride": y.strides[0], "scales": self.place(factors)}
        given |= {"dx": self.place(dx), "dx_stride": dx.strides[0]}
        if density is not None:
            given |= {"density": self.place(density), "density_stride": density.strides[0]}
        partial_address, bad = self.place(partial), self.place(self.bad)
        row_bytes, losses_address = np.uint32(partial.strides[0]), self.place(losses)
        if isinstance(plan, KernelPlan):
            n_tiles = -(-len(x) // plan.tile_rows)
            self.run(
                lambda target: fuser.make_single_gradient_kernel(target, self.spec, plan, options),
                plan, np.uint32(n_tiles), partial_address, row_bytes, losses_address, bad, np.uint32(1),
                self.io(x, **given), n_blocks=n_blocks,
            )  # fmt: skip
            n_losses = n_blocks
        else:
            n_losses = self._staged(x, y, plan, options, given, partial_address, row_bytes, losses_address, bad,
                                    density, dx, n_blocks, chunk_rows or len(x))  # fmt: skip
        gradients = np.full(self.n_params, np.nan, np.float32)
        loss = np.full(1, np.nan, np.float32)
        self.run(
            optimizer_kernels.make_collect_kernel, None,
            np.uint32(self.n_network), np.uint32(self.n_params), np.uint32(n_blocks), partial_address, row_bytes,
            self.place(self.table_gradient), losses_address, np.uint32(n_losses), self.place(loss), np.float32(mean),
            (self.place(gradients), np.uint32(0), np.float32(1), self.place(factors)),
            n_blocks=optimizer_kernels.n_blocks(self.n_network, self.n_params), threads=optimizer_kernels.THREADS,
        )  # fmt: skip
        return float(loss[0]), gradients, dx

    def _staged(self, x, y, plan, options, given, partial, row_bytes, losses, bad, density, dx, n_blocks, chunk_rows):
        propagate = plan.propagate
        n_slots = -(-chunk_rows // propagate.tile_rows) * propagate.warps
        saved = np.full(n_slots * saved_units(self.spec, propagate.rows)[2] * 32, 0xFFFFFFFF, np.uint32)
        saved_address = self.place(saved)
        for chunk, start in enumerate(range(0, len(x), chunk_rows)):
            rows = slice(start, min(start + chunk_rows, len(x)))
            n_rows = rows.stop - rows.start
            n_tiles = -(-n_rows // propagate.tile_rows)
            fields = given | {"saved": saved_address, "n_slots": n_slots, "batch": n_rows}
            fields |= {"y": given["y"] + start * y.strides[0], "dx": given["dx"] + start * dx.strides[0]}
            if density is not None:
                fields["density"] = given["density"] + start * density.strides[0]
            io = list(self.io(x, **fields))
            io[stage_io.X] = io[stage_io.X] + np.uint64(start * x.strides[0])
            self.run(
                lambda target: fuser.make_propagate_kernel(target, self.spec, propagate, options), propagate,
                np.uint32(n_tiles), losses + 4 * chunk * n_blocks, tuple(io), n_blocks=n_blocks,
            )  # fmt: skip
            for kernel_plan, layers in plan.weight_gradients:
                self.run(
                    lambda target, p=kernel_plan, l=layers: fuser.make_weight_gradient_kernel(target, self.spec, p, l),
                    kernel_plan, saved_address, np.uint32(n_slots), np.uint32(n_tiles), partial, row_bytes,
                    np.uint32(chunk > 0), bad, np.uint32(1), n_blocks=n_blocks, n_rows=len(layers),
                )  # fmt: skip
        return (chunk + 1) * n_blocks
