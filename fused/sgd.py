"""Gradient descent (mirror of reference/sgd.py): w <- w - learning_rate (g + l2_reg w), matrices or not."""

from __future__ import annotations

import functools

import numpy as np

from ..specs import SgdSpec
from .optimizer_contract import Leaf, Link, Step, no_finish


@functools.cache
def make_sgd(target, spec: SgdSpec):
    """Scalar update(g, w, learning_rate) -> w."""
    l2_reg = np.float32(spec.l2_reg)

    def update(g, w, learning_rate):
        return w - learning_rate * (l2_reg * w + g)

    return target.scalar(update)


class Sgd(Leaf):
    fields = (("learning_rate", "f32"),)

    @staticmethod
    def make_step(target, spec: SgdSpec, link: Link, nested: None) -> Step:
        update, map_values, u32 = make_sgd(target, spec), target.map_fragment, target.u32
        take, leave, rate = link.take, link.leave, link.place("learning_rate")

        def step(index, g, w, ok, run, active, extra):
            touched = u32(active * ok)
            w_old = take(w, index, touched, extra)
            w_new = leave(map_values(update, g, w_old, extra[rate]), w_old, index, touched, extra)
            return w_new, w_new

        return Step(target.device(step), no_finish(target), keeps=False)
