"""Shows that fused kernels and the reference agree over the whole space of configs: `python -m benchmarks.agreement`.

    draws.py            a model and the arrays that go in and out; `random_draws.py` draws them, from a `deck.py`
    comparison.py       one call after the other against the reference of the draw's dtype
    gate_flips.py       why two right implementations of a ReLU network can differ, with proof
    stored_values.py    what was stored for one sample, read off its gradient and checked value by value
    second_reference.py how far apart two right implementations are
    training.py         runs of several steps, and optimizers behind gradients that are the same
    second_order.py     second derivatives
    fused_model.py      what is compared: a draw on the device, its outputs full of NaN before each call
    examine.py          all comparisons of one draw, and what they found, as a line of JSON
    processes.py        many draws in a pool of processes, whatever becomes of one of them
    tables.py           what many draws found, for each of their `components.py`
    jobs.py             the kernels of a draw, to be compiled without a device

The tests use the same pieces, on the device and in the emulator.
"""
