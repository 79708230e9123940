"""The engine contract of `numba_tcnn.engines`, on top of `Model` and an optimizer."""

from __future__ import annotations

import copy

import numpy as np

from numba_tcnn.arrays import ArrayView
from numba_tcnn.engines import Explanation
from numba_tcnn.layout import n_params
from numba_tcnn.loss_values import LossValue
from numba_tcnn.specs import LossSpec, ModelSpec, OptimizerSpec

from .losses import loss_function
from .model import Model
from .optimizer_contract import Optimizer, State
from .optimizers import make_optimizer


class ReferenceRuntime:
    """One model in NumPy. The float32 master parameters are its own; see `engines.Runtime` for the methods.

    `model` computes with the master parameters. Where the optimizer keeps other parameters for inference, the method
    `inference` computes with those, in a second view of the model that is made when it is first needed.
    """

    name = "reference"

    def __init__(self, spec: ModelSpec, params: np.ndarray, dtype: str):
        self.spec = spec
        self.params = np.array(params, np.float32)
        self.model = Model(spec, self.params, dtype)
        self.optimizer: Optimizer | None = None
        self._kept: Model | None = None  # with the parameters kept for inference; None: not made, or out of date
        self.loss = LossSpec()
        self.gradients: np.ndarray | None = None  # of the last training step, kept to reuse its memory
        self._skipped_steps = 0

    def get_params(self) -> np.ndarray:
        return self.params.copy()

    def set_params(self, params: np.ndarray) -> None:
        """What the optimizer remembers of gradients stays; its averages of parameters start again from these."""
        self.params[:] = params
        if self.optimizer is not None:
            self.optimizer.forget_params()
        self._refresh()

    def _refresh(self) -> None:
        self.model.refresh()
        self._kept = None

    def set_max_level(self, max_level: float | np.ndarray | None) -> None:
        self.model.max_level = max_level
        self._kept = None

    def inference(
        self, x: ArrayView, out: ArrayView, *, training_params: bool = False, stream: int | None = None
    ) -> None:
        model = self.model if training_params else self._inference_model()
        out.numpy()[...] = model.forward(x.numpy())

    def _inference_model(self) -> Model:
        if self._kept is None:
            own = self.inference_params
            if own is None:
                return self.model
            self._kept = copy.copy(self.model)
            self._kept.params = own
            self._kept.refresh()
        return self._kept

    @property
    def inference_params(self) -> np.ndarray | None:
        return None if self.optimizer is None else self.optimizer.inference_params

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
        asked = {"params": params is not None, "input": input is not None}
        gradients = self.model.backward(x.numpy(), dL_dy.numpy(), **asked)
        if params is not None:
            target = params.numpy()
            target[...] = target + gradients.params if accumulate else gradients.params
        if input is not None:
            input.numpy()[...] = gradients.input

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
        gradients = self.model.backward_backward_input(x.numpy(), dL_ddLdinput.numpy(), dL_dy.numpy())
        dL_doutput.numpy()[...] = gradients.dL_doutput
        params.numpy()[...] = gradients.params
        input.numpy()[...] = gradients.input

    def configure_training(self, optimizer: OptimizerSpec, loss: LossSpec) -> None:
        loss_function(loss, self.spec.n_output_dims)  # refuses a loss that can't be evaluated
        self.optimizer = self._make_optimizer(optimizer)
        self.loss = loss
        self._kept = None
        self.gradients = np.empty(n_params(self.spec), self.model.precision.compute)
        self._skipped_steps = 0

    def _make_optimizer(self, spec: OptimizerSpec) -> Optimizer:
        return make_optimizer(spec, n_params(self.spec), self.spec.layer_shapes)

    def training_step(
        self,
        x: ArrayView,
        y: ArrayView | None,
        *,
        data_pdf: ArrayView | None = None,
        external_gradient: ArrayView | None = None,
        run_optimizer: bool = True,
        stream: int | None = None,
    ) -> LossValue:
        """With an external gradient there is no loss; its value is then 0."""
        optimizer, loss = self._training(), 0.0
        if external_gradient is not None:
            self.model.backward(x.numpy(), external_gradient.numpy(), input=False, out=self.gradients)
        else:
            pdf = None if data_pdf is None else data_pdf.numpy()
            loss, _ = self.model.loss_and_gradients(
                x.numpy(), y.numpy(), self.loss, pdf, input=False, out=self.gradients
            )
        if run_optimizer:
            finite = all_finite(self.gradients)
            optimizer.step(self.params, self.gradients.astype(np.float32, copy=False) if finite else None)
            self._skipped_steps += not finite
            self._refresh()
        return LossValue(loss)

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
        return self._skipped_steps

    def optimizer_state(self) -> State:
        return self._training().state()

    def load_optimizer_state(self, state: State) -> None:
        """In a fresh optimizer, so that a state which doesn't fit changes nothing."""
        optimizer = self._make_optimizer(self._training().spec)
        optimizer.load_state(state)
        self.optimizer, self._kept = optimizer, None

    def explain(self) -> Explanation:
        device = f"CPU (NumPy {np.__version__})"
        return Explanation("reference", "computed in NumPy", device, self.model.precision.name)

    def close(self) -> None:
        self.gradients = self.optimizer = self._kept = None

    def _training(self) -> Optimizer:
        if self.optimizer is None:
            raise RuntimeError("configure_training has not been called")
        return self.optimizer


def all_finite(values: np.ndarray) -> bool:
    """Whether no element is NaN or infinite; extrema propagate both, and need no temporary array."""
    return bool(np.isfinite(values.min(initial=0)) and np.isfinite(values.max(initial=0)))


def create_runtime(spec: ModelSpec, params: np.ndarray, *, dtype: str, seed: int) -> ReferenceRuntime:
    """A runtime that starts from `params`, float32 [n_params]. Raises EngineUnavailable for what is not implemented.

    `seed` has no effect: what this engine draws while it runs, for stochastic interpolation, has a seed of its own.
    """
    return ReferenceRuntime(spec, params, dtype)
