"""The kernels of plans that go layer by layer, by what they do; sizes of layers are arguments, so each is made once."""

from __future__ import annotations

from collections.abc import Callable

from ..specs import ModelSpec
from . import layer_kernels
from .fragments import Target
from .layer_gradients import make_layer_gradient_kernel
from .layer_plan import LayeredPlan
from .plan import keeps_gate
from .stage_io import GradientOptions, InferenceOptions, KernelBody

Made = tuple[str, Callable[[Target], KernelBody], str, object]
"""(role, make_body, what the body is a function of beside its plan, plan)"""


def layered_kernels(spec: ModelSpec, options: InferenceOptions | GradientOptions, plan: LayeredPlan) -> list[Made]:
    """In the order of their first launch."""
    network, trains, hidden = spec.network, isinstance(options, GradientOptions), len(spec.layer_shapes) > 1
    gates = trains and keeps_gate(spec)
    inputs = f"{spec.encoding!r} {options.input_dtype} {options.aligned_input} {options.max_level}"
    outputs = f"{network.output_activation} {network.bias} {spec.n_output_dims} {options!r}"
    kernels: list[Made] = [
        ("encode", lambda t: layer_kernels.make_encode_kernel(t, spec, plan.encode, options), inputs, plan.encode)
    ]
    if hidden:
        kernels.append((
            "layer",
            lambda t: layer_kernels.make_layer_kernel(t, spec, plan.forward, gates=gates),
            f"{network.activation} {network.bias} {gates}",
            plan.forward,
        ))  # fmt: skip
    if not trains:
        output = ("output", lambda t: layer_kernels.make_output_kernel(t, spec, plan.output, options))
        return [*kernels, (*output, outputs, plan.output)]
    kernels += [
        (
            "output_gradient",
            lambda t: layer_kernels.make_output_gradient_kernel(t, spec, plan.output, options),
            outputs,
            plan.output,
        ),
        (
            "layer_gradient",
            lambda t: make_layer_gradient_kernel(t, plan.weight_gradient),
            "",
            plan.weight_gradient,
        ),
    ]
    if hidden:
        kernels.append((
            "layer_backward",
            lambda t: layer_kernels.make_layer_backward_kernel(t, spec, plan.backward),
            network.activation,
            plan.backward,
        ))  # fmt: skip
    if options.encoding_gradient:
        kernels += [
            (
                "features_gradient",
                lambda t: layer_kernels.make_features_gradient_kernel(t, plan.features),
                "",
                plan.features,
            ),
            (
                "encode_backward",
                lambda t: layer_kernels.make_encode_backward_kernel(t, spec, plan.encode, options),
                f"{spec.n_input_dims} {spec.encoding!r} {options!r}",
                plan.encode,
            ),
        ]
    return kernels
