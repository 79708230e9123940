"""Wrappers that change when the nested optimizer steps, or how far (mirror of reference/scheduling.py)."""

from __future__ import annotations

import numpy as np

from ..learning_rates import DecayingRate
from ..specs import BatchedSpec, ExponentialDecaySpec
from .memory_access import make_load, make_load_word, make_store, make_store_word
from .optimizer_contract import Link, Optimizer, Slice, Step, Wrapper
from .optimizer_state import Counter


class ExponentialDecay(DecayingRate, Wrapper):
    """The nested learning rate times a factor that the host knows; the device sees the rate alone."""

    def __init__(self, spec: ExponentialDecaySpec, nested: Optimizer, where: Slice):
        super().__init__(spec, nested, where)
        self.start_rate()

    def step(self) -> None:
        self.decay()
        self.nested.step()


class Batched(Wrapper):
    """Gradients are added to a pool; every N-th call has its turn and hands their mean on. How many there were, the
    device counts: those that were not finite are left out. Without any left the nested step is one without gradients.
    """

    state_numbers = {"step": "current_step"}
    state_arrays = {"pool": np.float32}
    fields = (("pool", "u64"), ("has_turn", "u32"), ("n_pooled", "u64"), ("n_pooled_after", "u64"))
    current_step = 0

    def __init__(self, spec: BatchedSpec, nested: Optimizer, where: Slice):
        super().__init__(spec, nested, where)
        self.current_step = 0
        self.counters["n_pooled"] = Counter()

    @property
    def has_turn(self) -> bool:
        return self.current_step % self.spec.batch_size_multiplier == 0

    def step(self) -> None:
        self.current_step += 1
        if self.has_turn:
            self.nested.step()

    def numbers(self, start: int) -> dict[str, int | float]:
        count = self.counters["n_pooled"]
        return {"has_turn": int(self.has_turn), "n_pooled": count.before, "n_pooled_after": count.after}

    @staticmethod
    def make_step(target, spec: BatchedSpec, link: Link, nested: Step) -> Step:
        u32, np_f32, np_u32, map_values = target.u32, np.float32, np.uint32, target.map_fragment
        load, store = make_load(target, "f32", link.count), make_store(target, "f32", link.count)
        word, store_word = make_load_word(target), make_store_word(target)
        pool, turn, before, after = (link.place(name) for name in ("pool", "has_turn", "n_pooled", "n_pooled_after"))
        nested_step, nested_finish, does_before = nested.step, nested.finish, link.before

        def add_where(total, g, taken):
            return total + g if taken else total

        def mean(total, n):
            return total / np_f32(n) if n > np_u32(1) else total

        def rest(total, has_turn):
            return np_f32(0) if has_turn else total

        def at_most_1(n):
            return np_u32(1) if n > np_u32(0) else np_u32(0)

        add_where, mean, rest, at_most_1 = (target.scalar(f) for f in (add_where, mean, rest, at_most_1))

        def step(index, g, w, ok, run, active, extra):
            nested_run = u32(run * extra[turn])
            if does_before:
                n = u32(word(extra[before]) + ok)
                pooled = u32(active * run)
                total = map_values(add_where, load(extra[pool], index, pooled), g, ok)
                store(extra[pool], index, map_values(rest, total, extra[turn]), pooled)
                g = map_values(mean, total, n)
                ok = u32(nested_run * at_most_1(n))
            return nested_step(index, g, w, ok, nested_run, active, extra)

        def finish(is_first, ok, run, extra):
            nested_run = u32(run * extra[turn])
            n = u32(word(extra[before]) + ok)
            store_word(extra[after], u32(n * u32(u32(1) - nested_run)), is_first)
            nested_finish(is_first, u32(nested_run * at_most_1(n)), nested_run, extra)

        return Step(target.device(step), target.device(finish), nested.keeps)
