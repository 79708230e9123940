"""The fuser: plan and stages to kernel bodies, what one block does from start to end.

    encode           the encoding's items into rows of the x tile                      (encoding_stage.py)
    network          forward through all layers, loss, and back to d of the first      (network_stage.py)
    encode_backward  d W_0 through rows of the dx tile to the table and to dL/dx       (encoding_stage.py)
    weight gradients dW of all layers over the tile, summed in registers               (mlp.py)

Each `make_*` returns a `KernelBody`: a plain Python function and the kinds of its parameters, in order. The function's
control flow is the same in all threads of a block, so it is compiled for a GPU and emulated alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ..specs import ModelSpec
from .copied_features import distance_of_tiles, make_copied_features
from .encoding_stage import make_encode, make_encode_backward
from .fragments import (
    FragmentShape,
    Target,
    make_mask,
    make_note_not_finite,
    make_pack,
    make_restore,
    make_store_matrix,
    make_unpack,
    make_zeros,
    packed_registers,
)
from .keepers import make_region, make_saved_keeper, make_tile_keeper, saved_units
from .mlp import (
    make_backward_product,
    make_block_sum,
    make_weight_gradients,
    make_weight_gradients_from,
    make_write_partial_sums,
    n_accumulators,
)
from .network_stage import make_load_weights, make_loss_gradient, make_network_forward, make_network_gradient
from .plan import KernelPlan, bias_offsets, layer_offsets
from .prefetch import make_prefetch
from .stage_io import (
    BAD,
    BATCH,
    IO_PARAMETERS,
    MARK,
    Y_STRIDE,
    GradientOptions,
    InferenceOptions,
    KernelBody,
    Y,
)
from .tiles import (
    make_aligned_base,
    make_barriers,
    make_exchange,
    make_first_row_of,
    make_indices,
    make_load_fragment,
    make_store_fragment,
)


def make_features(
    target: Target, spec: ModelSpec, plan: KernelPlan, options, *, loads: bool = True
) -> tuple[Callable, Callable, Callable]:
    """(begin, take, end) as of `make_copied_features`, for the plan's way: copied ahead, or encoded into the x tile.
    Without `loads`, what `take` gives is of no use, and the features stay in the tile."""
    if plan.copied_ahead:
        begin, take_copied, end = make_copied_features(target, spec, plan, loads=loads)

        def take(base, shift, io, first_row, following):
            return take_copied(base, shift, io, following)

        return begin, target.device(take), end
    _, warp_barrier, _ = make_barriers(target)
    encode = make_encode(target, spec, plan, options)
    load_x = make_load_fragment(target, plan.x, FragmentShape(plan.rows, plan.x.columns))
    if not loads:
        load_x = target.device(lambda base: base)

    def begin(base, io, first_row):
        return

    def take(base, shift, io, first_row, following):
        encode(base, io, first_row)
        warp_barrier()
        return load_x(base)

    if plan.prefetches:
        copy_wait = make_barriers(target).copy_wait

        def end(base):
            copy_wait()

    else:

        def end(base):
            return

    return target.device(begin), target.device(take), target.device(end)


def make_inference_kernel(target: Target, spec: ModelSpec, plan: KernelPlan, options: InferenceOptions) -> KernelBody:
    """y = network(encoding(x)) for all samples, `out` [batch, n_output_dims] being where `io` has targets."""
    target = target.storing(plan.dtype)
    shared_base = make_aligned_base(target, plan.shared_alignment)
    _, warp_barrier, _ = make_barriers(target)
    block_index, n_blocks = make_indices(target).block, make_indices(target).n_blocks
    begin, take_x, end = make_features(target, spec, plan, options)
    x_shape = FragmentShape(plan.rows, plan.x.columns)
    first_row_of, u32, n_out = make_first_row_of(target, plan), target.u32, spec.n_output_dims
    if spec.network is None:
        store_y, unpack = make_store_matrix(target, x_shape, options.output_dtype), make_unpack(target, x_shape)

        def load_all(base, io):
            return

        def network(base, io, x):
            return unpack(x)

        load_all, network = target.device(load_all), target.device(network)
    else:
        load_all, need = make_load_weights(target, plan, layer_offsets(spec))
        network = make_network_forward(target, spec, plan, need)
        store_y = make_store_matrix(target, FragmentShape(plan.rows, spec.padded_output_width), options.output_dtype)

    def inference(n_tiles, io):
        base = shared_base()
        tile, step = u32(block_index()), u32(n_blocks())
        begin(base, io, first_row_of(tile))
        load_all(base, io)
        while tile < n_tiles:
            first_row = first_row_of(tile)
            y = network(base, io, take_x(base, u32(0), io, first_row, first_row_of(u32(tile + step))))
            store_y(io[Y], io[Y_STRIDE], first_row, io[BATCH], u32(n_out), y)
            warp_barrier()
            tile = u32(tile + step)
        end(base)

    return KernelBody("inference", inference, (("n_tiles", "u32"),), IO_PARAMETERS)


def make_single_gradient_kernel(
    target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions
) -> KernelBody:
    """Encode, forward, loss, backward and scatter; dW stays in registers to the end, then goes to the block's row."""
    target = target.storing(plan.dtype)
    shared_base = make_aligned_base(target, plan.shared_alignment)
    before_weight_gradients, after_weight_gradients = make_exchange(
        target, plan.exchange, by_wgmma=any(layer.by_warpgroups for layer in plan.layers)
    )
    block_index, n_blocks = make_indices(target).block, make_indices(target).n_blocks
    load_all, need = make_load_weights(target, plan, layer_offsets(spec))
    begin, take_x, end = make_features(target, spec, plan, options)
    h_keepers, d_keepers = (
        [
            make_tile_keeper(
                target, tile, FragmentShape(plan.rows, tile.columns), in_registers=plan.remembers_in_registers
            )
            for tile in tiles
        ]
        for tiles in (plan.h, plan.d)
    )
    network = make_network_gradient(target, spec, plan, options, need, h_keepers, d_keepers)
    zeros = make_zeros(target, n_accumulators(plan.layers))
    weight_gradients = make_weight_gradients_from(target, plan.layers)
    write = make_write_partial_sums(target, plan.layers, plan.scratch)
    block_sum, store_loss = make_block_sum(target, plan.threads), make_store_loss(target)
    first_row_of, u32, f32 = make_first_row_of(target, plan), target.u32, target.f32
    encoding_backward = make_features_backward(target, spec, plan, options, need)
    prefetch = (
        make_prefetch(target, spec, plan, options)
        if plan.prefetches
        else target.device(lambda base, io, first_row: None)
    )

    distance = distance_of_tiles(plan)

    def gradient(n_tiles, partial_sums, row_bytes, losses, io):
        base = shared_base()
        tile, step, shift = u32(block_index()), u32(n_blocks()), u32(0)
        begin(base, io, first_row_of(tile))
        load_all(base, io)
        accumulators, total = zeros(), f32(0)
        while tile < n_tiles:
            first_row, following = first_row_of(tile), first_row_of(u32(tile + step))
            prefetch(base, io, following)
            x = take_x(base, shift, io, first_row, following)
            d, value = network(base, io, u32(0), first_row, x)
            total = total + value
            encoding_backward(base, io, first_row, d)
            before_weight_gradients()
            accumulators = weight_gradients(base, u32(base + shift), accumulators)
            after_weight_gradients()
            tile, shift = u32(tile + step), u32(u32(distance) - shift)
        end(base)
        write(base, accumulators, partial_sums, partial_sums, row_bytes, block_index(), u32(0), io[BAD], io[MARK])
        store_loss(losses, block_index(), block_sum(base, total))

    parameters = (
        ("n_tiles", "u32"),
        ("partial_sums", "u64"),
        ("row_bytes", "u32"),
        ("losses", "u64"),
    )
    return KernelBody("gradient", gradient, parameters, IO_PARAMETERS)


def make_features_backward(target, spec, plan, options, need) -> Callable:
    """backward(base, io, first_row, d): dL/d(features) = d W_0 through the dx tile to the encoding; or nothing."""
    if not options.encoding_gradient:

        def nothing(base, io, first_row, d):
            return

        return target.device(nothing)
    weights = plan.weights.weights[0]
    shape = FragmentShape(plan.rows, plan.dx.columns)
    product, pack = make_backward_product(target, weights, plan.rows), make_pack(target, shape)
    store = make_store_fragment(target, plan.dx, shape)
    encode_backward = make_encode_backward(target, spec, plan, options)
    need_first, (_, warp_barrier, _) = need[0], make_barriers(target)
    note_not_finite = make_note_not_finite(target, shape)

    def features_backward(base, io, first_row, d):
        need_first(base, io)
        gradient = pack(product(base, d))
        note_not_finite(gradient, io[BAD], io[MARK])
        store(base, gradient)
        warp_barrier()
        encode_backward(base, io, first_row)

    return target.device(features_backward)


def make_store_loss(target: Target):
    @target.intrinsic(["u64", "u32", "f32"], "void")
    def store_loss(e, losses, block, total):
        with e.when(e.equal(e.thread(), 0)):
            e.store_global(e.address(losses, block, 4), "f32", [total])

    return store_loss


def make_propagate_kernel(target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions) -> KernelBody:
    """The staged plans' first kernel: as the single one, but fragments are saved and dW is left to others."""
    target = target.storing(plan.dtype)
    shared_base = make_aligned_base(target, plan.shared_alignment)
    _, warp_barrier, _ = make_barriers(target)
    indices = make_indices(target)
    warp_index, block_index, n_blocks = indices.warp, indices.block, indices.n_blocks
    load_all, need = make_load_weights(target, plan, layer_offsets(spec))
    encode = make_encode(target, spec, plan, options)
    load_x = make_load_fragment(target, plan.x, FragmentShape(plan.rows, plan.x.columns))
    h_units, d_units, _ = saved_units(spec, plan.rows, target.format.packed_words)
    fan_ins = [packed_registers(target, FragmentShape(plan.rows, fan_in)) for _, fan_in in spec.layer_shapes]
    fan_outs = [packed_registers(target, FragmentShape(plan.rows, fan_out)) for fan_out, _ in spec.layer_shapes]
    h_keepers = [make_saved_keeper(target, u, n) for u, n in zip(h_units, fan_ins, strict=True)]
    d_keepers = [make_saved_keeper(target, u, n) for u, n in zip(d_units, fan_outs, strict=True)]
    keep_x = h_keepers[0].keep
    network = make_network_gradient(target, spec, plan, options, need, h_keepers[1:], d_keepers)
    block_sum, store_loss = make_block_sum(target, plan.threads), make_store_loss(target)
    barrier = make_barriers(target).barrier
    encoding_backward = make_features_backward(target, spec, plan, options, need)
    first_row_of, u32, f32, warps = make_first_row_of(target, plan), target.u32, target.f32, plan.warps

    def propagate(n_tiles, losses, io):
        base = shared_base()
        load_all(base, io)
        total = f32(0)
        tile, step = u32(block_index()), u32(n_blocks())
        while tile < n_tiles:
            first_row = first_row_of(tile)
            slot = u32(u32(tile * u32(warps)) + warp_index())
            encode(base, io, first_row)
            warp_barrier()
            x = load_x(base)
            keep_x(base, io, slot, x)
            d, value = network(base, io, slot, first_row, x)
            total = total + value
            warp_barrier()
            encoding_backward(base, io, first_row, d)
            warp_barrier()
            tile = u32(tile + step)
        barrier()
        store_loss(losses, block_index(), block_sum(base, total))

    parameters = (("n_tiles", "u32"), ("losses", "u64"))
    return KernelBody("propagate", propagate, parameters, IO_PARAMETERS)


def make_weight_gradient_kernel(
    target: Target, spec: ModelSpec, plan: KernelPlan, layers: tuple[int, ...]
) -> KernelBody:
    """The staged plans' second kernel, for layers of one shape (the grid's y index counts through `layers`)."""
    target = target.storing(plan.dtype)
    shared_base = make_aligned_base(target, plan.shared_alignment)
    barrier, _, _ = make_barriers(target)
    indices = make_indices(target)
    warp_index, block_index, block_row, n_blocks = indices.warp, indices.block, indices.block_row, indices.n_blocks
    (h_tile,), (d_tile,) = plan.h, plan.d
    h_shape, d_shape = FragmentShape(plan.rows, h_tile.columns), FragmentShape(plan.rows, d_tile.columns)
    restore_h = make_restore(target, packed_registers(target, h_shape), constant=True)
    restore_d = make_restore(target, packed_registers(target, d_shape), constant=True)
    store_h, store_d = make_store_fragment(target, h_tile, h_shape), make_store_fragment(target, d_tile, d_shape)
    h_units, d_units, _ = saved_units(spec, plan.rows, target.format.packed_words)
    offsets = layer_offsets(spec)
    h_units_of = target.constant(np.array([h_units[i] for i in layers], np.uint32))
    d_units_of = target.constant(np.array([d_units[i] for i in layers], np.uint32))
    offset_of = target.constant(np.array([offsets[i] for i in layers], np.uint32))
    starts = bias_offsets(spec) or offsets  # of no use where there are no biases
    bias_offset_of = target.constant(np.array([starts[i] for i in layers], np.uint32))
    zeros = make_zeros(target, n_accumulators(plan.layers))
    weight_gradients = make_weight_gradients(target, plan.layers)
    write = make_write_partial_sums(target, plan.layers, plan.scratch)
    region, u32, warps = make_region(target), target.u32, plan.warps

    @target.intrinsic(["u64", "u32"], "u64")
    def parameter_address(e, partial_sums, offset):
        return e.address(partial_sums, offset, 4)

    def weight_gradient(saved, n_slots, n_tiles, partial_sums, row_bytes, accumulate, bad, mark):
        base = shared_base()
        layer = block_row()
        h_saved = region(saved, n_slots, h_units_of(layer))
        d_saved = region(saved, n_slots, d_units_of(layer))
        accumulators = zeros()
        tile, step = u32(block_index()), u32(n_blocks())
        while tile < n_tiles:
            slot = u32(u32(tile * u32(warps)) + warp_index())
            store_h(base, restore_h(h_saved, slot))
            store_d(base, restore_d(d_saved, slot))
            barrier()
            accumulators = weight_gradients(base, accumulators)
            barrier()
            tile = u32(tile + step)
        place = parameter_address(partial_sums, offset_of(layer))
        bias_place = parameter_address(partial_sums, bias_offset_of(layer))
        write(base, accumulators, place, bias_place, row_bytes, block_index(), accumulate, bad, mark)

    parameters = (
        ("saved", "u64"),
        ("n_slots", "u32"),
        ("n_tiles", "u32"),
        ("partial_sums", "u64"),
        ("row_bytes", "u32"),
        ("accumulate", "u32"),
        ("bad", "u64"),
        ("mark", "u32"),
    )
    return KernelBody("weight_gradient", weight_gradient, parameters)


def make_encoding_gradient_kernel(
    target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions
) -> KernelBody:
    """Backward pass of a bare encoding: its table's gradient and dL/dx for a given dL/dy, or for that of a loss, whose
    outputs are then computed first, in the tile in which their gradient will stand."""
    target = target.storing(plan.dtype)
    shared_base = make_aligned_base(target, plan.shared_alignment)
    barrier, warp_barrier, _ = make_barriers(target)
    block_index, n_blocks = make_indices(target).block, make_indices(target).n_blocks
    shape = FragmentShape(plan.rows, plan.dx.columns)
    pack, unpack, mask = make_pack(target, shape), make_unpack(target, shape), make_mask(target, shape)
    store, load = make_store_fragment(target, plan.dx, shape), make_load_fragment(target, plan.dx, shape)
    encode_backward = make_encode_backward(target, spec, plan, options)
    first_row_of, u32, f32, n_out = make_first_row_of(target, plan), target.u32, target.f32, spec.n_output_dims
    loss_gradient = make_loss_gradient(target, spec, options, shape)
    note_not_finite = make_note_not_finite(target, shape)

    if options.loss is None:

        def gradient_of_tile(base, io, first_row):
            g, total = loss_gradient(io, first_row, u32(0), u32(0))
            return pack(g), total

    else:
        encode = make_encode(target, spec, dataclasses.replace(plan, x=plan.dx), options)

        def gradient_of_tile(base, io, first_row):
            encode(base, io, first_row)
            warp_barrier()
            g, total = loss_gradient(io, first_row, u32(0), unpack(load(base)))
            warp_barrier()
            return pack(mask(g, first_row, io[BATCH], u32(n_out))), total

    gradient_of_tile = target.device(gradient_of_tile)
    block_sum, store_loss = make_block_sum(target, plan.threads), make_store_loss(target)

    def all_tiles(base, n_tiles, io):
        total = f32(0)
        tile, step = u32(block_index()), u32(n_blocks())
        while tile < n_tiles:
            first_row = first_row_of(tile)
            dx, value = gradient_of_tile(base, io, first_row)
            total = total + value
            note_not_finite(dx, io[BAD], io[MARK])
            store(base, dx)
            warp_barrier()
            encode_backward(base, io, first_row)
            warp_barrier()
            tile = u32(tile + step)
        return total

    all_tiles = target.device(all_tiles)
    if options.loss is None:

        def gradient(n_tiles, io):
            all_tiles(shared_base(), n_tiles, io)

        return KernelBody("encoding_gradient", gradient, (("n_tiles", "u32"),), IO_PARAMETERS)

    def gradient_and_loss(n_tiles, losses, io):
        base = shared_base()
        total = all_tiles(base, n_tiles, io)
        barrier()
        store_loss(losses, block_index(), block_sum(base, total))

    own = (("n_tiles", "u32"), ("losses", "u64"))
    return KernelBody("encoding_gradient", gradient_and_loss, own, IO_PARAMETERS)
