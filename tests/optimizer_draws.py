"""Random optimizer configs: every key of every optimizer, wrappers around leaves and around each other."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from benchmarks.agreement import random_optimizers
from benchmarks.agreement.random_optimizers import n_schedules

LAYERS = [(4, 6), (4, 6), (3, 4)]
N_MATRIX = 60
N_PARAMS = 80


def config(otype: str, keys: random_optimizers.Keys, **given: st.SearchStrategy) -> st.SearchStrategy[dict[str, Any]]:
    """Any subset of the keys: what is left out tests the default."""
    optional = {key: st.sampled_from(values) for key, values in keys.items()}
    return st.fixed_dictionaries({"otype": st.just(otype), **given}, optional=optional)


LEAVES = {otype: config(otype, keys) for otype, keys in random_optimizers.LEAVES.items()}
LEAF = st.one_of(*LEAVES.values())


def wrappers(nested: st.SearchStrategy[dict[str, Any]]) -> dict[str, st.SearchStrategy[dict[str, Any]]]:
    return {otype: config(otype, keys, nested=nested) for otype, keys in random_optimizers.WRAPPERS.items()}


WRAPPERS = wrappers(LEAF)
NESTED = st.one_of(*wrappers(st.one_of(LEAF, *WRAPPERS.values())).values()).filter(lambda c: n_schedules(c) <= 1)


@st.composite
def composites(draw: st.DrawFn, nested: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """Slices of any sizes, 0 included, that add up to all parameters."""
    cuts = sorted(draw(st.lists(st.integers(0, N_PARAMS), max_size=3)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, N_PARAMS], strict=True)]
    return {"otype": "Composite", "nested": [{**draw(nested), "n_params_to_optimize": size} for size in sizes]}
