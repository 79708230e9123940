"""Kernels of a user's own around a model's device function compile to what was meant, for every architecture, without a
device: nothing in local memory, no spills, registers within a budget recorded with the pinned toolchain; and what does
not fit together is refused in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from embedding_kernels import call_and_store
from test_embedding import COMPOSITE, CUTLASS, GRID
from test_fused_compile import check_text, needs_toolkit
from test_fused_kernels import make_spec

from numba_tcnn.config import parse_model
from numba_tcnn.fused import compiler, embedding
from numba_tcnn.specs import ModelSpec

pytestmark = [pytest.mark.slow, needs_toolkit]

IMAGE = make_spec(2, 3, {"otype": "HashGrid", "n_levels": 16, "log2_hashmap_size": 15}, n_neurons=64)
WIDE = make_spec(3, 16, {"otype": "Frequency", "n_frequencies": 8}, n_neurons=128, n_hidden_layers=3)
ODD = make_spec(7, 5, COMPOSITE, **CUTLASS, hidden=[40, 25], bias=True, activation="SiLU", output_activation="Softplus")
HARMONICS = parse_model(3, None, {"otype": "SphericalHarmonics", "degree": 4}, None)
SIXTY_FOUR = make_spec(64, 64, {"otype": "Identity"}, n_neurons=64)

BUDGETS = {
    "image": (IMAGE, (75, 80, 90, 120), 160, 0),
    "odd": (ODD, (75, 80, 90, 120), 160, 0),
    "wide": (WIDE, (80, 90), 224, 0),
    "64 to 64": (SIXTY_FOUR, (90,), 192, 0),
    "harmonics alone": (HARMONICS, (75, 90), 48, 0),
}
"""Of a model: architectures, registers and bytes spilled of a thread."""

CASES = [(name, cc) for name, (_, architectures, _, _) in BUDGETS.items() for cc in architectures]


def device_function(spec: ModelSpec, capability: tuple[int, int], block_size: int = 256) -> Callable:
    from numba_tcnn.fused import device_function

    return device_function.device_function(spec, capability, block_size)


def compile_kernel(kernel: Callable, specs: list[ModelSpec], capability: tuple[int, int]) -> tuple[str, str]:
    """(PTX, the assembler's report) of kernel(x, out, params ...), as `@cuda.jit` compiles it, and checked."""
    from numba import cuda, types

    from numba_tcnn.fused import device_function, numba_bridge

    matrix = types.Array(types.float32, 2, "C")
    signature = (matrix, matrix, *[device_function.params_type(spec) for spec in specs])
    text, name = numba_bridge.jitted_to_ptx(cuda.jit(kernel), signature, capability)
    check_text(text, name)
    _, log = compiler.assemble(text, capability)
    return text, log


def usage(log: str) -> tuple[int, int]:
    """(registers, bytes spilled)."""
    (registers,), (spilled,) = re.findall(r"Used (\d+) registers", log), re.findall(r"(\d+) bytes spill stores", log)
    return int(registers), int(spilled)


@pytest.mark.parametrize(("name", "cc"), CASES)
def test_a_kernel_that_calls_a_model_in_a_loop(name: str, cc: int) -> None:
    """Both calls of the kernel use the same scratch; the weights do not move into registers in front of the loop."""
    (spec, _, most_registers, most_spilled), capability = BUDGETS[name], divmod(cc, 10)
    f = device_function(spec, capability, 128)
    text, log = compile_kernel(call_and_store(f, spec, n_calls=9), [spec], capability)
    registers, spilled = usage(log)
    print(f"{name} sm_{cc}: {registers} registers, {spilled} bytes spilled")
    assert spilled <= most_spilled and registers <= most_registers
    (scratch,) = re.findall(r"\.shared .*\[(\d+)\]", text)
    assert int(scratch) == embedding.EmbeddedPlan(spec, 128).shared_bytes


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_two_models_in_one_kernel(capability: tuple[int, int]) -> None:
    """One evaluates where the other said, in some warps only."""
    from numba import cuda, float32

    one, two = make_spec(encoding=GRID), make_spec(3, 1, {"otype": "SphericalHarmonics", "degree": 3})
    f, g = device_function(one, capability), device_function(two, capability)

    def kernel(x, out, params, other):
        i = cuda.grid(1)
        inside = i < x.shape[0]
        place = (x[i, 0], x[i, 1]) if inside else (float32(0), float32(0))
        y = f(place, params)
        if cuda.any_sync(0xFFFFFFFF, inside and y[0] > float32(0)):
            z = g(y, other)
            if inside:
                out[i, 0] = z[0]

    text, log = compile_kernel(kernel, [one, two], capability)
    assert usage(log)[1] == 0
    assert len(re.findall(r"\.shared ", text)) >= 2


def test_the_user_s_fast_mathematics_and_bounds() -> None:
    from numba import cuda, types

    from numba_tcnn.fused import device_function as module
    from numba_tcnn.fused import numba_bridge

    f = device_function(IMAGE, (9, 0))
    kernel = cuda.jit(call_and_store(f, IMAGE), fastmath=True, launch_bounds=256, lto=False)
    matrix = types.Array(types.float32, 2, "C")
    text, name = numba_bridge.jitted_to_ptx(kernel, (matrix, matrix, module.params_type(IMAGE)), (9, 0))
    check_text(text, name)
    registers, spilled = usage(compiler.assemble(text, (9, 0))[1])
    assert registers <= 200 and spilled == 0


# ------------------------------------------------------------------------------------------------ misuse


def refusal(call: str, params: Any = None) -> str:
    """What the compiler says of a kernel with this call in it."""
    from numba import cuda, float32
    from numba.core import errors

    from numba_tcnn.fused import device_function as module
    from numba_tcnn.fused import numba_bridge

    spec = make_spec(encoding=GRID)
    namespace = {"f": device_function(spec, (9, 0)), "cuda": cuda, "float32": float32}
    exec(f"def kernel(x, out, params):\n    i = cuda.grid(1)\n    out[i, 0] = {call}[0]\n", namespace)
    matrix = float32[:, ::1]
    kind = module.params_type(spec) if params is None else params
    with pytest.raises((errors.TypingError, numba_bridge.TypingError)) as caught:
        numba_bridge.jitted_to_ptx(cuda.jit(namespace["kernel"]), (matrix, matrix, kind), (9, 0))
    return str(caught.value)


@pytest.mark.parametrize(
    ("call", "given"),
    [
        ("f((x[i, 0],), params)", "UniTuple(float32 x 1)"),
        ("f((x[i, 0], x[i, 1], x[i, 0]), params)", "UniTuple(float32 x 3)"),
        ("f((x[i, 0], 2.0 * x[i, 1]), params)", "Tuple(float32, float64)"),
        ("f((i, i), params)", "UniTuple(int64 x 2)"),
        ("f(x[i, 0], params)", "float32"),
        ("f(x[i], params)", "array(float32, 1d, C)"),
    ],
)
def test_inputs_that_are_no_tuple_of_float32(call: str, given: str) -> None:
    message = refusal(call)
    assert f"x must be a tuple of 2 float32, one for each input dim of the model, not {given}" in message


def test_params_of_another_model_or_of_none() -> None:
    from numba import types

    from numba_tcnn.fused.device_function import params_type

    other = params_type(make_spec(n_out=4, encoding=GRID))
    assert f"params are those of another model: {other}" in refusal("f((x[i, 0], x[i, 1]), params)", other)
    message = refusal("f((x[i, 0], x[i, 1]), params)", types.Array(types.float16, 1, "C"))
    assert "params must be the model's device_params, passed to the kernel as it is, not array(float16" in message


def test_a_model_that_was_given_no_arguments() -> None:
    assert "missing a required argument: 'params'" in refusal("f((x[i, 0], x[i, 1]))")


def test_the_type_of_parameters_is_one_per_configuration() -> None:
    from numba_tcnn.fused.device_function import params_type

    kinds = {params_type(spec) for spec in (IMAGE, WIDE, ODD, make_spec(7, 5, COMPOSITE, **CUTLASS, hidden=[40, 25]))}
    assert len(kinds) == 4 and all(kinds)
    assert params_type(make_spec(encoding=GRID)) is params_type(make_spec(encoding=dict(GRID)))
    assert np.unique([kind.name for kind in kinds]).size == 4
