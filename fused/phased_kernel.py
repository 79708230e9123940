"""The body of phased plans (`phased_plan.py`): propagate a block's tiles, then sum dW from what they left."""

from __future__ import annotations

from collections.abc import Callable

from ..specs import ModelSpec
from .copied_features import distance_of_tiles
from .fragments import Target, make_zeros
from .fuser import make_features, make_features_backward, make_store_loss
from .mlp import make_block_sum, make_weight_gradients, make_write_partial_sums, n_accumulators
from .network_stage import make_load_weights, make_network_gradient
from .phased_plan import GROUPS, PhasedPlan
from .plan import keeps_gate, layer_offsets
from .prefetch import make_prefetch
from .saved_images import (
    KNOWN_BY_SIGN,
    make_copy_image,
    make_image_keeper,
    make_sign_keeper,
    make_write_image_sums,
    slot_images,
)
from .stage_io import BAD, IO_PARAMETERS, MARK, SAVED, GradientOptions, KernelBody
from .summed_layers import (
    make_add_weight_gradient,
    make_await_first_weights,
    make_summed_network,
    make_tile_exchange,
)
from .tiles import make_aligned_base, make_barriers, make_divide_by, make_first_row_of, make_indices


def make_phased_gradient_kernel(
    target: Target, spec: ModelSpec, plan: PhasedPlan, options: GradientOptions
) -> KernelBody:
    """Gradients of a chunk of a batch. `saved` holds images of all its tiles, the blocks' pieces one after the other;
    `accumulate` is 0 to overwrite rows of partial sums, 1 to add to them."""
    target = target.storing(plan.dtype)
    shared_base = make_aligned_base(target, plan.shared_alignment)
    barrier = make_barriers(target).barrier
    block_index, n_blocks = make_indices(target).block, make_indices(target).n_blocks
    load_all, _ = make_load_weights(target, plan, layer_offsets(spec))
    begin, take_x, end = make_features(target, spec, plan, options, loads=not plan.keeps_x)
    first_row_of, distance = make_first_row_of(target, plan), distance_of_tiles(plan)
    propagate = _make_propagate(target, spec, plan, options, take_x)
    zeros, write_sums = make_zeros(target, max(1, n_accumulators(plan.summed))), _make_write_sums(target, plan)
    sum_layers = _make_sum_layers(target, spec, plan)
    block_sum, store_loss = make_block_sum(target, plan.threads), make_store_loss(target)
    u32, f32, divide = target.u32, target.f32, make_divide_by(target)

    def gradient(n_tiles, partial_sums, row_bytes, accumulate, losses, io):
        base = shared_base()
        total, tile, step, shift = f32(0), u32(block_index()), u32(n_blocks()), u32(0)
        begin(base, io, first_row_of(tile))
        load_all(base, io)
        tiles_a_block = divide(u32(u32(n_tiles + step) - u32(1)), step)[0]
        first_slot = u32(u32(tile * tiles_a_block) * u32(GROUPS))
        slot, sums = first_slot, zeros()
        while tile < n_tiles:
            value, sums = propagate(base, io, slot, shift, tile, step, sums)
            total = total + value
            slot = u32(slot + u32(GROUPS))
            tile, shift = u32(tile + step), u32(u32(distance) - shift)
        end(base)
        barrier()
        write_sums(base, io, sums, partial_sums, row_bytes, accumulate)
        sum_layers(base, io, first_slot, slot, partial_sums, row_bytes, accumulate)
        store_loss(losses, block_index(), block_sum(base, total))

    parameters = (
        ("n_tiles", "u32"),
        ("partial_sums", "u64"),
        ("row_bytes", "u32"),
        ("accumulate", "u32"),
        ("losses", "u64"),
    )
    return KernelBody("phased_gradient", gradient, parameters, IO_PARAMETERS)


def _make_propagate(
    target: Target, spec: ModelSpec, plan: PhasedPlan, options: GradientOptions, take_x: Callable
) -> Callable:
    """propagate(base, io, first_slot, shift, tile, step, sums) -> (sum of this thread's loss values, sums with dW of
    the tile's samples more). A warpgroup saves what belongs to its samples in a slot of its own, from `first_slot` on;
    `step` tiles further is the block's next; x is in the tile `shift` bytes behind the x tile."""
    _, warp_barrier, _ = make_barriers(target)
    _, need = make_load_weights(target, plan, layer_offsets(spec))
    h_images, d_images, slot_bytes = slot_images(spec, len(plan.layers))
    by_sign = spec.network.activation in KNOWN_BY_SIGN and not keeps_gate(spec)
    make_h_keeper = make_sign_keeper if by_sign else make_image_keeper
    h_keepers = [make_h_keeper(target, tile, slot_bytes) for tile in h_images[1:]]
    d_keepers = [make_image_keeper(target, tile, slot_bytes) for tile in d_images]
    network = _make_network(target, spec, plan, options, need, h_keepers, d_keepers)
    encoding_backward = make_features_backward(target, spec, plan, options, need)
    first_row_of, prefetch = make_first_row_of(target, plan), make_prefetch(target, spec, plan, options)
    u32, add_first = target.u32, _make_add_first(target, plan)
    await_first_weights = make_await_first_weights(target, plan)
    save_x = make_image_keeper(target, h_images[0], slot_bytes).keep if plan.layers else None
    if not plan.layers:

        def keep_x(base, io, slot, shift, x):
            return u32(base + shift)

    elif not plan.hands_on_packed:

        def keep_x(base, io, slot, shift, x):
            save_x(base, io, slot, x)
            return u32(base + shift)

    else:

        def keep_x(base, io, slot, shift, x):
            return save_x(base, io, slot, x)

    keep_x = target.device(keep_x)

    @target.intrinsic([], "u32")
    def warpgroup(e):
        return e.warpgroup()

    def propagate(base, io, first_slot, shift, tile, step, sums):
        first_row, following = first_row_of(tile), first_row_of(u32(tile + step))
        slot = u32(first_slot + warpgroup())
        await_first_weights()
        prefetch(base, io, following)
        x = take_x(base, shift, io, first_row, following)
        x = keep_x(base, io, slot, shift, x)
        d, total, sums = network(base, io, slot, first_row, x, sums)
        sums = add_first(base, u32(base + shift), sums)
        warp_barrier()
        encoding_backward(base, io, first_row, d)
        warp_barrier()
        return total, sums

    return target.device(propagate)


def _make_network(target: Target, spec, plan: PhasedPlan, options, need, h_keepers, d_keepers) -> Callable:
    """network(base, io, slot, first_row, x, sums) -> (d of layer 0, loss, sums); x is packed, or where layers are
    summed the address that its tile counts from."""
    if plan.summed:
        return make_summed_network(target, spec, plan, options, h_keepers, d_keepers)
    network = make_network_gradient(target, spec, plan, options, need, h_keepers, d_keepers)

    def network_without_sums(base, io, slot, first_row, x, sums):
        d, total = network(base, io, slot, first_row, x)
        return d, total, sums

    return target.device(network_without_sums)


def _make_add_first(target: Target, plan: PhasedPlan) -> Callable:
    """add(base, base_of_x, sums) -> sums with dW of layer 0 more, if that is summed here; behind it, nobody reads tiles
    that the next one of the batch overwrites."""
    _, before, after = make_tile_exchange(target)
    if plan.layers:

        def add(base, base_of_x, sums):
            return sums

    else:
        add_weight_gradient = make_add_weight_gradient(target, plan.summed, 0)

        def add(base, base_of_x, sums):
            before()
            sums = add_weight_gradient(base, base_of_x, sums)
            after()
            return sums

    return target.device(add)


def _make_write_sums(target: Target, plan: PhasedPlan) -> Callable:
    """write(base, io, sums, partial_sums, row_bytes, accumulate): dW of the layers summed in the first phase."""
    if not plan.summed:

        def nothing(base, io, sums, partial_sums, row_bytes, accumulate):
            return

        return target.device(nothing)
    write, block_index = make_write_partial_sums(target, plan.summed, plan.scratch), make_indices(target).block

    def write_sums(base, io, sums, partial_sums, row_bytes, accumulate):
        write(base, sums, partial_sums, partial_sums, row_bytes, block_index(), accumulate, io[BAD], io[MARK])

    return target.device(write_sums)


def _make_sum_layers(target: Target, spec: ModelSpec, plan: PhasedPlan) -> Callable:
    """sum(base, io, first_slot, last_slot, partial_sums, row_bytes, accumulate): dW of all layers over these slots.
    Shared memory is the caller's to lose; behind it, all threads of the block are done with it."""

    def chain(first: int) -> Callable:
        if first == len(plan.layers):
            return target.device(lambda base, io, first_slot, last_slot, partial_sums, row_bytes, accumulate: None)
        n_alike = _layers_alike(spec, len(plan.layers), first)
        sum_these, rest = _make_sum_alike(target, spec, plan, first, n_alike), chain(first + n_alike)

        def sum_and_go_on(base, io, first_slot, last_slot, partial_sums, row_bytes, accumulate):
            sum_these(base, io, first_slot, last_slot, partial_sums, row_bytes, accumulate)
            rest(base, io, first_slot, last_slot, partial_sums, row_bytes, accumulate)

        return target.device(sum_and_go_on)

    return chain(0)


def _layers_alike(spec: ModelSpec, n_saved: int, first: int) -> int:
    """How many saved layers from `first` on have one shape, as wide as high: their images, and their parameters, are
    as far apart as those of the first two."""
    shapes = spec.layer_shapes[first:n_saved]
    if shapes[0][0] != shapes[0][1]:
        return 1
    return next((i for i, shape in enumerate(shapes) if shape != shapes[0]), len(shapes))


def _make_sum_alike(target: Target, spec: ModelSpec, plan: PhasedPlan, first: int, n_layers: int) -> Callable:
    """The same for layers that are alike: one piece of code, gone through once a layer."""
    sum_layer, u32 = _make_sum_layer(target, spec, plan, first), target.u32
    image_bytes, (fan_out, fan_in) = plan.d[first].n_bytes, spec.layer_shapes[first]

    @target.intrinsic(["u64", "u32"], "u64")
    def images_of(e, saved, layer):
        return e.address(saved, layer, image_bytes)

    @target.intrinsic(["u64", "u32"], "u64")
    def sums_of(e, partial_sums, layer):
        return e.address(partial_sums, layer, 4 * fan_out * fan_in)

    def sum_alike(base, io, first_slot, last_slot, partial_sums, row_bytes, accumulate):
        layer = u32(0)
        while layer < u32(n_layers):
            saved, sums = images_of(io[SAVED], layer), sums_of(partial_sums, layer)
            sum_layer(base, io, saved, first_slot, last_slot, sums, row_bytes, accumulate)
            layer = u32(layer + u32(1))

    return target.device(sum_alike)


def _make_sum_layer(target: Target, spec: ModelSpec, plan: PhasedPlan, layer: int) -> Callable:
    """sum(base, io, saved, first_slot, last_slot, partial_sums, row_bytes, accumulate): one layer's, from the last slot
    to the first: what was saved last is still in the L2."""
    h_images, d_images, slot_bytes = slot_images(spec, len(plan.layers))
    copy_h = make_copy_image(target, plan.h[layer], h_images[layer], slot_bytes, plan.threads)
    copy_d = make_copy_image(target, plan.d[layer], d_images[layer], slot_bytes, plan.threads)
    layers = (plan.layers[layer],)
    zeros = make_zeros(target, layers[0].n_accumulators)
    add_products, write = make_weight_gradients(target, layers), make_write_image_sums(target, layers[0])
    barrier, block_index = make_barriers(target).barrier, make_indices(target).block
    u32, n_ahead, pair_bytes = target.u32, plan.stages - 1, plan.pair_bytes(layer)
    end = plan.stages * pair_bytes

    @target.intrinsic([], "void")
    def commit(e):
        e.copy_commit()

    @target.intrinsic([], "void")
    def arrived(e):
        """The pair after those multiplied so far is there, and nobody reads the memory of the one before it."""
        e.copy_wait(n_ahead - 1)
        e.fence_async()
        e.barrier()

    def copy(base, saved, stage, slot, first_slot, last_slot):
        if slot < last_slot:
            mirrored = u32(u32(u32(first_slot + last_slot) - u32(1)) - slot)
            copy_h(u32(base + stage), saved, mirrored)
            copy_d(u32(base + stage), saved, mirrored)
        commit()

    def next_stage(stage):
        following = u32(stage + u32(pair_bytes))
        return u32(0) if following == u32(end) else following

    copy, next_stage = target.device(copy), target.device(next_stage)

    def sum_layer(base, io, saved, first_slot, last_slot, partial_sums, row_bytes, accumulate):
        coming, free = first_slot, u32(0)
        while coming < u32(first_slot + u32(n_ahead)):
            copy(base, saved, free, coming, first_slot, last_slot)
            coming, free = u32(coming + u32(1)), next_stage(free)
        accumulators, slot, stage = zeros(), first_slot, u32(0)
        while slot < last_slot:
            arrived()
            copy(base, saved, free, coming, first_slot, last_slot)
            coming, free = u32(coming + u32(1)), next_stage(free)
            accumulators = add_products(u32(base + stage), accumulators)
            slot, stage = u32(slot + u32(1)), next_stage(stage)
        write(accumulators, partial_sums, row_bytes, block_index(), accumulate, io[BAD], io[MARK])
        barrier()

    return target.device(sum_layer)
