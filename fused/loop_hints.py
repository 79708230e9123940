"""Hints that ask LLVM to unroll a loop of a device function: a statement in the loop's body, no cost in the code.

LLVM unrolls small loops by itself; a loop over dims or corners that indexes a local array must be unrolled fully for
the array to live in registers, and then needs this word.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.cuda.extending import intrinsic as numba_intrinsic

I32 = ir.IntType(32)
VOID = ir.VoidType()

HINT_PREFIX = "__numba_tcnn_loop_hint_"


def make_loop_hint(kind: str):
    """A statement for a loop's body that asks LLVM to unroll that loop: kind "full", or "count_4".

    It emits a call to a name that `apply_loop_hints` turns into metadata on the loop's back edge and removes.
    """

    def hint(typing_context):
        def codegen(context, builder, sig, values):
            name = HINT_PREFIX + kind
            builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(VOID, []), name), [])
            return context.get_dummy_value()

        return types.void(), codegen

    hint.__name__ = hint.__qualname__ = "unroll_" + kind
    return numba_intrinsic(hint)


unroll_full = make_loop_hint("full")
unroll_by_2 = make_loop_hint("count_2")


class _SelfReferringMetadata(ir.values.MDValue):
    """`!n = distinct !{!n, options}`: how LLVM names a loop."""

    def __init__(self, module, options):
        super().__init__(module, options, name=str(len(module.metadata)))
        self.operands = (self, *options)

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


def _successors(block):
    terminator = block.terminator
    blocks = [o for o in getattr(terminator, "operands", ()) if isinstance(o, ir.Block)]
    if isinstance(terminator, ir.SwitchInstr):
        blocks += [terminator.default] + [b for _, b in terminator.cases]
    return blocks


def _natural_loops(function):
    """(body, latch) of every natural loop, smallest first."""
    predecessors = {b: [] for b in function.blocks}
    for block in function.blocks:
        for successor in _successors(block):
            predecessors[successor].append(block)
    back_edges, state = [], {function.blocks[0]: "open"}
    stack = [(function.blocks[0], iter(_successors(function.blocks[0])))]
    while stack:
        block, remaining = stack[-1]
        for successor in remaining:
            if state.get(successor) == "open":
                back_edges.append((successor, block))
            elif successor not in state:
                state[successor] = "open"
                stack.append((successor, iter(_successors(successor))))
                break
        else:
            state[block] = "closed"
            stack.pop()
    loops = []
    for head, latch in back_edges:
        body, work = {head}, [latch]
        while work:
            block = work.pop()
            if block not in body:
                body.add(block)
                work += predecessors[block]
        loops.append((body, latch))
    return sorted(loops, key=lambda loop: len(loop[0]))


def apply_loop_hints(module: ir.Module) -> None:
    """Turn the hint calls of a module into `llvm.loop` metadata on the innermost loop around each."""
    for function in module.functions:
        if function.is_declaration:
            continue
        hints = []
        for block in function.blocks:
            for instruction in list(block.instructions):
                name = getattr(getattr(instruction, "callee", None), "name", "")
                if name.startswith(HINT_PREFIX):
                    hints.append((block, name[len(HINT_PREFIX) :]))
                    block.instructions.remove(instruction)
        if not hints:
            continue
        loops = _natural_loops(function)
        for block, kind in hints:
            latch = next((latch for body, latch in loops if block in body), None)
            if latch is None:
                raise ValueError(f"a loop hint stands outside a loop in {function.name}")
            if kind.startswith("count_"):
                name = ir.MetaDataString(module, "llvm.loop.unroll.count")
                option = module.add_metadata([name, I32(int(kind[len("count_") :]))])
            else:
                option = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll." + kind)])
            latch.terminator.set_metadata("llvm.loop", _SelfReferringMetadata(module, [option]))
    for name in [g for g in module.globals if g.startswith(HINT_PREFIX)]:
        del module.globals[name]
