"""The model inside a user's own kernel: a device function of one sample a lane, that the lanes of a warp call together.

    encode     each lane its own sample, from registers into its row of 32 rows of shared memory     (sinks.LaneMemory)
    network    the rows to fragments, all layers on the tensor cores, weights through L1             (row_products.py)
    results    the fragment's rows through the same shared memory to their lanes

The scratch is static, `block_size` rows in all, so a kernel may use its own dynamic shared memory. Nothing waits for
other warps. Wide networks take their samples in two halves of 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engines import EngineUnavailable
from ..layout import bias_blocks, n_network_params
from ..specs import TENSOR_CORE_WIDTH, ModelSpec, round_up
from .activations import make_activation
from .encoding_parts import ItemGroup, float_features, make_padding
from .encoding_stage import chain_stages, two_turns_at_a_time
from .encodings import make_encoding, refuse_what_is_missing
from .fragments import FragmentShape, Target
from .packed_activations import make_pack_output
from .plan import layer_offsets
from .row_products import ColumnOrder, make_clear_columns, make_load_rows, make_row_product, make_rows_to_lanes
from .sinks import LaneMemory
from .tiles import HALF, ROW_PADDING, make_barriers, make_get

LANES = 32
MAX_BLOCK_SIZE = 1024
STATIC_SHARED_BYTES = 48 * 1024  # that a kernel may have without asking the driver
MIN_STRIDE = 4 * 16 + ROW_PADDING  # a block of float32 results
MAX_WIDTH = 128
LAYER_REGISTERS = 128  # half of what a thread has; the rest is for the weights on their way, and for the caller


@dataclass(frozen=True)
class EmbeddedPlan:
    """A model's device function for blocks of at most `block_size` threads.

    Raises EngineUnavailable where a model has no device function, ValueError for a block size that can't be.
    """

    spec: ModelSpec
    block_size: int

    def __post_init__(self):
        refuse_embedding(self.spec)
        size = self.block_size
        if isinstance(size, bool) or not isinstance(size, int) or size % LANES or not LANES <= size <= MAX_BLOCK_SIZE:
            raise ValueError(f"block_size: {size!r} is not a multiple of {LANES} from {LANES} to {MAX_BLOCK_SIZE}")
        if self.shared_bytes > STATIC_SHARED_BYTES:
            most = STATIC_SHARED_BYTES // self.stride // LANES * LANES
            hint = f"take a block_size of at most {most}" if most else "its encoding is too wide for a device function"
            raise ValueError(
                f"block_size: {size} threads of this model need {self.shared_bytes:,} bytes of static shared memory, "
                f"a kernel has {STATIC_SHARED_BYTES:,}; {hint}"
            )

    @property
    def n_warps(self) -> int:
        return self.block_size // LANES

    @property
    def features(self) -> ColumnOrder:
        return ColumnOrder(round_up(self.spec.encoding_width, TENSOR_CORE_WIDTH))

    @property
    def stride(self) -> int:
        """Bytes of a lane's row. As in a tile, an odd multiple of 16."""
        return max(HALF * self.features.columns + ROW_PADDING, MIN_STRIDE)

    @property
    def shared_bytes(self) -> int:
        return self.block_size * self.stride

    @property
    def rows(self) -> int:
        """Samples at a time: 32 where the registers hold a layer of them, float16 in and float32 out, beside x."""
        widest = max(max(shape) for shape in self.spec.layer_shapes)
        registers = LANES * widest // 64 + LANES * widest // 32 + self.spec.n_input_dims
        return 32 if registers <= LAYER_REGISTERS else 16


def refuse_embedding(spec: ModelSpec) -> None:
    """Raises EngineUnavailable, naming the reason, if a model has no device function."""
    refuse_what_is_missing(spec.encoding)
    if spec.network is None:
        return
    widest = max(max(shape) for shape in spec.layer_shapes)
    if widest > MAX_WIDTH:
        raise EngineUnavailable(
            f"device functions hold a layer in registers, up to a width of {MAX_WIDTH}; this model is {widest} wide"
        )


def make_evaluate(target: Target, plan: EmbeddedPlan) -> Callable:
    """evaluate(x, parameters) -> y: a tuple of n_input_dims float32 and the address of the float16 parameters in, a
    tuple of n_output_dims float32 out. For all lanes of the block's first `n_warps` warps."""
    spec, u32 = plan.spec, target.u32
    encode = _make_encode(target, plan)
    shared_base = target.static_shared_base(plan.shared_bytes)
    rows_of_warp, row_of_lane = _make_places(target, plan)
    table_of = _make_table_of(target, n_network_params(spec))
    if spec.network is None:
        get = make_get(target, spec.n_output_dims, 8)

        def evaluate(x, parameters):
            place = row_of_lane(rows_of_warp(shared_base()))
            encode(x, table_of(parameters), place)
            return get(place, u32(0))

        return target.device(evaluate)
    _, warp_barrier, _ = make_barriers(target)
    network = _make_network(target, plan)
    results = make_rows_to_lanes(target, _result_order(spec), plan.stride, spec.n_output_dims)

    def evaluate(x, parameters):
        rows = rows_of_warp(shared_base())
        warp_barrier()  # brings together lanes that come from different branches of the caller's
        encode(x, table_of(parameters), row_of_lane(rows))
        warp_barrier()
        return results(rows, network(parameters, rows))

    return target.device(evaluate)


def _make_places(target: Target, plan: EmbeddedPlan) -> tuple[Callable, Callable]:
    """(rows_of_warp(base), row_of_lane(rows)): where this warp's scratch starts, and in it this lane's row."""
    stride = plan.stride

    @target.intrinsic(["u32"], "u32")
    def rows_of_warp(e, base):
        return e.add(base, e.mul(e.warp_of_block(), LANES * stride))

    @target.intrinsic(["u32"], "u32")
    def row_of_lane(e, rows):
        return e.add(rows, e.mul(e.lane(), stride))

    return rows_of_warp, row_of_lane


def _make_table_of(target: Target, n_network: int) -> Callable:
    @target.intrinsic(["u64"], "u64")
    def table_of(e, parameters):
        return e.address(parameters, n_network, HALF)

    return table_of


def _make_encode(target: Target, plan: EmbeddedPlan) -> Callable:
    """encode(x, table, place): the features of this lane's sample into its row."""
    spec = plan.spec
    memory = LaneMemory(target, "float32", aligned=True, n_inputs=spec.n_input_dims)
    parts = make_encoding(target, spec.encoding, memory, table_gradient=False, input_gradient=False)
    n_own = spec.encoding.n_output_dims
    n_padding = plan.features.columns - n_own
    padding = make_padding(target, float_features(target), memory, n_own, n_padding, parts.padding_value)
    return chain_stages(target, [_make_encode_group(target, group) for group in (*parts.encode, *padding.encode)])


def _make_encode_group(target: Target, group: ItemGroup) -> Callable:
    """All items of a group, by one lane."""
    work, u32, first, count = group.work, target.u32, group.first, group.count

    def take_turn(x, table, place, turn):
        work(u32(turn + u32(first)), (x, u32(0), u32(0), table, place))

    take_turn = target.device(take_turn)
    if group.by_sample:
        return two_turns_at_a_time(target, count, take_turn)

    def encode_group(x, table, place):
        for turn in range(count):
            take_turn(x, table, place, u32(turn))

    return target.device(encode_group)


def _result_order(spec: ModelSpec) -> ColumnOrder:
    return ColumnOrder(spec.padded_output_width, group=16)


def _make_network(target: Target, plan: EmbeddedPlan) -> Callable:
    """network(parameters, rows) -> y of this warp's 32 samples in accumulator form, in the order of `_result_order`."""
    u32, load = target.u32, make_load_rows(target, plan.features, plan.rows, plan.stride)
    layers = _make_layers(target, plan)
    if plan.rows == LANES:

        def network(parameters, rows):
            return layers(parameters, load(rows))

    else:
        half, (_, warp_barrier, _) = plan.rows * plan.stride, make_barriers(target)

        def network(parameters, rows):
            upper = layers(parameters, load(rows))
            warp_barrier()  # or the assembler keeps the weights for the other half, in registers that it doesn't have
            return upper + layers(parameters, load(u32(rows + u32(half))))

    return target.device(network)


def _make_layers(target: Target, plan: EmbeddedPlan) -> Callable:
    """layers(parameters, x) -> y in accumulator form, from features packed."""
    spec, rows, map_values = plan.spec, plan.rows, target.map_fragment
    offsets, last = layer_offsets(spec), len(spec.layer_shapes) - 1
    bias_offsets = [block.offset for block in bias_blocks(spec)] or [None] * len(offsets)
    orders = [plan.features, *(ColumnOrder(fan_out) for fan_out, _ in spec.layer_shapes[:-1]), _result_order(spec)]

    def make_layer(layer: int) -> Callable:
        shape = orders[layer], orders[layer + 1], rows
        product = make_row_product(target, *shape, offsets[layer], bias_offsets[layer])
        if layer == last:
            activation = make_activation(target, spec.network.output_activation)

            def output(parameters, h):
                return map_values(activation, product(parameters, h))

            return target.device(output)
        inner, order, width = make_layer(layer + 1), orders[layer + 1], spec.logical_layer_shapes[layer][0]
        clear, stored = _make_clear(target, order, rows, width), FragmentShape(rows, order.columns)
        pack_output = make_pack_output(target, spec.network.activation, stored, clear)

        def hidden(parameters, h):
            return inner(parameters, pack_output(product(parameters, h)))

        return target.device(hidden)

    return make_layer(0)


def _make_clear(target: Target, order: ColumnOrder, rows: int, width: int) -> Callable:
    """A hidden width that is no multiple of 16 is padded; its padding must stay 0."""
    if width < order.columns:
        return make_clear_columns(target, order, rows, width)

    def nothing_to_clear(values):
        return values

    return target.device(nothing_to_clear)
