"""The fused engine: the contract of `numba_tcnn.engines`, kept by programs of fused kernels on one device."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np

from ..arrays import ArrayView
from ..engines import EngineUnavailable, Explanation
from ..layout import n_network_params, n_params
from ..specs import AdamSpec, LossSpec, ModelSpec, OptimizerSpec, round_up
from .device_status import device_status
from .driver import Device, DeviceBuffer
from .driver import device as open_device
from .gradient_programs import Batch, GradientProgram, make_gradient_program
from .jobs import GradientJob, InferenceJob, backward_job, is_aligned, training_job
from .optimizer_kernels import VECTOR
from .programs import GradientScaleProgram, InferenceProgram, OptimizerProgram, PartialSums, Toolbox, Workspace
from .refusals import refuse_model, refuse_training
from .stage_io import InferenceOptions

LOSS_SLOTS = 4096
"""Losses that wait on the device for someone to read them. Before one is overwritten, all are fetched together: who
keeps every loss of a long training waits for the device once in so many steps, not in each."""

STATE_ARRAYS = {"first_moments": np.float32, "second_moments": np.float32, "param_steps": np.uint32}

NO_PARTIAL_SUMS = PartialSums(0, 0, 16, 0, 0)


def _nothing_to_do(stream: int) -> None:
    """An array in device memory is complete as soon as the kernels are."""


class Loss:
    """A training step's loss, still on the device until it is read or its place is needed."""

    def __init__(self, buffer: DeviceBuffer, slot: int, stream: int):
        self._place: tuple[DeviceBuffer, int, int] | None = (buffer, slot, stream)
        self._value = 0.0

    def value(self) -> float:
        if self._place is not None:
            buffer, slot, stream = self._place
            host = np.empty(1, np.float32)
            buffer.device.use()
            buffer.download_into(host, stream, offset=4 * slot)
            self.settle(host[0])
        return self._value

    def settle(self, value: float) -> None:
        """The value, from whoever has read it; its place on the device is free."""
        self._value, self._place = float(value), None


class FusedRuntime:
    """One model on one device. Parameters are a float32 master and the float16 copy that kernels read.

    Programs are kept by what they are made for; the same call with the same dtypes finds its program in one look-up.
    """

    name = "fused"

    def __init__(self, spec: ModelSpec, params: np.ndarray, owner: Device):
        self.spec, self.device = spec, owner
        self.toolbox, self.workspace = Toolbox(owner), Workspace(owner)
        self.n_params, self.n_network = n_params(spec), n_network_params(spec)
        self.has_table = self.n_params > self.n_network
        owner.use()
        self._padded = round_up(self.n_params, VECTOR)  # optimizer kernels read and write whole vectors
        self._weights = DeviceBuffer(owner, 4 * self._padded)
        self._half_weights = DeviceBuffer(owner, 2 * self._padded)
        self._words = DeviceBuffer(owner, 32)
        self._words.upload(np.array([0, 0, 0, 0, 1, 1, 1, 1], np.float32))
        words = self._words.address
        self._bad, self._skipped, self._unread_loss = words, words + 4, words + 8
        self._given_scales, self._unit_scales = words + 16, words + 24  # two float32 each; see gradient_scale_kernels
        self._maximum = DeviceBuffer(owner, 16)
        self._losses = DeviceBuffer(owner, 4 * LOSS_SLOTS)
        self._waiting: list[weakref.ref | None] = [None] * LOSS_SLOTS
        self._next_slot = self._mark = self._last_stream = 0
        self._table_gradient: DeviceBuffer | None = None
        self._table_gradient_is_used = False  # between a gradient program and its optimizer program
        self._programs: dict[tuple, object] = {}
        self._optimizer: AdamSpec | None = None
        self._loss = LossSpec()
        self._state: dict[str, DeviceBuffer] = {}
        self._learning_rate = 0.0
        self.step = 0
        self.set_params(params)

    # ------------------------------------------------------------------------------------ parameters
    def get_params(self) -> np.ndarray:
        self.device.use()
        return self._weights.download(self.n_params, np.float32, self._last_stream)

    def set_params(self, params: np.ndarray) -> None:
        self.device.use()
        params = np.ascontiguousarray(params, np.float32)
        self._weights.upload(params, self._last_stream)
        with np.errstate(over="ignore"):
            self._half_weights.upload(params.astype(np.float16), self._last_stream)

    # --------------------------------------------------------------------------------------- arrays
    def _begin(self, stream: int | None, *views: ArrayView | None) -> int:
        """Make the device current and order the work of `stream` behind earlier work and the arrays' own streams."""
        self.device.use()
        stream = 0 if stream is None else int(stream)
        for v in views:
            if v is not None and v.on_device and v.stream and v.stream != stream:
                self.device.wait_for(v.stream, stream)
        if stream != self._last_stream:
            self.device.wait_for(self._last_stream, stream)
            self._last_stream = stream
        return stream

    def _input(self, name: str, v: ArrayView | None, stream: int) -> tuple[int, int]:
        """(device address, bytes a row) of an array that is read; host arrays are copied to the device."""
        if v is None:
            return 0, 0
        stride = v.shape[1] * v.dtype.itemsize
        if v.on_device:
            return v.pointer, stride
        host = v.numpy()
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

    def _constants(self) -> dict[str, int]:
        """What every kernel that knows these parameters is told once."""
        parameters = self._half_weights.address
        return {
            "parameters": parameters,
            "table": parameters + 2 * self.n_network,
            "table_gradient": self._table_gradient_address(),
            "bad": self._bad,
        }

    def _table_gradient_address(self) -> int:
        """float32 gradients of the encoding's parameters: zero between steps, as every optimizer program leaves it.

        What comes between the two programs may raise; `_run_gradient` then clears it before the next use.
        """
        if not self.has_table:
            return 0
        if self._table_gradient is None:
            self._table_gradient = DeviceBuffer(self.device, 4 * (self._padded - self.n_network))
            self._table_gradient.fill_zero(self._last_stream)
        return self._table_gradient.address

    # ------------------------------------------------------------------------------------ inference
    def inference(self, x: ArrayView, out: ArrayView, *, stream: int | None = None) -> None:
        stream = self._begin(stream, x, out)
        address, stride = self._input("x", x, stream)
        finish = None
        if out.on_device:
            out_address = out.pointer
        else:
            out_address, finish = self._output("y", out)
        key = ("inference", x.dtype, is_aligned(address, stride), out.dtype)
        program = self._programs.get(key)
        if program is None:
            job = InferenceJob(self.spec, InferenceOptions(x.dtype.name, key[2], out.dtype.name))
            constants = {k: v for k, v in self._constants().items() if k in ("parameters", "table")}
            program = self._programs[key] = InferenceProgram(self.toolbox, job, constants)
        program.run(address, stride, out_address, out.shape[1] * out.dtype.itemsize, x.shape[0], stream)
        if finish is not None:
            finish(stream)

    # ------------------------------------------------------------------------------------ gradients
    def _gradient_program(self, job: GradientJob) -> GradientProgram:
        constants = self._constants() | {"scales": self._given_scales}
        return make_gradient_program(self.toolbox, job, self.workspace, constants)

    def _optimizer_program(self, optimizer: AdamSpec | None) -> OptimizerProgram:
        key = ("optimizer", optimizer)
        program = self._programs.get(key)
        if program is None:
            constants = self._constants() | {
                "weights": self._weights.address,
                "half_weights": self._half_weights.address,
                "skipped": self._skipped,
                **{name: buffer.address for name, buffer in self._state.items()},
            }
            program = self._programs[key] = OptimizerProgram(self.toolbox, self.spec, optimizer, constants)
        return program

    def _set_scales(self, y: int, y_stride: int, dtype: np.dtype, batch: int, stream: int) -> None:
        """The power of two for given output gradients, so that the largest of them is about 8 in float16."""
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

    def _run_gradient(self, program: GradientProgram, batch: Batch, mark: int, stream: int) -> PartialSums:
        """Leaves sums that an optimizer program must collect."""
        if self._table_gradient_is_used and self._table_gradient is not None:
            self._table_gradient.fill_zero(stream)
        self._table_gradient_is_used = True
        return program.run(batch, mark, stream)

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
            params=params is not None, input=input is not None,
        )  # fmt: skip
        finish_input = None
        dx = 0
        if input is not None:
            dx, finish_input = self._output("dx", input)
        y, y_stride = self._input("y", dL_dy, stream)
        self._set_scales(y, y_stride, dL_dy.dtype, x.shape[0], stream)
        partial = NO_PARTIAL_SUMS
        if job is not None:
            key = ("gradient", job.options)
            program = self._programs.get(key)
            if program is None:
                program = self._programs[key] = self._gradient_program(job)
            batch = Batch(x.shape[0], address, stride, y, y_stride, dx=dx, dx_stride=4 * self.spec.n_input_dims)
            partial = self._run_gradient(program, batch, self._next_mark(), stream)
        if params is not None:
            self._collect(partial, params, accumulate, stream)
        self._table_gradient_is_used = False
        if finish_input is not None:
            finish_input(stream)

    def _collect(self, partial: PartialSums, params: ArrayView, accumulate: bool, stream: int) -> None:
        address, finish = self._output("gradients", params)
        if accumulate and not params.on_device:
            self.workspace.buffer("output gradients").upload(params.numpy(), stream)
        self._optimizer_program(None).run(
            partial, self._unread_loss, self._given_scales, 1.0, stream, gradients=address, accumulate=int(accumulate)
        )
        finish(stream)

    @property
    def inference_params(self) -> np.ndarray | None:
        return None

    def set_max_level(self, max_level: float | np.ndarray | None) -> None:
        if max_level is not None:
            raise EngineUnavailable("max_level has no fused kernel yet: fused grids use all levels")

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
        raise EngineUnavailable("second derivatives have no fused kernel yet")

    # ------------------------------------------------------------------------------------- training
    def configure_training(self, optimizer: OptimizerSpec, loss: LossSpec) -> None:
        refuse_training(optimizer, loss)
        self.device.use()
        self._optimizer, self._loss = optimizer, loss
        self._learning_rate, self.step = optimizer.learning_rate, 0
        for name in STATE_ARRAYS:
            if name not in self._state:
                self._state[name] = DeviceBuffer(self.device, 4 * self._padded)
            self._state[name].fill_zero(self._last_stream)
        self._words.upload(np.zeros(2, np.uint32), self._last_stream)  # bad and skipped
        self._programs = {key: p for key, p in self._programs.items() if key[0] not in ("training", "optimizer")}

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
        size = x.shape[0]
        own_loss = external_gradient is None
        given = y if own_loss else external_gradient
        density = data_pdf if own_loss else None
        address, stride = self._input("x", x, stream)
        aligned = is_aligned(address, stride)
        key = ("training", x.dtype, aligned, given.dtype, own_loss, None if density is None else density.dtype)
        program = self._programs.get(key)
        if program is None:
            job = training_job(
                self.spec, x.dtype.name, aligned, given.dtype.name,
                loss=self._loss.otype if own_loss else None,
                density_dtype=None if density is None else density.dtype.name,
            )  # fmt: skip
            program = self._programs[key] = self._gradient_program(job)
        optimizer = self._optimizer_program(self._optimizer if run_optimizer else None)
        batch = Batch(size, address, stride, *self._input("y", given, stream), *self._input("pdf", density, stream))
        if own_loss:
            scale, scales = 1.0 / (self.spec.n_output_dims * size), self._unit_scales
        else:
            self._set_scales(batch.y, batch.y_stride, given.dtype, size, stream)
            scale, scales = 1.0, self._given_scales
        mark = self._next_mark()
        partial = self._run_gradient(program, batch, mark, stream)
        loss, loss_address = self._new_loss(stream)
        if run_optimizer:
            self.step += 1
            optimizer.run(
                partial, loss_address, scales, scale, stream,
                learning_rate=self._learning_rate, step=self.step, mark=mark,
            )  # fmt: skip
        else:
            unused = self.workspace.get("gradients", 4 * self.n_params)
            optimizer.run(partial, loss_address, scales, scale, stream, gradients=unused, accumulate=0)
        self._table_gradient_is_used = False
        return loss

    def _new_loss(self, stream: int) -> tuple[Loss, int]:
        """A place for the next loss. Whoever still waits for the one that stood there gets it first."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % LOSS_SLOTS
        waiting = self._waiting[slot]
        if waiting is not None and waiting() is not None:
            self._fetch_losses(stream)
        loss = Loss(self._losses, slot, stream)
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
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._learning_rate = float(value)

    @property
    def skipped_steps(self) -> int:
        self.device.use()
        count = np.empty(1, np.uint32)
        self._words.download_into(count, self._last_stream, offset=self._skipped - self._words.address)
        return int(count[0])

    def optimizer_state(self) -> dict[str, np.ndarray | int | float]:
        self.device.use()
        state: dict[str, np.ndarray | int | float] = {"step": self.step, "learning_rate": self._learning_rate}
        for name, dtype in STATE_ARRAYS.items():
            state[name] = self._state[name].download(self.n_params, dtype, self._last_stream)
        return state

    def load_optimizer_state(self, state: dict[str, np.ndarray | int | float]) -> None:
        """Everything is checked before anything is loaded."""
        needed = {"step", "learning_rate", *STATE_ARRAYS}
        if set(state) != needed:
            raise ValueError(f"optimizer state holds {', '.join(state)}; Adam needs {', '.join(sorted(needed))}")
        arrays = {name: np.asarray(state[name], dtype) for name, dtype in STATE_ARRAYS.items()}
        for name, values in arrays.items():
            if values.shape != (self.n_params,):
                raise ValueError(
                    f"optimizer state: {name} has shape {values.shape}, the model needs ({self.n_params},)"
                )
        step, learning_rate = int(state["step"]), float(state["learning_rate"])
        self.device.use()
        for name, values in arrays.items():
            self._state[name].upload(values, self._last_stream)
        self.step, self._learning_rate = step, learning_rate

    # ----------------------------------------------------------------------------------------- rest
    def explain(self) -> Explanation:
        kernels = [p.report() for program in self._programs.values() for p in program.programs]
        properties = self.device.properties
        capability = ".".join(map(str, properties.capability))
        return Explanation(
            "fused",
            "fused kernels",
            f"{properties.name} (compute capability {capability})",
            "float16, float32 accumulation",
            tuple(kernels),
        )

    def close(self) -> None:
        """Fetch the losses that somebody still holds, then free all device memory."""
        self.device.use()
        self._fetch_losses(self._last_stream)
        self._programs.clear()
        self.workspace.free()
        buffers = (self._weights, self._half_weights, self._words, self._maximum, self._losses, *self._state.values())
        for buffer in (*buffers, *([self._table_gradient] if self._table_gradient else [])):
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
    return FusedRuntime(spec, params, open_device(device))
