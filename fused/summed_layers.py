"""The network's stages of phased plans whose last layers' dW is summed while tiles propagate (`PhasedPlan.summed`).

Two warpgroups share a tile of 128 samples: each propagates its own 64, and sums half of the rows of dW over all 128.
An output h of such a layer waits in a shared tile. On the way back, dW of the layer behind it and the gradient that
comes through that layer are one batch of products; then d of h's own layer takes the place of h. So every layer has
two barriers of the block: one before its dW, that all of d and h is there, one behind it, that nobody reads h any more.

dW takes most of the registers, so both operands of these layers' products are read from shared memory, h or d from its
tile.
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
from .saved_images import KNOWN_BY_SIGN, make_signs
from .stage_io import GradientOptions
from .swizzled_tile import SwizzledTile
from .tiles import make_barriers, make_load_fragment, make_store_fragment
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
def make_tile_product(target: Target, weights: SwizzledTile, tile: SwizzledTile) -> Callable:
    """product(base, base_of_tile) -> tile W^T in accumulator form."""

    @target.intrinsic(["u32", "u32"], ("f32", weights.rows // 2))
    def product(e, base, base_of_tile):
        (sums,) = e.wgmma([tile_product_chain(e, weights, base, tile, base_of_tile, transposed=False)])
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
    """network(base, io, slot, first_row, x, sums) -> (d of layer 0, loss, sums). x is packed; where the first layer is
    summed here too, it is the address that the x tile counts from.

    h_images, d_images   where outputs h_1 ... and gradients d_1 ... of the layers stay whose dW is not summed here
    """
    stage = _make_output_layer(target, spec, plan, options)
    for layer in range(len(spec.layer_shapes) - 2, -1, -1):
        if layer >= len(plan.layers):
            stage = _make_summed_layer(target, spec, plan, layer, stage)
        else:
            stage = _make_saved_layer(target, spec, plan, layer, h_images, d_images, stage)
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


def _make_summed_layer(target: Target, spec: ModelSpec, plan: PhasedPlan, layer: int, inner: Callable) -> Callable:
    """hidden(base, io, slot, first_row, base_of_h, sums) -> (d of this layer's z, loss, sums), `inner` being the next;
    h_in is in a tile that counts from `base_of_h`."""
    index = layer - len(plan.layers)
    weights = plan.weights.weights[layer]
    shape = FragmentShape(plan.rows, weights.rows)
    forward = make_tile_product(target, weights, plan.summed[index].h)
    pack_output = make_pack_output(
        target, spec.network.activation, shape, make_clear_padding(target, spec, layer, shape)
    )
    keep_h, recall_h = _next_h_keeper(target, spec, plan, layer)
    backward = _make_summing_backward(target, spec, plan, layer)
    own, before, after = make_tile_exchange(target)
    store_d = make_store_fragment(target, plan.summed[index].d, shape)

    def hidden(base, io, slot, first_row, base_of_h, sums):
        own()
        kept = keep_h(base, pack_output(forward(base, base_of_h)))
        d_next, total, sums = inner(base, io, slot, first_row, base, sums)
        before()
        d, sums = backward(base, sums, recall_h(base, kept))
        after()
        store_d(base, d)
        return d, total, sums

    return target.device(hidden)


def _make_saved_layer(
    target: Target, spec: ModelSpec, plan: PhasedPlan, layer: int, h_images: list, d_images: list, inner: Callable
) -> Callable:
    """hidden(base, io, slot, first_row, h_in, sums) -> (d of this layer's z, loss, sums), h_in packed."""
    shape = FragmentShape(plan.rows, plan.weights.weights[layer].rows)
    forward = make_forward_product(target, plan.weights.weights[layer], plan.rows)
    pack_output = make_pack_output(
        target, spec.network.activation, shape, make_clear_padding(target, spec, layer, shape)
    )
    keep_d = d_images[layer].keep
    if layer + 1 == len(plan.layers):  # what comes is summed
        keep_h, recall_h = _next_h_keeper(target, spec, plan, layer)
        backward, before = _make_summing_backward(target, spec, plan, layer), make_tile_exchange(target).before

        def hidden(base, io, slot, first_row, h_in, sums):
            kept = keep_h(base, pack_output(forward(base, h_in)))
            d_next, total, sums = inner(base, io, slot, first_row, base, sums)
            before()
            d, sums = backward(base, sums, recall_h(base, kept))
            keep_d(base, io, slot, d)
            return d, total, sums

        return target.device(hidden)
    keep_image, recall_image = h_images[layer].keep, h_images[layer].recall
    back = make_backward_product(target, plan.weights.weights[layer + 1], plan.rows)
    pack_gradient = make_pack_gradient(
        target, spec.network.activation, shape, make_clear_padding(target, spec, layer, shape)
    )

    def hidden(base, io, slot, first_row, h_in, sums):
        h = pack_output(forward(base, h_in))
        kept = keep_image(base, io, slot, h)
        d_next, total, sums = inner(base, io, slot, first_row, h, sums)
        d = pack_gradient(back(base, d_next), recall_image(base, io, slot, kept))
        keep_d(base, io, slot, d)
        return d, total, sums

    return target.device(hidden)


def _next_h_keeper(target: Target, spec: ModelSpec, plan: PhasedPlan, layer: int) -> tuple[Callable, Callable]:
    """(keep(base, packed) -> what stays in registers, recall(base, that) -> packed) of a layer's output, in the tile
    of the next layer's h, which d takes later; what the way back needs of it is read from there before, or is its
    signs."""
    tile = plan.summed[layer + 1 - len(plan.layers)].h
    shape = FragmentShape(plan.rows, tile.columns)
    store, load = make_store_fragment(target, tile, shape), make_load_fragment(target, tile, shape)
    signs, ones = make_signs(target, shape.n_packed)
    if spec.network.activation in KNOWN_BY_SIGN:

        def keep(base, packed):
            store(base, packed)
            return signs(packed)

        def recall(base, kept):
            return ones(kept)

    else:

        def keep(base, packed):
            store(base, packed)
            return packed

        def recall(base, kept):
            return load(base)

    return target.device(keep), target.device(recall)


def _make_summing_backward(target: Target, spec: ModelSpec, plan: PhasedPlan, layer: int) -> Callable:
    """backward(base, sums, h) -> (d of a layer, packed; sums with the next layer's dW more), d of which is in its
    tile."""
    weights, shape = plan.weights.weights[layer + 1], FragmentShape(plan.rows, plan.weights.weights[layer].rows)
    count, n_elements = n_accumulators(plan.summed), shape.n_elements
    add = make_add_and_go_back(target, plan.summed, layer + 1 - len(plan.layers), weights)
    sums_of = make_part(target, count + n_elements, 0, count)
    product_of = make_part(target, count + n_elements, count, n_elements)
    pack_gradient = make_pack_gradient(
        target, spec.network.activation, shape, make_clear_padding(target, spec, layer, shape)
    )

    def backward(base, sums, h):
        both = add(base, sums)
        return pack_gradient(product_of(both), h), sums_of(both)

    return target.device(backward)
