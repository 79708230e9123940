"""The jobs whose kernels run while a case is timed: a training step, inference, and the optimizer."""

from __future__ import annotations

import numpy as np

from numba_tcnn.fused.element_wise_jobs import optimizer_jobs
from numba_tcnn.fused.jobs import Job, inference_job, is_aligned, training_job
from numba_tcnn.fused.level_plan import can_split
from numba_tcnn.fused.offline import CAPABILITIES
from numba_tcnn.fused.optimizer_contract import Slice
from numba_tcnn.fused.optimizers import make_optimizer
from numba_tcnn.fused.plan import architecture
from numba_tcnn.fused.stage_io import InferenceOptions
from numba_tcnn.layout import n_network_params, n_params
from numba_tcnn.parameter_sizes import ParameterSizes

from .cases import Case


def timed_jobs(case: Case, arch: str) -> dict[str, Job]:
    """A job by the name of its call, on an architecture as in "sm_90".

    train, infer               on inputs of the case's dtype, float32 targets and outputs; the kernels of small batches
    train-large, infer-large   where large batches have kernels of their own
    infer-half                 of a bare network: float16 outputs
    optimizer                  and optimizer-2 ... where slices of the parameters have their own
    """
    spec, loss, optimizer = case.specs()
    aligned = is_aligned(0, spec.n_input_dims * np.dtype(case.input_dtype).itemsize)
    jobs: dict[str, Job] = {}
    for split in (False, True) if can_split(spec, architecture(CAPABILITIES[arch])) else (False,):
        size = "-large" if split else ""
        jobs[f"train{size}"] = training_job(spec, case.input_dtype, aligned, "float32", loss=loss.otype, split=split)
        options = InferenceOptions(case.input_dtype, aligned, "float32")
        jobs[f"infer{size}"] = inference_job(spec, options, split=split)
    if case.bare:
        jobs["infer-half"] = inference_job(spec, InferenceOptions(case.input_dtype, aligned, "float16"))
    made = make_optimizer(optimizer, Slice(0, ParameterSizes(n_params(spec), spec.layer_shapes)))
    for i, (job, _, _) in enumerate(optimizer_jobs(made, n_network_params(spec))):
        jobs[f"optimizer-{i + 1}" if i else "optimizer"] = job
    return jobs
