"""The contract between the public modules and the two engines; `engine_selection.py` chooses.

An engine makes a `Runtime` from a `ModelSpec`: the object that owns one model's parameters and optimizer state
and computes with them. `numba_tcnn.reference` does so in NumPy, `numba_tcnn.fused` in fused CUDA kernels; neither
knows the other, and the public modules know only this contract. Arrays cross it as `arrays.ArrayView`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .arrays import ArrayView
from .loss_values import LossValue
from .specs import LossSpec, ModelSpec, OptimizerSpec


class EngineUnavailable(RuntimeError):
    """The engine can't run this model here: no usable device, a kernel that doesn't compile, an unsupported option.

    `no_device` is True where there is no NVIDIA device at all, which is nobody's fault and needs no warning.
    """

    def __init__(self, reason: str, *, no_device: bool = False):
        super().__init__(reason)
        self.no_device = no_device


@dataclass(frozen=True)
class KernelReport:
    """What `explain()` tells of one loaded kernel."""

    name: str
    plan: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    blocks: int
    compile_seconds: float
    from_cache: bool


@dataclass(frozen=True)
class Explanation:
    """Which engine runs and why; printed by `print(model.explain())`. `notes` are further remarks, one a line."""

    engine: str
    reason: str
    device: str
    dtype: str
    kernels: tuple[KernelReport, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f"engine: {self.engine} ({self.reason})", f"device: {self.device}, compute in {self.dtype}"]
        for k in self.kernels:
            made = "cached" if k.from_cache else f"compiled in {k.compile_seconds:.2f} s"
            lines.append(
                f"  {k.name}: {k.plan}; {k.threads} threads, {k.registers} registers, {k.spill_bytes} B spilled, "
                f"{k.shared_bytes} B shared memory, {made}"
            )
        return "\n".join([*lines, *self.notes])


class RecordedStep(Protocol):
    """A training step between two arrays that a fused runtime can make again at little host cost."""

    def repeat(self) -> LossValue | None:
        """Make it again; None, and nothing done, where it no longer holds."""


class RecordedInference(Protocol):
    """Likewise an inference."""

    def repeat(self) -> bool:
        """Make it again; False, and nothing done, where it no longer holds."""


class Runtime(Protocol):
    """One model on one engine. Batches are [batch, n]; batch 0 never reaches a runtime."""

    name: str  # "fused" | "reference"
    spec: ModelSpec

    # -- parameters: the flat float32 master vector of `layout.py`
    def get_params(self) -> np.ndarray: ...
    def set_params(self, params: np.ndarray) -> None:
        """Averages of parameters that the optimizer keeps start again; what it remembers of gradients stays."""

    @property
    def inference_params(self) -> np.ndarray | None:
        """Those that inference uses where the optimizer keeps some for it, float32 [n_params]; None: the trained."""

    # -- the module
    def set_max_level(self, max_level: float | np.ndarray | None) -> None:
        """From now on grids use this fraction of their levels, or one fraction a row; None is all."""

    def inference(
        self, x: ArrayView, out: ArrayView, *, training_params: bool = False, stream: int | None = None
    ) -> None:
        """Write y [batch, n_output_dims] into `out` (float32 or float16).

        With `training_params` y is that of the trained parameters, as gradients are, whatever the optimizer keeps for
        inference.
        """

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
        """Forward again, then write dL/dparams [n_params] and dL/dx [batch, n_input_dims] (float32) where asked for.

        `accumulate` adds to what `params` holds instead of overwriting it. No loss scale goes in or comes out.
        """

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
        """Gradients of S = Σ ⟨dL_ddLdinput, dL/dx⟩, dL/dx being what `backward` gives for x and dL_dy.

        Writes dS/d(dL_dy) [batch, n_output_dims], dS/dparams [n_params] and dS/dx [batch, n_input_dims] (float32).
        An engine that has no second derivatives raises EngineUnavailable; the reference then does this call alone.
        """

    # -- training
    def configure_training(self, optimizer: OptimizerSpec, loss: LossSpec) -> None: ...

    def training_step(
        self,
        x: ArrayView,
        y: ArrayView | None,
        *,
        data_pdf: ArrayView | None = None,
        external_gradient: ArrayView | None = None,
        run_optimizer: bool = True,
        stream: int | None = None,
    ) -> LossValue: ...

    learning_rate: float
    step: int  # optimizer steps asked for, skipped ones included

    @property
    def skipped_steps(self) -> int:
        """Steps left out because a gradient was not finite."""

    def optimizer_state(self) -> dict[str, Any]:
        """Names to arrays and numbers, and to such dicts for nested optimizers; a copy."""

    def load_optimizer_state(self, state: dict[str, Any]) -> None: ...

    def explain(self) -> Explanation: ...
    def close(self) -> None:
        """Release device memory; the runtime is not used afterwards."""
