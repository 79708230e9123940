"""Wrappers that keep parameters of their own for inference (mirror of reference/averaging.py)."""

from __future__ import annotations

import numpy as np

from ..specs import AverageSpec, EmaSpec, LookaheadSpec
from .memory_access import make_choose, make_load, make_store
from .optimizer_contract import Link, Optimizer, Slice, Step, Wrapper
from .optimizer_state import StateVector


class AveragingWrapper(Wrapper):
    """`n_averaged` counts the parameter vectors taken in since the beginning, or since they were set from outside."""

    state_numbers = {"n_averaged": "n_averaged"}
    averages = keeps = True

    def __init__(self, spec: AverageSpec | EmaSpec | LookaheadSpec, nested: Optimizer, where: Slice):
        super().__init__(spec, nested, where)
        self.n_averaged = 0

    @property
    def keeps_now(self) -> bool:
        return self.n_averaged > 0

    def forget_params(self) -> None:
        super().forget_params()
        self.n_averaged = 0


class Average(AveragingWrapper):
    """The mean of the parameters after the last `n_samples` steps: a ring of samples, and their sum in float64."""

    state_arrays = {"total": np.float64}
    fields = (("total", "u64"), ("oldest", "u64"), ("is_full", "u32"), ("is_first", "u32"), ("n", "u32"))

    def __init__(self, spec: AverageSpec, nested: Optimizer, where: Slice):
        super().__init__(spec, nested, where)
        n = where.sizes.n_params
        self.arrays["samples"] = StateVector(np.float32, where.start, n, rows=spec.n_samples)

    def step(self) -> None:
        self.nested.step()
        self.n_averaged += 1

    def numbers(self, start: int) -> dict[str, int | float]:
        earlier, n_samples = self.n_averaged - 1, self.spec.n_samples
        return {
            "oldest": self.arrays["samples"].address(start, earlier % n_samples),
            "is_full": int(earlier >= n_samples),
            "is_first": int(earlier == 0),
            "n": self._count(),
        }

    def _count(self) -> int:
        return min(self.n_averaged, self.spec.n_samples)

    def inference_params(self, params: np.ndarray, stream: int) -> np.ndarray:
        return (self.arrays["total"].download(stream) / self._count()).astype(np.float32)

    @staticmethod
    def make_step(target, spec: AverageSpec, link: Link, nested: Step) -> Step:
        count, u32, nested_step = link.count, target.u32, nested.step
        load, load_total = make_load(target, "f32", count), make_load(target, "f64", count)
        store, store_total = make_store(target, "f32", count), make_store(target, "f64", count)
        total, oldest, is_full, is_first, n = (
            link.place(name) for name in ("total", "oldest", "is_full", "is_first", "n")
        )
        does_after = link.after

        @target.intrinsic([("f64", count), ("f32", count), ("f32", count), "u32"], ("f64", count))
        def exchange(e, sums, old, new, run):
            is_taken = e.less(0, run)
            return [
                e.select(is_taken, e.fadd(e.fadd(s, e.widen(e.fmul(o, e.f32(-1.0)))), e.widen(w)), s)
                for s, o, w in zip(sums, old, new, strict=True)
            ]

        @target.intrinsic([("f64", count), "u32"], ("f32", count))
        def mean(e, sums, n):
            divisor = e.to_f64(n)
            return [e.narrow(e.fdiv(s, divisor)) for s in sums]

        def step(index, g, w, ok, run, active, extra):
            w, kept = nested_step(index, g, w, ok, run, active, extra)
            if does_after:
                taken = u32(active * run)
                old = load(extra[oldest], index, u32(taken * extra[is_full]))
                sums = load_total(extra[total], index, u32(active * u32(u32(1) - u32(run * extra[is_first]))))
                sums = exchange(sums, old, w, run)
                store(extra[oldest], index, w, taken)
                store_total(extra[total], index, sums, taken)
                kept = mean(sums, extra[n])
            return w, kept

        return Step(target.device(step), nested.finish, keeps=True)


class Ema(AveragingWrapper):
    """An exponential moving average of the parameters, or of those that the nested optimizer keeps."""

    state_arrays = {"average": np.float32}
    fields = (("average", "u64"), ("old_share", "f32"), ("new_share", "f32"), ("of_kept", "u32"))
    shares = (0.0, 1.0)
    of_kept = 0

    def step(self) -> None:
        self.nested.step()
        self.n_averaged += 1
        decay, power = self.spec.decay, self.spec.decay**self.n_averaged
        self.shares = ((decay - power) / (1 - power), (1 - decay) / (1 - power))
        self.of_kept = int(self.nested.keeps_now)

    def numbers(self, start: int) -> dict[str, int | float]:
        old_share, new_share = self.shares
        return {"old_share": old_share, "new_share": new_share, "of_kept": self.of_kept}

    def inference_params(self, params: np.ndarray, stream: int) -> np.ndarray:
        return self.arrays["average"].download(stream)

    @staticmethod
    def make_step(target, spec: EmaSpec, link: Link, nested: Step) -> Step:
        u32, map_values, nested_step = target.u32, target.map_fragment, nested.step
        load, store = make_load(target, "f32", link.count), make_store(target, "f32", link.count)
        average, old_share, new_share, of_kept = (
            link.place(name) for name in ("average", "old_share", "new_share", "of_kept")
        )
        does_after, nested_keeps, choose = link.after, nested.keeps, make_choose(target)

        def blend(old, new, old_share, new_share, run):
            return old_share * old + new_share * new if run else old

        blend = target.scalar(blend)

        def step(index, g, w, ok, run, active, extra):
            w, kept = nested_step(index, g, w, ok, run, active, extra)
            if does_after:
                source = w
                if nested_keeps:
                    source = map_values(choose, kept, w, extra[of_kept])
                old = load(extra[average], index, active)
                kept = map_values(blend, old, source, extra[old_share], extra[new_share], run)
                store(extra[average], index, kept, u32(active * run))
            return w, kept

        return Step(target.device(step), nested.finish, keeps=True)


class Lookahead(AveragingWrapper):
    """Slow parameters that follow the trained ones every `n_steps` steps, and set them back."""

    state_arrays = {"slow_params": np.float32}
    fields = (("slow_params", "u64"), ("begins", "u32"), ("follows", "u32"))
    moves_before = True
    begins = follows = 0

    def step(self) -> None:
        self.begins = int(self.n_averaged == 0)
        self.follows = int(self.nested.current_step % self.spec.n_steps == 0)
        self.n_averaged += self.begins + self.follows
        self.nested.step()

    def numbers(self, start: int) -> dict[str, int | float]:
        return {"begins": self.begins, "follows": self.follows}

    def inference_params(self, params: np.ndarray, stream: int) -> np.ndarray:
        return self.arrays["slow_params"].download(stream)

    @staticmethod
    def make_step(target, spec: LookaheadSpec, link: Link, nested: Step) -> Step:
        u32, map_values, nested_step = target.u32, target.map_fragment, nested.step
        load, store = make_load(target, "f32", link.count), make_store(target, "f32", link.count)
        place, begins, follows = link.place("slow_params"), link.place("begins"), link.place("follows")
        alpha, choose, does_before = np.float32(spec.alpha), make_choose(target), link.before

        def move(slow, w, begins, follows):
            if begins:
                slow = w
            return slow + alpha * (w - slow) if follows else slow

        move = target.scalar(move)

        def step(index, g, w, ok, run, active, extra):
            slow = load(extra[place], index, active)
            if does_before:
                begins_now, follows_now = u32(run * extra[begins]), u32(run * extra[follows])
                slow = map_values(move, slow, w, begins_now, follows_now)
                store(extra[place], index, slow, u32(active * u32(begins_now | follows_now)))
                w = map_values(choose, slow, w, follows_now)
            w, _ = nested_step(index, g, w, ok, run, active, extra)
            return w, slow

        return Step(target.device(step), nested.finish, keeps=True)
