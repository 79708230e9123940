"""A ray march around a trained model in one kernel: `model.device_function()` inside a `@cuda.jit` kernel.

A small network learns the signed distance to a torus in the unit cube. Rays from an eye in front of the cube then walk
by the distance that the network gives where they are, until they meet the surface or leave the cube (sphere tracing,
Hart 1996). In the fused kernel a ray stays in registers for the whole walk; the other way, `inference` is called once a
step for all rays, and two small kernels move them in between. Both do the same arithmetic, which is checked.

    python examples/fused_ray_march.py --size 1024 --steps 64 --out torus.png
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable

import numpy as np

import numba_tcnn as tcnn

CONFIG = {
    "loss": {"otype": "L2"},
    "optimizer": {"otype": "Adam", "learning_rate": 5e-3, "epsilon": 1e-15},
    "encoding": {
        "otype": "HashGrid",
        "n_levels": 8,
        "log2_hashmap_size": 15,
        "base_resolution": 8,
        "per_level_scale": 1.5,
    },
    "network": {"otype": "FullyFusedMLP", "n_neurons": 64, "n_hidden_layers": 2},
}
EYE = (0.5, 0.5, -1.2)
MISSED = 2.0  # the depth of rays that leave the cube; longer than its diagonal
SURFACE = 2e-3  # as near as this is met
RING, TUBE = 0.28, 0.1

MAX_DIFFERENCE = 0.01  # in depth, of the two ways
MAX_DIFFERENT_RAYS = 0.01  # those that graze the surface may meet it the one way and pass it the other


def distance_to_torus(x: np.ndarray) -> np.ndarray:
    """Signed distances [n, 1] of points [n, 3] from a torus around (1/2, 1/2, 1/2), tilted towards the eye."""
    a, b, c = (x - 0.5).T
    b, c = 0.8 * b + 0.6 * c, 0.8 * c - 0.6 * b
    return (np.hypot(np.hypot(a, b) - RING, c) - TUBE)[:, None].astype(np.float32)


def train(model: tcnn.Model, n_steps: int, seed: int) -> float:
    """The root mean square error of the last step, in units of the cube's edge."""
    rng = np.random.default_rng(seed)
    loss = 0.0
    for step in range(n_steps):
        x = rng.random((1 << 14, 3), np.float32)
        loss = model.trainer.training_step(x, distance_to_torus(x))
        if step == 2 * n_steps // 3:
            model.trainer.learning_rate *= 0.1
    return float(loss) ** 0.5


def make_kernels(model: tcnn.Model, size: int, n_steps: int, block_size: int) -> tuple[Callable, Callable, Callable]:
    """(march(params, depths), place(depths, points), walk(distances, depths, walking)) for size x size rays."""
    f = model.device_function(block_size)  # first: it knows how to compile with the newest NumPy
    from numba import cuda, float32

    n_rays, missed, surface = size * size, float32(MISSED), float32(SURFACE)
    eye_x, eye_y, eye_z = (float32(value) for value in EYE)
    zero, one, half, pixel = float32(0), float32(1), float32(0.5), float32(1 / size)

    @cuda.jit(device=True)
    def exit_depth(x, dx):
        """Where a ray leaves [0, 1] along one axis."""
        return (one - x) / dx if dx > zero else (-x / dx if dx < zero else missed)

    @cuda.jit(device=True)
    def ray(i):
        """Where ray i enters the cube (at z = 0), its direction, and the depth at which it leaves the cube."""
        x, y = (float32(i % size) + half) * pixel, (float32(i // size) + half) * pixel
        dx, dy, dz = x - eye_x, y - eye_y, -eye_z
        scale = one / math.sqrt(dx * dx + dy * dy + dz * dz)
        dx, dy, dz = dx * scale, dy * scale, dz * scale
        return x, y, dx, dy, dz, min(min(exit_depth(x, dx), exit_depth(y, dy)), one / dz)

    @cuda.jit(device=True)
    def step(depth, distance, end):
        """(depth behind a step, whether the ray goes on)."""
        depth = depth + distance
        if depth >= end:
            return missed, False
        return depth, distance > surface

    @cuda.jit(launch_bounds=block_size)
    def march(params, depths):
        i = cuda.grid(1)
        inside = i < n_rays
        x, y, dx, dy, dz, end = ray(min(i, n_rays - 1))
        depth, walking = zero, inside
        for _ in range(n_steps):
            # the whole warp goes on while any of its rays does: the model needs all 32 lanes
            if not cuda.any_sync(0xFFFFFFFF, walking):
                break
            (distance,) = f((x + depth * dx, y + depth * dy, depth * dz), params)
            if walking:
                depth, walking = step(depth, distance, end)
        if inside:
            depths[i] = depth

    @cuda.jit
    def place(depths, points):
        i = cuda.grid(1)
        if i < n_rays:
            x, y, dx, dy, dz, _ = ray(i)
            points[i, 0], points[i, 1], points[i, 2] = x + depths[i] * dx, y + depths[i] * dy, depths[i] * dz

    @cuda.jit
    def walk(distances, depths, walking):
        i = cuda.grid(1)
        if i < n_rays and walking[i]:
            depths[i], walking[i] = step(depths[i], distances[i, 0], ray(i)[5])

    return march, place, walk


def timed(work: Callable[[], None], prepare: Callable[[], None], synchronize: Callable[[], None]) -> float:
    """The least seconds of five runs, after one that compiles; each after `prepare`, which is not counted."""
    times = []
    for _ in range(6):
        prepare()
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def save_picture(depths: np.ndarray, path: str) -> None:
    """Nearer is brighter; what was missed is black."""
    from PIL import Image

    brightness = (1.2 - depths).clip(0, 1)
    Image.fromarray((255 * brightness).astype(np.uint8)).save(path)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    def integer(low: int, high: int) -> Callable[[str], int]:
        def convert(text: str) -> int:
            if not text.isdecimal() or not low <= int(text) <= high:
                raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
            return int(text)

        return convert

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--size", type=integer(16, 8192), default=1024, help="pixels along an edge of the picture (%(default)s)")
    add("--steps", type=integer(1, 1000), default=64, help="most steps of a ray (%(default)s)")
    add("--train", type=integer(1, 1_000_000), default=1000, help="training steps of the model (%(default)s)")
    add("--block-size", type=int, choices=(32, 64, 128, 256), default=128, help="threads of a block (%(default)s)")
    add("--seed", type=integer(0, 2**31), default=0, help="of the training points (%(default)s)")
    add("--out", metavar="PNG", help="write a picture of the depths")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        model = tcnn.create_from_config(3, 1, CONFIG, engine="fused")
    except tcnn.EngineUnavailable as error:
        print(f"fused_ray_march: nothing to do without a GPU that fused kernels run on ({error})")
        return 0
    print(f"trained to an error of {train(model, options.train, options.seed):.4f}")

    march, place, walk = make_kernels(model, options.size, options.steps, options.block_size)
    from numba import cuda

    n_rays = options.size**2
    n_blocks = -(-n_rays // options.block_size)
    fused, depths = cuda.device_array(n_rays, np.float32), cuda.device_array(n_rays, np.float32)
    points, distances = cuda.device_array((n_rays, 3), np.float32), cuda.device_array((n_rays, 1), np.float32)
    walking = cuda.device_array(n_rays, np.bool_)
    at_the_start, all_walking = np.zeros(n_rays, np.float32), np.ones(n_rays, bool)
    infer = model.network.prepare(points, distances)

    def march_in_one_kernel() -> None:
        march[n_blocks, options.block_size](model.device_params, fused)

    def march_step_by_step() -> None:
        for _ in range(options.steps):
            place[n_blocks, options.block_size](depths, points)
            infer()
            walk[n_blocks, options.block_size](distances, depths, walking)

    def start_again() -> None:
        depths.copy_to_device(at_the_start)
        walking.copy_to_device(all_walking)

    fused.copy_to_device(np.full(n_rays, np.nan, np.float32))
    one_kernel = timed(march_in_one_kernel, lambda: None, cuda.synchronize)
    by_steps = timed(march_step_by_step, start_again, cuda.synchronize)

    found, expected = fused.copy_to_host(), depths.copy_to_host()
    different = np.mean(~(np.abs(found - expected) <= MAX_DIFFERENCE))
    print(f"{n_rays:,} rays of up to {options.steps} steps; {np.mean(found < MISSED):.0%} meet the torus")
    print(f"in one kernel            {1e3 * one_kernel:9.3f} ms")
    print(f"`inference` once a step  {1e3 * by_steps:9.3f} ms")
    print(f"{different:.3%} of the rays end more than {MAX_DIFFERENCE} apart")
    if options.out:
        save_picture(found.reshape(options.size, options.size), options.out)
    if different > MAX_DIFFERENT_RAYS:
        print(f"fused_ray_march: more than {MAX_DIFFERENT_RAYS:.0%}: the two ways do not agree", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
