"""Initial parameters, equal bit for bit to those of tiny-cuda-nn for the same seed.

They come from one pcg32 stream (O'Neill 2014), first the network's weight matrices, then the encoding's tables.
tiny-cuda-nn's Trainer seeds the generator with the first word of `std::seed_seq{seed}`, its PyTorch bindings with the
seed itself: the same seed gives different parameters, hence `seeding`.
"""

from __future__ import annotations

import math

import numpy as np

from .layout import ParameterBlock, n_encoding_params, n_network_params, n_params, weight_blocks
from .specs import CompositeSpec, EncodingSpec, GridSpec, ModelSpec

MULTIPLIER = 0x5851F42D4C957F2D
MASK64 = 2**64 - 1
MASK32 = 2**32 - 1

BLOCK = 1 << 16
"""Generator states are advanced in vectors of this many."""

GRID_BOUND = 1e-4
DRAWS_PER_THREAD = 4
THREADS_PER_BLOCK = 128


class Pcg32:
    """The generator pcg32 (XSH-RR, 64-bit state), vectorised by jumping ahead.

    state ← state·a + c (mod 2^64); n steps are again of that form, so a vector of states advances n steps at a time.
    """

    def __init__(self, seed: int, sequence: int = 1):
        self.increment = (2 * sequence + 1) & MASK64
        self.state = 0
        self.advance(1)
        self.state = (self.state + seed) & MASK64
        self.advance(1)

    def jump(self, n: int) -> tuple[int, int]:
        """(a_n, c_n) such that n steps are state·a_n + c_n: square and multiply."""
        factor, addend = 1, 0
        base_factor, base_addend = MULTIPLIER, self.increment
        while n > 0:
            if n & 1:
                factor, addend = factor * base_factor & MASK64, (addend * base_factor + base_addend) & MASK64
            base_addend = (base_factor + 1) * base_addend & MASK64
            base_factor = base_factor * base_factor & MASK64
            n >>= 1
        return factor, addend

    def advance(self, n: int) -> None:
        factor, addend = self.jump(n)
        self.state = (self.state * factor + addend) & MASK64

    def uint32(self, n: int) -> np.ndarray:
        """The next n outputs, uint32 [n]."""
        result = np.empty(n, np.uint32)
        states = self._next_states(min(n, BLOCK))
        factor, addend = (np.uint64(value) for value in self.jump(BLOCK))
        for start in range(0, n, BLOCK):
            count = min(BLOCK, n - start)
            result[start : start + count] = permute(states[:count])
            states = states * factor + addend
        self.advance(n)
        return result

    def uint32_after(self, steps: np.ndarray) -> np.ndarray:
        """The outputs, uint32, that come after `steps` (uint64, any shape) steps from here; the generator stays."""
        states = np.full(steps.shape, self.state, np.uint64)
        factor, addend = MULTIPLIER, self.increment
        for bit in range(int(steps.max(initial=0)).bit_length()):
            taken = steps >> np.uint64(bit) & np.uint64(1) != 0
            states = np.where(taken, states * np.uint64(factor) + np.uint64(addend), states)
            factor, addend = factor * factor & MASK64, (factor + 1) * addend & MASK64
        return permute(states)

    def uniform(self, n: int) -> np.ndarray:
        """The next n floats, float32 [n] in [0, 1): the upper 23 bits of each output as a mantissa."""
        bits = self.uint32(n)
        bits >>= np.uint32(9)
        bits |= np.uint32(0x3F800000)
        floats = bits.view(np.float32)
        floats -= np.float32(1)
        return floats

    def _next_states(self, n: int) -> np.ndarray:
        """This state and the n - 1 that follow, doubling the vector until it is long enough."""
        states = np.array([self.state], np.uint64)
        while len(states) < n:
            factor, addend = (np.uint64(value) for value in self.jump(len(states)))
            states = np.concatenate([states, states * factor + addend])
        return states[:n]


def permute(states: np.ndarray) -> np.ndarray:
    """pcg32's output function: xorshift the state to 32 bits, then rotate right by its upper 5 bits."""
    shifted = (((states >> np.uint64(18)) ^ states) >> np.uint64(27)).astype(np.uint32)
    rotation = (states >> np.uint64(59)).astype(np.uint32)
    return (shifted >> rotation) | (shifted << (-rotation & np.uint32(31)))


def seed_sequence(seeds: list[int], n: int) -> list[int]:
    """The n 32-bit words that C++'s std::seed_seq generates from `seeds` (ISO C++ [rand.util.seedseq])."""
    words = [0x8B8B8B8B] * n
    s = len(seeds)
    t = 11 if n >= 623 else 7 if n >= 68 else 5 if n >= 39 else 3 if n >= 7 else (n - 1) // 2
    p = (n - t) // 2
    q = p + t

    def mix(a: int) -> int:
        return a ^ (a >> 27)

    m = max(s + 1, n)
    for k in range(m):
        r1 = 1664525 * mix(words[k % n] ^ words[(k + p) % n] ^ words[(k - 1) % n]) & MASK32
        r2 = (r1 + (s if k == 0 else k % n + (seeds[k - 1] if k <= s else 0))) & MASK32
        words[(k + p) % n] = (words[(k + p) % n] + r1) & MASK32
        words[(k + q) % n] = (words[(k + q) % n] + r2) & MASK32
        words[k % n] = r2
    for k in range(m, m + n):
        r3 = 1566083941 * mix((words[k % n] + words[(k + p) % n] + words[(k - 1) % n]) & MASK32) & MASK32
        r4 = (r3 - k % n) & MASK32
        words[(k + p) % n] ^= r3
        words[(k + q) % n] ^= r4
        words[k % n] = r4
    return words


def generator(seed: int, seeding: str) -> Pcg32:
    """seeding: "trainer", as tiny-cuda-nn's Trainer, or "bindings", as its PyTorch modules."""
    if seeding == "trainer":
        return Pcg32(seed_sequence([seed & MASK32], 2)[0])
    if seeding == "bindings":
        return Pcg32(seed & MASK64)
    raise ValueError(f'seeding is "trainer" or "bindings", not {seeding!r}')


def initial_params(spec: ModelSpec, seed: int, *, seeding: str = "trainer") -> np.ndarray:
    """The flat float32 parameter vector [n_params] in the order of `layout.py`."""
    return draw_params(spec, generator(seed, seeding))


def draw_params(spec: ModelSpec, random: Pcg32) -> np.ndarray:
    """Initial parameters from a generator, which then stands where tiny-cuda-nn's does after them."""
    params = np.zeros(n_params(spec), np.float32)
    for i, block in enumerate(weight_blocks(spec)):
        draw_weights(block, i, spec, random, params)
    draw_encoding_params(spec.encoding, random, params[n_network_params(spec) :])
    return params


def draw_weights(block: ParameterBlock, layer: int, spec: ModelSpec, random: Pcg32, params: np.ndarray) -> None:
    """Fills a weight matrix row by row, with the padding that tiny-cuda-nn has: its output rows, no other.

    What pads the width of a hidden layer stays 0, as do biases: they take no numbers from the generator.
    """
    fan_out, fan_in = block.logical_shape
    if layer == len(spec.layer_shapes) - 1:
        fan_out = spec.padded_output_width
    bound = weight_bound(spec.network.activation, layer, fan_out, fan_in)
    weights = random.uniform(fan_out * fan_in).reshape(fan_out, fan_in)
    weights *= np.float32(2)
    weights *= bound
    weights -= bound
    block.stored(params)[:fan_out, :fan_in] = weights


def weight_bound(activation: str, layer: int, fan_out: int, fan_in: int) -> np.float32:
    """Weights are uniform in [-bound, bound): Glorot and Bengio 2010, or Sitzmann et al. 2020 for sine networks."""
    if activation == "Sine":
        return np.float32(30) / np.float32(fan_in) if layer == 0 else np.float32(math.sqrt(np.float32(6 / fan_in)))
    return np.float32(math.sqrt(np.float32(6 / (fan_out + fan_in))))


def draw_encoding_params(spec: EncodingSpec, random: Pcg32, params: np.ndarray) -> None:
    """Fills the encoding's flat parameters; grids are uniform in ±1e-4, composites in the order of their children."""
    if isinstance(spec, GridSpec):
        draw_grid_params(random, params)
    elif isinstance(spec, CompositeSpec):
        offset = 0
        for child in spec.nested:
            size = n_encoding_params(child.encoding)
            draw_encoding_params(child.encoding, random, params[offset : offset + size])
            offset += size


def draw_grid_params(random: Pcg32, params: np.ndarray) -> None:
    """Uniform in [-1e-4, 1e-4), in the order in which tiny-cuda-nn's GPU threads draw."""
    low, high = np.float32(-GRID_BOUND), np.float32(GRID_BOUND)
    # one rounding, as the GPU's fused multiply-add: the product is exact in float64
    params[:] = np.multiply(uniform_of_threads(random, params.size), np.float64(high - low)) + np.float64(low)


def uniform_of_threads(random: Pcg32, n: int) -> np.ndarray:
    """n floats, float32 [n] in [0, 1), in the order in which tiny-cuda-nn's GPU threads draw.

    Each of N threads (a multiple of 128) draws four numbers in a row and writes them N elements apart: element e gets
    number 4 (e mod N) + ⌊e/N⌋. However many are drawn, the generator then stands n further.
    """
    n_threads = THREADS_PER_BLOCK * math.ceil(math.ceil(n / DRAWS_PER_THREAD) / THREADS_PER_BLOCK)
    start = random.state
    draws = random.uniform(DRAWS_PER_THREAD * n_threads).reshape(n_threads, DRAWS_PER_THREAD).T.reshape(-1)[:n]
    random.state = start
    random.advance(n)
    return draws
