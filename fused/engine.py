"""The fused engine: the contract of `numba_tcnn.engines`, kept by programs of fused kernels on one device.

A call brings its arrays to the device (call_arrays.py), finds its program by dtypes and options, or makes it from a
job (jobs.py), and launches. Parameters and programs are the `DeviceModel`'s; what stands around gradient programs is in
gradient_runs.py, optimizers, losses and their steps are in training.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..arrays import ArrayView
from ..engines import EngineUnavailable, Explanation
from ..parameter_sizes import ParameterSizes
from ..specs import LossSpec, ModelSpec, OptimizerSpec
from .device_model import DeviceModel
from .device_status import device_status
from .driver import Device, current_device
from .driver import device as open_device
from .gradient_programs import Batch
from .gradient_runs import GradientRuns
from .jobs import backward_job, inference_job, is_aligned
from .level_split_programs import LevelSplitInferenceProgram
from .make_programs import make_inference_program
from .optimizer_contract import Slice, State
from .optimizers import make_optimizer
from .pending_losses import Loss, PendingLosses
from .plan import architecture, format_for
from .programs import PartialSums
from .recorded_calls import RecordedInference, RecordedStep, record_inference, record_step
from .refusals import refuse_model, refuse_training
from .second_order_programs import SecondOrderBatch, SecondOrderProgram, second_order_job
from .stage_io import InferenceOptions
from .stream_order import leaves_in_order
from .training import Training

SUMS_IN_FIXED_POINT = (
    "deterministic: table gradients are summed in fixed point, which takes 16 bytes a parameter instead of 4 and a "
    "64-bit reduction for each feature of each corner"
)

NO_PARTIAL_SUMS = PartialSums(0, 0, 16, 0, 0)


class FusedRuntime:
    """One model on one device."""

    name = "fused"

    def __init__(
        self, spec: ModelSpec, params: np.ndarray, owner: Device, dtype: str = "float16", *, deterministic: bool = False
    ):
        self.spec, self.device = spec, owner
        owner.use()
        self.model = DeviceModel(spec, params, owner, dtype, deterministic=deterministic)
        self._order = self.model.order
        self.gradients = GradientRuns(self.model)
        self.losses = PendingLosses(owner, self._order)
        self._training: Training | None = None
        self._unavailable: dict[tuple, EngineUnavailable] = {}  # second derivatives that can't be had, and why

    # ------------------------------------------------------------------------------------ parameters
    def get_params(self) -> np.ndarray:
        return self.model.get_params()

    def set_params(self, params: np.ndarray) -> None:
        self.model.set_params(params)
        if self._training is not None:
            self._training.optimizer.forget_params()

    @property
    def inference_params(self) -> np.ndarray | None:
        return None if self._training is None else self._training.inference_params()

    def inference_parameters(self) -> int:
        """Address of the parameters of inference, as kernels read them."""
        kept = None if self._training is None else self._training.kept
        return self.model.parameters if kept is None else kept

    @property
    def may_keep_parameters(self) -> bool:
        """Whether `inference_parameters` may become another one from call to call."""
        return self._training is not None and self._training.optimizer.keeps

    def set_max_level(self, max_level: float | np.ndarray | None) -> None:
        self.model.set_max_level(max_level)

    # ------------------------------------------------------------------------------------- inference
    @leaves_in_order
    def inference(
        self, x: ArrayView, out: ArrayView, *, training_params: bool = False, stream: int | None = None
    ) -> None:
        model = self.model
        stream = model.arrays.begin(stream, x, out)
        address, stride = model.arrays.read("x", x, stream)
        out_address, finish = model.arrays.write("y", out, stream)
        split, has_levels = model.splits(x.shape[0]), model.has_max_level
        key = ("inference", x.dtype, is_aligned(address, stride), out.dtype, split, has_levels)
        program = model.program(key, self._make_inference_program, *key[1:])
        parameters = model.parameters if training_params else self.inference_parameters()
        program.use(parameters, model.table_of(parameters))
        levels = {"max_levels": model.levels_of(x.shape[0])} if has_levels else {}
        program.run(address, stride, out_address, out.shape[1] * out.dtype.itemsize, x.shape[0], stream, **levels)
        finish()

    def _make_inference_program(
        self, x_dtype: np.dtype, aligned: bool, out_dtype: np.dtype, split: bool, has_levels: bool
    ):
        model = self.model
        options = InferenceOptions(x_dtype.name, aligned, out_dtype.name, has_levels)
        job = inference_job(self.spec, options, split=split, dtype=model.format.dtype)
        make = LevelSplitInferenceProgram if split else make_inference_program
        constants = {"parameters": model.parameters, "table": model.table_of(model.parameters)}
        return make(model.toolbox, job, model.workspace, constants)

    # ------------------------------------------------------------------------------------- embedding
    def device_function(self, block_size: int) -> Callable:
        """f(x, params) -> y, for kernels of the user's own; see `Module.device_function`."""
        from .device_function import device_function  # imports Numba

        self._check_embedding()
        return device_function(self.spec, self.device.properties.capability, block_size)

    def _check_embedding(self) -> None:
        dtype = self.model.format.dtype
        if dtype != "float16":
            raise EngineUnavailable(f"device functions compute in float16; {dtype} has none yet")

    def device_params_address(self, stream: int) -> int:
        """Where the parameters of inference are, for a kernel that comes on `stream` next; later steps wait for it."""
        current = current_device()
        if current != self.device.index:
            raise ValueError(
                f"a kernel on CUDA device {current} was given the parameters of a model on device "
                f"{self.device.index}; select that device, or create the model with device={current}"
            )
        self._check_embedding()
        self.model.arrays.begin(stream)
        return self.inference_parameters()

    def device_params_used(self) -> None:
        """The kernel has been launched: what comes next waits for it."""
        self._order.leave()

    # ------------------------------------------------------------------------------------- gradients
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
        model, gradients, size = self.model, self.gradients, x.shape[0]
        stream = model.arrays.begin(stream, x, dL_dy, params, input)
        address, stride = model.arrays.read("x", x, stream)
        job = backward_job(
            self.spec, x.dtype.name, is_aligned(address, stride), dL_dy.dtype.name, params=params is not None,
            input=input is not None, dtype=model.format.dtype, **gradients.kinds,
        )  # fmt: skip
        levels = model.levels_of(size)
        dx, finish_input = (0, None) if input is None else model.arrays.write("dx", input, stream)
        y, y_stride = model.arrays.read("y", dL_dy, stream)
        gradients.set_scales(y, y_stride, dL_dy.dtype, size, stream)
        partial, mark = NO_PARTIAL_SUMS, gradients.next_mark()
        if job is not None:
            program = model.program(("gradient", job.options), gradients.program, job)
            dx_stride = 4 * self.spec.n_input_dims
            batch = Batch(size, address, stride, y, y_stride, 0, 0, dx, dx_stride, *levels)
            partial = gradients.run(program, batch, mark, stream)
        if params is not None:
            more = {"mark": mark} | gradients.units(size)
            gradients.hand_out(partial, params, model.words.given_scales, stream, accumulate=accumulate, **more)
        model.table_gradient.collected()
        if finish_input is not None:
            finish_input()

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
        model, gradients, arrays, size = self.model, self.gradients, self.model.arrays, x.shape[0]
        stream = arrays.begin(stream, x, dL_ddLdinput, dL_dy, dL_doutput, params, input)
        address, stride = arrays.read("x", x, stream)
        levels, level_stride = model.levels_of(size)
        aligned = is_aligned(address, stride)
        key = ("second order", x.dtype, aligned, dL_ddLdinput.dtype, dL_dy.dtype, model.has_max_level)
        program = self._second_order_program(key)
        dx, finish_input = arrays.write("dx", input, stream)
        derivative, finish_derivative = arrays.write("derivative", dL_doutput, stream)
        directions, directions_stride = arrays.read("directions", dL_ddLdinput, stream)
        batch = SecondOrderBatch(
            size, address, stride, *arrays.read("y", dL_dy, stream),
            dx=dx, dx_stride=4 * self.spec.n_input_dims, max_levels=levels, max_level_stride=level_stride,
            directions=directions, directions_stride=directions_stride,
            derivative=derivative, derivative_stride=4 * self.spec.n_output_dims,
        )  # fmt: skip
        mark = gradients.next_mark()
        partial = gradients.run(program, batch, mark, stream)
        gradients.hand_out(partial, params, program.scales, stream, mark=mark, **program.units(size))
        model.table_gradient.collected()
        finish_input()
        finish_derivative()

    def _second_order_program(self, key: tuple) -> SecondOrderProgram:
        """Raises EngineUnavailable where there is none, at the second time without trying again."""
        if key in self._unavailable:
            raise self._unavailable[key]
        try:
            return self.model.program(key, self._make_second_order_program, *key[1:5])
        except EngineUnavailable as error:
            self._unavailable[key] = error
            raise

    def _make_second_order_program(
        self, x_dtype: np.dtype, aligned: bool, directions_dtype: np.dtype, gradient_dtype: np.dtype
    ) -> SecondOrderProgram:
        model = self.model
        job = second_order_job(
            self.spec, x_dtype.name, aligned, directions_dtype.name, gradient_dtype.name, dtype=model.format.dtype,
            **self.gradients.kinds,
        )  # fmt: skip
        return SecondOrderProgram(model.toolbox, job, model.workspace, model.constants())

    # -------------------------------------------------------------------------------------- training
    def configure_training(self, optimizer: OptimizerSpec, loss: LossSpec) -> None:
        refuse_training(loss)
        made = make_optimizer(optimizer, Slice(0, ParameterSizes(self.model.n_params, self.spec.layer_shapes)))
        self.device.use()
        self._free_training()
        self.model.validity.reconfigured()
        self._training = Training(self.model, self.gradients, self.losses, made, loss)
        self._training.prepare()

    def _free_training(self) -> None:
        training, self._training = self._training, None
        if training is not None:
            self._order.join()
            training.free()

    @property
    def training(self) -> Training:
        if self._training is None:
            raise RuntimeError("configure_training has not been called")
        return self._training

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
        return self.training.step(
            x, y, data_pdf=data_pdf, external_gradient=external_gradient, run_optimizer=run_optimizer, stream=stream
        )

    @property
    def learning_rate(self) -> float:
        return self.training.optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.training.optimizer.learning_rate = float(value)

    @property
    def step(self) -> int:
        return self.training.optimizer.current_step

    @property
    def skipped_steps(self) -> int:
        self.device.use()
        return self.model.words.n_skipped(self._order.join())

    def optimizer_state(self) -> State:
        return self.training.state()

    def load_optimizer_state(self, state: State) -> None:
        self.training.load_state(state)

    # ------------------------------------------------------------------ calls that come again and again
    @property
    def configuration(self) -> int:
        """Changes with what recorded calls depend on; what it was never comes again."""
        return self.model.validity.configuration

    def record_step(self, x: ArrayView, y: ArrayView) -> tuple[Loss, RecordedStep | None]:
        """`training_step` on the default stream, and what repeats it if something can."""
        return record_step(self, x, y)

    def record_inference(self, x: ArrayView, out: ArrayView) -> RecordedInference | None:
        """`inference` on the default stream, and what repeats it if something can."""
        return record_inference(self, x, out)

    # ------------------------------------------------------------------------------------------ rest
    def explain(self) -> Explanation:
        kernels = [p.report() for program in self.model.programs.values() for p in program.programs]
        properties = self.device.properties
        capability = ".".join(map(str, properties.capability))
        return Explanation(
            "fused",
            "fused kernels",
            f"{properties.name} (compute capability {capability})",
            self.model.format.in_words,
            tuple(kernels),
            (SUMS_IN_FIXED_POINT,) if self.model.sums_in_fixed_point else (),
        )

    def close(self) -> None:
        """Fetch the losses that somebody still holds, then free all device memory."""
        self.model.validity.reconfigured()  # first: no recorded call comes between
        self.device.use()
        self.losses.fetch(self._order.join())
        self._free_training()
        for part in (self.model, self.gradients, self.losses):
            part.free()


def create_runtime(
    spec: ModelSpec,
    params: np.ndarray,
    *,
    dtype: str = "float16",
    device: int = 0,
    deterministic: bool = False,
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
