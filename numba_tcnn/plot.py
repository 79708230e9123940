"""How far the fused engine is from the reference: numbers, and a picture of them.

The error of a tensor is ‖a - b‖ / ‖b‖ (Frobenius norms over the whole tensor), b being the reference's: outputs,
dL/dx, and dL/dparams block by block (a weight matrix, a grid level). Both engines start from the same parameters,
inputs and dL/dy. Without a usable device the reference with float16 rounding stands in for the fused engine and is
compared with float32: the part of the error that comes from storing in half precision.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import ArrayView, host_view
from .engine_selection import SelectedEngine
from .layout import parameter_blocks
from .modules import Module

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEED_OF_THE_GRADIENT = 20240
TOLERANCE = 5e-3
"""What fused kernels may differ from the reference of their own dtype: accumulation order and ReLU flips near zero."""


@dataclass(frozen=True)
class Comparison:
    """Errors by tensor, in the order they are drawn.

    tolerance   what they may be at most; None where there is no fused engine to judge
    to_float32  the same against the float32 reference, None where that is what they are against
    """

    title: str
    errors: dict[str, float]
    tolerance: float | None
    to_float32: dict[str, float] | None


def engine_errors(model: Any, x: Any, y: Any = None) -> dict[str, float]:
    """Relative L2 error of "outputs", "input gradient" and every parameter block, at the model's parameters.

    model  a Model or a module
    x      [batch, n_input_dims]
    y      [batch, n_output_dims], targets of the model's loss, whose gradient is sent back; without it dL/dy is a
           fixed standard normal sample
    """
    return compare_engines(model, x, y).errors


def engine_error(model: Any, x: Any, y: Any = None) -> Figure:
    """The same as a figure: one bar for each tensor on a logarithmic axis."""
    return draw(compare_engines(model, x, y))


def compare_engines(model: Any, x: Any, y: Any = None) -> Comparison:
    module: Module = getattr(model, "network", model)
    inputs = module._inputs(x).on_host()
    if inputs.shape[0] == 0:
        raise ValueError("x has no rows to compare the engines on")
    params = module.engine.get_params()
    options = replace(module.options, strict=True)
    dL_dy = output_gradient(model, module, inputs, y)

    def tensors(engine: str, dtype: str) -> dict[str, np.ndarray]:
        selected = SelectedEngine(module.spec, params, replace(options, engine=engine, dtype=dtype))
        try:
            return forward_and_backward(selected, inputs, dL_dy)
        finally:
            selected.runtime.close()

    exact = "float64" if options.dtype == "float64" else "float32"
    status = importlib.import_module("numba_tcnn.fused").device_status(options.device)
    if not status.usable or options.dtype == "float64":
        rounded = tensors("reference", "float16")
        title = f"No fused engine here: the reference in float16 against the reference in {exact}"
        return Comparison(title, relative_errors(rounded, tensors("reference", exact)), None, None)
    fused = tensors("fused", options.dtype)
    title = f"Fused against reference, both in {options.dtype}, {inputs.shape[0]:,} samples"
    errors = relative_errors(fused, tensors("reference", options.dtype))
    to_float32 = None if options.dtype == "float32" else relative_errors(fused, tensors("reference", "float32"))
    return Comparison(title, errors, TOLERANCE, to_float32)


def output_gradient(model: Any, module: Module, x: ArrayView, y: Any) -> ArrayView:
    """dL/dy [batch, n_output_dims] of the model's loss, or a standard normal sample where there are no targets."""
    shape = (x.shape[0], module.n_output_dims)
    if y is None:
        return host_view(np.random.default_rng(SEED_OF_THE_GRADIENT).standard_normal(shape, np.float32))
    if not hasattr(model, "loss"):
        raise TypeError("y needs a model with a loss; give the Model instead of its network")
    prediction = np.asarray(module.inference(x.array))
    return host_view(model.loss.evaluate(prediction, y)[1])


def forward_and_backward(engine: SelectedEngine, x: ArrayView, dL_dy: ArrayView) -> dict[str, np.ndarray]:
    """Outputs, dL/dx and dL/dparams by block, padding left out."""
    spec = engine.spec
    dtype = np.float64 if engine.options.dtype == "float64" else np.float32
    outputs = host_view(np.empty((x.shape[0], spec.n_output_dims), dtype))
    input_gradient = host_view(np.empty(x.shape, dtype))
    blocks = parameter_blocks(spec)
    gradient = host_view(np.empty(sum(block.size for block in blocks), dtype))
    engine.inference(x, outputs)
    engine.backward(x, dL_dy, params=gradient, accumulate=False, input=input_gradient)
    tensors = {"outputs": outputs.array, "input gradient": input_gradient.array}
    for block in blocks:
        tensors[block.name] = block.logical(gradient.array)
    return tensors


def relative_errors(tensors: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: relative_error(tensors[name], truth[name]) for name in truth}


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """‖a - b‖ / ‖b‖ in float64; 0 where both are zero, infinite where only b is."""
    difference = float(np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)))
    norm = float(np.linalg.norm(np.asarray(b, np.float64)))
    return difference / norm if norm > 0 else (0.0 if difference == 0 else float("inf"))


def draw(comparison: Comparison) -> Figure:
    """Bars from top to bottom in the order of computation; exact agreement is written, it has no logarithm."""
    from matplotlib.figure import Figure

    names, errors = list(comparison.errors), np.array(list(comparison.errors.values()))
    rows = np.arange(len(names))
    figure = Figure(figsize=(8, 1.6 + 0.26 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    tolerance = comparison.tolerance
    colours = ["tab:blue" if tolerance is None or error <= tolerance else "tab:red" for error in errors]
    drawn = np.isfinite(errors) & (errors > 0)
    others = [v for v in (comparison.to_float32 or {}).values() if np.isfinite(v) and v > 0]
    smallest = min([*errors[drawn], *others, 1e-3])
    floor = 10.0 ** np.floor(np.log10(smallest) - 0.5)
    axes.barh(rows[drawn], errors[drawn] - floor, left=floor, color=np.array(colours)[drawn], height=0.7)
    for row in rows[~drawn]:
        text = "equal to the bit" if errors[row] == 0 else f"{errors[row]}: the reference is zero or not finite"
        axes.text(floor, row, f" {text}", va="center", fontsize="small")
    if comparison.to_float32 is not None:
        distances = [comparison.to_float32[name] for name in names]
        axes.plot(distances, rows, "k|", markersize=9, label="distance to the float32 reference")
    if tolerance is not None:
        axes.axvline(tolerance, color="tab:gray", linestyle="--", linewidth=1, label=f"tolerance {tolerance:g}")
    axes.set(xscale="log", yticks=rows, yticklabels=names, xlabel="relative L2 error  ‖a − b‖ / ‖b‖")
    axes.set_xlim(left=floor)
    axes.set_title(comparison.title, fontsize="medium", loc="left")
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    if axes.get_legend_handles_labels()[0]:  # below, since there is no corner that a bar can't reach
        figure.legend(loc="outside lower right", ncols=2, fontsize="small")
    return figure
