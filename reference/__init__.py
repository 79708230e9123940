"""The NumPy engine: every operation in its plainest correct form, the truth that the fused engine is judged by."""

from .engine import ReferenceRuntime, create_runtime
from .losses import evaluate_loss
from .model import Gradients, Model, SecondOrderGradients
from .optimizers import make_optimizer

__all__ = [
    "Gradients",
    "Model",
    "ReferenceRuntime",
    "SecondOrderGradients",
    "create_runtime",
    "evaluate_loss",
    "make_optimizer",
]
