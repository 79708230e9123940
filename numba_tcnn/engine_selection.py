"""Which engine computes a model, and what happens when the fused one can't.

`engine="auto"` takes the fused engine where a usable device is present. With no NVIDIA device at all the reference
runs silently; with a device that can't be used, or after fusion was asked for through `jit_fusion = True`, there is
one `JitFusionWarning` with the cause and the same call goes on in the reference from the same parameters and
optimizer state. `strict` (implied by `engine="fused"`) raises `EngineUnavailable` instead. Kernels compile at their
first use, so any call may be the one that finds out.

Threads may share a model: one call at a time is in its runtime.

Second derivatives are an exception: where the fused engine has none, the reference computes that call alone, from the
current parameters, and the model stays where it is. `explain()` says so.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from .arrays import ArrayView, empty_like, host_view
from .config import ConfigError
from .engines import EngineUnavailable, Explanation, RecordedInference, RecordedStep, Runtime
from .loss_values import LossValue
from .specs import LossSpec, ModelSpec, OptimizerSpec

ENGINES = ("auto", "fused", "reference")
DTYPES = ("float16", "bfloat16", "float32", "float64")

Result = TypeVar("Result")


class JitFusionWarning(UserWarning):
    """The fused engine can't run a model here; the NumPy reference goes on in its place."""


def supports_jit_fusion(device: int = 0) -> bool:
    """Whether fused kernels can be compiled for and run on CUDA device number `device`."""
    return bool(importlib.import_module("numba_tcnn.fused").device_status(device).usable)


@dataclass(frozen=True)
class EngineOptions:
    """What a user can say about how a model is computed."""

    engine: str = "auto"
    dtype: str = "float16"
    device: int = 0
    seed: int = 1337
    deterministic: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("engine", ENGINES), ("dtype", DTYPES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is none of {', '.join(allowed)}")
        for name in ("device", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise ConfigError(f"{name}: {value!r} must be a whole number, 0 or larger")

    @property
    def strictly_fused(self) -> bool:
        return self.engine == "fused" or (self.strict and self.engine != "reference")


class SelectedEngine:
    """One model's runtime. The public objects of a model (network, trainer) share one of these.

    parameters_version  counts changes of the parameters and of max_level, so that a stale context is noticed
    max_level           fraction of the grid levels in use, or an array of one a row; None for all
    """

    def __init__(self, spec: ModelSpec, params: np.ndarray, options: EngineOptions):
        self.spec = spec
        self.options = options
        self.training: tuple[OptimizerSpec, LossSpec] | None = None
        self.parameters_version = 0
        self.max_level: float | np.ndarray | None = None
        self._skipped_in_earlier_runtimes = 0
        self._no_fused_second_order = ""  # the reason, once a call has found out
        self._one_at_a_time = threading.RLock()  # a kernel's packed arguments are set, then launched
        self.runtime, self.reason = self._first_runtime(params)

    # -- choosing

    def _first_runtime(self, params: np.ndarray) -> tuple[Runtime, str]:
        options = self.options
        if options.engine == "reference":
            return self._reference(params), "engine='reference' was asked for"
        if options.dtype == "float64" and not options.strictly_fused:
            return self._reference(params), "only the reference computes in float64"
        try:
            return self._fused(params), "fused kernels run on this device"
        except EngineUnavailable as error:
            if options.strictly_fused:
                raise
            if not error.no_device:
                warn_of_fallback(error)
            return self._reference(params), str(error)

    def _fused(self, params: np.ndarray) -> Runtime:
        options = self.options
        runtime = importlib.import_module("numba_tcnn.fused").create_runtime(
            self.spec,
            params,
            dtype=options.dtype,
            device=options.device,
            deterministic=options.deterministic,
        )
        return self._with_max_level(runtime)

    def _reference(self, params: np.ndarray) -> Runtime:
        create_runtime = importlib.import_module("numba_tcnn.reference").create_runtime
        runtime = create_runtime(self.spec, params, dtype=self.options.dtype, seed=self.options.seed)
        return self._with_max_level(runtime)

    def _with_max_level(self, runtime: Runtime) -> Runtime:
        if self.max_level is not None:
            runtime.set_max_level(self.max_level)
        return runtime

    @property
    def jit_fusion(self) -> bool:
        """Whether the fused engine runs this model. Setting it moves parameters and optimizer state to the other."""
        return self.runtime.name == "fused"

    @jit_fusion.setter
    def jit_fusion(self, wanted: bool) -> None:
        with self._one_at_a_time:
            if bool(wanted) == self.jit_fusion:
                return
            if not wanted:
                self._move(self._reference, "jit_fusion was set to False")
                return
            try:
                self._move(self._fused, "jit_fusion was set to True")
            except EngineUnavailable as error:
                if self.options.strictly_fused or self.options.strict:
                    raise
                warn_of_fallback(error)
                self.reason = str(error)

    def _move(self, create: Callable[[np.ndarray], Runtime], reason: str) -> None:
        """Go on in a new runtime from the same parameters, optimizer state and step counts."""
        old = self.runtime
        new = create(old.get_params())
        if self.training is not None:
            new.configure_training(*self.training)
            new.load_optimizer_state(old.optimizer_state())
            self._skipped_in_earlier_runtimes += old.skipped_steps
        self.runtime, self.reason = new, reason
        old.close()

    def run(self, operation: Callable[[Runtime], Result]) -> Result:
        """`operation(runtime)`; again in the reference where the fused runtime turns out to be unable to."""
        with self._one_at_a_time:
            try:
                return operation(self.runtime)
            except EngineUnavailable as error:
                if not self.jit_fusion or self.options.strictly_fused:
                    raise
                self._move(self._reference, str(error))
                warn_of_fallback(error)
            return operation(self.runtime)

    # -- computing; the arguments are those of `engines.Runtime`

    def empty_like(self, v: ArrayView, shape: tuple[int, ...], dtype: str | np.dtype) -> ArrayView:
        return empty_like(v, shape, dtype, device=self.options.device, on_host=not self.jit_fusion)

    def inference(
        self, x: ArrayView, out: ArrayView, *, training_params: bool = False, stream: int | None = None
    ) -> None:
        def operation(runtime: Runtime) -> None:
            if runtime.name == "fused":
                runtime.inference(x, out, training_params=training_params, stream=stream)
            else:
                y = _host_output(out)
                runtime.inference(x.on_host(), y, training_params=training_params)
                _write_back(out, y)

        self._check_device(x, out)
        self.run(operation)

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
        def operation(runtime: Runtime) -> None:
            if runtime.name == "fused":
                runtime.backward(x, dL_dy, params=params, accumulate=accumulate, input=input, stream=stream)
                return
            host_params = None if params is None else _host_output(params, keep=accumulate)
            host_input = None if input is None else _host_output(input)
            runtime.backward(x.on_host(), dL_dy.on_host(), params=host_params, accumulate=accumulate, input=host_input)
            _write_back(params, host_params)
            _write_back(input, host_input)

        self._check_device(x, dL_dy, params, input)
        self.run(operation)

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
        outputs = {"dL_doutput": dL_doutput, "params": params, "input": input}
        self._check_device(x, dL_ddLdinput, dL_dy, *outputs.values())
        runtime = self.runtime
        if runtime.name == "fused":
            try:
                runtime.backward_backward_input(x, dL_ddLdinput, dL_dy, **outputs, stream=stream)
                return
            except EngineUnavailable as error:
                if self.options.strictly_fused:
                    raise
                self._no_fused_second_order = str(error)
            runtime = self._reference(runtime.get_params())
        on_host = {name: _host_output(out) for name, out in outputs.items()}
        runtime.backward_backward_input(x.on_host(), dL_ddLdinput.on_host(), dL_dy.on_host(), **on_host)
        for name, out in outputs.items():
            _write_back(out, on_host[name])

    def device_function(self, block_size: int) -> Callable:
        return self._runtime_of_kernels().device_function(block_size)

    def device_params(self) -> Any:
        """An argument of the user's kernels that asks for the parameters' address at each launch, wherever they are."""
        self._runtime_of_kernels()

        def address_for(stream: int) -> int:
            with self._one_at_a_time:
                return self._runtime_of_kernels().device_params_address(stream)

        def launched() -> None:
            with self._one_at_a_time:
                if self.jit_fusion:
                    self.runtime.device_params_used()

        return importlib.import_module("numba_tcnn.fused.device_function").DeviceParams(
            self.spec, address_for, launched
        )

    def _runtime_of_kernels(self) -> Any:
        """The fused runtime; the reference has nothing that a kernel could call."""
        if not self.jit_fusion:
            raise EngineUnavailable(
                f"a model inside a kernel needs the fused engine, and the NumPy reference computes this one: "
                f"{self.reason}"
            )
        if self.max_level is not None:
            raise EngineUnavailable("a model inside a kernel uses all levels of its grids; set max_level to None")
        return self.runtime

    def configure_training(self, optimizer: OptimizerSpec, loss: LossSpec) -> None:
        self.run(lambda runtime: runtime.configure_training(optimizer, loss))
        self.training = (optimizer, loss)
        self._skipped_in_earlier_runtimes = 0

    def training_step(
        self,
        x: ArrayView,
        y: ArrayView | None,
        *,
        data_pdf: ArrayView | None,
        external_gradient: ArrayView | None,
        run_optimizer: bool,
        stream: int | None,
    ) -> LossValue:
        def operation(runtime: Runtime) -> LossValue:
            arrays = {"data_pdf": data_pdf, "external_gradient": external_gradient}
            if runtime.name == "fused":
                return runtime.training_step(x, y, **arrays, run_optimizer=run_optimizer, stream=stream)
            on_host = {name: _on_host(v) for name, v in arrays.items()}
            return runtime.training_step(x.on_host(), _on_host(y), **on_host, run_optimizer=run_optimizer)

        self._check_device(x, y, data_pdf, external_gradient)
        with self._one_at_a_time:
            loss = self.run(operation)
            if run_optimizer:
                self.parameters_version += 1
        return loss

    @property
    def configuration(self) -> object:
        """Differs where a recorded call can't hold, whatever its arrays; None where none can be recorded."""
        return self.runtime.configuration if self.jit_fusion else None

    def record_step(self, x: ArrayView, y: ArrayView) -> tuple[LossValue, RecordedStep | None]:
        """`training_step`, and what repeats it if something can."""

        def operation(runtime: Runtime) -> tuple[LossValue, RecordedStep | None]:
            if runtime.name == "fused":
                return runtime.record_step(x, y)
            return runtime.training_step(x.on_host(), y.on_host()), None

        self._check_device(x, y)
        with self._one_at_a_time:
            result = self.run(operation)
            self.parameters_version += 1
        return result

    def record_inference(self, x: ArrayView, out: ArrayView) -> RecordedInference | None:
        """`inference`, and what repeats it if something can."""
        with self._one_at_a_time:
            if self.runtime.name != "fused":
                self.inference(x, out)
                return None
            self._check_device(x, out)
            return self.run(lambda runtime: runtime.record_inference(x, out))

    def repeat_step(self, call: RecordedStep) -> LossValue | None:
        """The loss of a recorded step that has been made again; None where it no longer holds."""
        self._one_at_a_time.acquire()  # a `with` would take twice as long
        try:
            loss = call.repeat()
            if loss is not None:
                self.parameters_version += 1
        finally:
            self._one_at_a_time.release()
        return loss

    def repeat_inference(self, call: RecordedInference) -> bool:
        """Whether a recorded inference still holds and has been made again."""
        self._one_at_a_time.acquire()
        try:
            return call.repeat()
        finally:
            self._one_at_a_time.release()

    def _check_device(self, *arrays: ArrayView | None) -> None:
        if not self.jit_fusion:
            return
        for v in arrays:
            if v is not None and v.on_device and v.device is not None and v.device != self.options.device:
                raise ValueError(
                    f"an array is on CUDA device {v.device}, the model on device {self.options.device}; "
                    f"move the array or create the model with device={v.device}"
                )

    # -- state

    def get_params(self) -> np.ndarray:
        with self._one_at_a_time:
            return self.runtime.get_params()

    def set_params(self, params: np.ndarray) -> None:
        with self._one_at_a_time:
            self.runtime.set_params(params)
            self.parameters_version += 1

    def restore(self, params: np.ndarray, optimizer_state: dict[str, Any], skipped_steps: int) -> None:
        """Go on from a training that was saved, by this optimizer and with these parameters."""
        self.set_params(params)  # first: it starts averages of parameters again
        self.runtime.load_optimizer_state(optimizer_state)
        self._skipped_in_earlier_runtimes = skipped_steps - self.runtime.skipped_steps

    def set_max_level(self, max_level: float | np.ndarray | None) -> None:
        with self._one_at_a_time:
            self.runtime.set_max_level(max_level)
        self.max_level = max_level
        self.parameters_version += 1

    @property
    def skipped_steps(self) -> int:
        return self._skipped_in_earlier_runtimes + self.runtime.skipped_steps

    def explain(self) -> Explanation:
        explanation = replace(self.runtime.explain(), reason=self.reason)
        if not (self.jit_fusion and self._no_fused_second_order):
            return explanation
        note = f"backward_backward_input is computed by the reference ({self._no_fused_second_order})"
        return replace(explanation, notes=(*explanation.notes, note))

    def __reduce_ex__(self, protocol: int) -> Any:
        raise TypeError(
            "what a model computes with can't be pickled: a Trainer's optimizer holds it, but its state_dict() "
            "is plain arrays and numbers"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> SelectedEngine:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin._one_at_a_time = threading.RLock()
        twin.runtime = (self._fused if self.jit_fusion else self._reference)(self.get_params())
        if self.training is not None:
            twin.runtime.configure_training(*self.training)
            twin.runtime.load_optimizer_state(self.runtime.optimizer_state())
            twin._skipped_in_earlier_runtimes = self.skipped_steps
        return twin


def warn_of_fallback(error: EngineUnavailable) -> None:
    message = f"JIT fusion is off, the NumPy reference computes this model: {error}"
    warnings.warn(message, JitFusionWarning, stacklevel=_stack_level_of_caller())


def _stack_level_of_caller() -> int:
    """How far up the first frame outside of this package is: the line of the user that the warning is about."""
    frame, level = sys._getframe(1), 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "numba_tcnn":
        frame, level = frame.f_back, level + 1
    return level


def _on_host(v: ArrayView | None) -> ArrayView | None:
    return None if v is None else v.on_host()


def _host_output(out: ArrayView, *, keep: bool = False) -> ArrayView:
    """NumPy memory for what the reference writes: that of `out` itself where it is NumPy's own."""
    if out.kind == "numpy":
        return out
    return host_view(np.array(out.numpy()) if keep else np.empty(out.shape, out.dtype))


def _write_back(out: ArrayView | None, values: ArrayView | None) -> None:
    if out is not None and values is not out:
        out.write(values.array)
