"""The network's stages of phased plans whose last layers' dW is summed while tiles propagate (`PhasedPlan.summed`).

Two warpgroups share a tile of 128 samples: each propagates its own 64, and sums half of the rows of dW over all 128.
An output h of such a layer waits in a shared tile. On the way back, dW of the layer behind it and the gradient that
comes through that layer are one batch of products; then d of h's own layer takes the place of h. So every layer has
two barriers of the block: one before its dW, that all of d and h is there, one behind it, that nobody reads h any more.

dW takes most of the registers, so both operands of all products are read from shared memory, h or d from its tile.
Layers in front, whose dW is summed later from what they save, hand on h and d in registers if dW leaves enough
(`PhasedPlan.hands_on_packed`), or in one tile of their own rows (`transit`), which a summed layer's h takes in between.

Where shared memory is short, h of the first summed layer stands where W_0 did (`PhasedPlan.lends`): nobody needs W_0
from the first product of a tile on. It is read anew behind dW of that layer, while d goes on through the layers in
front, and waited for before the next tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from ..specs import ModelSpec
from .fragments import FragmentShape, Target, make_pack
from .keepers import Keeper
from .mlp import WeightGradient, make_backward_product, make_forward_product, n_accumulators
from .network_stage import make_clear_padding, make_output_gradient
from .packed_activations import make_pack_gradient, make_pack_output
from .phased_plan import PhasedPlan
from .plan import layer_offsets
from .saved_images import KNOWN_BY_SIGN, make_signs
from .stage_io import PARAMETERS, GradientOptions
from .swizzled_tile import SwizzledTile
from .tiles import make_barriers, make_load_fragment, make_load_tile, make_publish_weights, make_store_fragment
from .warpgroup_mlp import tile_product_chain, weight_gradient_chains


class Exchange(NamedTuple):
    """What stands between writing tiles and reading them by wgmma.

    own()      this warpgroup has written its rows, and reads no others
    before()   the block has written all
    after()    nobody reads any more
    """

    own: Callable
    before: Callable
    after: Callable


@functools.cache
def make_tile_exchange(target: Target) -> Exchange:
    @target.intrinsic([], "void")
    def own(e):
        e.fence_async()
        e.warpgroup_barrier()

    @target.intrinsic([], "void")
    def before(e):
        e.fence_async()
        e.barrier()

    return Exchange(own, before, make_barriers(target).barrier)


@functools.cache
def make_part(target: Target, count: int, first: int, n: int) -> Callable:
    """part(values) -> n of `count` float32 values, from number `first` on."""

    @target.intrinsic([("f32", count)], ("f32", n))
    def part(e, values):
        return list(values[first : first + n])

    return part


@functools.cache
def make_tile_product(
    target: Target, weights: SwizzledTile, tile: SwizzledTile, *, transposed: bool = False
) -> Callable:
    """product(base, base_of_tile) -> tile W^T, or with `transposed` tile W, in accumulator form."""
    n_columns = weights.columns if transposed else weights.rows

    @target.intrinsic(["u32", "u32"], ("f32", n_columns // 2))
    def product(e, base, base_of_tile):
        (sums,) = e.wgmma([tile_product_chain(e, weights, base, tile, base_of_tile, transposed=transposed)])
        return sums

    return product


@functools.cache
def make_add_weight_gradient(target: Target, summed: tuple[WeightGradient, ...], index: int) -> Callable:
    """add(base, base_of_h, sums) -> sums, of layer `index` with d^T h more; its h counts from `base_of_h`."""
    count, span, layer = n_accumulators(summed), _span(summed, index), summed[index]

    @target.intrinsic(["u32", "u32", ("f32", count)], ("f32", count))
    def add(e, base, base_of_h, sums):
        (added,) = e.wgmma(weight_gradient_chains(e, base, [(layer, sums[span], base_of_h)]))
        return [*sums[: span.start], *added, *sums[span.stop :]]

    return add


@functools.cache
def make_add_and_go_back(
    target: Target, summed: tuple[WeightGradient, ...], index: int, weights: SwizzledTile
) -> Callable:
    """add(base, sums) -> (sums, d W), all in one tuple: as `make_add_weight_gradient`, and the backward product beside
    it."""
    count, span, layer = n_accumulators(summed), _span(summed, index), summed[index]

    @target.intrinsic(["u32", ("f32", count)], ("f32", count + weights.columns // 2))
    def add(e, base, sums):
        chains = weight_gradient_chains(e, base, [(layer, sums[span], base)])
        chains.append(tile_product_chain(e, weights, base, layer.d, base, transposed=True))
        added, g = e.wgmma(chains)
        return [*sums[: span.start], *added, *sums[span.stop :], *g]

    return add


def _span(summed: tuple[WeightGradient, ...], index: int) -> slice:
    start = n_accumulators(summed[:index])
    return slice(start, start + summed[index].n_accumulators)


def make_summed_network(
    target: Target,
    spec: ModelSpec,
    plan: PhasedPlan,
    options: GradientOptions,
    h_images: list[Keeper],
    d_images: list[Keeper],
) -> Callable:
    """network(base, io, slot, first_row, x, sums) -> (d of layer 0, packed; loss, sums). x is packed, if the first
    layers hand on what is; else the address that the x tile counts from.

    h_images, d_images   where outputs h_1 ... and gradients d_1 ... of the layers stay whose dW is not summed here
    """
    stage = _make_output_layer(target, spec, plan, options)
    for layer in range(len(spec.layer_shapes) - 2, -1, -1):
        if plan.hands_on_packed and layer + 1 < len(plan.layers):
            stage = _make_packed_layer(target, spec, plan, layer, h_images, d_images, stage)
        else:
            stage = _make_layer(target, spec, plan, layer, h_images, d_images, stage)
    return stage


def _make_output_layer(target: Target, spec: ModelSpec, plan: PhasedPlan, options: GradientOptions) -> Callable:
    """output(base, io, slot, first_row, base_of_h, sums) -> (its d, loss, sums)."""
    weights, own = plan.weights.weights[-1], make_tile_exchange(target).own
    shape = FragmentShape(plan.rows, weights.rows)
    forward = make_tile_product(target, weights, plan.summed[-1].h)
    output_gradient, u32 = make_output_gradient(target, spec, options, shape), target.u32
    pack, store = make_pack(target, shape), make_store_fragment(target, plan.summed[-1].d, shape)

    def output(base, io, slot, first_row, base_of_h, sums):
        own()
        g, total = output_gradient(io, first_row, u32(0), forward(base, base_of_h))
        d = pack(g)
        store(base, d)
        return d, total, sums

    return target.device(output)


def _make_packed_layer(
    target: Target, spec: ModelSpec, plan: PhasedPlan, layer: int, h_images: list, d_images: list, inner: Callable
) -> Callable:
    """hidden(base, io, slot, first_row, h_in, sums) -> (d of this layer's z, loss, sums), h_in and d packed; the next
    layer is saved too."""
    shape = FragmentShape(plan.rows, plan.weights.weights[layer].rows)
    forward = make_forward_product(target, plan.weights.weights[layer], plan.rows)
    backward = make_backward_product(target, plan.weights.weights[layer + 1], plan.rows)
    pack_output, pack_gradient = _make_packs(target, spec, layer, shape)
    keep_h, recall_h, keep_d = h_images[layer].keep, h_images[layer].recall, d_images[layer].keep

    def hidden(base, io, slot, first_row, h_in, sums):
        h = pack_output(forward(base, h_in))
        kept = keep_h(base, io, slot, h)
        d_next, total, sums = inner(base, io, slot, first_row, h, sums)
        d = pack_gradient(backward(base, d_next), recall_h(base, io, slot, kept))
        keep_d(base, io, slot, d)
        return d, total, sums

    return target.device(hidden)


def _make_packs(target: Target, spec: ModelSpec, layer: int, shape: FragmentShape) -> list[Callable]:
    """(pack_output, pack_gradient) of a hidden layer."""
    clear = make_clear_padding(target, spec, layer, shape)
    return [make(target, spec.network.activation, shape, clear) for make in (make_pack_output, make_pack_gradient)]


def _make_layer(
    target: Target, spec: ModelSpec, plan: PhasedPlan, layer: int, h_images: list, d_images: list, inner: Callable
) -> Callable:
    """hidden(base, io, slot, first_row, h_in, sums) -> (d of this layer's z, loss, sums), `inner` being the next; h_in
    is the address that its tile counts from, or packed where that is how it is handed on."""
    weights = plan.weights.weights[layer]
    shape = FragmentShape(plan.rows, weights.rows)
    if plan.hands_on_packed and layer < len(plan.layers):
        forward = make_forward_product(target, weights, plan.rows)
    else:
        forward = _make_forward_from_tile(target, weights, plan.input_tile(layer))
    pack_output, pack_gradient = _make_packs(target, spec, layer, shape)
    keep_h, recall_h = _make_h_keeper(target, spec, plan, layer, shape, h_images)
    back = _make_back(target, spec, plan, layer, shape)
    count, n_elements = n_accumulators(plan.summed), shape.n_elements
    sums_of = make_part(target, count + n_elements, 0, count)
    product_of = make_part(target, count + n_elements, count, n_elements)
    leave = _make_leave(target, spec, plan, layer)
    keep_d = _make_d_keeper(target, plan, layer, shape, d_images)

    def hidden(base, io, slot, first_row, h_in, sums):
        kept = keep_h(base, io, slot, pack_output(forward(base, h_in)))
        d_next, total, sums = inner(base, io, slot, first_row, base, sums)
        h = recall_h(base, io, slot, kept)
        both = back(base, sums)
        d = pack_gradient(product_of(both), h)
        leave(base, io)
        keep_d(base, io, slot, d)
        return d, total, sums_of(both)

    return target.device(hidden)


def _make_forward_from_tile(target: Target, weights: SwizzledTile, tile: SwizzledTile) -> Callable:
    own, product = make_tile_exchange(target).own, make_tile_product(target, weights, tile)

    def forward(base, base_of_tile):
        own()
        return product(base, base_of_tile)

    return target.device(forward)


def _make_h_keeper(
    target: Target, spec: ModelSpec, plan: PhasedPlan, layer: int, shape: FragmentShape, h_images: list
) -> tuple[Callable, Callable]:
    """(keep(base, io, slot, packed) -> what stays in registers, recall(base, io, slot, that) -> packed) of a layer's
    output: in the tile of the next layer's h and, if dW of that is not summed here, its image. What the way back needs
    of it is read from there, before d takes the place, or is its signs."""
    tile, n_saved = plan.input_tile(layer + 1), len(plan.layers)
    store_alone, (own, _, after) = make_store_fragment(target, tile, shape), make_tile_exchange(target)
    if plan.lends and layer + 1 == n_saved:
        free = after  # nobody reads W_0 any more
    elif plan.input_tile(layer).offset == tile.offset and not plan.hands_on_packed:
        free = own  # nor the tile's own rows
    else:
        free = target.device(lambda: None)

    def store(base, packed):
        free()
        store_alone(base, packed)

    store = target.device(store)
    if layer + 1 < n_saved:
        keep_image, recall = h_images[layer].keep, h_images[layer].recall

        def keep(base, io, slot, packed):
            store(base, packed)
            return keep_image(base, io, slot, packed)

        return target.device(keep), recall
    if spec.network.activation in KNOWN_BY_SIGN:
        signs, ones = make_signs(target, shape.n_packed)

        def keep(base, io, slot, packed):
            store(base, packed)
            return signs(packed)

        def recall(base, io, slot, kept):
            return ones(kept)

    else:
        load = make_load_fragment(target, tile, shape)

        def keep(base, io, slot, packed):
            store(base, packed)
            return packed

        def recall(base, io, slot, kept):
            return load(base)

    return target.device(keep), target.device(recall)


def _make_back(target: Target, spec: ModelSpec, plan: PhasedPlan, layer: int, shape: FragmentShape) -> Callable:
    """back(base, sums) -> (sums, d W of the next layer), all in one tuple, d being in its tile; the sums with the next
    layer's dW more, if that is summed here."""
    weights, count = plan.weights.weights[layer + 1], n_accumulators(plan.summed)
    own, before, _ = make_tile_exchange(target)
    if layer + 1 >= len(plan.layers):
        add = make_add_and_go_back(target, plan.summed, layer + 1 - len(plan.layers), weights)

        def back(base, sums):
            before()
            return add(base, sums)

        return target.device(back)
    product = make_tile_product(target, weights, plan.gradient_tile(layer + 1), transposed=True)

    @target.intrinsic([("f32", count), ("f32", shape.n_elements)], ("f32", count + shape.n_elements))
    def beside(e, sums, g):
        return [*sums, *g]

    def back(base, sums):
        own()
        return beside(sums, product(base, base))

    return target.device(back)


def _make_leave(target: Target, spec: ModelSpec, plan: PhasedPlan, layer: int) -> Callable:
    """leave(base, io) behind the way back through the next layer: nobody reads its tiles any more; and what stood in
    the place of W_0 gives it back."""
    own, _, after = make_tile_exchange(target)
    reload = make_load_tile(target, plan.weights.weights[0], plan.threads, layer_offsets(spec)[0])
    if layer + 1 < len(plan.layers):

        def leave(base, io):
            own()

    elif plan.lends and layer + 1 == len(plan.layers):

        def leave(base, io):
            after()
            reload(base, io[PARAMETERS])

    else:

        def leave(base, io):
            after()

    return target.device(leave)


def _make_d_keeper(target: Target, plan: PhasedPlan, layer: int, shape: FragmentShape, d_images: list) -> Callable:
    """keep(base, io, slot, d): in its tile, if a layer in front or dW needs it there, and in its image, if dW is not
    summed here."""
    is_saved = layer < len(plan.layers)
    if is_saved:
        keep_image = d_images[layer].keep
    if is_saved and (layer == 0 or plan.hands_on_packed):

        def keep(base, io, slot, d):
            keep_image(base, io, slot, d)

        return target.device(keep)
    store = make_store_fragment(target, plan.gradient_tile(layer), shape)
    if is_saved:

        def keep(base, io, slot, d):
            keep_image(base, io, slot, d)
            store(base, d)

    else:

        def keep(base, io, slot, d):
            store(base, d)

    return target.device(keep)


def make_await_first_weights(target: Target, plan: PhasedPlan) -> Callable:
    """await_them(): W_0 is there again, before the first product of a tile."""
    if not plan.lends:
        return target.device(lambda: None)
    return make_publish_weights(target, plan.swizzled)
