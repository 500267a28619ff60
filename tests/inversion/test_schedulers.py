"""What `explain()` shows of an image is what the scheduler's own methods show, or it is refused."""

import diffusers
import pytest
import torch
from helpers.newer import newer
from helpers.tiers import tiered

import sdattn
from sdattn.inversion.schedules import check_scheduler, schedule_of

# some of diffusers' schedulers hand tensors to numpy
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
NOISE = [
    *("DDIM", "EulerDiscrete", "DPMSolverMultistep", "PNDM", "DDPM", "LMSDiscrete"),
    *("EulerAncestralDiscrete", "HeunDiscrete", "KDPM2Discrete", "KDPM2AncestralDiscrete"),
    *("DPMSolverSinglestep", "UniPCMultistep", "DEISMultistep", "LCM", "TCD", "SASolver"),
    *("DDIMParallel", "DDPMParallel", "DPMSolverMultistepInverse"),
]
FLOW = ["FlowMatchEulerDiscrete", "FlowMatchHeunDiscrete", "FlowMatchLCM", "FlowMapEulerDiscrete"]
NEEDS = {"CosineDPMSolverMultistep", "DPMSolverSDE"}  # a package that is not installed
EVERY = [name for name in dir(diffusers) if name.endswith("Scheduler")]
OTHERS = [name for name in EVERY if name.removesuffix("Scheduler") not in {*NOISE, *FLOW, *NEEDS}]


def pipeline(name, flow=False, **config):
    """A pipeline as far as it is asked: its class's name and its scheduler."""
    pipe = type("FluxPipeline" if flow else "StableDiffusionPipeline", (), {})()
    kind = newer(name)
    pipe.scheduler = kind(**config) if flow else kind.from_config({**BETAS, **config})
    return pipe


@pytest.mark.parametrize("name", tiered(NOISE, quick=4))
def test_noise_is_added_and_scaled_as_the_scheduler_does(name):
    pipe = pipeline(f"{name}Scheduler")
    check_scheduler(pipe)
    own, schedule = pipe.scheduler, schedule_of(pipe)
    latents, noise = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    own.set_timesteps(1000 if name not in ("LCM", "TCD") else 50)
    at = own.timesteps[len(own.timesteps) // 2 // 2 * 2]
    shown = own.scale_model_input(own.add_noise(latents, noise, at[None]), at)
    torch.testing.assert_close(schedule.mix(latents, noise, int(at)), shown, atol=1e-2, rtol=0)


@pytest.mark.parametrize("name", FLOW)
def test_a_flow_is_mixed_as_the_scheduler_does(name):
    pipe = pipeline(f"{name}Scheduler", flow=True)
    check_scheduler(pipe)
    pipe.scheduler.set_timesteps(10)
    at = pipe.scheduler.timesteps[4:5]
    latents, noise = torch.randn(2, 1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    shown = pipe.scheduler.scale_noise(latents, at, noise)
    found = schedule_of(pipe).mix(latents, noise, float(at))
    torch.testing.assert_close(found, shown, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["use_karras_sigmas", "use_beta_sigmas", "use_exponential_sigmas"])
def test_the_noise_that_a_run_visits_does_not_matter(name):
    check_scheduler(pipeline("DPMSolverMultistepScheduler", **{name: True}))
    check_scheduler(pipeline("EulerDiscreteScheduler", **{name: True}))


@pytest.mark.parametrize("name", tiered(["EDMEulerScheduler", *OTHERS], quick=3))
def test_any_other_scheduler_is_refused_by_name(name):
    for flow in (False, True):
        try:
            pipe = pipeline(name, flow)
        except (TypeError, ValueError, NotImplementedError):  # it needs arguments of its own
            continue
        with pytest.raises(sdattn.SdattnError, match=f"{type(pipe.scheduler).__name__} shows"):
            check_scheduler(pipe)


def test_continuous_timesteps_are_refused():
    config = {"timestep_type": "continuous", "prediction_type": "v_prediction"}
    with pytest.raises(TypeError, match="EulerDiscreteScheduler"):
        check_scheduler(pipeline("EulerDiscreteScheduler", **config))
