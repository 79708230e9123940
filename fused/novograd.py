"""NovoGrad (mirror of reference/novograd.py): moments of gradients that are normalised layer by layer.

Three kernels: partial sums of squares over every layer, in float64; a block that makes every layer's second moment and
the two factors of its first moments from them; the update. A layer is a weight matrix, and what is no matrix is one
more.
"""

from __future__ import annotations

import numpy as np

from ..parameter_sizes import ParameterSizes
from ..specs import NovogradSpec
from .fragments import Target
from .layer_optimizers import THREADS, LayerKernel, LayerLeaf, make_add_square, make_decayed, make_zero
from .memory_access import (
    make_is_below,
    make_load,
    make_load_word,
    make_store,
    make_store_copy,
    make_store_word,
    make_to_tuple,
)
from .mlp import make_block_sum
from .optimizer_contract import Slice
from .optimizer_state import StateBlock
from .stage_io import KernelBody
from .tiles import make_indices

PARAMETERS_A_BLOCK = 8 * THREADS  # at least, in sums over layers
MAX_BLOCKS = 512  # a layer


def layers_of(sizes: ParameterSizes) -> list[tuple[int, int]]:
    """(first parameter, number of parameters) of each layer; the last one may be empty."""
    slices = [*sizes.layers(), slice(sizes.n_matrix_params, sizes.n_params)]
    return [(layer.start, layer.stop - layer.start) for layer in slices]


def n_partials_of(sizes: ParameterSizes) -> int:
    """Blocks that share the sum over a layer."""
    largest = max(size for _, size in layers_of(sizes))
    return max(1, min(THREADS, -(-largest // PARAMETERS_A_BLOCK)))


class Novograd(LayerLeaf):
    state_arrays = {"first_moments": np.float32}

    def __init__(self, spec: NovogradSpec, where: Slice):
        super().__init__(spec, where)
        n_layers = len(layers_of(where.sizes))
        self.arrays["second_moments"] = StateBlock(np.zeros(n_layers, np.float32))
        self.scratch["partials"] = StateBlock(np.zeros(n_layers * n_partials_of(where.sizes), np.float64))
        self.scratch["factors"] = StateBlock(np.zeros(2 * n_layers, np.float32))

    @staticmethod
    def layer_kernels(spec: NovogradSpec, sizes: ParameterSizes) -> list[LayerKernel]:
        layers, n_partials = layers_of(sizes), n_partials_of(sizes)
        largest = max(size for _, size in layers)
        n_blocks = max(1, min(MAX_BLOCKS, -(-largest // THREADS)))
        return [
            LayerKernel(lambda target: make_norms_kernel(target, layers, n_partials), n_partials, len(layers)),
            LayerKernel(lambda target: make_moments_kernel(target, spec, len(layers), n_partials), 1),
            LayerKernel(lambda target: make_update_kernel(target, spec, layers), n_blocks, len(layers)),
        ]


def _make_tables(target: Target, layers: list[tuple[int, int]]):
    """(first parameter, number of parameters) of a layer by its number, from constant memory."""
    starts, counts = np.array(layers, np.uint32).T
    return target.constant(np.ascontiguousarray(starts)), target.constant(np.ascontiguousarray(counts))


def make_norms_kernel(target: Target, layers: list[tuple[int, int]], n_partials: int) -> KernelBody:
    """partials[layer, block] = the block's part of a layer's sum of squares, float64."""
    thread_index, _, _, block_index, block_row, n_blocks_of = make_indices(target)
    shared_base, u32 = target.dynamic_shared_base(), target.u32
    start_of, count_of = _make_tables(target, layers)
    is_below, load, store = make_is_below(target), make_load(target, "f32"), make_store(target, "f64")
    zero, add_square = make_zero(target), make_add_square(target)
    block_sum, to_tuple = make_block_sum(target, THREADS, "f64"), make_to_tuple(target, "f64")

    def body(handed, partials):
        layer = u32(block_row())
        start, count = u32(start_of(layer)), u32(count_of(layer))
        total, first = zero(), u32(block_index() * u32(THREADS))
        while first < count:
            index = u32(first + thread_index())
            total = add_square(total, load(handed, u32(start + index), is_below(index, count)))
            first = u32(first + u32(n_blocks_of() * u32(THREADS)))
        total = block_sum(shared_base(), total)
        place = u32(u32(layer * u32(n_partials)) + block_index())
        store(partials, place, to_tuple(total), is_below(thread_index(), u32(1)))

    return KernelBody("novograd_norms", body, (("handed", "u64"), ("partials", "u64")))


def make_moments_kernel(target: Target, spec: NovogradSpec, n_layers: int, n_partials: int) -> KernelBody:
    """v of every layer, and (beta1, (1 - beta1) / (sqrt(v) + epsilon)); beta1 = beta2 = 0 in the first update."""
    thread_index = make_indices(target).thread
    shared_base, u32, uniform = target.dynamic_shared_base(), target.u32, target.uniform
    is_below, word, store_word = make_is_below(target), make_load_word(target), make_store_word(target)
    load_partial, load, store = make_load(target, "f64"), make_load(target, "f32"), make_store(target, "f32")
    store_2, block_sum = make_store(target, "f32", 2), make_block_sum(target, THREADS, "f64")
    beta1, beta2, epsilon = float(spec.beta1), float(spec.beta2), float(spec.epsilon)

    @target.intrinsic(["f64", ("f32", 1), "u32"], ("f32", 3))
    def moments(e, squared_norm, old, n_updates):
        """(v, beta1, factor of the gradient)."""
        is_first, wide = e.equal(n_updates, 0), e.widen(old[0])
        mixed = e.fma(e.f64(beta2), wide, e.fmul(e.f64(1 - beta2), squared_norm))
        v = e.select(is_first, squared_norm, mixed)
        share = e.select(is_first, e.f64(1.0), e.f64(1 - beta1))
        factor = e.fdiv(share, e.fadd(e.square_root(v), e.f64(epsilon)))
        return [e.narrow(v), e.select(is_first, e.f32(0.0), e.f32(beta1)), e.narrow(factor)]

    @target.intrinsic([("f32", 3)], ("f32", 1))
    def first_of(e, values):
        return values[:1]

    @target.intrinsic([("f32", 3)], ("f32", 2))
    def others_of(e, values):
        return values[1:]

    def body(is_ready, n_updates, partials, second_moments, factors):
        if uniform(word(is_ready)) > u32(0):
            n, layer, thread = word(n_updates), u32(0), thread_index()
            is_first_thread = is_below(thread, u32(1))
            while layer < u32(n_layers):
                place = u32(u32(layer * u32(n_partials)) + thread)
                part = load_partial(partials, place, is_below(thread, u32(n_partials)))[0]
                squared_norm = block_sum(shared_base(), part)
                values = moments(squared_norm, load(second_moments, layer, u32(1)), n)
                store(second_moments, layer, first_of(values), is_first_thread)
                store_2(factors, u32(layer * u32(2)), others_of(values), is_first_thread)
                layer = u32(layer + u32(1))
            store_word(n_updates, u32(n + u32(1)), is_first_thread)

    parameters = ("is_ready", "n_updates", "partials", "second_moments", "factors")
    return KernelBody("novograd_moments", body, tuple((name, "u64") for name in parameters))


def make_update_kernel(target: Target, spec: NovogradSpec, layers: list[tuple[int, int]]) -> KernelBody:
    """m and w of every parameter."""
    thread_index, _, _, block_index, block_row, n_blocks_of = make_indices(target)
    u32, map_values, (start_of, count_of) = target.u32, target.map_fragment, _make_tables(target, layers)
    is_below, word = make_is_below(target), make_load_word(target)
    load, load_2 = make_load(target, "f32"), make_load(target, "f32", 2)
    store, store_copy, decayed = make_store(target, "f32"), make_store_copy(target), make_decayed(target)
    relative_decay, absolute_decay = np.float32(spec.relative_decay), np.float32(spec.absolute_decay)

    def update(g, w, m, kept, taken, learning_rate):
        m = kept * m + taken * g
        return decayed(w, relative_decay * learning_rate, absolute_decay * learning_rate) - learning_rate * m, m

    update = target.scalar(update)

    def body(is_ready, handed, factors, first_moments, weights, copy, learning_rate):
        layer = u32(block_row())
        start, count = u32(start_of(layer)), u32(count_of(layer))
        factor = load_2(factors, u32(layer * u32(2)), u32(1))
        ready, first = word(is_ready), u32(block_index() * u32(THREADS))
        while first < count:
            inside = u32(first + thread_index())
            index, active = u32(start + inside), u32(is_below(inside, count) * ready)
            g, w, m = load(handed, index, active), load(weights, index, active), load(first_moments, index, active)
            w, m = map_values(update, g, w, m, factor[0], factor[1], learning_rate)
            store(first_moments, index, m, active)
            store(weights, index, w, active)
            store_copy(copy, index, w, active)
            first = u32(first + u32(n_blocks_of() * u32(THREADS)))

    pointers = ("is_ready", "handed", "factors", "first_moments", "weights", "copy")
    parameters = (*((name, "u64") for name in pointers), ("learning_rate", "f32"))
    return KernelBody("novograd_update", body, parameters)
