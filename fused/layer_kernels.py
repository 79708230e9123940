"""Kernels of plans that go layer by layer (`layer_plan.py`): what one block does for one tile of one layer.

    encode             the encoding's items into rows of the x tile, from there to X
    layer              h = phi(x W^T + b), and phi' where it is kept
    output             y = phi_out(h W^T + b)
    output_gradient    the same, then loss and derivative: d of the output
    layer_backward     d_{l-1} = (d_l W) phi'
    features_gradient  dX = d_0 W_0
    encode_backward    from rows of dX through the dx tile to the table and to dL/dx

The weight gradient is in `layer_gradients.py`. The grid's x index counts tiles of samples, its y index tiles of
columns. Rows past the batch repeat its last one, and their d is 0.
"""

from __future__ import annotations

from collections.abc import Callable

from ..specs import ModelSpec
from .activations import make_activation, make_apply_derivative, make_gate
from .arithmetic import make_add, make_multiply
from .encoding_stage import make_encode, make_encode_backward
from .fragments import (
    FragmentShape,
    Target,
    make_load_columns,
    make_mask,
    make_note_not_finite,
    make_pack,
    make_shift,
    make_store_matrix,
    make_unpack,
    make_zeros,
)
from .layer_plan import ProductPlan
from .matrix_rows import make_copy_rows, make_fetch_piece
from .mlp import make_add_product, make_block_sum
from .network_stage import make_output_gradient
from .plan import KernelPlan, keeps_gate
from .stage_io import BATCH, IO_PARAMETERS, Y_STRIDE, GradientOptions, InferenceOptions, KernelBody, Y
from .tiles import HALF, make_barriers, make_first_row_of, make_indices, make_load_fragment, make_store_fragment

OPERANDS = (
    ("operand", "u64"),  # [n_rows, depth], row-major without gaps
    ("weights", "u64"),  # [depth, width] where they are taken as they stand, else [width, depth]
    ("n_rows", "u32"),
    ("depth", "u32"),
    ("width", "u32"),
)
LAYER_PARAMETERS = (
    *OPERANDS,
    ("own_width", "u32"),  # of `width`, without padding
    ("biases", "u64"),
    ("result", "u64"),  # [n_rows, width]
    ("gates", "u64"),  # [n_rows, width]
)
BACKWARD_PARAMETERS = (
    *OPERANDS,
    ("own_width", "u32"),
    ("state", "u64"),  # [n_rows, width]: phi', or the outputs that it is taken from
    ("result", "u64"),
)
FEATURES_PARAMETERS = (*OPERANDS, ("result", "u64"), ("bad", "u64"), ("mark", "u32"))


def _make_places(target: Target, plan: ProductPlan) -> tuple[Callable, Callable, Callable]:
    """(first_row(), own_row(), first_column()): of the block's tile, of this warp's part of it, and of its columns."""
    block_index, block_row = make_indices(target).block, make_indices(target).block_row
    first_row_of, u32, tile_rows, columns = make_first_row_of(target, plan), target.u32, plan.tile_rows, plan.columns

    def first_row():
        return u32(block_index() * u32(tile_rows))

    def own_row():
        return first_row_of(block_index())

    def first_column():
        return u32(block_row() * u32(columns))

    return target.device(first_row), target.device(own_row), target.device(first_column)


def make_tiled_product(target: Target, plan: ProductPlan) -> Callable:
    """product(base, operand, weights, n_rows, depth, width) -> this warp's part of the block's tile, in accumulator
    form. All warps are done with shared memory when it returns."""
    fetch_operand = make_fetch_piece(target, plan.operand, plan.threads)
    fetch_weights = make_fetch_piece(target, plan.weights, plan.threads)
    load = make_load_fragment(target, plan.operand, FragmentShape(plan.rows, plan.depth))
    add_product = make_add_product(target, plan.weights, plan.rows, transposed=plan.transposed)
    zeros = make_zeros(target, FragmentShape(plan.rows, plan.columns).n_elements)
    barrier, _, copy_wait = make_barriers(target)
    first_row, _, first_column = _make_places(target, plan)
    u32, piece_depth, piece_bytes, transposed = target.u32, plan.depth, plan.piece_bytes, plan.transposed

    def fetch(base, operand, weights, n_rows, depth, width, start):
        fetch_operand(base, operand, u32(depth * u32(HALF)), first_row(), n_rows, start, depth)
        if transposed:
            fetch_weights(base, weights, u32(width * u32(HALF)), start, depth, first_column(), width)
        else:
            fetch_weights(base, weights, u32(depth * u32(HALF)), first_column(), width, start, depth)

    fetch = target.device(fetch)

    def product(base, operand, weights, n_rows, depth, width):
        fetch(base, operand, weights, n_rows, depth, width, u32(0))
        sums, start, here, there = zeros(), u32(0), base, u32(base + u32(piece_bytes))
        while start < depth:
            copy_wait()
            barrier()  # the piece is there, and everyone is done with the one before
            following = u32(start + u32(piece_depth))
            if following < depth:
                fetch(there, operand, weights, n_rows, depth, width, following)
            sums = add_product(here, load(here), sums)
            start, here, there = following, there, here
        barrier()
        return sums

    return target.device(product)


def _make_add_biases(target: Target, spec: ModelSpec, shape: FragmentShape) -> Callable:
    """add_biases(z, biases, first_column, width) -> z + b, as a matrix [1, width] that every row reads."""
    if spec.network.bias:
        load, add, map_values, u32 = (
            make_load_columns(target, shape, target.format.dtype),
            make_add(target),
            target.map_fragment,
            target.u32,
        )

        def add_biases(z, biases, first_column, width):
            return map_values(add, z, load(biases, u32(0), u32(0), u32(1 << 30), first_column, width))

    else:

        def add_biases(z, biases, first_column, width):
            return z

    return target.device(add_biases)


def _make_store(target: Target, plan: ProductPlan) -> Callable:
    """store(base, packed, matrix, width): this warp's part of the block's tile to its place in [., width]."""
    shape = FragmentShape(plan.rows, plan.columns)
    store_fragment = make_store_fragment(target, plan.result, shape)
    copy = make_copy_rows(target, plan.result, plan.rows, to_tile=False)
    shift, u32, (_, warp_barrier, _) = make_shift(target, plan.dtype), target.u32, make_barriers(target)
    _, own_row, first_column = _make_places(target, plan)

    def store(base, packed, matrix, width):
        warp_barrier()  # what this warp's rows of the tile held before has been read
        store_fragment(base, packed)
        warp_barrier()
        column = first_column()
        copy(base, shift(matrix, column), u32(width * u32(HALF)), own_row(), u32(width - column))

    return target.device(store)


def make_layer_kernel(target: Target, spec: ModelSpec, plan: ProductPlan, *, gates: bool) -> KernelBody:
    """A hidden layer of any size; `gates`: phi' is kept."""
    target = target.storing(plan.dtype)
    shared_base, product = target.dynamic_shared_base(), make_tiled_product(target, plan)
    shape = FragmentShape(plan.rows, plan.columns)
    add_biases, store = _make_add_biases(target, spec, shape), _make_store(target, plan)
    name, map_values = spec.network.activation, target.map_fragment
    activation, gate = make_activation(target, name), make_gate(target, name)
    mask, pack, u32, all_rows = make_mask(target, shape), make_pack(target, shape), target.u32, plan.rows
    _, _, first_column = _make_places(target, plan)

    def layer(operand, weights, n_rows, depth, width, own_width, biases, result, kept):
        base, column = shared_base(), first_column()
        z = add_biases(product(base, operand, weights, n_rows, depth, width), biases, column, width)
        own_columns = u32(own_width - column)
        store(base, pack(mask(map_values(activation, z), u32(0), u32(all_rows), own_columns)), result, width)
        if gates:
            store(base, pack(mask(map_values(gate, z), u32(0), u32(all_rows), own_columns)), kept, width)

    return KernelBody("layer", layer, LAYER_PARAMETERS)


def make_output_kernel(target: Target, spec: ModelSpec, plan: ProductPlan, options: InferenceOptions) -> KernelBody:
    target = target.storing(plan.dtype)
    shared_base, product = target.dynamic_shared_base(), make_tiled_product(target, plan)
    shape = FragmentShape(plan.rows, plan.columns)
    add_biases, map_values = _make_add_biases(target, spec, shape), target.map_fragment
    activation = make_activation(target, spec.network.output_activation)
    store_y, shift = make_store_matrix(target, shape, options.output_dtype), make_shift(target, options.output_dtype)
    _, own_row, first_column = _make_places(target, plan)
    u32, n_out = target.u32, spec.n_output_dims

    def output(operand, weights, n_rows, depth, width, biases, io):
        column = first_column()
        z = add_biases(product(shared_base(), operand, weights, n_rows, depth, width), biases, column, width)
        y, n_left = map_values(activation, z), u32(u32(n_out) - column)
        store_y(shift(io[Y], column), io[Y_STRIDE], own_row(), io[BATCH], n_left, y)

    return KernelBody("output", output, (*OPERANDS, ("biases", "u64")), IO_PARAMETERS)


def make_output_gradient_kernel(
    target: Target, spec: ModelSpec, plan: ProductPlan, options: GradientOptions
) -> KernelBody:
    """`losses`: one number a block, [column tiles, row tiles]."""
    target = target.storing(plan.dtype)
    shared_base, product = target.dynamic_shared_base(), make_tiled_product(target, plan)
    shape = FragmentShape(plan.rows, plan.columns)
    add_biases, store, pack = _make_add_biases(target, spec, shape), _make_store(target, plan), make_pack(target, shape)
    output_gradient = make_output_gradient(target, spec, options, shape)
    block_sum = make_block_sum(target, plan.threads)
    indices = make_indices(target)
    block_index, block_row, n_blocks = indices.block, indices.block_row, indices.n_blocks
    _, own_row, first_column = _make_places(target, plan)
    u32 = target.u32

    @target.intrinsic(["u64", "u32", "f32"], "void")
    def store_loss(e, losses, index, total):
        with e.when(e.equal(e.thread(), 0)):
            e.store_global(e.address(losses, index, 4), "f32", [total])

    def gradient(operand, weights, n_rows, depth, width, biases, result, losses, io):
        base, column = shared_base(), first_column()
        z = add_biases(product(base, operand, weights, n_rows, depth, width), biases, column, width)
        g, total = output_gradient(io, own_row(), column, z)
        store(base, pack(g), result, width)
        index = u32(u32(block_row() * n_blocks()) + block_index())
        store_loss(losses, index, block_sum(base, total))

    parameters = (*OPERANDS, ("biases", "u64"), ("result", "u64"), ("losses", "u64"))
    return KernelBody("output_gradient", gradient, parameters, IO_PARAMETERS)


def make_layer_backward_kernel(target: Target, spec: ModelSpec, plan: ProductPlan) -> KernelBody:
    """d of a hidden layer from d of the next one: `operand` [n_rows, depth] and its weights [depth, width]."""
    target = target.storing(plan.dtype)
    shared_base, product = target.dynamic_shared_base(), make_tiled_product(target, plan)
    shape = FragmentShape(plan.rows, plan.columns)
    store, pack, unpack = _make_store(target, plan), make_pack(target, shape), make_unpack(target, shape)
    copy = make_copy_rows(target, plan.result, plan.rows, to_tile=True)
    load = make_load_fragment(target, plan.result, shape)
    shift, (_, warp_barrier, _) = make_shift(target, plan.dtype), make_barriers(target)
    mask, u32, all_rows = make_mask(target, shape), target.u32, plan.rows
    apply = make_multiply(target) if keeps_gate(spec) else make_apply_derivative(target, spec.network.activation)
    map_values = target.map_fragment
    _, own_row, first_column = _make_places(target, plan)

    def backward(operand, weights, n_rows, depth, width, own_width, state, result):
        base, column = shared_base(), first_column()
        g = product(base, operand, weights, n_rows, depth, width)
        copy(base, shift(state, column), u32(width * u32(HALF)), own_row(), u32(width - column))
        warp_barrier()
        g = map_values(apply, g, unpack(load(base)))
        store(base, pack(mask(g, u32(0), u32(all_rows), u32(own_width - column))), result, width)

    return KernelBody("layer_backward", backward, BACKWARD_PARAMETERS)


def make_features_gradient_kernel(target: Target, plan: ProductPlan) -> KernelBody:
    """dL/d(features), marked where it is not finite: it goes to the table, which no other kernel checks."""
    target = target.storing(plan.dtype)
    shared_base, product = target.dynamic_shared_base(), make_tiled_product(target, plan)
    shape = FragmentShape(plan.rows, plan.columns)
    store, pack, note_not_finite = (
        _make_store(target, plan),
        make_pack(target, shape),
        make_note_not_finite(target, shape),
    )

    def features_gradient(operand, weights, n_rows, depth, width, result, bad, mark):
        base = shared_base()
        gradient = pack(product(base, operand, weights, n_rows, depth, width))
        note_not_finite(gradient, bad, mark)
        store(base, gradient, result, width)

    return KernelBody("features_gradient", features_gradient, FEATURES_PARAMETERS)


def make_encode_kernel(
    target: Target, spec: ModelSpec, plan: KernelPlan, options: InferenceOptions | GradientOptions
) -> KernelBody:
    """Features of a tile of samples to `features` [., encoding width]."""
    target = target.storing(plan.dtype)
    shared_base, block_index = target.dynamic_shared_base(), make_indices(target).block
    first_row_of = make_first_row_of(target, plan)
    encode, (_, warp_barrier, _) = make_encode(target, spec, plan, options), make_barriers(target)
    copy, u32, columns = make_copy_rows(target, plan.x, plan.rows, to_tile=False), target.u32, plan.x.columns

    def encode_rows(features, io):
        base, first_row = shared_base(), first_row_of(block_index())
        encode(base, io, first_row)
        warp_barrier()
        copy(base, features, u32(columns * HALF), first_row, u32(columns))

    return KernelBody("encode", encode_rows, (("features", "u64"),), IO_PARAMETERS)


def make_encode_backward_kernel(
    target: Target, spec: ModelSpec, plan: KernelPlan, options: GradientOptions
) -> KernelBody:
    """From `features` [., encoding width], their gradients, to the table's gradient and to dL/dx."""
    target = target.storing(plan.dtype)
    shared_base, block_index = target.dynamic_shared_base(), make_indices(target).block
    first_row_of = make_first_row_of(target, plan)
    encode_backward, (_, warp_barrier, _) = make_encode_backward(target, spec, plan, options), make_barriers(target)
    copy, u32, columns = make_copy_rows(target, plan.dx, plan.rows, to_tile=True), target.u32, plan.dx.columns

    def encode_backward_rows(features, io):
        base, first_row = shared_base(), first_row_of(block_index())
        copy(base, features, u32(columns * HALF), first_row, u32(columns))
        warp_barrier()
        encode_backward(base, io, first_row)

    return KernelBody("encode_backward", encode_backward_rows, (("features", "u64"),), IO_PARAMETERS)
