"""Adam (mirror of reference/adam.py; Kingma and Ba 2015, tiny-cuda-nn's variant).

For a parameter w with gradient g (loss scale and batch size already divided out), moments m and v, and k updates of
this parameter so far:

    g <- clip(g + l2_reg w)          m <- beta1 m + (1 - beta1) g          v <- beta2 v + (1 - beta2) g^2
    eta = learning_rate sqrt(1 - beta2^(k+1)) / (1 - beta1^(k+1))
    w <- (1 - relative_decay eta) w - sign(w) absolute_decay eta - m clamp(eta / (math.sqrt(v) + epsilon))

Powers of beta are taken as expm1((k+1) ln beta), exact for small k where 1 - exp2(k log2 beta) loses four digits.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ..specs import AdamSpec
from .memory_access import make_load, make_store
from .optimizer_contract import Leaf, Link, Step, no_finish

f32, u32 = np.float32, np.uint32
LARGEST = np.finfo(np.float32).max


@functools.cache
def make_adam(target, spec: AdamSpec, is_matrix: bool):
    """Scalar update(g, w, m, v, k, learning_rate, step) -> (w, m, v, k); step is the optimizer's own, from 1.

    A parameter is left alone altogether where the spec excludes it, or where it is no matrix parameter and has
    gradient 0, since no sample touched it.
    """
    optimize = spec.optimize_matrix_params if is_matrix else spec.optimize_non_matrix_params
    skip_zero = spec.skip_zero_grad_non_matrix_params and not is_matrix
    l2_reg = f32(spec.l2_reg if is_matrix else spec.non_matrix_l2_reg)
    rate_factor = f32(1.0 if is_matrix else spec.non_matrix_learning_rate_factor)
    beta1, beta2 = f32(spec.beta1), f32(spec.beta2)
    rest1, rest2 = f32(1.0 - spec.beta1), f32(1.0 - spec.beta2)
    log_beta1, log_beta2 = (f32(math.log(b) if b > 0 else -100.0) for b in (spec.beta1, spec.beta2))
    epsilon = f32(spec.epsilon)
    relative_decay, absolute_decay = f32(spec.relative_decay), f32(spec.absolute_decay)
    gradient_clip, weight_clip = f32(spec.gradient_clipping_magnitude), f32(spec.clipping_magnitude)
    adabound = spec.adabound

    def update(g, w, m, v, k, learning_rate, step):
        if not optimize or (skip_zero and g == f32(0)):
            return w, m, v, k
        g = g + l2_reg * w
        if gradient_clip != f32(0):
            g = min(max(g, -gradient_clip), gradient_clip)
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        count = u32(k + u32(1))
        exponent = f32(count)
        eta = learning_rate * rate_factor
        eta = eta * math.sqrt(-math.expm1(exponent * log_beta2)) / -math.expm1(exponent * log_beta1)
        effective = eta / (math.sqrt(v) + epsilon)
        if adabound:
            progress = rest2 * f32(step)
            effective = max(effective, f32(0.1) - f32(0.1) / (progress + f32(1)))
            effective = min(effective, f32(0.1) + f32(0.1) / progress)
        else:
            effective = min(effective, LARGEST)
        decay = absolute_decay * eta
        w = (f32(1) - relative_decay * eta) * w - (decay if w >= f32(0) else -decay)
        w = w - effective * m
        if weight_clip != f32(0):
            w = min(max(w, -weight_clip), weight_clip)
        return w, m, v, count

    return target.scalar(update)


class Adam(Leaf):
    state_arrays = {"first_moments": np.float32, "second_moments": np.float32, "param_steps": np.uint32}
    fields = (
        ("first_moments", "u64"),
        ("second_moments", "u64"),
        ("param_steps", "u64"),
        ("learning_rate", "f32"),
        ("step", "u32"),
    )

    def numbers(self, start: int) -> dict[str, int | float]:
        return {**super().numbers(start), "step": self.current_step}

    @staticmethod
    def make_step(target, spec: AdamSpec, link: Link, nested: None) -> Step:
        """Where gradient 0 leaves parameters alone, nothing of them is touched unless one of `count` has another."""
        count, update, map_values = link.count, make_adam(target, spec, link.is_matrix), target.map_fragment
        load, load_count = make_load(target, "f32", count), make_load(target, "u32", count)
        store, store_count = make_store(target, "f32", count), make_store(target, "u32", count)
        take, leave, u32 = link.take, link.leave, target.u32
        first, second, ages = (link.place(name) for name in ("first_moments", "second_moments", "param_steps"))
        rate, step_number = link.place("learning_rate"), link.place("step")
        skips_zero = spec.skip_zero_grad_non_matrix_params and not link.is_matrix

        @target.intrinsic([("f32", count)], "u32")
        def any_nonzero(e, g):
            found = e.u32(0)
            for value in g:
                found = e.or_(found, e.and_(e.float_to_bits(value), 0x7FFFFFFF))
            return e.select(e.equal(found, 0), e.u32(0), e.u32(1))

        def step(index, g, w, ok, run, active, extra):
            touched = u32(active * ok)
            if skips_zero:
                touched = u32(touched * any_nonzero(g))
            w_old, m_old = take(w, index, touched, extra), load(extra[first], index, touched)
            v_old, k_old = load(extra[second], index, touched), load_count(extra[ages], index, touched)
            w_new, m_new, v_new, k_new = map_values(
                update, g, w_old, m_old, v_old, k_old, extra[rate], extra[step_number]
            )
            w_new = leave(w_new, w_old, index, touched, extra)
            store(extra[first], index, m_new, touched)
            store(extra[second], index, v_new, touched)
            store_count(extra[ages], index, k_new, touched)
            return w_new, w_new

        return Step(target.device(step), no_finish(target), keeps=False)
