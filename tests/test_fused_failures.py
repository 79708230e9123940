"""Kernels that spill or do not compile, options without fused kernels, and devices that can't be used, on the emulated
driver.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest
from emulated_driver import CUresult, EmulatedDriver, installed
from emulated_models import CONFIG, assert_same_training, batch, make, predict, reference_of, step

import numba_tcnn as tcnn
from numba_tcnn.engines import EngineUnavailable
from numba_tcnn.fused import device_status, driver, losses
from numba_tcnn.fused.compiler import MAX_SPILL_BYTES
from numba_tcnn.fused.layer_plan import LAYER_BY_LAYER
from numba_tcnn.reference.engine import ReferenceRuntime


def test_plans_that_spill_give_way(gpu: EmulatedDriver, no_reference: None) -> None:
    """The first candidate that spills no more than a kernel may is taken."""
    seen = []

    def spills(description: str) -> int:
        if description.startswith("single"):
            seen.append(description)
            return {1: MAX_SPILL_BYTES + 1, 2: 4000}.get(len(seen), MAX_SPILL_BYTES)
        return 0

    gpu.compiler.spills = spills
    model = make()
    x, y = batch(20)
    model.trainer.training_step(x, y)
    (gradient,) = [kernel for kernel in model.explain().kernels if kernel.name == "gradient"]
    assert len(set(seen)) == 3 and gradient.spill_bytes == MAX_SPILL_BYTES


def test_when_every_plan_spills_the_one_that_spills_least_is_taken(gpu: EmulatedDriver, no_reference: None) -> None:
    seen = {}

    def spills(description: str) -> int:
        return seen.setdefault(description, 200 if len(seen) == 2 else 300) if "GradientOptions" in description else 0

    gpu.compiler.spills = spills
    model = make()
    start, twin = model.params, reference_of(model)
    x, y = batch(20)
    model.trainer.training_step(x, y)
    step(twin, x, y)
    assert_same_training(model, twin, start)
    (gradient,) = [kernel for kernel in model.explain().kernels if kernel.name == "gradient"]
    assert gradient.spill_bytes == 200 and len(seen) > 3


def test_when_every_plan_spills_too_much_the_reason_is_told(gpu: EmulatedDriver) -> None:
    gpu.compiler.spills = lambda description: 4096
    model = make()
    with pytest.raises(EngineUnavailable, match="no kernel plan can be used: .*4096 bytes spilled"):
        model.network.inference(batch(20)[0])


def test_kernels_are_loaded_once(gpu: EmulatedDriver) -> None:
    model = make()
    x, y = batch(20)
    model.trainer.training_step(x, y)
    made = len(gpu.compiler.made)
    for size in (20, 30, 300):
        model.trainer.training_step(*batch(size))
    assert len(gpu.compiler.made) == made


FUSED = ("single", "propagate")
"""Parts of the descriptions of a gradient program's kernels, but for those that go `LAYER_BY_LAYER`."""


@pytest.mark.parametrize(("failing", "kernels"), [
    (("single",), {"propagate", "weight_gradient"}), (FUSED, {"layer_backward", "layer_gradient"}),
])  # fmt: skip
def test_plans_that_do_not_compile_give_way(
    failing: tuple, kernels: set, gpu: EmulatedDriver, no_reference: None
) -> None:
    gpu.compiler.fails = failing
    model = make()
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    model.trainer.training_step(x, y)
    step(twin, x, y)
    assert_same_training(model, twin, start)
    assert kernels <= {kernel.name for kernel in model.explain().kernels}


@pytest.mark.parametrize(
    "failing", [(*FUSED, LAYER_BY_LAYER), ("optimizer AdamSpec",), ("inference", LAYER_BY_LAYER)], ids=str
)
def test_a_kernel_that_does_not_compile_carries_everything_over(failing: tuple, gpu: EmulatedDriver) -> None:
    """Three fused steps, then a call for which a kernel is missing: one warning, and the same call goes on in the
    reference from the same parameters and moments."""
    model = make(engine="auto")
    twin, start = reference_of(model), model.params
    x, y = batch(70)
    for _ in range(3):
        model.trainer.training_step(x, y)
        step(twin, x, y)
    gpu.compiler.fails = failing
    model.network.engine.runtime.model.programs.clear()
    before = model.params
    with pytest.warns(tcnn.JitFusionWarning, match="NvvmError: not today") as caught:
        if "inference" in failing:
            y_out = model.predict(x)
            np.testing.assert_array_equal(y_out, predict(ReferenceRuntime(twin.spec, before, "float16"), x))
        else:
            loss = model.trainer.training_step(x, y)
            assert float(loss) == pytest.approx(step(twin, x, y), rel=1e-4)
    assert len(caught) == 1 and model.explain().engine == "reference"
    model.trainer.training_step(x, y)
    step(twin, x, y)
    assert_same_training(model, twin, start)


def test_strict_models_raise_instead(gpu: EmulatedDriver) -> None:
    gpu.compiler.fails = (*FUSED, LAYER_BY_LAYER)
    model = make()
    with pytest.raises(EngineUnavailable, match="did not compile"):
        model.trainer.training_step(*batch(20))


def test_what_has_no_fused_kernel_is_named(gpu: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loss has one; without it, its name would be told."""
    monkeypatch.delitem(losses.LOSSES, "RelativeL2")
    config = CONFIG | {"loss": {"otype": "RelativeL2"}}
    with pytest.raises(EngineUnavailable, match="the loss RelativeL2 has no fused kernel yet"):
        tcnn.create_from_config(3, 3, config, engine="fused")


@pytest.mark.parametrize("options", [{"dtype": "float64"}, {"dtype": "float32", "deterministic": True}])
def test_options_without_fused_kernels_are_refused(options: dict, gpu: EmulatedDriver) -> None:
    with pytest.raises(EngineUnavailable, match=f"{next(iter(options.values()))}.* has none yet"):
        tcnn.create_from_config(2, 3, CONFIG, engine="fused", **options)


# ----------------------------------------------------------------------------------------- device status


def test_a_usable_device(gpu: EmulatedDriver) -> None:
    status = device_status(0)
    assert status.usable and status.name == "Emulated GPU" and status.compute_capability == (9, 0)
    assert status.driver_version == (13, 0) and tcnn.supports_jit_fusion()


def test_a_device_that_is_not_there(gpu: EmulatedDriver) -> None:
    status = device_status(3)
    assert not status.usable and status.reason == "there is no CUDA device 3: this machine has 1"
    assert not status.no_device  # there are devices, so somebody should hear of it


@pytest.mark.parametrize(("options", "reason"), [
    ({"version": 11080}, r"the NVIDIA driver supports CUDA 11.8; 12.0 is needed"),
    ({"capability": (7, 0)}, r"compute capability 7.0 has no usable tensor cores; 7.5 is needed"),
], ids=["driver", "chip"])  # fmt: skip
def test_devices_that_cannot_be_used(options: dict, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(EmulatedDriver(**options), monkeypatch):
        status = device_status(0)
        assert (status.usable, status.no_device, status.reason) == (False, False, reason)
        assert status.name == "Emulated GPU"
        with pytest.warns(tcnn.JitFusionWarning, match=reason.replace(".", r"\.")):
            model = tcnn.create_from_config(2, 3, CONFIG)
        assert model.explain().engine == "reference"
        with pytest.raises(EngineUnavailable, match="is needed"):
            tcnn.create_from_config(2, 3, CONFIG, engine="fused")


def test_a_context_that_cannot_be_made(gpu: EmulatedDriver) -> None:
    gpu.failing["cuDevicePrimaryCtxRetain"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    status = device_status(0)
    assert not status.usable and not status.no_device
    assert status.reason.startswith("making a context on device 0: CUDA_ERROR_OUT_OF_MEMORY")


class TestBindings:
    """`driver.bindings` itself, with a module of the emulated driver in place of cuda.bindings."""

    @pytest.fixture
    def bound(self, monkeypatch: pytest.MonkeyPatch):
        emulated = EmulatedDriver()
        package = type(sys)("cuda.bindings")
        package.driver = emulated
        monkeypatch.setitem(sys.modules, "cuda.bindings", package)
        return emulated

    def reason(self) -> EngineUnavailable:
        with pytest.raises(EngineUnavailable) as caught:
            driver.bindings.__wrapped__()
        return caught.value

    def test_they_are_initialised(self, bound: EmulatedDriver) -> None:
        assert driver.bindings.__wrapped__() is bound

    def test_packages_that_are_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
        error = self.reason()
        assert "the CUDA packages are not installed" in str(error) and "pip install" in str(error) and error.no_device

    def test_no_driver(self, bound: EmulatedDriver) -> None:
        def raises(flags):
            raise RuntimeError("libcuda.so.1: cannot open shared object file")

        bound.cuInit = raises
        error = self.reason()
        assert "there is no NVIDIA driver on this machine" in str(error) and error.no_device

    def test_no_device(self, bound: EmulatedDriver) -> None:
        bound.failing["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
        error = self.reason()
        assert str(error) == "there is no NVIDIA device on this machine" and error.no_device

    def test_a_driver_that_does_not_work(self, bound: EmulatedDriver) -> None:
        bound.failing["cuInit"] = CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        error = self.reason()
        assert "could not be initialised: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in str(error) and not error.no_device
