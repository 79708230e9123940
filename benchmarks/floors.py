"""How long a call must take at least on an NVIDIA H200, by formula from specs: no GPU is needed.

    python -m benchmarks.floors [--configs NAME,NAME] [--batches 14,18]

prints microseconds for each resource. Those of the batch are used at the same time by different samples, so the most
occupied one counts: bytes that must pass between chip and memory, products of tensor cores, a multiprocessor's shared
memory (tables of grid levels that fit there, and sums of their gradients), look-ups in larger tables, and reductions
to their gradients. The optimizer must wait for the last sample's gradient, so its bytes come on top:

    floor = max(launch, max(bytes, products, shared, look-ups, reductions) + optimizer)

It is a bound for float16 models on uniformly distributed samples. Left out is what has no ceiling here: features that
pass between kernels, sines, exponentials, what a multiprocessor converts and stores between two products.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from numba_tcnn.fused.optimizer_contract import Slice
from numba_tcnn.fused.optimizer_state import StateVector
from numba_tcnn.fused.optimizers import make_optimizer
from numba_tcnn.layout import GridLevel, grid_levels, n_encoding_params, n_network_params, n_params
from numba_tcnn.parameter_sizes import ParameterSizes
from numba_tcnn.specs import AdamSpec, CompositeSpec, EncodingSpec, GridSpec, ModelSpec, OptimizerSpec

from .cases import BATCHES, Case, load_cases

DEVICE = "NVIDIA H200"


@dataclass(frozen=True)
class Ceiling:
    """What was reached of something in a second, and by what."""

    a_second: float
    unit: str
    source: str

    def microseconds(self, amount: float) -> float:
        return 1e6 * amount / self.a_second


CEILINGS = {
    "bytes": Ceiling(4.3e12, "bytes read or written", "copy from one array on the device to another"),
    "near bytes": Ceiling(
        5.9e12, "bytes read or written", "Adam with sums of partial gradients, all in the L2: 35 MB in 5.9 us"
    ),
    "products": Ceiling(790e12, "float16 operations", "large matrix products through cuBLAS (wgmma)"),
    "shared look-ups": Ceiling(
        1.4e12, "words of 4 bytes", "levels of 2^15 entries of two float16 in shared memory, 2 dims, 2^20 samples"
    ),
    "shared sums": Ceiling(
        1.6e12, "additions", "the same levels' gradients, int32 in shared memory, a feature a block, 2^20 samples"
    ),
    "look-ups": Ceiling(
        537e9, "entries", "levels of 2^15 entries, 2 dims, one behind the other, 2^20 samples: 125 us for 16"
    ),
    "look-ups, 2^19": Ceiling(
        260e9, "entries", "16 levels of up to 2^19 entries, 3 dims, 2^18 samples, two neighbours in a load: 129 us"
    ),
    "look-ups, 2^22": Ceiling(137e9, "entries", "the same of up to 2^22 entries, each alone: 244 us"),
    "reductions": Ceiling(
        90e9,
        "reductions of up to 16 bytes",
        "float32 vectors, levels of up to 2^15 or 2^19 entries, 3 dims, 2^18 samples",
    ),
    "reductions, 2^22": Ceiling(39e9, "reductions of up to 16 bytes", "the same of up to 2^22 entries: 860 us"),
    "launch": Ceiling(1 / 3e-6, "calls", "kernels launched from C++, one behind the other: 3 us each"),
}
"""Of one `DEVICE`, measured on 2026-11-30 (driver 580.159, CUDA 13.0), on uniformly distributed samples."""

SHARED_BYTES = 227 * 1024
"""Of a block."""

L2_BYTES = 60 << 20

PAIRED = 0.75
"""Reductions a corner where entries of up to two features that are neighbours go together: half of the pairs do."""

COPY = 2
GRADIENT = MASTER = 4
"""Bytes of a parameter: as kernels read it; its gradient, and as the optimizer keeps it, in float32."""


@dataclass(frozen=True)
class Floor:
    """Microseconds of each resource while the batch is worked on, and of the optimizer behind it."""

    batch: dict[str, float]
    optimizer: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        return self.batch | {"optimizer": self.optimizer}

    @property
    def microseconds(self) -> float:
        return max(self._launch, max(self.batch.values()) + self.optimizer)

    @property
    def bound_by(self) -> str:
        """The largest part."""
        if self.microseconds == self._launch:
            return "launch"
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def _launch(self) -> float:
        return CEILINGS["launch"].microseconds(1)


# --------------------------------------------------------------------------------------------- what is done


def grids_of(encoding: EncodingSpec) -> Iterator[GridSpec]:
    if isinstance(encoding, GridSpec):
        yield encoding
    elif isinstance(encoding, CompositeSpec):
        for child in encoding.nested:
            yield from grids_of(child.encoding)


def n_corners(grid: GridSpec) -> int:
    return 1 if grid.interpolation == "Nearest" else 2**grid.n_input_dims


def n_touched(grid: GridSpec, level: GridLevel, batch: int) -> float:
    """Entries of a level that some sample of the batch needs: n (1 - (1 - c / n)^B), for c corners a sample."""
    share = min(n_corners(grid) / level.n_entries, 1.0)
    return level.n_entries * (1 - (1 - share) ** batch)


def touched_params(spec: ModelSpec, batch: int) -> float:
    """Of the encoding."""
    return sum(
        grid.n_features_per_level * n_touched(grid, level, batch)
        for grid in grids_of(spec.encoding)
        for level in grid_levels(grid)
    )


def of_table(resource: str, level: GridLevel) -> Ceiling:
    """What was reached on the largest tables measured that are no larger than this level's."""
    sizes = [size for size in (22, 19) if f"{resource}, 2^{size}" in CEILINGS and level.n_entries >= 1 << size]
    return CEILINGS[f"{resource}, 2^{sizes[0]}" if sizes else resource]


def look_ups(spec: ModelSpec, batch: int) -> dict[str, float]:
    """Microseconds to gather the features, of shared memory and of larger tables."""
    times = {"shared": 0.0, "look-ups": 0.0}
    for grid in grids_of(spec.encoding):
        entry_bytes = COPY * grid.n_features_per_level
        for level in grid_levels(grid):
            n = batch * n_corners(grid)
            if level.n_entries * entry_bytes <= SHARED_BYTES:
                times["shared"] += CEILINGS["shared look-ups"].microseconds(n * -(-entry_bytes // 4))
            else:
                loads = n * -(-entry_bytes // 16)
                times["look-ups"] += of_table("look-ups", level).microseconds(loads)
    return times


def reductions(spec: ModelSpec, batch: int) -> dict[str, float]:
    """Microseconds to sum the table gradient, in shared memory and in global memory."""
    times = {"shared": 0.0, "reductions": 0.0}
    for grid in grids_of(spec.encoding):
        features = grid.n_features_per_level
        for level in grid_levels(grid):
            n = batch * (1 if grid.stochastic_interpolation else n_corners(grid))
            if level.n_entries * GRADIENT <= SHARED_BYTES:
                times["shared"] += CEILINGS["shared sums"].microseconds(n * features)
            else:
                paired = PAIRED if features <= 2 and n > batch else 1
                vectors = n * paired * -(-GRADIENT * features // 16)
                times["reductions"] += of_table("reductions", level).microseconds(vectors)
    return times


def n_operations(spec: ModelSpec, batch: int, *, training: bool) -> int:
    """Multiplications and additions of the matrix products, padding included.

    Training has one product for outputs, one for weight gradients and one for what is handed to the layer below,
    which the lowest has only where the encoding learns.
    """
    sizes = [fan_out * fan_in for fan_out, fan_in in spec.layer_shapes]
    total = sum(sizes)
    if training:
        total = 3 * total - (0 if n_encoding_params(spec.encoding) else sizes[0])
    return 2 * batch * total


def optimizer_bytes(spec: ModelSpec, optimizer: OptimizerSpec, batch: int) -> float:
    """What a step of the optimizer reads and writes.

    Of a parameter: itself and its gradient (read and cleared) in float32, its copy, its state. Adam alone leaves
    parameters of the encoding that no sample needed as they are, and reads their gradient only.
    """
    n, n_network = n_params(spec), n_network_params(spec)
    made = make_optimizer(optimizer, Slice(0, ParameterSizes(n, spec.layer_shapes)))
    share = touched_params(spec, batch) / max(n - n_network, 1)
    total = 0.0
    for where, chain in made.chains():
        links = [part for part in chain if part.fields is not None]
        state = sum(a.dtype.itemsize for part in links for a in part.arrays.values() if isinstance(a, StateVector))
        skips = [isinstance(o.spec, AdamSpec) and o.spec.skip_zero_grad_non_matrix_params for o in links] == [True]
        n_table = max(where.stop - max(where.start, n_network), 0)
        n_moved = where.sizes.n_params - (n_table * (1 - share) if skips else 0)
        total += n_moved * (2 * (MASTER + GRADIENT + state) + COPY) + (where.sizes.n_params - n_moved) * GRADIENT
    return total


def batch_bytes(spec: ModelSpec, batch: int, *sample_dtypes: tuple[int, str]) -> float:
    """Numbers a sample, (how many, dtype), and every parameter that is needed, once."""
    sample = sum(n * np.dtype(dtype).itemsize for n, dtype in sample_dtypes)
    return batch * sample + COPY * (n_network_params(spec) + touched_params(spec, batch))


def _bytes_ceiling(n_bytes: float) -> Ceiling:
    """Of a call that reads and writes so much: what fits the L2 may be there already."""
    return CEILINGS["near bytes" if n_bytes <= L2_BYTES else "bytes"]


def training_floor(case: Case, batch: int) -> Floor:
    """Of a training step on inputs of the case's dtype and float32 targets."""
    spec, _, optimizer = case.specs()
    passed = batch_bytes(spec, batch, (case.n_input_dims, case.input_dtype), (case.n_output_dims, "float32"))
    updated = optimizer_bytes(spec, optimizer, batch)
    memory = _bytes_ceiling(passed + updated)
    gathered, summed = look_ups(spec, batch), reductions(spec, batch)
    parts = {
        "bytes": memory.microseconds(passed),
        "products": CEILINGS["products"].microseconds(n_operations(spec, batch, training=True)),
        "shared": gathered["shared"] + summed["shared"],
        "look-ups": gathered["look-ups"],
        "reductions": summed["reductions"],
    }
    return Floor(parts, memory.microseconds(updated))


def inference_floor(case: Case, batch: int) -> Floor:
    """Of inference from the case's dtype to float32."""
    spec, _, _ = case.specs()
    passed = batch_bytes(spec, batch, (case.n_input_dims, case.input_dtype), (case.n_output_dims, "float32"))
    parts = {
        "bytes": _bytes_ceiling(passed).microseconds(passed),
        "products": CEILINGS["products"].microseconds(n_operations(spec, batch, training=False)),
    }
    return Floor(parts | look_ups(spec, batch))


FLOORS = {"train": training_floor, "infer": inference_floor}
"""By the name of what is timed."""


# ----------------------------------------------------------------------------------------------- the command

PARTS = ("bytes", "products", "shared", "look-ups", "reductions", "optimizer")


def told(microseconds: float) -> str:
    """With a digit behind the point up to 100; nothing where there is nothing to do."""
    if microseconds == 0:
        return ""
    return f"{microseconds:.1f}" if microseconds < 100 else f"{microseconds:.0f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.floors", description=__doc__.splitlines()[0])
    parser.add_argument("--configs", type=lambda text: text.split(","), help="names, separated by commas (all)")
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], default=list(BATCHES),
        help="binary logarithms of batch sizes (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        cases = load_cases(options.configs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{'':28}{''.join(f'{part:>12}' for part in (*PARTS, 'floor, us'))}  bound by")
    for case in cases:
        for log2_batch in options.batches:
            for kind, floor_of in FLOORS.items():
                floor = floor_of(case, 1 << log2_batch)
                figures = (*(floor.parts.get(part, 0.0) for part in PARTS), floor.microseconds)
                columns = "".join(f"{told(figure):>12}" for figure in figures)
                print(f"{f'{case.name} 2^{log2_batch} {kind}':28}{columns}  {floor.bound_by}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
