"""guide(): the latents go down the gradient of losses on the coming step's heatmaps."""

import copy
import inspect
import json
import re
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverSinglestepScheduler,
    EulerDiscreteScheduler,
    FirstBlockCacheConfig,
    HeunDiscreteScheduler,
    PNDMScheduler,
    RePaintScheduler,
    SASolverScheduler,
    UniPCMultistepScheduler,
)
from helpers.flow_pipelines import flow_pipeline
from helpers.refusals import refused_unrun
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_sdxl_pipeline, small_pipeline
from helpers.transformer_rows import own_norms

import sdattn
from sdattn.edit import guide, guiding, inside, share_inside
from sdattn.errors import SdattnWarning

PROMPT = "a red cat"
BOX = (0, 0, 0.5, 0.5)
FAST = {"num_inference_steps": 3}
LOSS = inside("cat", BOX)
OPPOSITES = [inside("cat", (0, 0, 0.5, 1)), inside("cat", (0.5, 0, 1, 1))]  # 1 - a + a


def euler():
    """A scheduler whose model's input is not the latents themselves."""
    pipe = small_pipeline()
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    return pipe, {**FAST, "guidance_scale": 4.0}


def flow(name, **guidance):
    pipe, options = flow_pipeline(name)
    own_norms(pipe.transformer)
    return pipe, {**options, **FAST, "height": 64, "width": 96, **guidance}


PIPELINES = {
    "SD": lambda: (small_pipeline(), {**FAST, "guidance_scale": 4.0}),
    "SD, unguided": lambda: (small_pipeline(), {**FAST, "guidance_scale": 1.0}),
    "SD, Euler": euler,
    "SDXL": lambda: (make_sdxl_pipeline(), {**FAST, "guidance_scale": 4.0}),
    "SD3": lambda: flow("SD3", guidance_scale=4.0),
    "FLUX": lambda: flow("FLUX.1", guidance_scale=3.5),
    "FLUX, true CFG": lambda: flow("FLUX.1", true_cfg_scale=4.0, negative_prompt="o"),
    "Qwen-Image": lambda: flow("Qwen-Image", true_cfg_scale=4.0, negative_prompt="o"),
}


def pixels(run):
    return np.asarray(run[0].image)


@pytest.mark.parametrize("name", tiered(list(PIPELINES), 3))
def test_losses_see_the_maps_of_the_coming_step_and_an_idle_guide_changes_nothing(name):
    pipe, options = PIPELINES[name]()
    preset = "columns" if hasattr(pipe, "transformer") else "p2p"
    seen = []

    def look(heatmaps):
        seen.append(heatmaps.maps.detach())
        return LOSS(heatmaps)

    plain = sdattn.generate(pipe, PROMPT, **options)
    with sdattn.capture(pipe, steps=[1, 2]) as store:
        pipe(PROMPT, generator=torch.Generator().manual_seed(0), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # no strays among them
        run = guide(pipe, PROMPT, [look], maps=preset, steps=1.0, enough=1.0, **options)
    assert np.array_equal(pixels(run), pixels(plain))
    _, *coming = seen  # the first were even maps
    assert len(coming) == 2
    for number, found in enumerate(coming):
        layers = store.layer_maps(preset)
        for layer_name, layer in layers.layers.items():
            layer.maps.copy_(store.maps[layer_name][:, number])
        expected = sdattn.maps.aggregation.aggregate(layers, sdattn.maps.presets.PRESETS[preset])[0]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", tiered(list(PIPELINES), 3))
def test_the_word_goes_into_its_box(name):
    pipe, options = PIPELINES[name]()
    before = sdattn.generate(pipe, PROMPT, **options)
    run = guide(pipe, PROMPT, [LOSS], scale=0.5, steps=1.0, enough=0, **options)
    shares = [float(share_inside(one[0].heatmaps["cat"].values, BOX)) for one in (before, run)]
    assert shares[1] > shares[0]
    assert not np.array_equal(pixels(run), pixels(before))


# How far the differences reach, in deviations of the latents: losses are float32 sums, precise to
# about 1e-7, of which Euler's large latents need a long way; FLUX's bend strongly.
@pytest.mark.parametrize("preset", ["attend-and-excite", "daam", "ovam", "sum"])
def test_losses_may_read_any_preset_of_unrefined_maps(preset):
    pipe, options = PIPELINES["SD, unguided"]()
    seen = []

    def look(heatmaps):
        seen.append(heatmaps)
        return LOSS(heatmaps)

    guide(pipe, PROMPT, [look], maps=preset, steps=(0.4, 0.6), iterations=1, **options)
    assert seen[-1].preset.name == preset
    assert seen[-1]["cat"].values.requires_grad


@pytest.mark.parametrize(("name", "reach"), [("SD, Euler", 0.02), ("SD3", 0.003), ("FLUX", 0.003)])
def test_the_gradient_is_that_of_finite_differences_in_float64(name, reach, monkeypatch):
    pipe, options = PIPELINES[name]()
    pipe.to(torch.float64)
    compared = []

    def moved(self, latents, loss, _length):
        [gradient] = torch.autograd.grad(loss, latents)
        assert gradient.dtype == torch.float64
        timestep = pipe.scheduler.timesteps[1]
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(3)).double()
        down = gradient / gradient.norm()
        far = reach * float(latents.detach().std())
        for direction in (down, down + noise / noise.norm()):
            ahead = self.loss(latents.detach() + far * direction, timestep)
            behind = self.loss(latents.detach() - far * direction, timestep)
            difference = float((ahead - behind).detach()) / (2 * far)
            compared.append((difference, float((gradient * direction).sum())))
        return latents.detach()

    monkeypatch.setattr(guiding._Descent, "moved", moved)
    guide(pipe, PROMPT, [LOSS], steps=(0.4, 0.6), iterations=1, maps="sum", **options)
    assert len(compared) == 2
    for difference, product in compared:
        assert difference == pytest.approx(product, rel=0.01)


@pytest.mark.parametrize("name", ["SD", "SD, Euler"])
def test_a_move_has_the_length_that_was_asked_for_as_the_model_sees_it(name, monkeypatch):
    pipe, options = PIPELINES[name]()
    lengths = []
    move = guiding._Descent.moved

    def measured(self, latents, loss, length):
        found = move(self, latents, loss, length)
        away = pipe.scheduler.scale_model_input(found - latents, pipe.scheduler.timesteps[1])
        lengths.append(float(away.detach().square().mean().sqrt()))
        return found

    monkeypatch.setattr(guiding._Descent, "moved", measured)
    guide(pipe, PROMPT, [LOSS], scale=0.3, steps=(0.4, 0.6), iterations=2, enough=0, **options)
    assert lengths == pytest.approx([0.3] * 2, rel=1e-4)


def test_nothing_is_left_behind():
    pipe, options = PIPELINES["SD"]()
    weight = next(pipe.unet.parameters())
    before = dict(pipe.unet.attn_processors), pipe.scheduler, len(pipe.unet._forward_pre_hooks)

    def fails(heatmaps):
        if heatmaps["cat"].values.detach().std() > 0:
            raise RuntimeError("boom")
        return LOSS(heatmaps)

    for losses, end in (
        ([LOSS], nullcontext()),
        ([fails], pytest.raises(RuntimeError, match="boom")),
    ):
        with end:
            guide(pipe, PROMPT, losses, **options)
        after = dict(pipe.unet.attn_processors), pipe.scheduler, len(pipe.unet._forward_pre_hooks)
        assert after == before
        assert weight.requires_grad


def test_defaults_are_those_that_the_page_tells():
    page = Path(__file__).parents[2] / "docs" / "guide" / "guiding.md"
    told = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", page.read_text("utf-8"), re.M))
    assert {*told} == {"scale", "steps", "iterations", "enough", "maps"}
    known = inspect.signature(guide).parameters
    for name, default in told.items():
        assert known[name].default == json.loads(default)


def test_without_losses_or_length_it_is_the_plain_run():
    pipe, options = PIPELINES["SD"]()
    plain = sdattn.generate(pipe, PROMPT, seed=7, **options)
    satisfied = [lambda heatmaps: 0 * LOSS(heatmaps)]
    for losses, scale in (([], 0.05), ([LOSS], 0), (satisfied, 0.05)):
        run = guide(pipe, PROMPT, losses, seed=7, scale=scale, **options)
        assert np.array_equal(pixels(run), pixels(plain))
        assert torch.equal(run[0].heatmaps.maps, plain[0].heatmaps.maps)
        assert bool(run[0].settings.options_left_out) == (losses is satisfied)
    of_one = partial(guide, pipe, PROMPT, seed=7, **options)
    # a loss of exactly ``enough``, with a gradient
    of_enough = of_one(lambda maps: 0.25 + (LOSS(maps) - LOSS(maps).detach()), enough=0.25)
    assert np.array_equal(pixels(of_enough), pixels(plain))
    guided = of_one(LOSS)  # one loss needs no list
    assert "losses" in guided[0].settings.options_left_out


def compiled():
    pipe = small_pipeline()
    pipe.unet.compile(backend="eager")
    return pipe


def total_share(heatmaps):
    """Return the share of the word in the whole image: 1, with a gradient of mere rounding."""
    return share_inside(heatmaps["cat"].values, (0, 0, 1, 1))


def checkpointing():
    pipe = small_pipeline()
    pipe.unet.enable_gradient_checkpointing()
    return pipe


def cached():
    pipe, _ = flow("FLUX.1")
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    return pipe


def scheduled(kind, **options):
    pipe = small_pipeline()
    pipe.scheduler = kind.from_config(pipe.scheduler.config, **options)
    return pipe


@pytest.mark.parametrize(
    ("kind", "message", "changed"),
    [
        (KeyError, "'dog' is not in the prompt.*red, cat", {"losses": [inside("dog", BOX)]}),
        (ValueError, "`losses=3`.*list of functions", {"losses": 3}),
        (ValueError, "`losses=", {"losses": ["cat"]}),
        (TypeError, "returned 1.0 for maps", {"losses": [lambda _: 1.0]}),
        (TypeError, "scalar tensor", {"losses": [lambda maps: maps["cat"].values]}),
        (TypeError, "with its graph", {"losses": [lambda _: torch.tensor(0.5)]}),
        (ValueError, "`scale=-1`", {"scale": -1}),
        (ValueError, "`scale=nan`", {"scale": float("nan")}),
        (ValueError, "`enough='low'`", {"enough": "low"}),
        (ValueError, "`iterations=0`", {"iterations": 0}),
        (ValueError, r"`steps=0\.1`.*3 steps.*Pass 1.0", {"steps": 0.1}),  # the first alone
        (ValueError, r"`steps=0\.7`.*2 steps.*Pass 1.0", {"num_inference_steps": 2}),
        (ValueError, "a single step.*Draw more", {"num_inference_steps": 1, "steps": 1.0}),
        (ValueError, "part of the run", {"steps": 3}),
        (TypeError, "one image of one text", {"prompt": [PROMPT]}),
        (ValueError, "num_images_per_prompt", {"num_images_per_prompt": 2}),
        (ValueError, "sets `callback_on_step_end` itself", {"callback_on_step_end": print}),
        (ValueError, "itertions.*Did you mean 'iterations'", {"itertions": 3}),
        (ValueError, "'nice'", {"maps": "nice"}),
        (TypeError, "compiled", {"pipe": compiled}),
        (TypeError, r"cache of diffusers is on.*disable_cache\(\)", {"pipe": cached}),
        (TypeError, "checkpointing.*disable_gradient_checkpointing", {"pipe": checkpointing}),
        (ValueError, "2 losses, which cancel each other, is 1 what", {"losses": OPPOSITES}),
        (ValueError, "The loss is 1 whatever", {"losses": [lambda maps: 0 * LOSS(maps) + 1]}),
        (ValueError, "The loss is 1 whatever", {"losses": [total_share]}),
        (
            TypeError,
            "UniPCMultistepScheduler goes on from samples of its own in all of the 1 chosen",
            {"pipe": lambda: scheduled(UniPCMultistepScheduler)},
        ),
        (TypeError, "SASolver.*lost", {"pipe": lambda: scheduled(SASolverScheduler)}),
        (
            TypeError,
            "RePaintScheduler.*cannot be asked",
            {"pipe": lambda: scheduled(RePaintScheduler)},
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(kind, message, changed):
    given = {"pipe": small_pipeline, "prompt": PROMPT, "losses": [LOSS], **FAST, **changed}
    pipe = given.pop("pipe")()
    with refused_unrun(pipe, message, kind):
        guide(pipe, **given)


def test_gradients_that_cannot_be_are_refused():
    pipe, options = PIPELINES["SD"]()
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        guide(pipe, PROMPT, [LOSS], **options)
    forward = pipe.unet.conv_in.forward
    pipe.unet.conv_in.forward = torch.no_grad()(forward)  # as kernels without a backward pass
    with pytest.raises(TypeError, match="no gradient through this UNet2DConditionModel.*float32"):
        guide(pipe, PROMPT, [LOSS], **options)
    pipe.unet.conv_in.forward = forward


WHERE_MOVES_STAY = {  # passes, counted from 0, of those in a run of 4 steps
    "DDIM": (DDIMScheduler, {}, [1, 2, 3]),
    "PNDM": (PNDMScheduler, {"skip_prk_steps": True}, [2, 3, 4]),
    "Heun": (HeunDiscreteScheduler, {}, [2, 4, 6]),
    "singlestep": (DPMSolverSinglestepScheduler, {}, [2, 3]),
    "UniPC, early": (UniPCMultistepScheduler, {"disable_corrector": [0]}, [1, 3]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # numpy's of diffusers
@pytest.mark.parametrize("name", WHERE_MOVES_STAY)
def test_latents_are_moved_where_the_scheduler_goes_on_from_them(name, monkeypatch):
    kind, options, expected = WHERE_MOVES_STAY[name]
    pipe = scheduled(kind, **options)
    scheduler = pipe.scheduler
    moves = []
    answers = []
    usual = kind.step

    def step(output, timestep, sample, **options):
        """Ask two copies about the same output, for the sample that is given and the last one."""
        if answers and not torch.equal(answers[-1], sample):
            found = []
            for one in (answers[-1], sample):
                asked = copy.deepcopy(scheduler)
                del asked.step
                found.append(usual(asked, output, timestep, one, return_dict=False)[0])
            moves.append((len(answers), not torch.equal(*found)))
        made = usual(scheduler, output, timestep, sample, **options)
        answers.append(made[0])
        return made

    scheduler.step = step
    few = {"num_inference_steps": 4, "iterations": 1, "enough": 0.0, "steps": 1.0}
    lost = {"DDIM": 0}.get(name, 1)
    with pytest.warns(SdattnWarning, match="moves.* lost") if lost else nullcontext():
        guide(pipe, PROMPT, [LOSS], **few)
    assert moves == [(number, True) for number in expected]


def broken_latents(pipe, monkeypatch):
    usual = type(pipe.scheduler).step

    def spoil(self, *given, **options):
        return (usual(self, *given, **options)[0] * float("nan"),)

    monkeypatch.setattr(type(pipe.scheduler), "step", spoil)


def broken_attention(pipe, monkeypatch):
    """An attention layer that is not finite where gradients are taken."""

    def spoil(module, args, output):
        return output * float("nan") if torch.is_grad_enabled() else output

    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2.to_q.register_forward_hook(spoil)


def broken_backward(pipe, monkeypatch):
    """A layer before all attention whose backward pass underflows."""
    pipe.unet.conv_in.register_full_backward_hook(lambda module, given, _: (0 * given[0],))


def late(broken):
    """A loss that is well on the maps that it is tried on."""
    tried = []

    def loss(heatmaps):
        tried.append(heatmaps)
        return LOSS(heatmaps) if len(tried) == 1 else broken(LOSS(heatmaps))

    return loss


BROKEN = {
    "latents": (broken_latents, LOSS, ValueError, "latents of the image are not finite after step"),
    "attention": (broken_attention, LOSS, ValueError, "maps of the coming step are not finite"),
    "loss": (None, late(lambda one: one / 0), RuntimeError, r"loss <func.*> is inf for maps"),
    "slope": (
        None,
        late(lambda one: 0 * one + 1),
        RuntimeError,
        "with respect to the maps is zero",
    ),
    "steep": (
        None,
        late(lambda one: (one - one.detach()).sqrt() + 1),
        RuntimeError,
        "with respect to the maps is not finite",
    ),
    "backward": (broken_backward, LOSS, RuntimeError, "gradient through this UNet.* is 0 in torch"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_errors_blame_what_broke(name, monkeypatch):
    spoil, loss, kind, message = BROKEN[name]
    pipe, options = PIPELINES["SD"]()
    if spoil is not None:
        spoil(pipe, monkeypatch)
    with pytest.raises(kind, match=message):
        guide(pipe, PROMPT, [loss], **options)
