"""The fuser: plan and operations to the stages of a kernel.

A kernel follows a tile of samples through closures, outside in:

    encode           the encoding's items, divided among the lanes of each warp, into rows of the x tile
    layer 0 .. n-1   forward product, activation, keep h; the *inner* closure, which gives d; backward product, times
                     phi', keep d
    output           forward product, output activation, loss (or a given gradient), d of the output
    encode_backward  dL/d(features) from rows of the dx tile: to the table's gradient and to dL/dx

`hidden_layer` is a closure around the next layer's, so that a sample's way in and its gradient's way back are one
function. Where h and d are kept, in shared tiles or in global memory, is the plan's choice: the closures only call
`keep` and `recall`.

Arguments that all stages share travel as one tuple `io`; its fields are named in `IO`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..specs import ModelSpec
from .activations import ACTIVATIONS, make_activation, make_apply_derivative, make_gate
from .encodings import ENCODINGS, padding_value
from .fragments import (
    FragmentShape,
    Target,
    make_load_matrix,
    make_mask,
    make_pack,
    make_restore,
    make_save,
    make_sum,
    make_unpack,
)
from .losses import make_loss
from .mlp import make_backward_product, make_forward_product
from .plan import KernelPlan, keeps_gate
from .sinks import RowMemory
from .tiles import (
    make_barriers,
    make_indices,
    make_load_fragment,
    make_load_tile,
    make_row_address,
    make_store_fragment,
)

IO = (
    "parameters",  # u64  float16 parameter vector
    "table",  # u64  the encoding's part of it
    "x",  # u64  inputs
    "x_stride",  # u32  bytes a row
    "batch",  # u32  rows of x
    "y",  # u64  targets, or given output gradients
    "y_stride",  # u32
    "density",  # u64  sampling density of each target element
    "density_stride",  # u32
    "table_gradient",  # u64  float32
    "dx",  # u64  float32 [batch, n_input_dims]
    "dx_stride",  # u32
    "scales",  # u64  float32 [2]: factor of given output gradients, factor of results
    "saved",  # u64  fragments of a chunk (staged plans)
    "n_slots",  # u32  fragments of each kind in it
)
IO_TYPES = {
    "parameters": "u64", "table": "u64", "x": "u64", "x_stride": "u32", "batch": "u32", "y": "u64", "y_stride": "u32",
    "density": "u64", "density_stride": "u32", "table_gradient": "u64", "dx": "u64", "dx_stride": "u32",
    "scales": "u64", "saved": "u64", "n_slots": "u32",
}  # fmt: skip
PARAMETERS, TABLE, X, X_STRIDE, BATCH, Y, Y_STRIDE, DENSITY, DENSITY_STRIDE = range(9)
TABLE_GRADIENT, DX, DX_STRIDE, SCALES, SAVED, N_SLOTS = range(9, 15)


@dataclass(frozen=True)
class GradientOptions:
    """What a gradient kernel reads and computes beyond its model.

    loss             name of the loss, or None where the output gradient is given
    density_dtype    dtype of the targets' sampling density, or None where there is none
    table_gradient, input_gradient   which gradients the encoding's backward pass computes
    """

    input_dtype: str = "float32"
    aligned_input: bool = True
    target_dtype: str = "float32"
    loss: str | None = "L2"
    density_dtype: str | None = None
    table_gradient: bool = True
    input_gradient: bool = False

    @property
    def encoding_gradient(self) -> bool:
        return self.table_gradient or self.input_gradient


# --------------------------------------------------------------------------------------------- encoding


@functools.cache
def _make_lane_arithmetic(target: Target):
    """Scalar functions for who does what: (smaller, inside, quotient, remainder)."""
    u32, f32 = np.uint32, np.float32

    def smaller(a, b):
        return min(a, b)

    def inside(index, count):
        return f32(1) if index < count else f32(0)

    def quotient(a, b):
        return u32(a // b)

    def remainder(a, b):
        return u32(a % b)

    return tuple(target.scalar(f) for f in (smaller, inside, quotient, remainder))


def _encoding_parts(target: Target, spec: ModelSpec, memory: RowMemory, *, table_gradient=False, input_gradient=False):
    factory = ENCODINGS[type(spec.encoding)]
    return factory(
        target, spec.encoding, memory, first_column=0, table_gradient=table_gradient, input_gradient=input_gradient
    )


def make_encode(target: Target, spec: ModelSpec, plan: KernelPlan, options) -> Callable:
    """encode(base, io, first_row): features of this warp's samples, from `first_row` of the batch on, into the x tile.

    Rows past the batch repeat its last row; their gradients will be 0.
    """
    memory = RowMemory(target, options.input_dtype, options.aligned_input)
    parts = _encoding_parts(target, spec, memory)
    stages = [_make_encode_group(target, plan, parts.by_sample, group) for group in parts.groups]
    padding = _make_padding(target, spec, plan)
    return _chain(target, [*stages, *([padding] if padding else [])])


def _chain(target: Target, stages: list[Callable]) -> Callable:
    """One function that calls all stages with the same three arguments."""
    first, rest = stages[0], stages[1:]
    if not rest:
        return first
    second = _chain(target, rest)

    def both(base, io, first_row):
        first(base, io, first_row)
        second(base, io, first_row)

    return target.device(both)


def _make_encode_group(target: Target, plan: KernelPlan, by_sample: bool, group) -> Callable:
    encode_item, first_item, count = group.encode, group.first, group.count
    turns, locate = _make_division(target, plan, by_sample, first_item, count)
    row_address = make_row_address(target, plan.x)
    u32, unroll = target.u32, target.unroll_by_2

    def encode_group(base, io, first_row):
        for turn in range(turns):
            unroll()
            item, row, place_row, live, lead = locate(u32(turn), first_row, io[BATCH])
            encode_item(item, io[X], io[X_STRIDE], row, io[TABLE], row_address(base, place_row))

    return target.device(encode_group)


def _make_division(target: Target, plan: KernelPlan, by_sample: bool, first_item: int, count: int):
    """How a warp divides `count` items of its samples among its lanes.

    Returns the number of turns and locate(turn, first_row, batch) -> (item, row of the batch, row of the tile, live,
    lead): live is 1.0 for work that counts (0.0 past the batch or past the items, where a lane repeats something),
    lead the index of the lane's share of its sample.
    """
    rows = plan.rows
    shares = 32 // rows
    u32 = target.u32
    _, lane_index, warp_index, *_ = make_indices(target)
    smaller, inside, quotient, remainder = _make_lane_arithmetic(target)

    def multiply(a, b):
        return a * b

    multiply = target.scalar(multiply)
    if by_sample:
        turns = -(-count // shares)

        def locate(turn, first_row, batch):
            lane = lane_index()
            local_row, share = remainder(lane, u32(rows)), quotient(lane, u32(rows))
            item = u32(u32(turn * u32(shares)) + share)
            row = u32(first_row + local_row)
            live = multiply(inside(row, batch), inside(item, u32(count)))
            item = u32(smaller(item, u32(count - 1)) + u32(first_item))
            place_row = u32(u32(warp_index() * u32(rows)) + local_row)
            return item, smaller(row, u32(batch - u32(1))), place_row, live, share

    else:
        total = rows * count
        turns = -(-total // 32)

        def locate(turn, first_row, batch):
            index = smaller(u32(u32(turn * u32(32)) + lane_index()), u32(total - 1))
            local_row, item = quotient(index, u32(count)), u32(remainder(index, u32(count)) + u32(first_item))
            row = u32(first_row + local_row)
            live = inside(row, batch)
            place_row = u32(u32(warp_index() * u32(rows)) + local_row)
            return item, smaller(row, u32(batch - u32(1))), place_row, live, u32(0)

    return turns, target.device(locate)


def _make_padding(target: Target, spec: ModelSpec, plan: KernelPlan) -> Callable | None:
    """Fill the columns behind the encoding's own with its padding value."""
    first_column = spec.encoding.n_output_dims
    count = plan.x.columns - first_column  # a bare encoding's tile is wider than the encoding
    if count == 0:
        return None
    turns, locate = _make_division(target, plan, False, first_column, count)
    row_address = make_row_address(target, plan.x)
    u32, value = target.u32, padding_value(spec.encoding)

    @target.intrinsic(["u32", "u32"], "void")
    def put_padding(e, row, column):
        e.store_shared(e.add(row, e.shl(column, 1)), "u16", [e.float_to_half(e.f32(value))])

    def pad(base, io, first_row):
        for turn in range(turns):
            column, _, place_row, _, _ = locate(u32(turn), first_row, io[BATCH])
            put_padding(row_address(base, place_row), column)

    return target.device(pad)


def make_encode_backward(target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions) -> Callable:
    """encode_backward(base, io, first_row): from this warp's rows of the dx tile to dL/d(table) and dL/dx."""
    memory = RowMemory(target, options.input_dtype, options.aligned_input)
    parts = _encoding_parts(
        target, spec, memory, table_gradient=options.table_gradient, input_gradient=options.input_gradient
    )
    make = _make_backward_by_sample if parts.by_sample else _make_backward_by_item
    return make(target, plan, parts, options)


@functools.cache
def _make_store_input_gradient(target: Target):
    """store(dx, dx_stride, row, batch, dim, share, value): one element of dL/dx, by the sample's first lane."""

    @target.intrinsic(["u64", "u32", "u32", "u32", "u32", "u32", "f32"], "void")
    def store_input_gradient(e, dx, dx_stride, row, batch, dim, share, value):
        with e.when(e.both(e.less(row, batch), e.equal(share, 0))):
            e.store_global(e.address(e.address_by(dx, row, dx_stride), dim, 4), "f32", [value])

    return store_input_gradient


@functools.cache
def make_read_scale(target: Target, index: int):
    """read(scales) -> scales[index]."""

    @target.intrinsic(["u64"], "f32")
    def read_scale(e, scales):
        return e.load_global(scales, "f32", 1, 4 * index)[0]

    return read_scale


@functools.cache
def _make_add_shares(target: Target, rows: int):
    """Sum of a value over the lanes that share a sample."""

    @target.intrinsic(["f32"], "f32")
    def add_shares(e, value):
        return e.fadd(value, e.shuffle_xor(value, 16)) if rows == 16 else value

    return add_shares


def _make_backward_by_sample(target: Target, plan: KernelPlan, parts, options: GradientOptions) -> Callable:
    u32, f32, unroll, unroll_2 = target.u32, target.f32, target.unroll_full, target.unroll_by_2
    spaces, np_f32, n_dims, rows = target.memory_spaces, np.float32, parts.n_input_dims, plan.rows
    row_address = make_row_address(target, plan.dx)
    store, result_scale = _make_store_input_gradient(target), make_read_scale(target, 1)
    add_shares = _make_add_shares(target, rows)
    _, lane_index, *_ = make_indices(target)
    _, _, quotient, remainder = _make_lane_arithmetic(target)
    input_gradient = options.input_gradient

    def make_group(group):
        backward_item = group.backward
        turns, locate = _make_division(target, plan, True, group.first, group.count)

        def backward_group(base, io, first_row, dx):
            for turn in range(turns):
                unroll_2()
                item, row, place_row, live, lead = locate(u32(turn), first_row, io[BATCH])
                place = row_address(base, place_row)
                backward_item(item, io[X], io[X_STRIDE], row, io[TABLE], io[TABLE_GRADIENT], place, live, dx)

        return target.device(backward_group)

    def chain(groups):
        first = make_group(groups[0])
        if len(groups) == 1:
            return first
        second = chain(groups[1:])

        def both(base, io, first_row, dx):
            first(base, io, first_row, dx)
            second(base, io, first_row, dx)

        return target.device(both)

    all_groups = chain(parts.groups)

    def encode_backward(base, io, first_row):
        dx = spaces.local.array(n_dims, np_f32)
        for d in range(n_dims):
            unroll()
            dx[d] = f32(0)
        all_groups(base, io, first_row, dx)
        if input_gradient:
            lane = lane_index()
            row, share = u32(first_row + remainder(lane, u32(rows))), quotient(lane, u32(rows))
            scale = result_scale(io[SCALES])
            for d in range(n_dims):
                unroll()
                store(io[DX], io[DX_STRIDE], row, io[BATCH], u32(d), share, add_shares(dx[d]) * scale)

    return target.device(encode_backward)


def _make_backward_by_item(target: Target, plan: KernelPlan, parts, options: GradientOptions) -> Callable:
    u32, f32, unroll = target.u32, target.f32, target.unroll_full
    spaces, np_f32, size = target.memory_spaces, np.float32, parts.input_dims_per_item
    row_address = make_row_address(target, plan.dx)
    store, result_scale = _make_store_input_gradient(target), make_read_scale(target, 1)
    (group,) = parts.groups
    backward_item = group.backward
    turns, locate = _make_division(target, plan, False, group.first, group.count)

    def encode_backward(base, io, first_row):
        scale = result_scale(io[SCALES])
        for turn in range(turns):
            item, row, place_row, live, share = locate(u32(turn), first_row, io[BATCH])
            dx = spaces.local.array(size, np_f32)
            for i in range(size):
                unroll()
                dx[i] = f32(0)
            place = row_address(base, place_row)
            backward_item(item, io[X], io[X_STRIDE], row, io[TABLE], io[TABLE_GRADIENT], place, live, dx)
            row = u32(first_row + u32(place_row - u32(warp_first_row())))
            for i in range(size):
                unroll()
                store(io[DX], io[DX_STRIDE], row, io[BATCH], u32(u32(item * u32(size)) + u32(i)), share, dx[i] * scale)

    _, _, warp_index, *_ = make_indices(target)
    rows = plan.rows

    def warp_first_row():
        return u32(warp_index() * u32(rows))

    warp_first_row = target.device(warp_first_row)
    return target.device(encode_backward)


# ------------------------------------------------------------------------------ where activations are kept


@dataclass(frozen=True)
class Keeper:
    """keep(base, io, slot, packed) and recall(base, io, slot) of one matrix of a tile's samples."""

    keep: Callable
    recall: Callable


def make_tile_keeper(target: Target, tile, shape: FragmentShape) -> Keeper:
    """In a shared tile, where the weight gradient will read it too."""
    store, load = make_store_fragment(target, tile, shape), make_load_fragment(target, tile, shape)

    def keep(base, io, slot, packed):
        store(base, packed)

    def recall(base, io, slot):
        return load(base)

    return Keeper(target.device(keep), target.device(recall))


@functools.cache
def make_region(target: Target):
    """region(saved, n_slots, units): start of the fragments that come after `units` registers a lane of others."""

    @target.intrinsic(["u64", "u32", "u32"], "u64")
    def region(e, saved, n_slots, units):
        return e.address_by(saved, n_slots, e.mul(units, 128))

    return region


def make_saved_keeper(target: Target, units: int, n_packed: int) -> Keeper:
    """In global memory, in register order; `units` registers a lane of other fragments come before."""
    save, restore = make_save(target, n_packed), make_restore(target, n_packed, constant=False)
    region, u32 = make_region(target), target.u32

    def keep(base, io, slot, packed):
        save(region(io[SAVED], io[N_SLOTS], u32(units)), slot, packed)

    def recall(base, io, slot):
        return restore(region(io[SAVED], io[N_SLOTS], u32(units)), slot)

    return Keeper(target.device(keep), target.device(recall))


def saved_units(spec: ModelSpec, rows: int) -> tuple[list[int], list[int], int]:
    """Where staged plans save the inputs of each layer and the gradients of its outputs, and how much in all.

    In registers a lane before it: ([x, h_1 ...], [d_1 ... d_out], total).
    """
    widths = [fan_in for _, fan_in in spec.layer_shapes] + [fan_out for fan_out, _ in spec.layer_shapes]
    starts, total = [], 0
    for width in widths:
        starts.append(total)
        total += FragmentShape(rows, width).n_packed
    n_layers = len(spec.layer_shapes)
    return starts[:n_layers], starts[n_layers:], total


# ---------------------------------------------------------------------------------------------- network


def make_load_weights(target: Target, plan: KernelPlan, layer_offsets: list[int]) -> tuple[Callable, list[Callable]]:
    """(load_all, need): load_all(base, io) before the first tile; need[i](base, io) before each use of layer i.

    Resident weights are all loaded at once and need nothing later; streamed ones are loaded at every use.
    """
    barrier, _, copy_wait = make_barriers(target)
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
                copy_wait()
                barrier()

            return target.device(need)

        return nothing, [make_need(load) for load in loads]

    def chain(loads):
        load = loads[0]
        if len(loads) == 1:

            def last(base, io):
                load(base, io[PARAMETERS])
                copy_wait()
                barrier()

            return target.device(last)
        rest = chain(loads[1:])

        def load_and_go_on(base, io):
            load(base, io[PARAMETERS])
            rest(base, io)

        return target.device(load_and_go_on)

    return chain(loads), [nothing] * len(loads)


def make_output_layer(
    target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions, need: Callable, d_keeper: Keeper
) -> Callable:
    """output(base, io, slot, first_row, h) -> (d of the output, packed; sum of this thread's loss values)."""
    tile = plan.weights.weights[-1]
    shape = FragmentShape(plan.rows, tile.rows)
    forward, pack, map_values = (
        make_forward_product(target, tile, plan.rows),
        make_pack(target, shape),
        target.map_fragment,
    )
    name = spec.network.output_activation
    activation, apply_derivative = make_activation(target, name), make_apply_derivative(target, name)
    of_output = ACTIVATIONS[name].derivative_of_output
    load_y = make_load_matrix(target, shape, options.target_dtype)
    load_density = make_load_matrix(target, shape, options.density_dtype or "float32")
    mask, total_of = make_mask(target, shape), make_sum(target, shape.n_elements)
    n_out, u32, f32, keep = spec.n_output_dims, target.u32, target.f32, d_keeper.keep
    has_density, given_scale = options.density_dtype is not None, make_read_scale(target, 0)

    if options.loss is None:

        def multiply(a, b):
            return a * b

        multiply = target.scalar(multiply)

        def output_gradient(io, first_row, p):
            given = load_y(io[Y], io[Y_STRIDE], first_row, io[BATCH], u32(n_out))
            return map_values(multiply, given, given_scale(io[SCALES])), f32(0)

    else:
        loss = make_loss(target, options.loss)

        def output_gradient(io, first_row, p):
            t = load_y(io[Y], io[Y_STRIDE], first_row, io[BATCH], u32(n_out))
            if has_density:
                density = load_density(io[DENSITY], io[DENSITY_STRIDE], first_row, io[BATCH], u32(n_out))
                values, g = map_values(loss, p, t, density)
            else:
                values, g = map_values(loss, p, t, f32(1))
            return g, total_of(mask(values, first_row, io[BATCH], u32(n_out)))

    output_gradient = target.device(output_gradient)

    def output(base, io, slot, first_row, h):
        need(base, io)
        z = forward(base, h)
        p = map_values(activation, z)
        g, total = output_gradient(io, first_row, p)
        if of_output:
            g = map_values(apply_derivative, g, p)
        else:
            g = map_values(apply_derivative, g, z)
        d = pack(mask(g, first_row, io[BATCH], u32(n_out)))
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
    pack, unpack, map_values = make_pack(target, shape), make_unpack(target, shape), target.map_fragment
    name = spec.network.activation
    activation, gate, apply_derivative = (
        make_activation(target, name),
        make_gate(target, name),
        make_apply_derivative(target, name),
    )
    need_this, need_next = need[layer], need[layer + 1]
    keep_h, recall_h, keep_d, recall_d = h_keeper.keep, h_keeper.recall, d_keeper.keep, d_keeper.recall

    def multiply(a, b):
        return a * b

    multiply = target.scalar(multiply)

    if keeps_gate(spec):

        def hidden(base, io, slot, first_row, h_in):
            need_this(base, io)
            z = forward(base, h_in)
            h = pack(map_values(activation, z))
            keep_h(base, io, slot, h)
            keep_d(base, io, slot, pack(map_values(gate, z)))  # phi' waits where d will stand
            d_next, total = inner(base, io, slot, first_row, h)
            need_next(base, io)
            g = backward(base, d_next)
            d = pack(map_values(multiply, g, unpack(recall_d(base, io, slot))))
            keep_d(base, io, slot, d)
            return d, total

    else:

        def hidden(base, io, slot, first_row, h_in):
            need_this(base, io)
            h = pack(map_values(activation, forward(base, h_in)))
            keep_h(base, io, slot, h)
            d_next, total = inner(base, io, slot, first_row, h)
            need_next(base, io)
            g = backward(base, d_next)
            d = pack(map_values(apply_derivative, g, unpack(recall_h(base, io, slot))))
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
        forward, activation = make_forward_product(target, tile, plan.rows), make_activation(target, name)
        need_this, map_values = need[layer], target.map_fragment
        if last:

            def output(base, io, h):
                need_this(base, io)
                return map_values(activation, forward(base, h))

            return target.device(output)
        inner, pack = make_layer(layer + 1), make_pack(target, FragmentShape(plan.rows, tile.rows))

        def hidden(base, io, h):
            need_this(base, io)
            return inner(base, io, pack(map_values(activation, forward(base, h))))

        return target.device(hidden)

    return make_layer(0)
