"""The network's stages: all layers of a tile, forward and back, as closures around one another.

    layer 0 .. n-1   forward product, activation, keep h; the *inner* closure, which gives d; backward product, times
                     phi', keep d
    output           forward product, output activation, loss (or a given gradient), d of the output

A hidden layer is a closure around the next one, so that a sample's way in and its gradient's way back are one function.
A hidden width that is no multiple of 16 is padded in every tile; `make_clear_padding` keeps its padding 0.
"""

from __future__ import annotations

from collections.abc import Callable

from ..specs import ModelSpec
from .activations import ACTIVATIONS, make_activation, make_apply_derivative, make_gate
from .arithmetic import make_divide, make_multiply
from .biases import make_add_bias
from .encoding_stage import make_read_scale
from .fragments import FragmentShape, Target, make_load_columns, make_mask, make_pack, make_sum, make_unpack
from .keepers import Keeper
from .losses import make_loss, make_luminance, needs_luminance
from .mlp import make_backward_product, make_forward_product
from .packed_activations import make_pack_gradient, make_pack_output
from .plan import KernelPlan, keeps_gate
from .stage_io import BATCH, DENSITY, DENSITY_STRIDE, PARAMETERS, SCALES, Y_STRIDE, GradientOptions, Y
from .tiles import make_barriers, make_load_tile, make_publish_weights


def make_load_weights(target: Target, plan: KernelPlan, layer_offsets: list[int]) -> tuple[Callable, list[Callable]]:
    """(load_all, need): load_all(base, io) before the first tile; need[i](base, io) before each use of layer i.

    Resident weights are all loaded at once and need nothing later; streamed ones are loaded at every use.
    """
    barrier, publish = make_barriers(target).barrier, make_publish_weights(target, plan.swizzled)
    loads = [
        make_load_tile(target, tile, plan.threads, offset)
        for tile, offset in zip(plan.weights.weights, layer_offsets, strict=True)
    ]

    def nothing(base, io):
        return

    nothing = target.device(nothing)
    if not plan.weights.resident:

        def make_need(load):
            def need(base, io):
                barrier()  # everyone is done with the layer before
                load(base, io[PARAMETERS])
                publish()

            return target.device(need)

        return nothing, [make_need(load) for load in loads]

    def chain(loads):
        load = loads[0]
        if len(loads) == 1:

            def last(base, io):
                load(base, io[PARAMETERS])
                publish()

            return target.device(last)
        rest = chain(loads[1:])

        def load_and_go_on(base, io):
            load(base, io[PARAMETERS])
            rest(base, io)

        return target.device(load_and_go_on)

    return chain(loads), [nothing] * len(loads)


def make_clear_padding(target: Target, spec: ModelSpec, layer: int, shape: FragmentShape) -> Callable:
    """clear(fragment): 0 in the columns past the layer's own width, where phi(0) or a stray weight may stand."""
    fan_out, _ = spec.logical_layer_shapes[layer]
    if fan_out == shape.columns:

        def clear(values):
            return values

    else:
        mask, u32, all_rows = make_mask(target, shape), target.u32, shape.rows

        def clear(values):
            return mask(values, u32(0), u32(all_rows), u32(fan_out))

    return target.device(clear)


def make_weights(target: Target, spec: ModelSpec, options: GradientOptions, shape: FragmentShape) -> Callable:
    """weights(io, first_row, first_column) -> 1 / density of the targets from `first_column` on; the number 1 where
    there are no densities."""
    f32, u32, n_out, map_values = target.f32, target.u32, spec.n_output_dims, target.map_fragment
    if options.density_dtype is None:

        def weights(io, first_row, first_column):
            return f32(1)

    else:
        load = make_load_columns(target, shape, options.density_dtype, clear=False)
        divide = make_divide(target)

        def weights(io, first_row, first_column):
            density = load(io[DENSITY], io[DENSITY_STRIDE], first_row, io[BATCH], first_column, u32(n_out))
            return map_values(divide, f32(1), density)

    return target.device(weights)


def make_loss_gradient(target: Target, spec: ModelSpec, options: GradientOptions, shape: FragmentShape) -> Callable:
    """loss_gradient(io, first_row, first_column, p) -> (dL/dp, sum of this thread's loss values) of the outputs p from
    `first_column` on; where the gradient is given, whatever p is, and 0. dL/dp beyond the batch and the outputs is 0
    where it is given, else any number."""
    load_y = make_load_columns(target, shape, options.target_dtype, clear=options.loss is None)
    weights = make_weights(target, spec, options, shape)
    mask, total_of = make_mask(target, shape), make_sum(target, shape.n_elements)
    n_out, u32, f32, map_values = spec.n_output_dims, target.u32, target.f32, target.map_fragment

    if options.loss is None:
        multiply, given_scale = make_multiply(target), make_read_scale(target, 0)

        def loss_gradient(io, first_row, first_column, p):
            given = load_y(io[Y], io[Y_STRIDE], first_row, io[BATCH], first_column, u32(n_out))
            g = map_values(multiply, given, given_scale(io[SCALES]))
            return map_values(multiply, g, weights(io, first_row, first_column)), f32(0)

    elif needs_luminance(options.loss):
        loss, luminance = make_loss(target, options.loss), make_luminance(target, shape, n_out)

        def loss_gradient(io, first_row, first_column, p):
            t = load_y(io[Y], io[Y_STRIDE], first_row, io[BATCH], first_column, u32(n_out))
            values, g = map_values(loss, p, t, weights(io, first_row, first_column), luminance(p))
            return g, total_of(mask(values, first_row, io[BATCH], u32(u32(n_out) - first_column)))

    else:
        loss = make_loss(target, options.loss)

        def loss_gradient(io, first_row, first_column, p):
            t = load_y(io[Y], io[Y_STRIDE], first_row, io[BATCH], first_column, u32(n_out))
            values, g = map_values(loss, p, t, weights(io, first_row, first_column))
            return g, total_of(mask(values, first_row, io[BATCH], u32(u32(n_out) - first_column)))

    return target.device(loss_gradient)


def make_output_gradient(target: Target, spec: ModelSpec, options: GradientOptions, shape: FragmentShape) -> Callable:
    """output_gradient(io, first_row, first_column, z) -> (d, sum of this thread's loss values), d in accumulator form:
    output activation, loss or a given gradient, derivative, for outputs from `first_column` on."""
    map_values, name = target.map_fragment, spec.network.output_activation
    activation, apply_derivative = make_activation(target, name), make_apply_derivative(target, name)
    of_output = ACTIVATIONS[name].derivative_of_output
    loss_gradient, mask = make_loss_gradient(target, spec, options, shape), make_mask(target, shape)
    n_out, u32 = spec.n_output_dims, target.u32

    def output_gradient(io, first_row, first_column, z):
        p = map_values(activation, z)
        g, total = loss_gradient(io, first_row, first_column, p)
        if of_output:
            g = map_values(apply_derivative, g, p)
        else:
            g = map_values(apply_derivative, g, z)
        return mask(g, first_row, io[BATCH], u32(u32(n_out) - first_column)), total

    return target.device(output_gradient)


def make_output_layer(
    target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions, need: Callable, d_keeper: Keeper
) -> Callable:
    """output(base, io, slot, first_row, h) -> (d of the output, packed; sum of this thread's loss values)."""
    tile = plan.weights.weights[-1]
    shape = FragmentShape(plan.rows, tile.rows)
    forward, pack = make_forward_product(target, tile, plan.rows), make_pack(target, shape)
    add_bias = make_add_bias(target, spec, len(spec.layer_shapes) - 1, shape)
    output_gradient, u32, keep = make_output_gradient(target, spec, options, shape), target.u32, d_keeper.keep

    def output(base, io, slot, first_row, h):
        need(base, io)
        g, total = output_gradient(io, first_row, u32(0), add_bias(io, forward(base, h)))
        d = pack(g)
        keep(base, io, slot, d)
        return d, total

    return target.device(output)


def make_hidden_layer(
    target: Target,
    spec: ModelSpec,
    plan: KernelPlan,
    layer: int,
    need: list[Callable],
    h_keeper: Keeper,
    d_keeper: Keeper,
    inner: Callable,
) -> Callable:
    """hidden(base, io, slot, first_row, h_in) -> (d of this layer's z, packed; loss), `inner` being the next layer."""
    tile, next_tile = plan.weights.weights[layer], plan.weights.weights[layer + 1]
    shape = FragmentShape(plan.rows, tile.rows)
    forward = make_forward_product(target, tile, plan.rows)
    backward = make_backward_product(target, next_tile, plan.rows)
    name = spec.network.activation
    need_this, need_next = need[layer], need[layer + 1]
    keep_h, recall_h, keep_d, recall_d = h_keeper.keep, h_keeper.recall, d_keeper.keep, d_keeper.recall
    clear, add_bias = make_clear_padding(target, spec, layer, shape), make_add_bias(target, spec, layer, shape)
    pack_output = make_pack_output(target, name, shape, clear)

    if keeps_gate(spec):
        pack, unpack, map_values = make_pack(target, shape), make_unpack(target, shape), target.map_fragment
        gate, multiply = make_gate(target, name), make_multiply(target)

        def hidden(base, io, slot, first_row, h_in):
            need_this(base, io)
            z = add_bias(io, forward(base, h_in))
            h = pack_output(z)
            keep_h(base, io, slot, h)
            slope = pack(map_values(gate, z))
            kept = keep_d(base, io, slot, slope)  # phi' waits where d will stand
            d_next, total = inner(base, io, slot, first_row, h)
            need_next(base, io)
            g = backward(base, d_next)
            d = pack(clear(map_values(multiply, g, unpack(recall_d(base, io, slot, kept)))))
            keep_d(base, io, slot, d)
            return d, total

    else:
        pack_gradient = make_pack_gradient(target, name, shape, clear)

        def hidden(base, io, slot, first_row, h_in):
            need_this(base, io)
            h = pack_output(add_bias(io, forward(base, h_in)))
            kept = keep_h(base, io, slot, h)
            d_next, total = inner(base, io, slot, first_row, h)
            need_next(base, io)
            g = backward(base, d_next)
            d = pack_gradient(g, recall_h(base, io, slot, kept))
            keep_d(base, io, slot, d)
            return d, total

    return target.device(hidden)


def make_network_gradient(
    target: Target,
    spec: ModelSpec,
    plan: KernelPlan,
    options: GradientOptions,
    need: list[Callable],
    h_keepers: list[Keeper],
    d_keepers: list[Keeper],
) -> Callable:
    """network(base, io, slot, first_row, x) -> (d of layer 0, loss): all layers nested into one another."""
    stage = make_output_layer(target, spec, plan, options, need[-1], d_keepers[-1])
    for layer in range(len(spec.layer_shapes) - 2, -1, -1):
        stage = make_hidden_layer(target, spec, plan, layer, need, h_keepers[layer], d_keepers[layer], stage)
    return stage


def make_network_forward(target: Target, spec: ModelSpec, plan: KernelPlan, need: list[Callable]) -> Callable:
    """network(base, io, x) -> the network's output in accumulator form, nothing kept."""

    def make_layer(layer: int) -> Callable:
        tile = plan.weights.weights[layer]
        last = layer == len(spec.layer_shapes) - 1
        name = spec.network.output_activation if last else spec.network.activation
        forward, need_this = make_forward_product(target, tile, plan.rows), need[layer]
        shape = FragmentShape(plan.rows, tile.rows)
        add_bias = make_add_bias(target, spec, layer, shape)
        if last:
            activation, map_values = make_activation(target, name), target.map_fragment

            def output(base, io, h):
                need_this(base, io)
                return map_values(activation, add_bias(io, forward(base, h)))

            return target.device(output)
        inner = make_layer(layer + 1)
        pack_output = make_pack_output(target, name, shape, make_clear_padding(target, spec, layer, shape))

        def hidden(base, io, h):
            need_this(base, io)
            return inner(base, io, pack_output(add_bias(io, forward(base, h))))

        return target.device(hidden)

    return make_layer(0)
