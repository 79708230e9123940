"""Training: the step that does forward, loss, backward and optimizer in one, and the loss it returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .arrays import ArrayView, host_view
from .config_losses import check_loss
from .config_optimizers import check_size
from .engines import Explanation
from .initial_values import initial_params
from .loss_values import LossValue
from .modules import Module, NotPickled
from .objectives import Loss, Optimizer, checked_learning_rate, create_loss, create_optimizer, non_negative
from .perturbation import LogisticNoise
from .repeated_calls import RepeatedCalls, never_move
from .streams import stream_handle


class Trainer(NotPickled):
    """Trains a module's parameters with an optimizer on a loss.

    Draws new initial parameters from `seed` in the way of tiny-cuda-nn's Trainer, which differs from that of its
    bindings for the same seed; `keep_parameters=True` goes on from the module's own.

    perturbation_sigma  standard deviation of logistic noise that is added to the outputs before the loss sees them; the
                        loss's gradient at the perturbed outputs goes back through the model as it is. 0 is off.
    """

    def __init__(
        self,
        network: Module,
        optimizer: Optimizer | Mapping[str, Any] | str,
        loss: Loss | Mapping[str, Any] | str,
        *,
        seed: int = 1337,
        perturbation_sigma: float = 0.0,
        keep_parameters: bool = False,
    ):
        self.network = network
        self.optimizer = optimizer if isinstance(optimizer, Optimizer) else create_optimizer(optimizer)
        self.loss = loss if isinstance(loss, Loss) else create_loss(loss)
        check_loss(self.loss.spec, network.n_output_dims)
        self.perturbation_sigma = non_negative(perturbation_sigma, "perturbation_sigma")
        self._noise = LogisticNoise(network.spec, seed, self.perturbation_sigma) if self.perturbation_sigma else None
        self._repeated = RepeatedCalls()
        check_size(self.optimizer.spec, network.n_params, "optimizer")
        if not keep_parameters:
            network.engine.set_params(initial_params(network.spec, seed, seeding="trainer"))
        network.engine.configure_training(self.optimizer.spec, self.loss.spec)
        self.optimizer._attach(network.engine)

    def training_step(
        self,
        x: Any,
        y: Any,
        *,
        data_pdf: Any = None,
        external_gradient: Any = None,
        run_optimizer: bool = True,
        stream: Any = None,
    ) -> LossValue:
        """One step on x [batch, n_input_dims] with targets y [batch, n_output_dims]; any batch size.

        data_pdf           [batch, n_output_dims], probability density with which the samples were drawn
        external_gradient  [batch, n_output_dims], dL/dy to use instead of the loss's gradient; y may then be None
        run_optimizer      False: only the loss, the parameters stay as they are
        stream             CUDA stream to launch on, a handle or a library's object; by default that of x

        A batch of 0 samples changes nothing and has loss 0.
        """
        is_plain = data_pdf is None and external_gradient is None and run_optimizer and stream is None
        if is_plain:
            call = self._repeated.find(x, y)
            if call is not None:
                loss = self.network.engine.repeat_step(call)
                if loss is not None:
                    return loss
        stream = stream_handle(stream, None)
        inputs = self.network._inputs(x)
        targets = self._rows(y, "y", inputs)
        if targets is None and external_gradient is None:
            raise TypeError("y may be None only where external_gradient is given")
        can_repeat = is_plain and self._noise is None and never_move(x, y)
        can_repeat = can_repeat and inputs.shape[0] > 0 and inputs.array is x and targets.array is y
        if can_repeat and self._repeated.should_record(x, y, self.network.engine.configuration):
            loss, call = self.network.engine.record_step(inputs, targets)
            self._repeated.keep(x, y, call)
            return loss
        density = self._rows(data_pdf, "data_pdf", inputs)
        gradient = self._rows(external_gradient, "external_gradient", inputs)
        return self._step(inputs, targets, density, gradient, run_optimizer, stream)

    def _rows(self, array: Any, name: str, inputs: ArrayView) -> ArrayView | None:
        """An array of one row for each row of x, if given."""
        if array is None:
            return None
        v = self.network._batch(array, name, self.network.n_output_dims)
        if v.shape[0] != inputs.shape[0]:
            raise ValueError(f"{name} has {v.shape[0]} rows, x has {inputs.shape[0]}")
        return v

    def _step(
        self,
        x: ArrayView,
        y: ArrayView | None,
        data_pdf: ArrayView | None = None,
        external_gradient: ArrayView | None = None,
        run_optimizer: bool = True,
        stream: int | None = None,
    ) -> LossValue:
        """`training_step` on arrays that have been checked."""
        if x.shape[0] == 0:
            return LossValue(0.0)
        stream = x.stream if stream is None else stream
        perturbed = None
        if self._noise is not None and external_gradient is None:
            perturbed, gradient = self._perturbed_loss(x, y, data_pdf, stream)
            y, data_pdf, external_gradient = None, None, host_view(gradient)
        loss = self.network.engine.training_step(
            x,
            y,
            data_pdf=data_pdf,
            external_gradient=external_gradient,
            run_optimizer=run_optimizer,
            stream=stream,
        )
        return loss if perturbed is None else LossValue(perturbed)

    def _perturbed_loss(
        self, x: ArrayView, y: ArrayView, data_pdf: ArrayView | None, stream: int | None
    ) -> tuple[float, np.ndarray]:
        """The mean loss at perturbed outputs, and its gradient with respect to them."""
        network = self.network
        prediction = np.empty(y.shape, network._gradient_dtype)
        network.engine.inference(x, host_view(prediction), training_params=True, stream=stream)
        perturbed = (prediction + self._noise.draw(x.shape[0])).astype(prediction.dtype)
        density = None if data_pdf is None else data_pdf.numpy()
        values, gradient = self.loss.evaluate(perturbed, y.numpy(), data_pdf=density)
        return float(values.sum(dtype=np.float64)), gradient

    @property
    def learning_rate(self) -> float:
        return self.network.engine.runtime.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.network.engine.runtime.learning_rate = checked_learning_rate(value)

    @property
    def step(self) -> int:
        """Optimizer steps asked for so far, skipped ones included."""
        return self.network.engine.runtime.step

    @property
    def skipped_steps(self) -> int:
        """Steps left out because a gradient was not finite."""
        return self.network.engine.skipped_steps

    @property
    def jit_fusion(self) -> bool:
        return self.network.jit_fusion

    @jit_fusion.setter
    def jit_fusion(self, wanted: bool) -> None:
        self.network.jit_fusion = wanted

    def explain(self) -> Explanation:
        return self.network.explain()
