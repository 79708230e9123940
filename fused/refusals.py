"""What has no fused kernel yet: refused by name, before anything is compiled or allocated."""

from __future__ import annotations

from ..engines import EngineUnavailable
from ..specs import LossSpec, ModelSpec
from .encodings import refuse_what_is_missing
from .formats import number_format
from .losses import CONSTANT_GRADIENT, LOSSES


def refuse_model(spec: ModelSpec, *, dtype: str, deterministic: bool = False) -> None:
    """Raises EngineUnavailable with the reason if this model has no fused kernels."""
    number_format(dtype)
    if deterministic and dtype != "float16":
        raise EngineUnavailable(f"deterministic=True sums what float16 kernels add; {dtype} has none yet")
    refuse_what_is_missing(spec.encoding)


def refuse_training(loss: LossSpec) -> None:
    """Raises EngineUnavailable, naming the loss, if it has no fused kernel."""
    if loss.otype not in (*LOSSES, CONSTANT_GRADIENT):
        raise EngineUnavailable(f"the loss {loss.otype} has no fused kernel yet")
