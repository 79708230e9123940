# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fused against reference: how wrong is fast?
#
# This library computes everything twice. The **reference** engine is plain NumPy, slow and easy to check. The **fused**
# engine makes one CUDA kernel of encoding, network, loss and backward pass; it keeps numbers in half precision, runs
# on tensor cores, and adds things up in whatever order the hardware finds convenient. How do we know that it computes
# the same?
#
# Not by asking for equal bits. Two correct programs that add the same numbers in another order differ in the last
# digits. So we ask two better questions: *how far* apart are they, and *is that as far as we can explain*? This
# notebook builds the explanation from the bottom. It runs without a GPU; with one, the last picture is about the real
# fused kernels.

# %%
import os

import matplotlib.pyplot as plt
import numpy as np

import numba_tcnn as tcnn

SMALL = "NUMBA_TCNN_SMALL_NOTEBOOKS" in os.environ  # the test suite runs a shorter version
SAMPLES = 500 if SMALL else 5000
STEPS = 30 if SMALL else 300

plt.rcParams["figure.dpi"] = 70
rng = np.random.default_rng(0)

# %% [markdown]
# ## Half precision
#
# A float16 has 11 significant bits: between 1 and 2 its values are $2^{-10} \approx 0.001$ apart. Rounding to the
# nearest one is wrong by at most half of that, so the *relative* error of one rounded number is at most
# $2^{-11} \approx 5 \cdot 10^{-4}$. On average it is smaller; here is the distribution.

# %%
values = rng.uniform(0.1, 10, 100_000)
relative = np.abs(values.astype(np.float16) - values) / values
print(f"largest {relative.max():.1e}, root mean square {np.sqrt(np.mean(relative**2)):.1e}, 2^-11 = {2**-11:.1e}")

fig, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
ax.hist(relative, bins=80)
ax.axvline(2**-11, color="tab:red", label="$2^{-11}$")
ax.legend()
ax.set_xlabel("relative error of rounding to float16")
ax.yaxis.set_visible(False)

# %% [markdown]
# Errors have random signs, so sums of many rounded numbers are *relatively* about as good as one number. What must not
# happen is that the running sum itself is kept in float16: then every addition rounds again, and small addends vanish
# next to a large sum. That is why products are rounded inputs, but sums are float32, in both engines.

# %%
n = 4096
a, b = rng.random(n), rng.random(n)
exact = a @ b
a16, b16 = a.astype(np.float16), b.astype(np.float16)
wide = np.sum(a16.astype(np.float32) * b16.astype(np.float32))
narrow = np.float16(0)
for p, q in zip(a16, b16, strict=True):
    narrow = np.float16(narrow + p * q)
print(f"float16 inputs, float32 sum: relative error {abs(wide / exact - 1):.1e}")
print(f"float16 inputs, float16 sum: relative error {abs(narrow / exact - 1):.1e}")

# %% [markdown]
# ## A model, and one number for its error
#
# We train a small model for a moment (freshly drawn weights are untypical: a hash grid starts at almost zero) and then
# freeze it. For a whole tensor, say the outputs of 5000 samples, we measure
#
# $$\text{relative } L_2 \text{ error} = \frac{\lVert a - b \rVert}{\lVert b \rVert},$$
#
# the length of the difference over the length of the truth. It doesn't drown in a single element that happens to be
# near zero, as an element-wise relative error would.

# %%
config = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2},
    "encoding": {"otype": "HashGrid", "n_levels": 8, "log2_hashmap_size": 12, "base_resolution": 8},
    "network": {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2, "activation": "ReLU"},
}


def target(x):
    """Something to learn: waves that get shorter to the right."""
    phase = 30 * x[:, :1] ** 2 + 5 * x[:, 1:]
    return np.concatenate([np.sin(phase), np.cos(phase), x[:, :1] * x[:, 1:]], axis=1)


model = tcnn.create_from_config(2, 3, config, engine="reference")
x = rng.random((SAMPLES, 2), np.float32)
y = target(x)
history = model.fit(x, y, steps=STEPS, batch_size=500)
print(f"loss {history.loss[0]:.3f} -> {history.loss[-1]:.5f}")

# %% [markdown]
# The reference takes a `dtype`. In `float64` it is the truth for all purposes here. In `float16` it does what the fused
# kernels do: round wherever a kernel *stores* a value, and calculate in float32 in between. So the distance between
# the two is the part of the fused engine's error that is due to half precision and to nothing else.


# %%
def gradients(dtype, activation="ReLU"):
    """Outputs and gradients of the trained parameters, computed in `dtype`, for the loss against y."""
    changed = {**config, "network": {**config["network"], "activation": activation}}
    twin = tcnn.create_from_config(2, 3, changed, engine="reference", dtype=dtype)
    twin.params = model.params
    outputs, context = twin.network.forward(x)
    truth_outputs = outputs if dtype == "float64" else gradients("float64", activation)[0]
    _, dL_dy = twin.loss.evaluate(truth_outputs, y)  # the same dL/dy for everyone
    result = twin.network.backward(context, dL_dy)
    return outputs, result.input, result.params


def relative_l2(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


truth = gradients("float64")
for dtype in ("float32", "float16"):
    errors = [relative_l2(a, b) for a, b in zip(gradients(dtype), truth, strict=True)]
    print(f"{dtype}: outputs {errors[0]:.1e}, input gradient {errors[1]:.1e}, parameter gradient {errors[2]:.1e}")

# %% [markdown]
# Float32 is what its 24 bits promise. Float16's outputs are about as good as one rounded number. But its gradients are
# ten times worse or more. Is something wrong?
#
# ## The case of the switching units
#
# Look at single samples instead of the whole tensor.

# %%
half = gradients("float16")
row_error = np.linalg.norm(half[1] - truth[1], axis=1) / np.linalg.norm(truth[1], axis=1)
order = np.sort(row_error)[::-1]
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.loglog(np.arange(1, SAMPLES + 1), order)
ax.set(xlabel="samples, the worst first", ylabel="error of dL/dx")
ax.grid(alpha=0.3)
print(f"median {np.median(row_error):.1e}, worst {order[0]:.1e}")

# %% [markdown]
# Most samples are fine, a few are wrong by per cents, and the worst by more than their own length. The culprit is the
# ReLU, $\max(z, 0)$, whose derivative jumps from 0 to 1 at $z = 0$. When a unit's input is $+0.00001$ in one
# calculation and $-0.00001$ in the other, its *output* is practically the same, yet in one backward pass the unit
# takes part and in the other it doesn't. Neither is more right: the function has a kink there.
#
# If that is the explanation, a smooth activation must not show it.

# %%
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
for activation in ("ReLU", "Sigmoid"):
    a, b = gradients("float16", activation), gradients("float64", activation)
    rows = np.linalg.norm(a[1] - b[1], axis=1) / np.linalg.norm(b[1], axis=1)
    ax.loglog(np.arange(1, SAMPLES + 1), np.sort(rows)[::-1], label=activation)
    print(f"{activation:8} worst sample {rows.max():.1e}, whole tensor {relative_l2(a[1], b[1]):.1e}")
ax.set(xlabel="samples, the worst first", ylabel="error of dL/dx")
ax.legend()
ax.grid(alpha=0.3)

# %% [markdown]
# It doesn't: the worst samples are gone. (Not all of them need be: a sample whose gradient nearly cancels has a large
# *relative* error however well it is computed.)
#
# This is why fused kernels are judged against the reference **of their own dtype**. Both round at the same places, so
# nearly all units switch the same way, and what is left is the order of additions.
#
# ## The picture
#
# `tcnn.plot.engine_error` measures every tensor at once: outputs, dL/dx, each weight matrix, each level of the grid.
# With a usable GPU the bars are the distance between fused and reference in float16, and black marks show the distance
# to float32. Without one, as its title then says, the bars are what you have just taken apart: float16 against
# float32 in the reference.

# %%
figure = tcnn.plot.engine_error(model, x, y)
figure.set_dpi(70)
figure  # noqa: B018

# %% [markdown]
# Reading it from top to bottom is following the calculation: outputs have passed all roundings of the forward pass.
# The last layer's weight gradient needs only the activations before it and the error at the output, and is the most
# exact. The further back a gradient travels, the more roundings and switched units it has met; the grid, at the very
# start of the network, comes last. If a single bar stands out from its neighbours, the code of that operation
# deserves a look.
#
# The same numbers without a picture, for instance to put a bound on them in a test:

# %%
errors = tcnn.plot.engine_errors(model, x, y)
for name, error in errors.items():
    print(f"{name:16} {error:.1e}")

# %% [markdown]
# ## Go on
#
# - Train longer, or start from fresh weights: which errors change, and can you say why?
# - Use 6 hidden layers. How does the error of `layer0.weight` grow with depth?
# - Send back a random dL/dy instead of the loss's gradient (leave `y` out). Gradients of a *trained* model largely
#   cancel over the samples. What does that do to their relative error?
