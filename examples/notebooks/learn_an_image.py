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
# # Learn an image
#
# A photo is usually a table: one colour for each pixel. It can also be a *function*
#
# $$f: (u, v) \in [0, 1]^2 \;\mapsto\; (r, g, b),$$
#
# and a function is something that a neural network can learn. Nobody needs another way to store a photo. But the same
# recipe, with more inputs or other outputs, stores the distance to a surface, the light in a room, or the density of
# smoke, things for which no table would be fine enough. A photo is the case where you can *see* what the network has
# learned and what it hasn't.
#
# We write the training loop by hand, in NumPy. It runs without a GPU; with one, the very same lines run as fused CUDA
# kernels.

# %%
import copy
import os
import time

import matplotlib.pyplot as plt
import numpy as np

import numba_tcnn as tcnn
from numba_tcnn.photo import bilinear, default_photo, load_photo, pixel_centres, psnr

SMALL = "NUMBA_TCNN_SMALL_NOTEBOOKS" in os.environ  # the test suite runs a shorter version
STEPS = 40 if SMALL else 1000
BATCH = 1024 if SMALL else 4096

plt.rcParams["figure.dpi"] = 55

# %%
photo = load_photo(default_photo())[::2, ::2]  # every second pixel, to keep the notebook quick
height, width, _ = photo.shape
print(f"{height} x {width} pixels, {photo.size:,} numbers between {photo.min():.2f} and {photo.max():.2f}")

fig, ax = plt.subplots(figsize=(3, 3.5))
ax.imshow(photo)
ax.set_axis_off()

# %% [markdown]
# ## The training data
#
# There is no fixed data set. We draw a point anywhere in the unit square and look up the photo's colour there, with
# *bilinear interpolation*: between four pixel centres the colour is a weighted mean of the four. So the network sees
# a slightly different sample of the same function in every step, and never the same batch twice.

# %%
rng = np.random.default_rng(0)


def draw_batch(n):
    points = rng.random((n, 2), np.float32)  # (u, v): from left to right, from top to bottom
    return points, bilinear(photo, points)


points, colours = draw_batch(2000)
fig, ax = plt.subplots(figsize=(3, 3.5))
ax.scatter(points[:, 0], points[:, 1], s=6, c=colours)
ax.set(xlim=(0, 1), ylim=(1, 0), title="one (small) batch", aspect=height / width)
ax.set_axis_off()

# %% [markdown]
# ## First attempt: a network alone
#
# A multi-layer perceptron with 64 neurons in each of two hidden layers, fed with the two coordinates as they are
# (`Identity`). The config is the JSON of tiny-cuda-nn; `create_from_config` makes of it the network, the loss and the
# optimizer in one object.

# %%
network = {
    "otype": "FullyFusedMLP",
    "n_neurons": 64,
    "n_hidden_layers": 2,
    "activation": "ReLU",
    "output_activation": "None",
}
training = {
    "loss": {"otype": "RelativeL2"},
    "optimizer": {"otype": "Adam", "learning_rate": 1e-2, "beta2": 0.99, "epsilon": 1e-15, "l2_reg": 1e-6},
}
plain = tcnn.create_from_config(2, 3, {**training, "encoding": {"otype": "Identity"}, "network": network})
print(plain.explain())

# %% [markdown]
# And the loop. One call of `training_step` does everything that a step consists of: it evaluates the network at `x`,
# compares with `y`, propagates the error back to every weight, and lets the optimizer change the weights. It returns
# the loss lazily: on a GPU the number is fetched only when you look at it.


# %%
def train(model, steps, snapshots=()):
    """Train, and keep the learned picture after some of the steps."""
    losses, pictures = [], {}
    start = time.perf_counter()
    for step in range(1, steps + 1):
        x, y = draw_batch(BATCH)
        loss = model.trainer.training_step(x, y)
        losses.append(float(loss))
        if step in snapshots:
            pictures[step] = picture_of(model)
    print(f"{steps} steps in {time.perf_counter() - start:.1f} s, PSNR {psnr(picture_of(model), photo):.1f} dB")
    return np.array(losses), pictures


def picture_of(model):
    """The model's answer at the centre of every pixel."""
    return np.clip(model.predict(pixel_centres(height, width)), 0, 1).reshape(photo.shape)


def show(pictures, titles):
    fig, axes = plt.subplots(1, len(pictures), figsize=(2.6 * len(pictures), 3.4), layout="constrained")
    for ax, picture, title in zip(np.atleast_1d(axes), pictures, titles, strict=True):
        ax.imshow(picture)
        ax.set_title(title)
        ax.set_axis_off()


plain_losses, _ = train(plain, STEPS)
show([photo, picture_of(plain)], ["reference", "network alone"])

# %% [markdown]
# Colours roughly in the right places, and not one sharp edge. This is no lack of neurons or of patience: networks
# learn slow variation long before fast variation (their *spectral bias*), and a photo is full of fast variation.
#
# ## Second attempt: give the network better inputs
#
# The trick is to not feed $(u, v)$ but an **encoding** of it. Ours is a *multiresolution hash grid*: 16 grids lie over
# the picture, from coarse to fine. Every vertex of every grid holds two numbers, which are learned like the weights.
# For a point, each grid interpolates the numbers of the four vertices around it, and the 16 x 2 results go into the
# same small network as before.
#
# The finest grid would have far more vertices than we want numbers, so vertices share the entries of a table through a
# hash function. Two vertices with the same entry disturb each other, but rarely do both matter, and the other levels
# tell them apart.

# %%
grid = {
    "otype": "HashGrid",
    "n_levels": 16,
    "n_features_per_level": 2,
    "log2_hashmap_size": 13,
    "base_resolution": 16,
    "per_level_scale": 1.3,
}
model = tcnn.create_from_config(2, 3, {**training, "encoding": grid, "network": network})
for name, block in model.blocks().items():
    print(f"{name:14} {block.shape[0]:6} x {block.shape[1]}")
print(f"together {model.n_params:,} parameters for {photo.size:,} numbers of the photo")

# %%
snapshots = [step for step in (1, 10, 30, 100, 300, 1000) if step <= STEPS]
losses, pictures = train(model, STEPS, snapshots)
show(list(pictures.values()), [f"step {step}" for step in pictures])

# %%
learned = picture_of(model)
error = np.clip(4 * np.abs(learned - photo), 0, 1)
show([photo, learned, error], ["reference", f"{psnr(learned, photo):.1f} dB", "absolute error x 4"])

# %% [markdown]
# **PSNR**, the peak signal-to-noise ratio, is $-10 \log_{10}$ of the mean squared error, in decibels: 20 dB means a
# typical error of 0.1, 30 dB one of 0.03, 40 dB one of 0.01 (of a full brightness of 1).
#
# The two loss curves side by side: the encoding does not change *what* is optimized, only how easy it is.

# %%
fig, ax = plt.subplots(figsize=(6, 3.2), layout="constrained")
for curve, label in ((plain_losses, "network alone"), (losses, "hash grid and network")):
    ax.semilogy(curve, linewidth=1, label=label)
ax.set(xlabel="step", ylabel="loss of the step's batch")
ax.legend()
ax.grid(alpha=0.3)

# %% [markdown]
# ## What do the levels do?
#
# Parameters are yours to look at and to change. Here we take the trained model and set the finer levels' entries to
# zero, all but the first few. The network was not trained for that, so colours shift, but you can see detail arrive
# level by level.


# %%
def only_coarse_levels(model, n_levels):
    cut = copy.deepcopy(model)  # a model of its own: parameters, optimizer state and all
    for name, block in model.blocks().items():
        if name.startswith("grid.level") and int(name.removeprefix("grid.level")) >= n_levels:
            cut.set_block(name, np.zeros_like(block))
    return cut


kept = (2, 6, 10, 14, 16)
show([picture_of(only_coarse_levels(model, n)) for n in kept], [f"{n} levels" for n in kept])

# %% [markdown]
# ## Go on
#
# - Set `log2_hashmap_size` to 9. Where do collisions show first, and why there?
# - Replace `HashGrid` by `DenseGrid` with 4 levels: no hashing, no collisions. How many parameters does it take for
#   the same PSNR?
# - `"activation": "Sine"` or `"Squareplus"` instead of `"ReLU"`: what happens to the network alone?
# - The loop above is short enough to be written out. For a fixed data set, `model.fit(x, y, steps=1000)` is the same
#   loop, and `numba-tcnn image my_photo.jpg` does all of this notebook from the command line.
