"""Which steps of diffusers' schedulers go on from the sample that they are given, against the exact
way of a model whose images are normally distributed."""

import functools
import importlib
import inspect
import pkgutil

import diffusers.schedulers
import numpy as np
import pytest
import torch
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from helpers.tiers import tiered
from helpers.tiny_pipelines import small_pipeline

from sdattn.edit.given_samples import asked_scheduler, passes_from_given
from sdattn.models.facts import PipelineFacts

pytestmark = pytest.mark.filterwarnings("ignore")  # diffusers' own
SPREAD = 0.5  # standard deviation of the images
ALL = "all"
FIRST = "the first call of each step"


def schedulers():
    """Return all schedulers of the installed diffusers, by name."""
    found = {}
    for module in pkgutil.iter_modules(diffusers.schedulers.__path__):
        try:
            module = importlib.import_module(f"{diffusers.schedulers.__name__}.{module.name}")
        except ImportError:  # of a package that it needs
            continue
        for name, held in vars(module).items():
            if inspect.isclass(held) and issubclass(held, SchedulerMixin) and hasattr(held, "step"):
                found[name] = held
    found.pop("SchedulerMixin", None)
    return found


# What each answers in a run of 8 steps: all its passes go on from what they are given, or only the
# first call of each step, or these; None if it cannot be asked. A later version's are not listed.
ANSWERS = {
    "AmusedScheduler": None,
    "BlockRefinementScheduler": None,
    "CMStochasticIterativeScheduler": ALL,
    "CogVideoXDDIMScheduler": ALL,
    "CogVideoXDPMScheduler": None,
    "DDIMInverseScheduler": ALL,
    "DDIMParallelScheduler": ALL,
    "DDIMScheduler": ALL,
    "DDPMParallelScheduler": ALL,
    "DDPMScheduler": ALL,
    "DDPMWuerstchenScheduler": None,
    "DEISMultistepScheduler": ALL,
    "DPMSolverMultistepInverseScheduler": ALL,
    "DPMSolverMultistepScheduler": ALL,
    "DPMSolverSinglestepScheduler": (0, 2, 4, 6, 7),  # the last is of first order
    "EDMDPMSolverMultistepScheduler": ALL,
    "EDMEulerScheduler": ALL,
    "EulerAncestralDiscreteScheduler": ALL,
    "EulerDiscreteScheduler": ALL,
    "FlowMatchEulerDiscreteScheduler": ALL,
    "FlowMatchHeunDiscreteScheduler": FIRST,
    "FlowMatchLCMScheduler": ALL,
    "HeliosDMDScheduler": None,
    "HeliosScheduler": None,
    "HeunDiscreteScheduler": FIRST,
    "IPNDMScheduler": (0,),  # remembers outputs mixed with samples
    "KDPM2AncestralDiscreteScheduler": FIRST,
    "KDPM2DiscreteScheduler": FIRST,
    "LCMScheduler": ALL,
    "LMSDiscreteScheduler": ALL,
    "PNDMScheduler": (0, 4, 8, *range(12, 17)),  # three steps of Runge and Kutta first
    "PiflowScheduler": None,
    "RFD4ProteinaScheduler": None,
    "RePaintScheduler": None,
    "SASolverScheduler": (0, 7),
    "SCMScheduler": None,
    "TCDScheduler": ALL,
    "UnCLIPScheduler": ALL,
    "UniPCMultistepScheduler": (0, 7),
    "VQDiffusionScheduler": None,
}


@pytest.fixture(scope="module")
def pipe():
    return small_pipeline()


@pytest.mark.parametrize("name", ANSWERS)
def test_every_scheduler_answers_or_cannot_be_asked(name, pipe):
    kind = schedulers().get(name)
    if kind is None:
        pytest.skip("not in this diffusers")
    expected = ANSWERS[name]
    try:
        pipe.scheduler = kind()
    except TypeError:  # needs facts of a model of its own
        assert expected is None
        return
    asked = functools.partial(asked_scheduler, PipelineFacts.of(pipe), {"num_inference_steps": 8})
    if expected is None:
        with pytest.raises(TypeError, match=f"Whether a {name} goes on .*cannot be asked"):
            asked()
        return
    before = pipe.scheduler.timesteps
    number, found = asked()
    known = {ALL: range(number), FIRST: range(0, number, 2)}
    assert found == {*known.get(expected, expected)}
    assert pipe.scheduler.timesteps is before  # it was a copy's run


def config(kind, **options):
    known = inspect.signature(kind.__init__).parameters
    return {name: value for name, value in options.items() if name in known}


LAST = {"final_sigmas_type": "sigma_min"}
WAYS = {  # of multistep and second-order methods, and one of a single step
    "DDIM": ("DDIMScheduler", {}),
    "DDIM, v": ("DDIMScheduler", {"prediction_type": "v_prediction"}),
    "PNDM": ("PNDMScheduler", {"skip_prk_steps": True}),
    "PNDM, v": ("PNDMScheduler", {"skip_prk_steps": True, "prediction_type": "v_prediction"}),
    "PNDM, Runge-Kutta": ("PNDMScheduler", {}),
    "LMS": ("LMSDiscreteScheduler", {}),
    "LMS, v": ("LMSDiscreteScheduler", {"prediction_type": "v_prediction"}),
    "Heun": ("HeunDiscreteScheduler", {}),
    "Heun, v": ("HeunDiscreteScheduler", {"prediction_type": "v_prediction"}),
    "KDPM2": ("KDPM2DiscreteScheduler", {}),
    "DEIS": ("DEISMultistepScheduler", {}),
    "DPM++": ("DPMSolverMultistepScheduler", {}),
    "DPM++, v": ("DPMSolverMultistepScheduler", {"prediction_type": "v_prediction"}),
    "DPM++, Karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "DPM": ("DPMSolverMultistepScheduler", {"algorithm_type": "dpmsolver", **LAST}),
    "singlestep": ("DPMSolverSinglestepScheduler", {}),
    "singlestep, third order": ("DPMSolverSinglestepScheduler", {"solver_order": 3}),
    "UniPC": ("UniPCMultistepScheduler", {}),
    "UniPC of noise": ("UniPCMultistepScheduler", {"predict_x0": False, **LAST}),
    "UniPC without corrector": ("UniPCMultistepScheduler", {"disable_corrector": [*range(99)]}),
    "UniPC, early": ("UniPCMultistepScheduler", {"disable_corrector": [5, 6]}),
    "SASolver": ("SASolverScheduler", {"tau_func": lambda _: 0}),
    "Euler": ("EulerDiscreteScheduler", {}),
    "flow": ("FlowMatchEulerDiscreteScheduler", {}),
    "flow, Heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "flow, UniPC": (
        "UniPCMultistepScheduler",
        {"prediction_type": "flow_prediction", "use_flow_sigmas": True},
    ),
}
STEPS = 24


def scheduler_of(way):
    name, options = WAYS[way]
    kind = schedulers()[name]
    if "Flow" not in name:  # as Stable Diffusion's
        options = {**options, "beta_start": 0.00085, "beta_end": 0.012}
        options["beta_schedule"] = "scaled_linear"
    made = kind(**config(kind, **options))
    made.set_timesteps(STEPS)
    return made


def shares(made, timestep):
    """Return what image and noise have of the model's input, float64."""
    if "flow" in made.config.get("prediction_type", "") or "Flow" in type(made).__name__:
        sigma = float(timestep) / 1000
        return 1 - sigma, sigma
    betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    abar = np.interp(float(timestep), np.arange(1000), np.cumprod(1 - betas))
    return abar**0.5, (1 - abar) ** 0.5


def end(made, move_at=None, move=0.0):
    """Return the end of a run, with a move before a pass, and the exact deviation of the end."""
    sample = torch.ones(1, 1, 1, 1) * getattr(made, "init_noise_sigma", 1.0)
    expected = None
    for number, timestep in enumerate(made.timesteps):
        one = torch.ones(1, 1, 1, 1)
        alpha, sigma = shares(made, timestep)
        if number == move_at:
            sample = sample + move
        scaled = getattr(made, "scale_model_input", lambda given, _: given)
        shown = scaled(sample, timestep).double()
        if number == move_at:  # along the exact way samples keep their ratio to their deviation
            spread = (alpha**2 * SPREAD**2 + sigma**2) ** 0.5
            expected = move * float(scaled(one, timestep)) * SPREAD / spread
        image = alpha * SPREAD**2 / (alpha**2 * SPREAD**2 + sigma**2) * shown
        noise = (shown - alpha * image) / sigma
        kind = made.config.get("prediction_type", "epsilon")
        output = {"v_prediction": alpha * noise - sigma * image}.get(kind, noise)
        if "flow" in kind or "Flow" in type(made).__name__:
            output = noise - image
        sample = made.step(output.float(), timestep, sample).prev_sample
    return float(sample), expected


RARE = ("LMS, v", "KDPM2", "UniPC, early", "UniPC of noise", "PNDM, v", "Heun, v")


@pytest.mark.parametrize("way", tiered(sorted(WAYS, key=RARE.__contains__), len(WAYS) - len(RARE)))
def test_moves_that_arrive_are_as_large_at_the_end_as_the_exact_way_makes_them(way):
    """But for the error of n steps: of 24, 100 and 250 it is at most 2.9/n, and 7.2/n of a move
    that is lost."""
    given = passes_from_given(scheduler_of(way))
    plain, _ = end(scheduler_of(way))
    for number in (1, 6, 7, 9):
        found, expected = end(scheduler_of(way), number, 0.5)
        ratio = (found - plain) / expected
        if number in given:
            assert ratio == pytest.approx(1, abs=3 / STEPS)
        else:
            assert abs(ratio) < 8 / STEPS


@pytest.mark.parametrize("sigmas", ["use_karras_sigmas", "use_lu_lambdas"])
def test_timesteps_that_stand_twice_are_known_by_their_place(sigmas):
    made = schedulers()["DPMSolverMultistepScheduler"](**{sigmas: True, "solver_order": 3})
    made.set_timesteps(120)
    assert len(made.timesteps.unique()) < 120
    assert passes_from_given(made) == {*range(120)}
