"""Numba intrinsics: bodies that ask the emitter of `ptx.py` for instructions, and two that look into Numba's types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic as numba_intrinsic

from .ptx import I32, Emitter

NUMBA_TYPES = {
    "u32": types.uint32, "f32": types.float32, "f64": types.float64, "u64": types.uint64, "void": types.void,
}  # fmt: skip


def _numba_type(kind):
    if isinstance(kind, tuple):
        return types.UniTuple(NUMBA_TYPES[kind[0]], kind[1])
    return NUMBA_TYPES[kind]


def make_intrinsic(cc: int, arguments: Sequence, result, body: Callable):
    """A Numba intrinsic from a body. Kinds: "u32", "f32", "u64", "void", or (kind, n) for a tuple of n registers.

    Numba keeps every intrinsic for the life of the process, so factories that make them are memoised.
    """
    signature = _numba_type(result)(*[_numba_type(a) for a in arguments])

    def codegen(context, builder, sig, values):
        emitter = Emitter(builder, cc)
        unpacked = [
            [builder.extract_value(v, i) for i in range(kind[1])] if isinstance(kind, tuple) else v
            for kind, v in zip(arguments, values, strict=True)
        ]
        returned = body(emitter, *unpacked)
        if result == "void":
            return context.get_dummy_value()
        if isinstance(result, tuple):
            return context.make_tuple(builder, sig.return_type, list(returned))
        return returned

    # Numba takes the number of arguments from the typing function's own signature.
    names = ", ".join(f"a{i}" for i in range(len(arguments)))
    namespace = {"result": (signature, codegen)}
    exec(f"def typing(context{', ' if names else ''}{names}):\n    return result", namespace)
    typing = namespace["typing"]
    typing.__name__ = typing.__qualname__ = body.__name__
    return numba_intrinsic(typing)


@functools.cache
def make_take_turn(cc: int):
    """take_turn(): a kernel's first statement, which orders it among the kernels of a stream; see PTX, griddepcontrol.

    A kernel may be launched so that its blocks start while the one before still runs (programmatic dependent launch).
    They wait here until that one has ended and all that it wrote is there, and then let the next kernel's blocks come.
    As every kernel waits before it does anything, what was written by kernels further back is there as well.
    """

    def take_turn(e):
        e.asm([], "griddepcontrol.wait;", "~{memory}")
        e.asm([], "griddepcontrol.launch_dependents;", "~{memory}")

    return make_intrinsic(cc, (), "void", take_turn)


@numba_intrinsic
def map_fragment(typing_context, function, *operands):
    """Call a scalar device function on every element of some fragments, inlined: map_fragment(f, F, G, s).

    Tuples are walked together; anything else is passed to every call. A function that returns a tuple of k values
    gives k fragments. One intrinsic whatever the length, so it costs the compiler's front end next to nothing.
    """
    operands = operands[0] if len(operands) == 1 and isinstance(operands[0], types.StarArgTuple) else operands
    fragments = [t for t in operands if isinstance(t, types.BaseTuple)]
    count = len(fragments[0])
    element_types = tuple(t.dtype if isinstance(t, types.UniTuple) else t for t in operands)
    call = typing_context.resolve_function_type(function, element_types, {})
    several = isinstance(call.return_type, types.BaseTuple)
    if several:
        result = types.Tuple([types.UniTuple(t, count) for t in call.return_type])
    else:
        result = types.UniTuple(call.return_type, count)

    def codegen(context, builder, sig, values):
        operand_values = [builder.extract_value(values[1], i) for i in range(len(operands))]
        implementation = context.get_function(function, call)
        outcomes = []
        for i in range(count):
            arguments = []
            for kind, wanted, value in zip(operands, call.args, operand_values, strict=True):
                element = kind.dtype if isinstance(kind, types.UniTuple) else kind
                if isinstance(kind, types.UniTuple):
                    value = builder.extract_value(value, i)
                arguments.append(context.cast(builder, value, element, wanted))
            outcomes.append(implementation(builder, arguments))
        if not several:
            return context.make_tuple(builder, sig.return_type, outcomes)
        columns = []
        for k, fragment in enumerate(sig.return_type):
            column = [builder.extract_value(outcome, k) for outcome in outcomes]
            columns.append(context.make_tuple(builder, fragment, column))
        return context.make_tuple(builder, sig.return_type, columns)

    return result(function, types.StarArgTuple(operands)), codegen


@numba_intrinsic
def address_of_shared(typing_context, array):
    """The 32-bit shared-memory address of an array in shared memory."""

    def codegen(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        shared = builder.addrspacecast(data, ir.PointerType(data.type.pointee, 3))
        return builder.ptrtoint(shared, I32)

    return types.uint32(array), codegen
