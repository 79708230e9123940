"""Runs whole fused kernels in the emulator: the same bodies and plans as on a GPU, block after block, in NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from numba_tcnn.fused import emulator, fuser, gradient_scale_kernels, optimizer_kernels
from numba_tcnn.fused.emulated_memory import SHARED_START, GlobalMemory
from numba_tcnn.fused.fixed_point import fixed_point_of
from numba_tcnn.fused.formats import number_format
from numba_tcnn.fused.keepers import saved_units
from numba_tcnn.fused.optimizer_chains import Chain, make_chain_kernel
from numba_tcnn.fused.phased_kernel import make_phased_gradient_kernel
from numba_tcnn.fused.phased_plan import GROUPS, PhasedPlan
from numba_tcnn.fused.plan import KernelPlan, StagedPlan
from numba_tcnn.fused.saved_images import slot_images
from numba_tcnn.fused.stage_io import GradientOptions, InferenceOptions, KernelBody
from numba_tcnn.fused.target import EmulatorTarget
from numba_tcnn.layout import n_matrix_params, n_network_params, n_params
from numba_tcnn.specs import AdamSpec, ModelSpec, round_up

KINDS = {"u32": lambda v: np.uint32(int(v) & 0xFFFFFFFF), "u64": np.uint64, "f32": np.float32}


def identity_of(value: object) -> object:
    """What tells two values apart that a closure may capture: equal for equal numbers, the object itself otherwise."""
    if isinstance(value, bool | int | float | np.generic):
        return type(value), repr(value)
    return value


class CompileOnceTarget(EmulatorTarget):
    """The emulator's target, keeping what it compiled: a scalar function is told by its code and what it captures.

    Compiling them is most of an emulated kernel's time, and every kernel asks for the same few dozen.
    """

    def __init__(self, cc: int):
        super().__init__(cc)
        self._compiled: dict[tuple, Callable] = {}

    def _once(self, compile_function: Callable, function: Callable) -> Callable:
        captured = tuple(identity_of(cell.cell_contents) for cell in function.__closure__ or ())
        key = (compile_function.__name__, function.__code__, captured)
        if key not in self._compiled:
            self._compiled[key] = compile_function(function)
        return self._compiled[key]

    def scalar(self, function: Callable) -> Callable:
        return self._once(super().scalar, function)

    def scalar_part(self, function: Callable) -> Callable:
        return self._once(super().scalar_part, function)


@functools.cache
def emulator_target(cc: int = 90) -> CompileOnceTarget:
    """The target of compute capability `cc`; one object each, as for CUDA."""
    return CompileOnceTarget(cc)


def run_kernel(
    target: CompileOnceTarget,
    memory: GlobalMemory,
    body: KernelBody,
    values: Sequence | Mapping,
    *,
    threads: int,
    shared_bytes: int,
    n_blocks: int,
    n_rows: int = 1,
    shuffle: np.random.Generator | None = None,
) -> None:
    """All blocks of a launch, in order or shuffled. `values` by position in `body.parameters`, or by name. The body was
    made for `target`."""
    if isinstance(values, Mapping):
        values = [values[name] for name, _ in body.parameters]
    typed = [KINDS[kind](value) for (_, kind), value in zip(body.parameters, values, strict=True)]
    arguments = typed[: len(body.own)]
    if body.bundle:
        arguments.append(tuple(typed[len(body.own) :]))
    memory.begin_launch()
    with np.errstate(all="ignore"):
        places = [(row, block) for row in range(n_rows) for block in range(n_blocks)]
        if shuffle is not None:
            shuffle.shuffle(places)
        for row, block in places:
            target.block = emulator.Block(
                memory, threads, shared_bytes, block=block, n_blocks=n_blocks, block_row=row, shared_start=SHARED_START
            )
            body.function(*arguments)


class EmulatedModel:
    """A model's parameters and buffers in emulated global memory; every buffer starts poisoned with NaN.

    misaligned   whether inputs start at an address that is no multiple of 16
    cc           compute capability
    max_level    fraction of a grid's levels in use, or an array of one for each sample
    shuffle      the order of a launch's blocks
    dtype        that plans are made for
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: np.ndarray,
        *,
        misaligned: bool = False,
        cc: int = 90,
        max_level: float | np.ndarray | None = None,
        shuffle: np.random.Generator | None = None,
        dtype: str = "float16",
    ):
        self.spec, self.misaligned, self.target = spec, misaligned, emulator_target(cc)
        self.max_level, self.shuffle = max_level, shuffle
        self.memory = GlobalMemory()
        self.n_network, self.n_params = n_network_params(spec), n_params(spec)
        self.weights = params.astype(np.float32)
        self.dtype, stored = dtype, number_format(dtype)
        self.copy = stored.parameters(self.weights)  # in float32 the master itself
        n_table = round_up(self.n_params - self.n_network, 4) or 4
        self.table_gradient = np.zeros(n_table, np.float32)
        self.fixed_point_sums = np.zeros((n_table, 2), np.int64)
        self.bad, self.skipped = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        parameters = self.memory.place(self.copy)
        self.constants = {
            "parameters": parameters,
            "table": parameters + stored.parameter_bytes * self.n_network,
            "table_gradient": self.memory.place(self.table_gradient),
            "first_row": 0,
            "bad": self.memory.place(self.bad),
            "skipped": self.memory.place(self.skipped),
            "mark": 1,
            "n_matrix": n_matrix_params(spec),
            "n_network": self.n_network,
            "n_params": self.n_params,
        }

    def place(self, array: np.ndarray) -> int:
        return self.memory.place(array)

    def matrix(self, name: str, array: np.ndarray, *, misaligned: bool = False) -> dict[str, int]:
        """Arguments `name` and `name`_stride for a matrix in memory."""
        if misaligned:
            size = array.dtype.itemsize
            shifted = np.zeros(array.size + 1, array.dtype)
            shifted[1:] = array.ravel()
            return {name: self.place(shifted) + size, f"{name}_stride": array.strides[0]}
        return {name: self.place(array), f"{name}_stride": array.strides[0]}

    def run(self, make_body: Callable, plan: KernelPlan | None, n_blocks: int, n_rows: int = 1, **arguments) -> None:
        """Make a kernel and run its blocks; plan None: one of the element-wise kernels, with 256 threads."""
        body = make_body(self.target)
        values = dict.fromkeys((name for name, _ in body.parameters), 0) | self.constants | arguments
        run_kernel(
            self.target, self.memory, body, values, n_blocks=n_blocks, n_rows=n_rows,
            threads=plan.threads if plan else optimizer_kernels.THREADS,
            shared_bytes=plan.shared_bytes if plan else optimizer_kernels.SHARED_BYTES, shuffle=self.shuffle,
        )  # fmt: skip

    def samples(self, batch: int) -> dict[str, int]:
        """Arguments that say which samples of a whole batch, and which levels they use."""
        levels = np.atleast_1d(np.asarray(1.0 if self.max_level is None else self.max_level, np.float32))
        stride = 4 if np.ndim(self.max_level) else 0
        return {"batch_size": batch, "max_levels": self.place(levels.copy()), "max_level_stride": stride}

    def summing(self, options: GradientOptions, batch: int) -> tuple[dict, dict]:
        """Arguments of gradient kernels and of collecting ones about how the table's gradient is summed."""
        if not options.fixed_point:
            return {}, {}
        numbers, place = fixed_point_of(self.spec.encoding, batch), self.place(self.fixed_point_sums)
        return {"table_gradient": place} | numbers.scales, {"table_gradient": place} | numbers.units

    # ------------------------------------------------------------------------------------ whole jobs
    def inference(self, x: np.ndarray, plan: KernelPlan, options: InferenceOptions, n_blocks: int = 2) -> np.ndarray:
        out = np.full((len(x), self.spec.n_output_dims), np.nan, options.output_dtype)
        self.run(
            lambda target: fuser.make_inference_kernel(target, self.spec, plan, options),
            plan, n_blocks, n_tiles=-(-len(x) // plan.tile_rows), batch=len(x), **self.samples(len(x)),
            **self.matrix("x", x, misaligned=self.misaligned), **self.matrix("y", out),
        )  # fmt: skip
        return out

    def gradient(
        self,
        x: np.ndarray,
        y: np.ndarray,
        plan: KernelPlan | StagedPlan,
        options: GradientOptions,
        *,
        density: np.ndarray | None = None,
        scales: tuple[float, float] | None = None,
        n_blocks: int = 2,
        chunk_rows: int | None = None,
        into: np.ndarray | None = None,
    ) -> tuple[float, np.ndarray, np.ndarray]:
        """(loss, dL/dparams, dL/dx).

        scales       factor of given output gradients and factor of results; default: that of the loss's mean
        chunk_rows   samples of a chunk of a staged or phased plan; default: all
        into         gradients to add to
        """
        mean = 1.0 / (self.spec.n_output_dims * len(x))
        factors = np.array(scales or (1.0, mean), np.float32)
        dx = np.full((len(x), self.spec.n_input_dims), np.nan, np.float32)
        n_chunks = -(-len(x) // (chunk_rows or len(x)))
        losses = np.full(n_blocks * n_chunks, np.nan, np.float32)
        partial = np.full((n_blocks, max(self.n_network, 4)), np.nan, np.float32)
        self.bad[:] = 0
        given = self.matrix("x", x, misaligned=self.misaligned) | self.matrix("y", y) | self.matrix("dx", dx)
        given |= {"scales": self.place(factors), "losses": self.place(losses), "batch": len(x)}
        given |= {"partial_sums": self.place(partial), "row_bytes": partial.strides[0]}
        given |= self.samples(len(x))
        scales_of_sums, units_of_sums = self.summing(options, len(x))
        given |= scales_of_sums
        if density is not None:
            given |= self.matrix("density", density)
        n_partials, n_losses = n_blocks, n_blocks * n_chunks
        if self.spec.network is None:
            self.run(
                lambda target: fuser.make_encoding_gradient_kernel(target, self.spec, plan, options),
                plan, n_blocks, n_tiles=-(-len(x) // plan.tile_rows), **given,
            )  # fmt: skip
            n_partials, n_losses = 0, n_losses if options.loss else 0
        elif isinstance(plan, PhasedPlan):
            self._phased(plan, options, given, n_blocks, chunk_rows or len(x))
        elif isinstance(plan, KernelPlan):
            self.run(
                lambda target: fuser.make_single_gradient_kernel(target, self.spec, plan, options),
                plan, n_blocks, n_tiles=-(-len(x) // plan.tile_rows), **given,
            )  # fmt: skip
        else:
            self._staged(plan, options, given, n_blocks, chunk_rows or len(x))
        gradients = np.full(self.n_params, np.nan, np.float32) if into is None else into
        loss = np.full(1, np.nan, np.float32)
        self.run(
            lambda target: optimizer_kernels.make_collect_kernel(target, fixed_point=options.fixed_point),
            None, optimizer_kernels.n_blocks(self.n_network, self.n_params), **units_of_sums,
            n_partials=n_partials, partial_sums=given["partial_sums"], row_bytes=given["row_bytes"],
            losses=given["losses"], n_losses=n_losses, loss=self.place(loss), loss_scale=mean,
            gradients=self.place(gradients), accumulate=int(into is not None), gradient_scale=1.0,
            scales=given["scales"],
        )  # fmt: skip
        return float(loss[0]), gradients, dx

    def _phased(self, plan: PhasedPlan, options: GradientOptions, given: dict, n_blocks: int, chunk_rows: int) -> None:
        slots = round_up(-(-chunk_rows // plan.tile_rows), n_blocks) * GROUPS
        given = given | {
            "saved": self.place(np.full(slots * slot_images(self.spec, len(plan.layers))[2], 0xFF, np.uint8))
        }
        for chunk, fields in enumerate(self._chunks(given, n_blocks, chunk_rows)):
            self.run(
                lambda target: make_phased_gradient_kernel(target, self.spec, plan, options), plan, n_blocks,
                n_tiles=-(-fields["batch"] // plan.tile_rows), accumulate=int(chunk > 0), **fields,
            )  # fmt: skip

    @staticmethod
    def _chunks(given: dict, n_blocks: int, chunk_rows: int) -> Iterator[dict]:
        """Arguments for one chunk of the batch after the other, each with losses of its own."""
        for chunk, start in enumerate(range(0, given["batch"], chunk_rows)):
            n_rows = min(chunk_rows, given["batch"] - start)
            fields = given | {"batch": n_rows, "losses": given["losses"] + 4 * chunk * n_blocks, "first_row": start}
            fields["max_levels"] = given["max_levels"] + start * given["max_level_stride"]
            for name in ("x", "y", "dx", "density"):
                if name in given:
                    fields[name] = given[name] + start * given[f"{name}_stride"]
            yield fields

    def _staged(self, plan: StagedPlan, options: GradientOptions, given: dict, n_blocks: int, chunk_rows: int) -> None:
        propagate = plan.propagate
        n_slots = -(-chunk_rows // propagate.tile_rows) * propagate.warps
        packed_words = number_format(propagate.dtype).packed_words
        saved = np.full(n_slots * saved_units(self.spec, propagate.rows, packed_words)[2] * 32, 0xFFFFFFFF, np.uint32)
        given = given | {"saved": self.place(saved), "n_slots": n_slots}
        for chunk, fields in enumerate(self._chunks(given, n_blocks, chunk_rows)):
            n_tiles = -(-fields["batch"] // propagate.tile_rows)
            self.run(
                lambda target: fuser.make_propagate_kernel(target, self.spec, propagate, options),
                propagate, n_blocks, n_tiles=n_tiles, **fields,
            )  # fmt: skip
            for kernel_plan, layers in plan.weight_gradients:
                self.run(
                    lambda target, p=kernel_plan, l=layers: fuser.make_weight_gradient_kernel(target, self.spec, p, l),
                    kernel_plan, n_blocks, len(layers), n_tiles=n_tiles, accumulate=int(chunk > 0), **fields,
                )  # fmt: skip

    def gradient_scales(self, dL_dy: np.ndarray, n_blocks: int = 3) -> np.ndarray:
        """The two factors for given output gradients, float32 [2]."""
        maximum, scales = np.zeros(1, np.uint32), np.full(2, np.nan, np.float32)
        places = {"maximum": self.place(maximum), "scales": self.place(scales)}
        self.run(
            lambda target: gradient_scale_kernels.make_largest_gradient_kernel(target, dL_dy.dtype.name),
            None, n_blocks, batch=len(dL_dy), n_columns=dL_dy.shape[1], **self.matrix("y", dL_dy), **places,
        )  # fmt: skip
        self.run(gradient_scale_kernels.make_write_scales_kernel, None, 1, **places)
        return scales


class EmulatedAdam:
    """Adam's kernel on a vector of parameters, the first `n_network` of them the network's, with gradients as partial
    sums of `n_partials` blocks and a table gradient. The last `n_biases` of the network's are no matrices. The copy
    that kernels read is in the format of `dtype`; in float32 there is none, and its place stays as it was."""

    def __init__(self, spec: AdamSpec, params: np.ndarray, n_network: int, n_biases: int = 0, dtype: str = "float16"):
        self.spec, self.n_network, self.n_matrix = spec, n_network, n_network - n_biases
        self.dtype = dtype
        self.memory = GlobalMemory()
        self.n_params = len(params)
        padded = round_up(self.n_params, 4)  # the encoding's parameters are updated four at a time
        self.weights = np.zeros(padded, np.float32)
        self.weights[: self.n_params] = params
        stored = number_format(dtype)
        self.copy = np.full(padded, 0x7FFF, np.uint16) if stored.reads_master else stored.parameters(self.weights)
        self.first_moments, self.second_moments = np.zeros_like(self.weights), np.zeros_like(self.weights)
        self.param_steps = np.zeros(padded, np.uint32)
        self.bad, self.skipped, self.step_count = np.zeros(1, np.uint32), np.zeros(1, np.uint32), 0
        shared, own = ("weights", "copy", "bad", "skipped"), ("first_moments", "second_moments", "param_steps")
        self.places = {name: self.memory.place(getattr(self, name)) for name in shared} | {"kept_copy": 0}
        self.places |= {f"{name}_0": self.memory.place(getattr(self, name)) for name in own}

    def step(
        self,
        partial_sums: np.ndarray,
        table_gradient: np.ndarray,
        *,
        gradient_scale: float = 1.0,
        given_scale: float = 1.0,
        losses: np.ndarray | None = None,
        loss_scale: float = 1.0,
        learning_rate: float | None = None,
        mark: int = 1,
    ) -> float:
        """One launch; the loss. The gradient is gradient_scale * given_scale times the sums."""
        self.step_count += 1
        losses = np.zeros(1, np.float32) if losses is None else losses
        loss, scales = np.full(1, np.nan, np.float32), np.array([np.nan, given_scale], np.float32)
        place = self.memory.place
        values = self.places | {
            "n_matrix": self.n_matrix, "n_network": self.n_network, "n_params": self.n_params,
            "n_partials": len(partial_sums),
            "partial_sums": place(partial_sums), "row_bytes": partial_sums.strides[0],
            "table_gradient": place(table_gradient), "losses": place(losses), "n_losses": len(losses),
            "loss": place(loss), "loss_scale": loss_scale, "step_0": self.step_count,
            "learning_rate_0": self.spec.learning_rate if learning_rate is None else learning_rate,
            "gradient_scale": gradient_scale, "scales": place(scales), "mark": mark,
        }  # fmt: skip
        target = emulator_target().storing(self.dtype)
        run_kernel(
            target, self.memory,
            make_chain_kernel(target, Chain((self.spec,)), biases=self.n_matrix < self.n_network), values,
            threads=optimizer_kernels.THREADS, shared_bytes=optimizer_kernels.SHARED_BYTES,
            n_blocks=optimizer_kernels.n_blocks(self.n_network, self.n_params),
        )  # fmt: skip
        return float(loss[0])
