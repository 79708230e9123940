"""What has no fused kernel yet: refused by name, before anything is compiled or allocated."""

from __future__ import annotations

from ..engines import EngineUnavailable
from ..specs import AdamSpec, LossSpec, ModelSpec, OptimizerSpec
from .encodings import refuse_what_is_missing
from .losses import LOSSES


def refuse_model(spec: ModelSpec, *, dtype: str, deterministic: bool = False) -> None:
    """Raises EngineUnavailable with the reason if this model has no fused kernels."""
    if dtype != "float16":
        raise EngineUnavailable(f"fused kernels compute in float16 with float32 accumulation; {dtype} has none yet")
    if deterministic:
        raise EngineUnavailable(
            "fused kernels add up grid gradients in no fixed order; deterministic=True has none yet"
        )
    refuse_what_is_missing(spec.encoding)
    if spec.network is not None and spec.network.bias:
        raise EngineUnavailable("networks with biases (bias=true) have no fused kernel yet")


def refuse_training(optimizer: OptimizerSpec, loss: LossSpec) -> None:
    """Raises EngineUnavailable, naming the optimizer or the loss, if it has no fused kernel."""
    if not isinstance(optimizer, AdamSpec):
        name = type(optimizer).__name__.removesuffix("Spec")
        raise EngineUnavailable(f"the optimizer {name} has no fused kernel yet")
    if loss.otype not in LOSSES:
        raise EngineUnavailable(f"the loss {loss.otype} has no fused kernel yet")
