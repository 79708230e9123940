"""From jobs to programs: the kind of program that the chosen plan asks for."""

from __future__ import annotations

from .gradient_programs import (
    EncodingGradientProgram,
    GradientProgram,
    PhasedGradientProgram,
    SingleGradientProgram,
    StagedGradientProgram,
)
from .jobs import GradientJob, InferenceJob
from .layer_plan import LayeredPlan
from .layer_programs import LayeredGradientProgram, LayeredInferenceProgram
from .phased_plan import PhasedPlan
from .plan import StagedPlan
from .programs import InferenceProgram, Toolbox, Workspace


def make_inference_program(
    toolbox: Toolbox, job: InferenceJob, workspace: Workspace, constants: dict[str, int]
) -> InferenceProgram | LayeredInferenceProgram:
    plan, programs = toolbox.load_first_that_fits(job)
    if isinstance(plan, LayeredPlan):
        return LayeredInferenceProgram(job.spec, plan, programs, workspace, constants)
    (program,) = programs
    return InferenceProgram(plan, program, constants)


def make_gradient_program(
    toolbox: Toolbox, job: GradientJob, workspace: Workspace, constants: dict[str, int]
) -> GradientProgram:
    plan, programs = toolbox.load_first_that_fits(job)
    if job.spec.network is None:
        kind = EncodingGradientProgram
    elif isinstance(plan, LayeredPlan):
        kind = LayeredGradientProgram
    else:
        kinds = {StagedPlan: StagedGradientProgram, PhasedPlan: PhasedGradientProgram}
        kind = kinds.get(type(plan), SingleGradientProgram)
    program = kind(job.spec, plan, programs, workspace, constants)
    program.fixed_point, program.has_loss = job.options.fixed_point, job.options.loss is not None
    return program
