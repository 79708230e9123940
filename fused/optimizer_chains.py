"""Chains of optimizers as kernels: all that updates parameters one by one, composed of closures around one another.

A chain is one kernel where its leaf updates every parameter by itself. A leaf that needs whole layers stands between
two: `before` brings the gradients to it, its own kernels follow, and `after` is for wrappers that read its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..specs import OptimizerSpec
from .fragments import Target
from .memory_access import (
    make_is_below,
    make_load,
    make_load_word,
    make_store,
    make_store_copy,
    make_store_parameters,
    make_store_word,
)
from .optimizer_contract import Link, Optimizer, Step, make_weight_access
from .optimizer_kernels import THREADS, make_gradient_body
from .optimizer_state import VECTOR
from .optimizers import CLASSES
from .stage_io import KernelBody
from .tiles import make_indices


@dataclass(frozen=True)
class Chain:
    """What the element-wise kernels of a slice are made from: `links` are specs, the outermost first.

    The leaf of a chain with `before` but not `after` hands gradients over, one with `after` alone finds them used.
    """

    links: tuple[OptimizerSpec, ...]
    before: bool = True
    after: bool = True

    @property
    def kinds(self) -> list[type[Optimizer]]:
        return [CLASSES[type(spec)] for spec in self.links]

    @property
    def name(self) -> str:
        names = [kind.__name__.lower().removesuffix("optimizer") for kind in self.kinds]
        part = "" if self.after and self.before else "_before" if self.before else "_after"
        return "_".join(names) + part

    @property
    def carries_weights(self) -> bool:
        """Whether links other than the leaf read or write the parameters: all are then loaded."""
        return any((self.before and kind.moves_before) or (self.after and kind.averages) for kind in self.kinds)

    def fields(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of the parameters of all links; names end with the link's number in the chain."""
        fields = []
        for depth, kind in enumerate(self.kinds):
            own = kind.fields if self.is_whole or depth < len(self.links) - 1 else HANDOVER
            fields += [(f"{name}_{depth}", field_kind) for name, field_kind in own]
        return tuple(fields)

    @property
    def is_whole(self) -> bool:
        return self.before and self.after


CHAIN_FIELDS = (
    ("weights", "u64"),
    ("copy", "u64"),
    ("gradient_scale", "f32"),
    ("scales", "u64"),
    ("bad", "u64"),
    ("mark", "u32"),
    ("skipped", "u64"),
    ("kept_copy", "u64"),  # what inference uses, in the format of the copy, where the chain keeps it
)

HANDOVER = (("handed", "u64"), ("is_ready", "u64"))
"""float32 gradients of the slice, and a word that becomes 1 where the leaf shall take them, else 0."""


def _make_handover(target: Target, link: Link) -> Step:
    """In place of a leaf that works layer by layer."""
    u32, store, store_word = target.u32, make_store(target, "f32", link.count), make_store_word(target)
    handed, is_ready, does_before = link.place("handed"), link.place("is_ready"), link.before

    def step(index, g, w, ok, run, active, extra):
        if does_before:
            store(extra[handed], index, g, u32(active * ok))
        return w, w

    def finish(is_first, ok, run, extra):
        store_word(extra[is_ready], ok, is_first)

    return Step(target.device(step), target.device(finish), keeps=False)


def _make_chain(target: Target, chain: Chain, count: int, is_matrix: bool) -> Step:
    """The chain's outermost link around the others."""
    places = {name: i for i, (name, _) in enumerate((*CHAIN_FIELDS, *chain.fields()))}
    take, leave = make_weight_access(target, places.__getitem__, count, chain.carries_weights)
    step = None
    for depth in reversed(range(len(chain.links))):

        def place(name: str, depth: int = depth) -> int:
            return places[f"{name}_{depth}"]

        link = Link(place, count, is_matrix, chain.before, chain.after, take, leave)
        if step is None and not chain.is_whole:
            step = _make_handover(target, link)
        else:
            step = chain.kinds[depth].make_step(target, chain.links[depth], link, step)
    return step


def make_chain_kernel(
    target: Target, chain: Chain, vector: int = VECTOR, *, biases: bool = False, fixed_point: bool = False
) -> KernelBody:
    """A chain of optimizers on the gradients of all parameters of a slice: whole, or what comes before its leaf.

    biases        whether some of the network's parameters are no matrices
    fixed_point   whether the table's gradient is in fixed point
    """
    u32, np_u32, map_values = target.u32, np.uint32, target.map_fragment
    word = make_load_word(target)
    names = [name for name, _ in CHAIN_FIELDS]
    weights, copy, gradient_scale, scales, bad, mark, skipped, kept_copy = range(len(names))
    carries = chain.carries_weights

    def scaled(g, gradient_scale, given_scale):
        return g * gradient_scale * given_scale

    def differ(a, b):
        return np_u32(1) if a != b else np_u32(0)

    scaled, differ = target.scalar(scaled), target.scalar(differ)

    def make_act(is_matrix, count):
        step = _make_chain(target, chain, count, is_matrix)
        run_step, stores_kept = step.step, step.keeps and chain.after
        load_scale = make_load(target, "f32")
        load, store = make_load(target, "f32", count), make_store(target, "f32", count)
        store_copy, store_kept = make_store_copy(target, count), make_store_parameters(target, count)

        def act(index, end, g, active, extra):
            ok = differ(word(extra[bad]), extra[mark])
            g = map_values(scaled, g, extra[gradient_scale], load_scale(extra[scales], u32(1), u32(1))[0])
            w = g
            if carries:
                w = load(extra[weights], index, active)
            w, kept = run_step(index, g, w, ok, u32(1), active, extra)
            if carries:
                store(extra[weights], index, w, active)
                store_copy(extra[copy], index, w, active)
            if stores_kept:
                store_kept(extra[kept_copy], index, kept, active)

        return target.device(act)

    finish_chain = _make_chain(target, chain, 1, True).finish

    @target.intrinsic(["u64", "u32"], "void")
    def count_skipped(e, skipped, active):
        with e.when(e.less(0, active)):
            e.add_global_u32(skipped, 1)

    def finish(is_first, extra):
        ok = differ(word(extra[bad]), extra[mark])
        count_skipped(extra[skipped], u32(is_first * u32(u32(1) - ok)))
        finish_chain(is_first, ok, u32(1), extra)

    acts = (make_act(True, 1), make_act(False, vector), target.device(finish))
    act_on_biases = make_act(False, 1) if biases else None
    fields = (*CHAIN_FIELDS, *chain.fields())
    return make_gradient_body(target, chain.name, acts, fields, vector, act_on_biases, fixed_point=fixed_point)


def make_after_kernel(target: Target, chain: Chain, count: int) -> KernelBody:
    """What comes behind the leaf's own kernels, for `count` parameters a thread of a slice of `n_params`."""
    u32 = target.u32
    indices = make_indices(target)
    thread_index, block_index = indices.thread, indices.block
    is_below = make_is_below(target)
    step = _make_chain(target, chain, count, True)
    run_step, keeps = step.step, step.keeps
    load, store_kept = make_load(target, "f32", count), make_store_parameters(target, count)
    weights, kept_copy = 0, len(CHAIN_FIELDS) - 1

    def body(n_params, extra):
        index = u32(u32(u32(block_index() * u32(THREADS)) + thread_index()) * u32(count))
        active = is_below(index, n_params)
        w = load(extra[weights], index, active)
        _, kept = run_step(index, w, w, u32(1), u32(1), active, extra)
        if keeps:
            store_kept(extra[kept_copy], index, kept, active)

    return KernelBody(chain.name, body, (("n_params", "u32"),), (*CHAIN_FIELDS, *chain.fields()))
