"""Random optimizer configs: every key of every optimizer, wrappers around leaves and around each other."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

LAYERS = [(4, 6), (4, 6), (3, 4)]
N_MATRIX = 60
N_PARAMS = 80

RATES = st.sampled_from([1e-3, 3e-3, 1e-2])
ANY_RATE = st.floats(0, 2e-2)
BETAS = st.sampled_from([0.0, 0.5, 0.9, 0.95])
SECOND_BETAS = st.sampled_from([0.0, 0.9, 0.99, 0.999])
EPSILONS = st.sampled_from([1e-15, 1e-8, 1e-3])
REGULARISATIONS = st.sampled_from([0.0, 1e-8, 1e-5, 1e-2])
RELATIVE_DECAYS = st.sampled_from([0.0, 0.1, 0.5])
ABSOLUTE_DECAYS = st.sampled_from([0.0, 0.01, 0.1])


def config(otype: str, **keys: st.SearchStrategy) -> st.SearchStrategy[dict[str, Any]]:
    """Any subset of the keys: what is left out tests the default."""
    return st.fixed_dictionaries({"otype": st.just(otype)}, optional=keys)


DECAYS = {"relative_decay": RELATIVE_DECAYS, "absolute_decay": ABSOLUTE_DECAYS}

LEAVES = {
    "Adam": config(
        "Adam",
        learning_rate=RATES,
        beta1=BETAS,
        beta2=SECOND_BETAS,
        epsilon=EPSILONS,
        l2_reg=REGULARISATIONS,
        non_matrix_l2_reg=REGULARISATIONS,
        non_matrix_learning_rate_factor=st.sampled_from([0.0, 0.1, 3.0]),
        **DECAYS,
        clipping_magnitude=st.sampled_from([0.0, 0.5]),
        gradient_clipping_magnitude=st.sampled_from([0.0, 0.3]),
        adabound=st.booleans(),
        optimize_matrix_params=st.booleans(),
        optimize_non_matrix_params=st.booleans(),
        skip_zero_grad_non_matrix_params=st.booleans(),
    ),
    "SGD": config("SGD", learning_rate=ANY_RATE, l2_reg=REGULARISATIONS),
    "Novograd": config("Novograd", learning_rate=ANY_RATE, beta1=BETAS, beta2=SECOND_BETAS, epsilon=EPSILONS, **DECAYS),
    "Shampoo": config(
        "Shampoo",
        learning_rate=RATES,
        beta1=BETAS,
        beta2=st.sampled_from([0.5, 0.9, 0.99, 0.999]),  # with 0, a gradient of 0 asks for a step of m/ε
        beta3=BETAS,
        beta_shampoo=BETAS,
        epsilon=EPSILONS,
        identity=st.sampled_from([0.01, 0.1, 1.0]),
        cg_on_momentum=st.booleans(),
        l2_reg=REGULARISATIONS,
        **DECAYS,
        frobenius_normalization=st.booleans(),
    ),
}
LEAF = st.one_of(*LEAVES.values())


def wrappers(nested: st.SearchStrategy[dict[str, Any]]) -> dict[str, st.SearchStrategy[dict[str, Any]]]:
    def around(otype: str, **keys: st.SearchStrategy) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({"otype": st.just(otype), "nested": nested}, optional=keys)

    return {
        "Average": around("Average", n_samples=st.integers(1, 60)),
        "EMA": around("EMA", decay=st.sampled_from([0.0, 0.5, 0.9, 0.999]), full_precision=st.booleans()),
        "Lookahead": around("Lookahead", alpha=st.floats(0, 1), n_steps=st.integers(1, 20)),
        "Batched": around("Batched", batch_size_multiplier=st.integers(1, 7)),
        "ExponentialDecay": around(
            "ExponentialDecay",
            decay_base=st.sampled_from([0.5, 0.9, 1.1]),
            decay_start=st.integers(0, 30),
            decay_end=st.integers(0, 60),
            decay_interval=st.integers(1, 20),
        ),
    }


def n_schedules(config: dict[str, Any]) -> int:
    """How many ExponentialDecay stand inside each other: an outer one sets the rate that an inner one scales."""
    return (config["otype"] == "ExponentialDecay") + (n_schedules(config["nested"]) if "nested" in config else 0)


WRAPPERS = wrappers(LEAF)
NESTED = st.one_of(*wrappers(st.one_of(LEAF, *WRAPPERS.values())).values()).filter(lambda c: n_schedules(c) <= 1)


@st.composite
def composites(draw: st.DrawFn, nested: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    """Slices of any sizes, 0 included, that add up to all parameters."""
    cuts = sorted(draw(st.lists(st.integers(0, N_PARAMS), max_size=3)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, N_PARAMS], strict=True)]
    return {"otype": "Composite", "nested": [{**draw(nested), "n_params_to_optimize": size} for size in sizes]}
