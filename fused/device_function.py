"""A model's device function and the argument that brings its parameters into a user's kernel, as Numba sees them.

Imports Numba, which nothing else asks for before a kernel is compiled; so this file is imported when it is needed.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from llvmlite import ir
from numba import types

from ..specs import ModelSpec
from .embedding import LANES, EmbeddedPlan, make_evaluate
from .fragments import Target
from .intrinsics import numba_intrinsic
from .numba_bridge import ArgHint, PrimitiveModel, Record, TypingError, launched_block, register_model
from .target import cuda_target


class ParamsType(Record):
    """Numba's type of the parameters of models of one spec; in a kernel, an address.

    It is a record only because numba-cuda passes a record as one pointer, for which it asks the argument, with the
    stream, at every launch.

    block_sizes   of the device functions made for such models
    """

    def __init__(self, spec: ModelSpec):
        digest = hashlib.sha256(repr(spec).encode()).hexdigest()[:12]
        self.spec, self.block_sizes = spec, set()
        self.fields, self.size, self.aligned, self.bitwidth = {}, 8, True, 64
        network = "" if spec.network is None else ", ".join(f"{i}x{o}" for o, i in spec.layer_shapes) + ", "
        name = f"device_params({spec.n_input_dims} -> {spec.n_output_dims}, {network}{digest})"
        types.Type.__init__(self, name)

    @property
    def key(self):
        return self.name

    def __bool__(self):
        return True  # though a record without fields has the length 0

    def can_convert_to(self, typing_context, other):
        return None


@register_model(ParamsType)
class _AddressModel(PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, ir.IntType(64))


params_type = functools.cache(ParamsType)


@dataclass(frozen=True)
class _Address:
    ptr: int


class DeviceParams(ArgHint):
    """The parameters of one model, as an argument of kernels that call its device function.

    What a kernel sees are the parameters at its launch: those of all training steps before it, on whatever stream.
    """

    def __init__(self, spec: ModelSpec, address_for: Callable[[int], int], launched: Callable[[], None]):
        """address_for(stream): the address now; what comes on the stream next may read there.
        launched(): it has come."""
        self._kind, self._address_for, self._launched = params_type(spec), address_for, launched

    @property
    def _numba_type_(self) -> ParamsType:
        return self._kind

    def __repr__(self) -> str:
        return f"<{self._kind.name}>"

    def to_device(self, retr, stream=0) -> _Address:
        check_block(self._kind, launched_block())
        handle = getattr(stream, "handle", stream)
        address = self._address_for(int(handle))
        retr.append(self._launched)  # called behind the launch
        return _Address(address)


def check_block(kind: ParamsType, block: tuple[int, ...] | None) -> None:
    """Raises ValueError for a launch that no device function for such parameters can be called from."""
    if block is None or not kind.block_sizes:
        return
    threads, most = math.prod(block), max(kind.block_sizes)
    if threads > most:
        raise ValueError(
            f"a block of {threads} threads calls a device function that was made for {most}: launch with at most "
            f"{most}, or make it with device_function(block_size={-(-threads // LANES) * LANES})"
        )
    if threads % LANES:
        raise ValueError(f"a block of {threads} threads: a device function needs whole warps, multiples of {LANES}")


def _make_open_arguments(spec: ModelSpec):
    """open(x, params) -> (x, address of the parameters); raises TypingError where they are not the model's."""
    kind, inputs = params_type(spec), types.UniTuple(types.float32, spec.n_input_dims)

    def open_arguments(typing_context, x, params):
        if x != inputs:
            raise TypingError(
                f"numba-tcnn: x must be a tuple of {spec.n_input_dims} float32, one for each input dim of the model, "
                f"not {x}; write (numba.float32(a), ...)"
            )
        if not isinstance(params, ParamsType):
            raise TypingError(
                f"numba-tcnn: params must be the model's device_params, passed to the kernel as it is, not {params}"
            )
        if params != kind:
            raise TypingError(
                f"numba-tcnn: params are those of another model: {params} in the device function for {kind}"
            )

        def codegen(context, builder, signature, values):
            return context.make_tuple(builder, signature.return_type, list(values))

        return types.Tuple((inputs, types.uint64))(inputs, kind), codegen

    return numba_intrinsic(open_arguments)


def _make_no_result(target: Target, plan: EmbeddedPlan):
    """(is_in_block(), no_result()): whether this warp has scratch, and NaN for one that has none."""
    n_warps, n_out = plan.n_warps, plan.spec.n_output_dims

    @target.intrinsic([], "u32")
    def is_in_block(e):
        return e.select(e.less(e.warp_of_block(), n_warps), e.u32(1), e.u32(0))

    @target.intrinsic([], ("f32", n_out))
    def no_result(e):
        return [e.f32(math.nan)] * n_out

    return is_in_block, no_result


@functools.cache
def device_function(spec: ModelSpec, capability: tuple[int, int], block_size: int) -> Callable:
    """f(x, params) -> y for kernels on devices of a compute capability; see `Module.device_function`."""
    plan = EmbeddedPlan(spec, block_size)
    target = cuda_target(10 * capability[0] + capability[1])
    open_arguments, evaluate = _make_open_arguments(spec), make_evaluate(target, plan)
    is_in_block, no_result = _make_no_result(target, plan)

    def model(x, params):
        """The warps of a block that is larger than `block_size` have no scratch, and must not use another's."""
        given = open_arguments(x, params)
        if is_in_block() == 0:
            return no_result()
        return evaluate(given[0], given[1])

    params_type(spec).block_sizes.add(block_size)
    return target.device(model)
