"""The network's stages in dual numbers: network_stage.py with a tangent beside every value.

    forward    z = W h,  z' = W h';   h = phi(z),  h' = phi'(z) z'
    output     y' = phi'(z) z';   d = u phi'(z),  d' = u phi''(z) z'           u = dL/dy
    backward   d = (W^T d) phi',  d' = (W^T d') phi' + (W^T d) phi'' z'        with the next layer's W and d

phi' and its tangent phi'' z' wait where d and d' will stand. Values are rounded as in the first derivative (phi' too),
and so are tangents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..specs import ModelSpec
from .activations import STRAIGHT, make_dual_activation
from .arithmetic import make_multiply
from .encoding_stage import make_read_scale
from .fragments import FragmentShape, Target, make_load_matrix, make_mask, make_pack, make_store_matrix, make_unpack
from .mlp import make_backward_product, make_forward_product
from .network_stage import make_clear_padding
from .second_order_io import DERIVATIVE, DERIVATIVE_SCALE, DERIVATIVE_STRIDE, GRADIENT_SCALE, SecondOrderOptions
from .second_order_plan import SecondOrderPlan
from .stage_io import BATCH, SCALES, Y_STRIDE, Y
from .tiles import Tile, make_load_fragment, make_store_fragment


def make_dual_tile(target: Target, tile: Tile, twin: Tile, rows: int) -> tuple[Callable, Callable]:
    """(store(base, dual), load(base) -> dual): this warp's rows of a tile and of its twin, packed."""
    shape = FragmentShape(rows, tile.columns)
    store_value, store_tangent = make_store_fragment(target, tile, shape), make_store_fragment(target, twin, shape)
    load_value, load_tangent = make_load_fragment(target, tile, shape), make_load_fragment(target, twin, shape)

    def store(base, dual):
        store_value(base, dual[0])
        store_tangent(base, dual[1])

    def load(base):
        return load_value(base), load_tangent(base)

    return target.device(store), target.device(load)


def make_load_gradient(target: Target, spec: ModelSpec, shape: FragmentShape, dtype: str) -> Callable:
    """load(io, first_row) -> u = dL/dy of this warp's rows times its power of two, 0 outside the matrix."""
    load_matrix, scale = make_load_matrix(target, shape, dtype), make_read_scale(target, GRADIENT_SCALE)
    map_values, multiply, u32, n_out = target.map_fragment, make_multiply(target), target.u32, spec.n_output_dims

    def load(io, first_row):
        given = load_matrix(io[Y], io[Y_STRIDE], first_row, io[BATCH], u32(n_out))
        return map_values(multiply, given, scale(io[SCALES]))

    return target.device(load)


def make_store_derivative(target: Target, spec: ModelSpec, shape: FragmentShape) -> Callable:
    """store(io, first_row, y'): this warp's rows, for the directions as they were given."""
    store_matrix, scale = make_store_matrix(target, shape, "float32"), make_read_scale(target, DERIVATIVE_SCALE)
    map_values, multiply, u32, n_out = target.map_fragment, make_multiply(target), target.u32, spec.n_output_dims

    def store(io, first_row, tangents):
        values = map_values(multiply, tangents, scale(io[SCALES]))
        store_matrix(io[DERIVATIVE], io[DERIVATIVE_STRIDE], first_row, io[BATCH], u32(n_out), values)

    return target.device(store)


@functools.cache
def make_zeros_at_run_time(target: Target, n_registers: int) -> Callable:
    """zeros() -> `n_registers` zeros to be stored as a fragment (`ptx.Emitter.zero_at_run_time` says why)."""

    @target.intrinsic([], ("f32", n_registers))
    def zeros(e):
        return [e.zero_at_run_time()] * n_registers

    return zeros


def make_dual_forward(target: Target, weights: Tile, rows: int) -> Callable:
    """forward(base, (h, h')) -> (z, z') in accumulator form."""
    return _twice(target, make_forward_product(target, weights, 2 * rows), FragmentShape(rows, weights.rows))


def make_dual_backward(target: Target, weights: Tile, rows: int) -> Callable:
    """backward(base, (d, d')) -> (d W, d' W) in accumulator form."""
    return _twice(target, make_backward_product(target, weights, 2 * rows), FragmentShape(rows, weights.columns))


def _twice(target: Target, product: Callable, result: FragmentShape) -> Callable:
    """A product of values above and tangents below, as of one fragment with twice the rows: weights are read once."""
    n_elements = result.n_elements

    def of_dual(base, dual):
        both = product(base, dual[0] + dual[1])
        return both[:n_elements], both[n_elements:]

    return target.device(of_dual)


def make_dual_network(target: Target, spec: ModelSpec, plan: SecondOrderPlan, options: SecondOrderOptions) -> Callable:
    """network(base, io, first_row, (x, x')): leaves every layer's h, h', d and d' in its tiles, and writes y'."""
    stage = _make_output_layer(target, spec, plan, options)
    for layer in range(len(spec.layer_shapes) - 2, -1, -1):
        stage = _make_hidden_layer(target, spec, plan, layer, stage)

    def network(base, io, first_row, x):
        stage(base, io, first_row, x)

    return target.device(network)


def _make_output_layer(target: Target, spec: ModelSpec, plan: SecondOrderPlan, options: SecondOrderOptions) -> Callable:
    """output(base, io, first_row, (h, h')) -> (d, d') of the output, packed."""
    weights, rows = plan.weights.weights[-1], plan.rows
    shape = FragmentShape(rows, weights.rows)
    forward, activation = (
        make_dual_forward(target, weights, rows),
        make_dual_activation(target, spec.network.output_activation),
    )
    load_gradient, store_derivative = (
        make_load_gradient(target, spec, shape, options.target_dtype),
        make_store_derivative(target, spec, shape),
    )
    store, _ = make_dual_tile(target, plan.d[-1], plan.d_twins[-1], rows)
    pack, mask, multiply = make_pack(target, shape), make_mask(target, shape), make_multiply(target)
    map_values, u32, n_out = target.map_fragment, target.u32, spec.n_output_dims

    def times_slope(io, first_row, u, slope):
        return pack(mask(map_values(multiply, u, slope), first_row, io[BATCH], u32(n_out)))

    times_slope = target.device(times_slope)

    def output(base, io, first_row, h):
        z = forward(base, h)
        _, derivative, slope, bend = map_values(activation, z[0], z[1])
        store_derivative(io, first_row, derivative)
        u = load_gradient(io, first_row)
        d = times_slope(io, first_row, u, slope), times_slope(io, first_row, u, bend)
        store(base, d)
        return d

    return target.device(output)


def _make_hidden_layer(target: Target, spec: ModelSpec, plan: SecondOrderPlan, layer: int, inner: Callable) -> Callable:
    """hidden(base, io, first_row, (h_in, h_in')) -> (d, d') of this layer's z; `inner` is the next layer."""
    weights, next_weights = plan.weights.weights[layer : layer + 2]
    rows, map_values = plan.rows, target.map_fragment
    shape = FragmentShape(rows, weights.rows)
    forward, backward = make_dual_forward(target, weights, rows), make_dual_backward(target, next_weights, rows)
    activation, multiply = make_dual_activation(target, spec.network.activation), make_multiply(target)
    pack, unpack, clear = (
        make_pack(target, shape),
        make_unpack(target, shape),
        make_clear_padding(target, spec, layer, shape),
    )
    store_h, _ = make_dual_tile(target, plan.h[layer], plan.h_twins[layer], rows)
    store_d, load_d = make_dual_tile(target, plan.d[layer], plan.d_twins[layer], rows)
    zeros = make_zeros_at_run_time(target, shape.n_elements)
    if spec.network.activation in STRAIGHT:

        def storable(bend):
            return zeros()

    else:

        def storable(bend):
            return bend

    storable = target.device(storable)

    def product_rule(g, g_tangent, slope, bend):
        return g_tangent * slope + g * bend

    product_rule = target.scalar(product_rule)

    def hidden(base, io, first_row, h_in):
        z = forward(base, h_in)
        value, tangent, slope, bend = map_values(activation, z[0], z[1])
        h = pack(clear(value)), pack(clear(tangent))
        store_h(base, h)
        store_d(base, (pack(slope), pack(storable(bend))))
        g = backward(base, inner(base, io, first_row, h))
        kept = load_d(base)
        slope, bend = unpack(kept[0]), unpack(kept[1])
        d_tangent = pack(clear(map_values(product_rule, g[0], g[1], slope, bend)))
        d = pack(clear(map_values(multiply, g[0], slope))), d_tangent
        store_d(base, d)
        return d

    return target.device(hidden)
