"""What a draw's calls compile, as jobs: so that kernels can be made without a device, on a machine with more time.

The same as `FusedModel`'s calls ask of the engine, but for optimizers with SGD inside, whose rate the gradient decides.
"""

from __future__ import annotations

import itertools

import numpy as np

from numba_tcnn.config import parse_optimizer
from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused.element_wise_jobs import CollectJob, GradientScaleJob, optimizer_jobs
from numba_tcnn.fused.formats import number_format
from numba_tcnn.fused.jobs import Job, backward_job, inference_job, is_aligned, training_job
from numba_tcnn.fused.level_plan import split_batch
from numba_tcnn.fused.optimizer_contract import Slice
from numba_tcnn.fused.optimizers import make_optimizer
from numba_tcnn.fused.plan import architecture
from numba_tcnn.fused.second_order_programs import second_order_job
from numba_tcnn.fused.stage_io import InferenceOptions
from numba_tcnn.layout import n_network_params, n_params
from numba_tcnn.parameter_sizes import ParameterSizes

from .draws import CONSTANT_GRADIENT, OPTIMIZER, Config, Draw
from .fused_model import MARGIN
from .training import ADAM, SGD


def jobs_of(draw: Draw, capability: tuple[int, int], largest_batch: int) -> list[Job]:
    """Of all calls that a draw is compared in, on a chip of this compute capability, and up to this batch size."""
    spec, dtype = draw.spec, draw.dtype
    input_dtype = "float32" if draw.input_dtype == "float64" else draw.input_dtype
    aligned = arrives_aligned(draw, input_dtype)
    loss = None if draw.loss == CONSTANT_GRADIENT else draw.loss
    has_table = n_params(spec) > n_network_params(spec)
    how = {"fixed_point": draw.deterministic and has_table, "max_level": draw.max_level is not None}
    splits = may_split(draw, capability, largest_batch)
    jobs: list[Job | None] = [
        *(
            training_job(
                spec, input_dtype, aligned, "float32", loss=loss,
                density_dtype=draw.density_dtype,
                split=split, dtype=dtype, **how,
            )
            for split in ((False, True) if splits and not draw.deterministic else (False,))
        ),
        backward_job(spec, input_dtype, aligned, "float32", params=True, input=True, dtype=dtype, **how),
        *(
            inference_job(
                spec, InferenceOptions(input_dtype, aligned, output, how["max_level"]), split=split, dtype=dtype
            )
            for output, split in itertools.product({draw.output_dtype, "float32"}, {False, splits})
        ),
        *optimizers_of(draw),
        CollectJob(how["fixed_point"]),
        GradientScaleJob("float32") if number_format(dtype).scales_given_gradients else None,
        second_order_if_any(draw, capability, input_dtype, aligned, how),
    ]  # fmt: skip
    return [job for job in jobs if job is not None]


def arrives_aligned(draw: Draw, dtype: str) -> bool:
    """Whether rows of x begin at multiples of 16 bytes where kernels find them."""
    size, width = np.dtype(dtype).itemsize, draw.n_input_dims
    match draw.layout:
        case "unaligned":
            return is_aligned(size, width * size)
        case "columns":
            return is_aligned(MARGIN * size, (width + 2 * MARGIN) * size)
        case "every other row":
            return is_aligned(0, 2 * width * size)
    return is_aligned(0, width * size)


def may_split(draw: Draw, capability: tuple[int, int], largest_batch: int) -> bool:
    """Whether the largest batch is one that kernels work through level by level."""
    from_here_on = split_batch(draw.spec, architecture(capability), draw.dtype)
    return from_here_on is not None and largest_batch >= from_here_on and draw.max_level is None


def optimizers_of(draw: Draw) -> list[Job]:
    fixed_point = draw.deterministic and n_params(draw.spec) > n_network_params(draw.spec)
    where = Slice(0, ParameterSizes(n_params(draw.spec), draw.spec.layer_shapes))
    configs: list[Config] = [OPTIMIZER]
    if where.sizes.n_params:
        configs += [SGD, ADAM, draw.optimizer]
    jobs = []
    for config in configs:
        made = make_optimizer(parse_optimizer(config), where)
        made_jobs = optimizer_jobs(made, n_network_params(draw.spec), draw.dtype, fixed_point=fixed_point)
        jobs += [job for job, _, _ in made_jobs]
    return list(dict.fromkeys(jobs))


def second_order_if_any(
    draw: Draw, capability: tuple[int, int], input_dtype: str, aligned: bool, how: dict[str, bool]
) -> Job | None:
    job = second_order_job(draw.spec, input_dtype, aligned, "float32", "float32", dtype=draw.dtype, **how)
    try:
        job.plans(architecture(capability))
    except EngineUnavailable:
        return None
    return job
