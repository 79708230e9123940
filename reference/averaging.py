"""Wrappers that keep parameters of their own for inference: averages of those that are trained.

Until the first step, and after parameters were set from outside until the next one, inference uses the trained ones.
The averages are float32 where tiny-cuda-nn stores half precision.
"""

from __future__ import annotations

import numpy as np

from numba_tcnn.parameter_sizes import ParameterSizes
from numba_tcnn.specs import AverageSpec, EmaSpec, LookaheadSpec

from .optimizer_contract import Optimizer, Wrapper, blend


class AveragingWrapper(Wrapper):
    """`n_averaged` counts the parameter vectors taken in since the beginning, or since they were set from outside."""

    state_numbers = {"n_averaged": "n_averaged"}

    def __init__(self, spec: AverageSpec | EmaSpec | LookaheadSpec, nested: Optimizer, sizes: ParameterSizes):
        super().__init__(spec, nested, sizes)
        self.n_averaged = 0

    @property
    def keeps_params(self) -> bool:
        return True

    def forget_params(self) -> None:
        super().forget_params()
        self.n_averaged = 0


class Average(AveragingWrapper):
    """Inference with the mean of the parameters after the last n = min(steps, `n_samples`) steps:

        w̄ = (w_t + w_{t-1} + ... + w_{t-n+1}) / n

    The parameters before the first step take no part; in tiny-cuda-nn they stay in w̄ as an offset for good, and
    the steps that are still missing count as 0. Averages of a nested optimizer are not used. The running sum is
    float64, in which adding new and taking out old parameters leaves no roundings behind.
    """

    state_arrays = ("samples", "total")

    def __init__(self, spec: AverageSpec, nested: Optimizer, sizes: ParameterSizes):
        super().__init__(spec, nested, sizes)
        self.samples = np.zeros((spec.n_samples, sizes.n_params), np.float32)
        self.total = np.zeros(sizes.n_params, np.float64)

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        self.nested.step(params, gradients, loss_scale)
        oldest = self.samples[self.n_averaged % self.spec.n_samples]
        if self.n_averaged == 0:
            self.total[...] = 0
        if self.n_averaged >= self.spec.n_samples:
            self.total -= oldest
        oldest[...] = params
        self.total += params
        self.n_averaged += 1

    @property
    def inference_params(self) -> np.ndarray | None:
        if self.n_averaged == 0:
            return None
        return (self.total / min(self.n_averaged, self.spec.n_samples)).astype(np.float32)


class Ema(AveragingWrapper):
    """Inference with an exponential moving average of the parameters, after the t-th step and with d = `decay`:

        e_t = ((d - d^t) e_{t-1} + (1 - d) s_t) / (1 - d^t)

    s_t are the nested optimizer's own inference parameters where it has some, else the trained ones. Around Batched
    every call counts, also one in which the parameters stand still. `full_precision` changes nothing: tiny-cuda-nn
    asks with it for the float32 that is always kept here.
    """

    state_arrays = ("average",)

    def __init__(self, spec: EmaSpec, nested: Optimizer, sizes: ParameterSizes):
        super().__init__(spec, nested, sizes)
        self.average = np.zeros(sizes.n_params, np.float32)

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        self.nested.step(params, gradients, loss_scale)
        source = self.nested.inference_params
        self.n_averaged += 1
        blend(self.average, params if source is None else source, self.spec.decay, self.n_averaged)

    @property
    def inference_params(self) -> np.ndarray | None:
        return self.average if self.n_averaged else None


class Lookahead(AveragingWrapper):
    """Lookahead (Zhang et al. 2019): slow parameters a follow the trained ones and set them back. With t the steps
    that the nested optimizer has counted so far, before its next step:

        a ← w                                    the first time
        a ← a + alpha · (w - a),   w ← a         if t mod n_steps = 0

    Inference uses a, which changes only every `n_steps` steps.
    """

    state_arrays = ("slow_params",)

    def __init__(self, spec: LookaheadSpec, nested: Optimizer, sizes: ParameterSizes):
        super().__init__(spec, nested, sizes)
        self.slow_params = np.zeros(sizes.n_params, np.float32)

    def step(self, params: np.ndarray, gradients: np.ndarray | None, loss_scale: float = 1.0) -> None:
        if self.n_averaged == 0:
            self.slow_params[...] = params
            self.n_averaged = 1
        if self.nested.current_step % self.spec.n_steps == 0:
            self.slow_params += np.float32(self.spec.alpha) * (params - self.slow_params)
            params[...] = self.slow_params
            self.n_averaged += 1
        self.nested.step(params, gradients, loss_scale)

    @property
    def inference_params(self) -> np.ndarray | None:
        return self.slow_params if self.n_averaged else None
