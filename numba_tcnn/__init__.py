"""numba-tcnn: tiny-cuda-nn's JIT fusion in pure Python.

An encoding, a small network, the loss and the whole backward pass become CUDA kernels that Numba compiles at run
time; without a GPU the same models train in NumPy. Importing this needs neither a GPU nor the CUDA toolkit.
"""

from pathlib import Path as _Path

from . import plot
from ._version import __version__
from .config import ConfigError
from .engine_selection import JitFusionWarning, supports_jit_fusion
from .engines import EngineUnavailable, Explanation, KernelReport
from .fit import History
from .model import Model, create_from_config, load
from .modules import Context, Encoding, Gradients, Module, Network, NetworkWithInputEncoding
from .objectives import Loss, Optimizer, create_loss, create_optimizer
from .snapshot_files import SnapshotError
from .trainer import LossValue, Trainer

__all__ = [
    "ConfigError",
    "Context",
    "Encoding",
    "EngineUnavailable",
    "Explanation",
    "Gradients",
    "History",
    "JitFusionWarning",
    "KernelReport",
    "Loss",
    "LossValue",
    "Model",
    "Module",
    "Network",
    "NetworkWithInputEncoding",
    "Optimizer",
    "SnapshotError",
    "Trainer",
    "__version__",
    "create_from_config",
    "create_loss",
    "create_optimizer",
    "load",
    "plot",
    "supports_jit_fusion",
]

_root = _Path(__file__).resolve().parent
if not (_root / "fused").is_dir() and (_root.parent / "fused").is_dir():
    # In a source tree the two engines stand beside this package; they are its sub-packages all the same.
    __path__.append(str(_root.parent))
