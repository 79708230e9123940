"""Training on a device: an optimizer and a loss, and the step that runs a gradient program and the optimizer's."""

from __future__ import annotations

import numpy as np

from ..arrays import ArrayView
from ..specs import LossSpec
from .compile_processes import compile_processes
from .device_model import DeviceModel
from .driver import DeviceBuffer
from .element_wise_jobs import OptimizerJob, optimizer_jobs
from .gradient_programs import Batch
from .gradient_runs import GradientRuns
from .jobs import is_aligned, training_job, usual_training_jobs
from .losses import CONSTANT_GRADIENT
from .optimizer_contract import Optimizer, State
from .pending_losses import Loss, PendingLosses
from .programs import OptimizerProgram

CONSTANT_DTYPE = np.dtype(np.float32)  # of the gradient of ConstantGradient

OWN_PROGRAMS = ("training", "optimizer")
"""First words of the keys of programs that depend on the optimizer or the loss."""


class Training:
    """One configuration of a model's training; another configuration is another object.

    optimizer   not allocated yet
    """

    def __init__(
        self, model: DeviceModel, gradients: GradientRuns, losses: PendingLosses, optimizer: Optimizer, loss: LossSpec
    ):
        self._model, self._gradients, self._losses = model, gradients, losses
        self.optimizer, self._loss = optimizer, loss
        stream = model.order.join()
        self._constant_gradient: DeviceBuffer | None = None
        if loss.otype == CONSTANT_GRADIENT:
            self._constant_gradient = DeviceBuffer(model.device, 4 * model.spec.n_output_dims)
            self._constant_gradient.upload(np.array(loss.gradient, np.float32), stream)
        optimizer.allocate(model.device, stream)
        self._kept = model.parameters_buffer() if optimizer.keeps else None
        model.words.forget_skipped(stream)

    def free(self) -> None:
        """Give its memory back; the model forgets its programs."""
        programs = self._model.programs
        for key in [key for key in programs if key[0] in OWN_PROGRAMS]:
            del programs[key]
        self.optimizer.free()
        for buffer in (self._kept, self._constant_gradient):
            if buffer is not None:
                buffer.free()

    # ------------------------------------------------------------------------- parameters and state
    @property
    def kept(self) -> int | None:
        """Address of the parameters of inference, as kernels read them, where the optimizer now keeps some."""
        return self._kept.address if self.optimizer.keeps_now else None

    def inference_params(self) -> np.ndarray | None:
        if not self.optimizer.keeps_now:
            return None
        return self.optimizer.inference_params(self._model.get_params(), self._model.order.join())

    def state(self) -> State:
        self._model.device.use()
        return self.optimizer.state(self._model.order.join())

    def load_state(self, state: State) -> None:
        """Everything is checked before anything is loaded."""
        model = self._model
        model.device.use()
        stream = model.order.join()
        self.optimizer.load_state(state, stream)
        model.validity.reconfigured()
        kept = self.inference_params()
        if kept is not None:
            self._kept.upload(model.format.parameters(kept), stream)

    # ---------------------------------------------------------------------------------------- steps
    def step(
        self,
        x: ArrayView,
        y: ArrayView | None,
        *,
        data_pdf: ArrayView | None,
        external_gradient: ArrayView | None,
        run_optimizer: bool,
        stream: int | None,
    ) -> Loss:
        """One step. With an external gradient there is no loss; its value is then 0."""
        model, gradients = self._model, self._gradients
        stream = model.arrays.begin(stream, x, y, data_pdf, external_gradient)
        size, levels = x.shape[0], model.levels_of(x.shape[0])
        own_loss = external_gradient is None
        density = data_pdf if own_loss else None
        density_dtype = None if density is None else density.dtype
        address, stride = model.arrays.read("x", x, stream)
        density_place = model.arrays.read("pdf", density, stream)
        loss_name: str | None = None
        if own_loss and self._constant_gradient is not None:  # one row, given for all samples
            dtype, y_place, n_given = CONSTANT_DTYPE, (self._constant_gradient.address, 0), 1
        else:
            given = y if own_loss else external_gradient
            dtype, y_place, n_given = given.dtype, model.arrays.read("y", given, stream), size
            loss_name = self._loss.otype if own_loss else None
        # levels that don't fit shared memory are summed in float32, in any order
        split = model.splits(size) and not model.sums_in_fixed_point
        aligned = is_aligned(address, stride)
        key = ("training", x.dtype, aligned, dtype, loss_name, density_dtype, model.has_max_level, split)
        program = model.program(key, self._make_program, key)
        behind = self.optimizer_program() if run_optimizer else gradients.collect_program()
        batch = Batch(size, address, stride, *y_place, *density_place, 0, 0, *levels)
        if loss_name is not None:
            scale, scales = 1.0 / (model.spec.n_output_dims * size), model.words.unit_scales
        else:
            gradients.set_scales(*y_place, dtype, n_given, stream)
            scale, scales = 1.0, model.words.given_scales
        mark = gradients.next_mark()
        partial = gradients.run(program, batch, mark, stream)
        loss = self._losses.new(stream)
        more = {"mark": mark} | gradients.units(size)
        if not run_optimizer:
            more |= {"gradients": model.workspace.get("gradients", 4 * model.n_params), "accumulate": 0}
        behind.run(partial, loss.address, scales, scale, stream, **more)
        model.table_gradient.collected()
        return loss

    def _make_program(self, key: tuple):
        self._start_optimizer_program()
        _, x_dtype, aligned, dtype, loss_name, density_dtype, _, split = key
        job = training_job(
            self._model.spec, x_dtype.name, aligned, dtype.name, loss=loss_name,
            density_dtype=None if density_dtype is None else density_dtype.name, split=split,
            dtype=self._model.format.dtype, **self._gradients.kinds,
        )  # fmt: skip
        return self._gradients.program(job)

    def _start_optimizer_program(self) -> None:
        """Its kernels compile while the gradient program's do."""
        if ("optimizer",) not in self._model.programs:
            for job in self._optimizer_jobs():
                self._model.toolbox.start(job)

    def prepare(self) -> None:
        """Start what compiles in other processes, in the background, where the disk cache seems to lack kernels of the
        first step: the optimizer's, or the gradient's for every usual kind of inputs."""
        model, processes = self._model, compile_processes()
        if not processes.may_start:
            return
        stored = model.toolbox.has_stored
        usual = usual_training_jobs(model.spec, self._loss, model.format.dtype, **self._gradients.kinds)
        if not (all(map(stored, self._optimizer_jobs())) and any(map(stored, usual))):
            processes.start()

    def _optimizer_jobs(self) -> list[OptimizerJob]:
        model = self._model
        jobs = optimizer_jobs(
            self.optimizer, model.n_network, model.format.dtype, fixed_point=model.sums_in_fixed_point
        )
        return [job for job, _, _ in jobs]

    def optimizer_program(self) -> OptimizerProgram:
        return self._model.program(("optimizer",), self._make_optimizer_program)

    def _make_optimizer_program(self) -> OptimizerProgram:
        model = self._model
        constants = model.constants() | {
            "weights": model.master,
            "copy": model.parameters,
            "kept_copy": self._kept.address if self._kept else 0,
            "skipped": model.words.skipped,
        }
        return OptimizerProgram(
            model.toolbox, model.spec, self.optimizer, constants, model.words.unread, model.format.dtype,
            fixed_point=model.sums_in_fixed_point,
        )  # fmt: skip
