"""The fused engine: the contract of `numba_tcnn.engines`, kept by programs of fused kernels on one device."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from ..arrays import ArrayView
from ..engines import EngineUnavailable, Explanation
from ..layout import n_network_params, n_params
from ..parameter_sizes import ParameterSizes
from ..specs import LossSpec, ModelSpec, OptimizerSpec, round_up
from . import fixed_point
from .device_status import device_status
from .driver import Device, DeviceBuffer, current_device
from .driver import device as open_device
from .formats import number_format
from .gradient_programs import Batch, GradientProgram
from .jobs import (
    GradientJob,
    LevelSplitGradientJob,
    backward_job,
    inference_job,
    is_aligned,
    training_job,
)
from .level_plan import can_split
from .level_split_programs import LevelSplitGradientProgram, LevelSplitInferenceProgram
from .losses import CONSTANT_GRADIENT
from .make_programs import make_gradient_program, make_inference_program
from .optimizer_contract import Optimizer, Slice, State
from .optimizer_state import VECTOR
from .optimizers import make_optimizer
from .plan import architecture, format_for
from .programs import (
    CollectProgram,
    GradientScaleProgram,
    OptimizerProgram,
    PartialSums,
    Toolbox,
    Workspace,
)
from .recorded_calls import RecordedInference, RecordedStep, record_inference, record_step
from .refusals import refuse_model, refuse_training
from .second_order_programs import SecondOrderBatch, SecondOrderProgram, second_order_job
from .stage_io import InferenceOptions
from .stream_order import StreamOrder, leaves_in_order

LOSS_SLOTS = 4096
"""Losses that wait on the device for someone to read them. Before one is overwritten, all are fetched together: who
keeps every loss of a long training waits for the device once in so many steps, not in each."""

LEVEL_SPLIT_BATCH = 1 << 15
"""Samples from which on kernels that work level by level pay for their launches and for filling shared memory."""

CONSTANT_DTYPE = np.dtype(np.float32)  # of the gradient of ConstantGradient

SUMS_IN_FIXED_POINT = (
    "deterministic: table gradients are summed in fixed point, which takes 16 bytes a parameter instead of 4 and a "
    "64-bit reduction for each feature of each corner"
)

MAX_BATCH = (1 << 31) - 1
"""Rows are numbered in 32 bits, the last tile's and a step of the grid beyond the batch included."""

NO_PARTIAL_SUMS = PartialSums(0, 0, 16, 0, 0)


def _nothing_to_do(stream: int) -> None:
    """An array in device memory is complete as soon as the kernels are."""


class Loss:
    """A training step's loss, still on the device until it is read or its place is needed."""

    def __init__(self, buffer: DeviceBuffer, slot: int, order: StreamOrder):
        self._place: tuple[DeviceBuffer, int, StreamOrder] | None = (buffer, slot, order)
        self._value = 0.0

    @property
    def address(self) -> int | None:
        """Where it is on the device; None once it has been read."""
        return None if self._place is None else self._place[0].address + 4 * self._place[1]

    def value(self) -> float:
        if self._place is not None:
            buffer, slot, order = self._place
            host = np.empty(1, np.float32)
            buffer.device.use()
            buffer.download_into(host, order.reading(), offset=4 * slot)
            self.settle(host[0])
        return self._value

    def settle(self, value: float) -> None:
        """The value, from whoever has read it; its place on the device is free."""
        self._value, self._place = float(value), None


class FusedRuntime:
    """One model on one device. Parameters are a float32 master and, but in float32, a copy of it that kernels read.

    Programs are kept by what they are made for; the same call with the same dtypes finds its program in one look-up.
    """

    name = "fused"

    def __init__(
        self, spec: ModelSpec, params: np.ndarray, owner: Device, dtype: str = "float16", *, deterministic: bool = False
    ):
        self.spec, self.device, self.format = spec, owner, number_format(dtype)
        self.deterministic = deterministic
        self.toolbox, self.workspace = Toolbox(owner), Workspace(owner)
        self.n_params, self.n_network = n_params(spec), n_network_params(spec)
        self.has_table = self.n_params > self.n_network
        self._can_split = can_split(spec, self.toolbox.chip, dtype)
        owner.use()
        self._padded = round_up(self.n_params, VECTOR)  # optimizer kernels read and write whole vectors
        self._weights = DeviceBuffer(owner, 4 * self._padded)
        self._copy = None if self.format.reads_master else self._parameters_buffer()
        self._words = DeviceBuffer(owner, 32)
        self._words.upload(np.array([0, 0, 0, 0, 1, 1, 1, 1], np.float32))  # scales are 1 until something sets them
        words = self._words.address
        self._bad, self._skipped, self._unread = words, words + 4, words + 8
        self._given_scales, self._unit_scales = words + 16, words + 24  # two float32 each; see gradient_scale_kernels
        self._maximum = DeviceBuffer(owner, 16)
        self._losses = DeviceBuffer(owner, 4 * LOSS_SLOTS)
        self._waiting: list[weakref.ref | None] = [None] * LOSS_SLOTS
        self._next_slot = self._mark = 0
        self._order = StreamOrder(owner)
        self._table_gradient: DeviceBuffer | None = None
        self._table_gradient_is_used = False  # between a gradient program and its optimizer program
        self._programs: dict[tuple, object] = {}
        self.configuration = 0  # changes with what recorded calls depend on
        self._unavailable: dict[tuple, EngineUnavailable] = {}  # programs that can't be made, and why
        self._optimizer: Optimizer | None = None
        self._kept: DeviceBuffer | None = None  # what inference uses where the optimizer keeps it
        self._loss = LossSpec()
        self._constant_gradient: DeviceBuffer | None = None
        self._max_levels: tuple[DeviceBuffer, int | None] | None = None  # and of how many samples; None: one for all
        self.set_params(params)

    def _parameters_buffer(self) -> DeviceBuffer:
        """For parameters as kernels read them."""
        return DeviceBuffer(self.device, self.format.parameter_bytes * self._padded)

    # ------------------------------------------------------------------------------------ parameters
    def get_params(self) -> np.ndarray:
        self.device.use()
        return self._weights.download(self.n_params, np.float32, self._order.join())

    def set_params(self, params: np.ndarray) -> None:
        self.device.use()
        params, stream = np.ascontiguousarray(params, np.float32), self._order.join()
        self._weights.upload(params, stream)
        if self._copy is not None:
            self._copy.upload(self.format.parameters(params), stream)
        if self._optimizer is not None:
            self._optimizer.forget_params()

    # --------------------------------------------------------------------------------------- arrays
    def _begin(self, stream: int | None, *views: ArrayView | None) -> int:
        """Make the device current and order the work of `stream` behind earlier work and the arrays' own streams."""
        self.device.use()
        stream = 0 if stream is None else int(stream)
        for v in views:
            if v is not None and v.shape[0] > MAX_BATCH:
                raise ValueError(f"{v.shape[0]} rows are too many for one call: at most {MAX_BATCH}")
            if v is None or not v.on_device:
                continue
            if v.device is None and self.device.n_devices > 1 and v.pointer and not self.device.holds(v.pointer):
                raise ValueError(
                    f"an array is not on CUDA device {self.device.index}, where the model is; move it there"
                )
            if v.stream and v.stream != stream:
                self.device.wait_for(v.stream, stream)
        self._order.enter(stream)
        return stream

    def _levels_of(self, batch: int) -> tuple[int, int]:
        """(address, bytes a sample) of the fractions of a grid's levels that are in use; (0, 0): all are."""
        if self._max_levels is None:
            return 0, 0
        buffer, n_samples = self._max_levels
        if n_samples is None:
            return buffer.address, 0
        if n_samples != batch:
            raise ValueError(f"max_level has {n_samples} rows, the batch has {batch}")
        return buffer.address, 4

    def _input(self, name: str, v: ArrayView | None, stream: int) -> tuple[int, int]:
        """(device address, bytes a row) of an array that is read; host arrays are copied to the device."""
        if v is None:
            return 0, 0
        if v.on_device:
            return v.pointer, v.row_stride
        host, stride = v.numpy(), v.row_stride
        address = self.workspace.get(f"input {name}", host.nbytes)
        self.workspace.buffer(f"input {name}").upload(host, stream)
        return address, stride

    def _output(self, name: str, v: ArrayView) -> tuple[int, Callable[[int], None]]:
        """(device address to write to, what to call at the end with the stream) for an array that is written."""
        if v.on_device:
            return v.pointer, _nothing_to_do
        host = v.numpy()
        address = self.workspace.get(f"output {name}", host.nbytes)
        buffer = self.workspace.buffer(f"output {name}")
        return address, lambda stream: buffer.download_into(host, stream)

    @property
    def _parameters_address(self) -> int:
        """Of the parameters that kernels read."""
        return (self._copy or self._weights).address

    def _constants(self) -> dict[str, int]:
        """What every kernel that knows these parameters is told once."""
        parameters = self._parameters_address
        return {
            "parameters": parameters,
            "table": parameters + self.format.parameter_bytes * self.n_network,
            "table_gradient": self._table_gradient_address(),
            "bad": self._bad,
        }

    def _table_gradient_address(self) -> int:
        """Gradients of the encoding's parameters: zero between steps, as every optimizer program leaves it.

        What comes between the two programs may raise; `_run_gradient` then clears it before the next use.
        """
        if not self.has_table:
            return 0
        if self._table_gradient is None:
            element = fixed_point.BYTES if self.deterministic else 4
            self._table_gradient = DeviceBuffer(self.device, element * (self._padded - self.n_network))
            self._table_gradient.fill_zero(self._order.stream)
        return self._table_gradient.address

    # ------------------------------------------------------------------------------------ inference
    @leaves_in_order
    def inference(
        self, x: ArrayView, out: ArrayView, *, training_params: bool = False, stream: int | None = None
    ) -> None:
        stream = self._begin(stream, x, out)
        address, stride = self._input("x", x, stream)
        finish = None
        if out.on_device:
            out_address = out.pointer
        else:
            out_address, finish = self._output("y", out)
        split, has_levels = self._split(x.shape[0]), self._max_levels is not None
        key = ("inference", x.dtype, is_aligned(address, stride), out.dtype, split, has_levels)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._inference_program(*key[1:])
        parameters = self._parameters_address if training_params else self.inference_parameters()
        program.use(parameters, parameters + self.format.parameter_bytes * self.n_network)
        levels = {"max_levels": self._levels_of(x.shape[0])} if has_levels else {}
        program.run(address, stride, out_address, out.shape[1] * out.dtype.itemsize, x.shape[0], stream, **levels)
        if finish is not None:
            finish(stream)

    def inference_parameters(self) -> int:
        """Address of the parameters of inference, as kernels read them."""
        uses_kept = self._optimizer is not None and self._optimizer.keeps_now
        return self._kept.address if uses_kept else self._parameters_address

    def _split(self, batch: int) -> bool:
        """Whether a batch is large enough for kernels that work level by level, and all levels are in use."""
        return batch >= LEVEL_SPLIT_BATCH and self._can_split and self._max_levels is None

    def _inference_program(self, x_dtype: np.dtype, aligned: bool, out_dtype: np.dtype, split: bool, has_levels: bool):
        options = InferenceOptions(x_dtype.name, aligned, out_dtype.name, has_levels)
        constants = {k: v for k, v in self._constants().items() if k in ("parameters", "table")}
        job = inference_job(self.spec, options, split=split, dtype=self.format.dtype)
        if split:
            return LevelSplitInferenceProgram(self.toolbox, job, self.workspace, constants)
        return make_inference_program(self.toolbox, job, self.workspace, constants)

    # ------------------------------------------------------------------------------------ embedding
    def device_function(self, block_size: int) -> Callable:
        """f(x, params) -> y, for kernels of the user's own; see `Module.device_function`."""
        from .device_function import device_function  # imports Numba

        self._check_embedding()
        return device_function(self.spec, self.device.properties.capability, block_size)

    def _check_embedding(self) -> None:
        if self.format.dtype != "float16":
            raise EngineUnavailable(f"device functions compute in float16; {self.format.dtype} has none yet")

    def device_params_address(self, stream: int) -> int:
        """Where the parameters of inference are, for a kernel that comes on `stream` next; later steps wait for it."""
        current = current_device()
        if current != self.device.index:
            raise ValueError(
                f"a kernel on CUDA device {current} was given the parameters of a model on device "
                f"{self.device.index}; select that device, or create the model with device={current}"
            )
        self._check_embedding()
        self._begin(stream)
        return self.inference_parameters()

    def device_params_used(self) -> None:
        """The kernel has been launched: what comes next waits for it."""
        self._order.leave()

    # ------------------------------------------------------------------------------------ gradients
    def _gradient_program(self, job: GradientJob | LevelSplitGradientJob) -> GradientProgram:
        constants = self._constants() | {"scales": self._given_scales}
        if isinstance(job, LevelSplitGradientJob):
            return LevelSplitGradientProgram(self.toolbox, job, self.workspace, constants)
        return make_gradient_program(self.toolbox, job, self.workspace, constants)

    def _collect_program(self) -> CollectProgram:
        program = self._programs.get(("collect",))
        if program is None:
            program = CollectProgram(self.toolbox, self.spec, self._constants(), fixed_point=self._sums_in_fixed_point)
            self._programs[("collect",)] = program
        return program

    def optimizer_program(self) -> OptimizerProgram:
        program = self._programs.get(("optimizer",))
        if program is None:
            constants = self._constants() | {
                "weights": self._weights.address,
                "copy": self._parameters_address,
                "kept_copy": self._kept.address if self._kept else 0,
                "skipped": self._skipped,
            }
            program = OptimizerProgram(
                self.toolbox,
                self.spec,
                self._training(),
                constants,
                self._unread,
                self.format.dtype,
                fixed_point=self._sums_in_fixed_point,
            )
            self._programs[("optimizer",)] = program
        return program

    @property
    def _sums_in_fixed_point(self) -> bool:
        """Whether the table's gradient is summed in fixed point; there may be none."""
        return self.deterministic and self.has_table

    def _kinds(self) -> dict[str, bool]:
        """What gradient jobs of now are, beyond their dtypes."""
        return {"fixed_point": self._sums_in_fixed_point, "max_level": self._max_levels is not None}

    def _units(self, batch: int) -> dict[str, float]:
        """What an optimizer program is told of the sums that a gradient program of such a batch has left."""
        return fixed_point.fixed_point_of(self.spec.encoding, batch).units if self._sums_in_fixed_point else {}

    def _set_scales(self, y: int, y_stride: int, dtype: np.dtype, batch: int, stream: int) -> None:
        """The power of two for given output gradients, so that the largest of them is about 8 in float16; 1 in formats
        that need none."""
        if not self.format.scales_given_gradients:
            return
        key = ("scales", dtype)
        program = self._programs.get(key)
        if program is None:
            program = GradientScaleProgram(self.toolbox, dtype.name, self._maximum, self._given_scales)
            self._programs[key] = program
        program.run(y, y_stride, batch, self.spec.n_output_dims, stream)

    def _next_mark(self) -> int:
        """A number larger than any before, that kernels write where they meet a gradient that is not finite."""
        self._mark += 1
        return self._mark

    def _run_gradient(
        self, program: GradientProgram | SecondOrderProgram, batch: Batch, mark: int, stream: int
    ) -> PartialSums:
        """Leaves sums that an optimizer program must collect."""
        self._take_table_gradient(stream)
        return program.run(batch, mark, stream)

    def _take_table_gradient(self, stream: int) -> None:
        """For gradient kernels; cleared first where an exception kept the last ones' sums from being collected."""
        if self._table_gradient_is_used and self._table_gradient is not None:
            self._table_gradient.fill_zero(stream)
        self._table_gradient_is_used = True

    @leaves_in_order
    def backward(
        self,
        x: ArrayView,
        dL_dy: ArrayView,
        *,
        params: ArrayView | None,
        accumulate: bool,
        input: ArrayView | None,
        stream: int | None = None,
    ) -> None:
        stream = self._begin(stream, x, dL_dy, params, input)
        address, stride = self._input("x", x, stream)
        job = backward_job(
            self.spec, x.dtype.name, is_aligned(address, stride), dL_dy.dtype.name,
            params=params is not None, input=input is not None, dtype=self.format.dtype, **self._kinds(),
        )  # fmt: skip
        levels = self._levels_of(x.shape[0])
        finish_input = None
        dx = 0
        if input is not None:
            dx, finish_input = self._output("dx", input)
        y, y_stride = self._input("y", dL_dy, stream)
        self._set_scales(y, y_stride, dL_dy.dtype, x.shape[0], stream)
        partial, mark = NO_PARTIAL_SUMS, self._next_mark()
        if job is not None:
            key = ("gradient", job.options)
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = self._gradient_program(job)
            dx_stride = 4 * self.spec.n_input_dims
            batch = Batch(x.shape[0], address, stride, y, y_stride, 0, 0, dx, dx_stride, *levels)
            partial = self._run_gradient(program, batch, mark, stream)
        if params is not None:
            more = {"accumulate": int(accumulate), "mark": mark} | self._units(x.shape[0])
            self._collect(partial, params, self._given_scales, more, stream)
        self._table_gradient_is_used = False
        if finish_input is not None:
            finish_input(stream)

    def _collect(
        self, partial: PartialSums, params: ArrayView, scales: int, more: dict[str, float], stream: int
    ) -> None:
        """more   further arguments of the collecting kernel, `accumulate` among them"""
        address, finish = self._output("gradients", params)
        if more["accumulate"] and not params.on_device:
            self.workspace.buffer("output gradients").upload(params.numpy(), stream)
        self._collect_program().run(partial, self._unread, scales, 1.0, stream, gradients=address, **more)
        finish(stream)

    @property
    def inference_params(self) -> np.ndarray | None:
        if self._optimizer is None or not self._optimizer.keeps_now:
            return None
        return self._optimizer.inference_params(self.get_params(), self._order.join())

    def set_max_level(self, max_level: float | np.ndarray | None) -> None:
        self.configuration += 1
        if max_level is None:
            self._max_levels = None
            return
        self.device.use()
        fractions = np.atleast_1d(np.asarray(max_level, np.float32))
        buffer = DeviceBuffer(self.device, fractions.nbytes)
        buffer.upload(fractions, self._order.join())
        self._max_levels = buffer, len(fractions) if np.ndim(max_level) else None

    @leaves_in_order
    def backward_backward_input(
        self,
        x: ArrayView,
        dL_ddLdinput: ArrayView,
        dL_dy: ArrayView,
        *,
        dL_doutput: ArrayView,
        params: ArrayView,
        input: ArrayView,
        stream: int | None = None,
    ) -> None:
        stream = self._begin(stream, x, dL_ddLdinput, dL_dy, dL_doutput, params, input)
        address, stride = self._input("x", x, stream)
        levels, has_levels = self._levels_of(x.shape[0]), self._max_levels is not None
        key = ("second order", x.dtype, is_aligned(address, stride), dL_ddLdinput.dtype, dL_dy.dtype, has_levels)
        program = self._second_order_program(key)
        dx, finish_input = self._output("dx", input)
        derivative, finish_derivative = self._output("derivative", dL_doutput)
        directions, directions_stride = self._input("directions", dL_ddLdinput, stream)
        batch = SecondOrderBatch(
            x.shape[0], address, stride, *self._input("y", dL_dy, stream),
            dx=dx, dx_stride=4 * self.spec.n_input_dims, max_levels=levels[0], max_level_stride=levels[1],
            directions=directions, directions_stride=directions_stride,
            derivative=derivative, derivative_stride=4 * self.spec.n_output_dims,
        )  # fmt: skip
        mark = self._next_mark()
        partial = self._run_gradient(program, batch, mark, stream)
        more = {"accumulate": 0, "mark": mark} | program.units(x.shape[0])
        self._collect(partial, params, program.scales, more, stream)
        self._table_gradient_is_used = False
        finish_input(stream)
        finish_derivative(stream)

    def _second_order_program(self, key: tuple) -> SecondOrderProgram:
        """Raises EngineUnavailable where there is none, at the second time without trying again."""
        if key in self._unavailable:
            raise self._unavailable[key]
        program = self._programs.get(key)
        if program is None:
            _, x_dtype, aligned, directions_dtype, gradient_dtype, _ = key
            job = second_order_job(
                self.spec,
                x_dtype.name,
                aligned,
                directions_dtype.name,
                gradient_dtype.name,
                dtype=self.format.dtype,
                **self._kinds(),
            )
            try:
                program = SecondOrderProgram(self.toolbox, job, self.workspace, self._constants())
            except EngineUnavailable as error:
                self._unavailable[key] = error
                raise
            self._programs[key] = program
        return program

    # ------------------------------------------------------------------------------------- training
    def configure_training(self, optimizer: OptimizerSpec, loss: LossSpec) -> None:
        refuse_training(loss)
        self.device.use()
        stream = self._order.join()
        where = Slice(0, ParameterSizes(self.n_params, self.spec.layer_shapes))
        made = make_optimizer(optimizer, where)
        self._constant_gradient = None
        if loss.otype == CONSTANT_GRADIENT:
            self._constant_gradient = DeviceBuffer(self.device, 4 * self.spec.n_output_dims)
            self._constant_gradient.upload(np.array(loss.gradient, np.float32), stream)
        self._programs = {key: p for key, p in self._programs.items() if key[0] not in ("training", "optimizer")}
        self._release_optimizer()
        self.configuration += 1
        made.allocate(self.device, stream)
        if made.keeps:
            self._kept = self._parameters_buffer()
        self._optimizer, self._loss = made, loss
        self._words.upload(np.zeros(2, np.uint32), stream)  # bad and skipped

    def _release_optimizer(self) -> None:
        if self._optimizer is not None:
            self._optimizer.free()
        if self._kept is not None:
            self._kept.free()
        self._optimizer = self._kept = None

    def _training(self) -> Optimizer:
        if self._optimizer is None:
            raise RuntimeError("configure_training has not been called")
        return self._optimizer

    @leaves_in_order
    def training_step(
        self,
        x: ArrayView,
        y: ArrayView | None,
        *,
        data_pdf: ArrayView | None = None,
        external_gradient: ArrayView | None = None,
        run_optimizer: bool = True,
        stream: int | None = None,
    ) -> Loss:
        """One step. With an external gradient there is no loss; its value is then 0."""
        stream = self._begin(stream, x, y, data_pdf, external_gradient)
        size, levels = x.shape[0], self._levels_of(x.shape[0])
        own_loss = external_gradient is None
        density = data_pdf if own_loss else None
        density_dtype = None if density is None else density.dtype
        address, stride = self._input("x", x, stream)
        aligned = is_aligned(address, stride)
        density_place = self._input("pdf", density, stream)
        loss_name: str | None = None
        if own_loss and self._constant_gradient is not None:  # one row, given for all samples
            dtype, y_place, n_given = CONSTANT_DTYPE, (self._constant_gradient.address, 0), 1
        else:
            given = y if own_loss else external_gradient
            dtype, y_place, n_given = given.dtype, self._input("y", given, stream), size
            loss_name = self._loss.otype if own_loss else None
        # levels that don't fit shared memory are summed in float32, in any order
        split = self._split(size) and not self.deterministic
        key = ("training", x.dtype, aligned, dtype, loss_name, density_dtype, self._max_levels is not None, split)
        program = self._programs.get(key)
        if program is None:
            job = training_job(
                self.spec, x.dtype.name, aligned, dtype.name, loss=loss_name,
                density_dtype=None if density is None else density_dtype.name, split=split, dtype=self.format.dtype,
                **self._kinds(),
            )  # fmt: skip
            program = self._programs[key] = self._gradient_program(job)
        behind = self.optimizer_program() if run_optimizer else self._collect_program()
        batch = Batch(size, address, stride, *y_place, *density_place, 0, 0, *levels)
        if loss_name is not None:
            scale, scales = 1.0 / (self.spec.n_output_dims * size), self._unit_scales
        else:
            self._set_scales(*y_place, dtype, n_given, stream)
            scale, scales = 1.0, self._given_scales
        mark = self._next_mark()
        partial = self._run_gradient(program, batch, mark, stream)
        loss, loss_address = self._new_loss(stream)
        more = {"mark": mark} | self._units(size)
        if run_optimizer:
            behind.run(partial, loss_address, scales, scale, stream, **more)
        else:
            unused = self.workspace.get("gradients", 4 * self.n_params)
            behind.run(partial, loss_address, scales, scale, stream, gradients=unused, accumulate=0, **more)
        self._table_gradient_is_used = False
        return loss

    def record_step(self, x: ArrayView, y: ArrayView) -> tuple[Loss, RecordedStep | None]:
        """`training_step` on the default stream, and what repeats it if something can."""
        return record_step(self, x, y)

    def record_inference(self, x: ArrayView, out: ArrayView) -> RecordedInference | None:
        """`inference` on the default stream, and what repeats it if something can."""
        return record_inference(self, x, out)

    @leaves_in_order
    def repeat_step(self, recorded: RecordedStep) -> Loss:
        """`training_step` once more, on the arrays and with the kernels of a recorded one that still holds."""
        self.device.use()
        self._order.enter(0)
        self._take_table_gradient(0)
        loss, address = self._new_loss(0)
        optimizer = self._training()
        optimizer.step()
        recorded.set(self._next_mark(), address)
        recorded.launch()
        optimizer.turn()
        self._table_gradient_is_used = False
        return loss

    @leaves_in_order
    def repeat_inference(self, recorded: RecordedInference) -> None:
        """`inference` once more, as `repeat_step`."""
        self.device.use()
        self._order.enter(0)
        recorded.launch()

    def _new_loss(self, stream: int) -> tuple[Loss, int]:
        """A place for the next loss. Whoever still waits for the one that stood there gets it first."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % LOSS_SLOTS
        waiting = self._waiting[slot]
        if waiting is not None and waiting() is not None:
            self._fetch_losses(stream)
        loss = Loss(self._losses, slot, self._order)
        self._waiting[slot] = weakref.ref(loss)
        return loss, self._losses.address + 4 * slot

    def _fetch_losses(self, stream: int) -> None:
        """Read all losses that somebody still holds; `stream` is behind the steps that they are of."""
        values = self._losses.download(LOSS_SLOTS, np.float32, stream)
        for slot, waiting in enumerate(self._waiting):
            loss = waiting() if waiting is not None else None
            if loss is not None:
                loss.settle(values[slot])
        self._waiting = [None] * LOSS_SLOTS

    @property
    def learning_rate(self) -> float:
        return self._training().learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._training().learning_rate = float(value)

    @property
    def step(self) -> int:
        return self._training().current_step

    @property
    def skipped_steps(self) -> int:
        self.device.use()
        count = np.empty(1, np.uint32)
        self._words.download_into(count, self._order.join(), offset=self._skipped - self._words.address)
        return int(count[0])

    def optimizer_state(self) -> State:
        self.device.use()
        return self._training().state(self._order.join())

    def load_optimizer_state(self, state: State) -> None:
        """Everything is checked before anything is loaded."""
        self.device.use()
        stream = self._order.join()
        self._training().load_state(state, stream)
        self.configuration += 1
        kept = self.inference_params
        if kept is not None:
            self._kept.upload(self.format.parameters(kept), stream)

    # ----------------------------------------------------------------------------------------- rest
    def explain(self) -> Explanation:
        kernels = [p.report() for program in self._programs.values() for p in program.programs]
        properties = self.device.properties
        capability = ".".join(map(str, properties.capability))
        return Explanation(
            "fused",
            "fused kernels",
            f"{properties.name} (compute capability {capability})",
            self.format.in_words,
            tuple(kernels),
            (SUMS_IN_FIXED_POINT,) if self._sums_in_fixed_point else (),
        )

    def close(self) -> None:
        """Fetch the losses that somebody still holds, then free all device memory."""
        self.device.use()
        self._fetch_losses(self._order.join())
        self._programs.clear()
        self.configuration += 1
        self.workspace.free()
        self._release_optimizer()
        buffers = (self._weights, self._copy, self._words, self._maximum, self._losses)
        levels = self._max_levels[0] if self._max_levels else None
        for buffer in (*buffers, self._table_gradient, self._constant_gradient, levels):
            if buffer is not None:
                buffer.free()


def create_runtime(
    spec: ModelSpec,
    params: np.ndarray,
    *,
    dtype: str = "float16",
    device: int = 0,
    deterministic: bool = False,
    strict: bool = False,
) -> FusedRuntime:
    """A runtime on CUDA device number `device` that starts from `params`, float32 [n_params].

    Raises EngineUnavailable with the reason: no usable device, or something that has no fused kernel yet.
    """
    status = device_status(device)
    if not status.usable:
        raise EngineUnavailable(status.reason, no_device=status.no_device)
    refuse_model(spec, dtype=dtype, deterministic=deterministic)
    opened = open_device(device)
    format_for(dtype, architecture(opened.properties.capability))
    return FusedRuntime(spec, params, opened, dtype, deterministic=deterministic)
