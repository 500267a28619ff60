"""Modular pipelines, captured, with an attached store and by generate().

Each shares the models of a classic pipeline, which runs both prompts in one batch, or in turn under
names of its own: what it shows is the answer.
"""

import pytest
import torch
from diffusers.guiders import ClassifierFreeGuidance, PerturbedAttentionGuidance
from helpers.modular_pipelines import modular
from helpers.tiny_pipelines import make_sdxl_pipeline
from helpers.transformer_rows import flux, qwen_image, sd3

import sdattn
from sdattn import AttentionStore, TorchAttnProcessor, TorchJointProcessor
from sdattn.models.denoiser import find_denoiser

PROMPT, NEGATIVE, SIZE = "a red cat", "red dog", {"height": 128, "width": 128}
SHORT = {"max_sequence_length": 24}
SCALE = 4.0
# a classic pipeline, the modular one, options of both, the classic one's name for the scale
PIPELINES = {
    "SDXL": (make_sdxl_pipeline, "StableDiffusionXLModularPipeline", {}, "guidance_scale"),
    "SD3": (sd3, "StableDiffusion3ModularPipeline", SHORT, "guidance_scale"),
    "Qwen-Image": (qwen_image, "QwenImageModularPipeline", {}, "true_cfg_scale"),
    "FLUX.1": (flux, "FluxModularPipeline", SHORT, None),  # it has no guider
}
GUIDED = [name for name, (*_, scale) in PIPELINES.items() if scale]


def pair(name):
    """A classic and a modular pipeline of the same models, and how each is run."""
    make, kind, options, scale = PIPELINES[name]
    classic = make()
    pipe = modular(classic, kind, **({"guidance_scale": SCALE} if scale else {}))
    given = {"prompt": PROMPT, "num_inference_steps": 3, "output_type": "pt", **SIZE, **options}
    given |= {"negative_prompt": NEGATIVE} if scale else {}

    def run(which, **more):
        seeded = {"generator": torch.Generator().manual_seed(0), **given, **more}
        if which is pipe:
            return which(**seeded, output="images")
        return which(**seeded, **({scale: SCALE} if scale else {})).images

    return classic, pipe, run


def same(found, expected, tolerance=1e-4):
    """Maps are those of the other pipeline, layer by layer."""
    assert found.maps.keys() == expected.maps.keys()
    for name, maps in expected.maps.items():
        torch.testing.assert_close(found.maps[name], maps, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.slow
def test_the_image_stays_and_the_maps_are_the_classic_pipelines(name):
    classic, pipe, run = pair(name)
    plain = run(pipe)
    with sdattn.capture(pipe) as store:
        watched = run(pipe)
    assert torch.equal(watched, plain)
    with sdattn.capture(classic) as expected:
        torch.testing.assert_close(run(classic), plain, atol=1e-4, rtol=0)
    same(store, expected)
    assert len(store.timesteps) == 3
    assert store.skipped == (3 if name in GUIDED else 0)  # one pass a step, of the negative prompt
    [own], [theirs] = store.heatmaps(), expected.heatmaps()
    assert own.prompt == theirs.prompt
    torch.testing.assert_close(own.maps, theirs.maps, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=f"a blue dog.*was '{PROMPT}'"):
        store.heatmaps(prompt="a blue dog")


@pytest.mark.parametrize("name", GUIDED)
def test_the_negative_prompt_has_maps_of_its_own(name):
    classic, pipe, run = pair(name)
    # both pad to the longer text, so that a pass of the other branch would fit
    own = {"negative_prompt": "red dog, cat"} if name == "Qwen-Image" else {}
    with sdattn.capture(pipe) as both, sdattn.capture(pipe, branch="unconditional") as store:
        run(pipe, **own)
    with sdattn.capture(classic, branch="unconditional") as expected:
        run(classic, **own)
    same(store, expected)
    names = [name for name in both.maps if both.maps[name].shape == store.maps[name].shape]
    apart = [float((both.maps[name] - store.maps[name]).abs().max()) for name in names]
    assert not names or max(apart) > 1e-3  # so that 1e-4 tells them apart
    assert store.drawn.texts["unconditional"] == (own.get("negative_prompt", NEGATIVE),)


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.slow
def test_an_attached_store_leaves_the_negative_prompt_out(name):
    classic, pipe, run = pair(name)
    model = find_denoiser(pipe).model
    stores = []
    for which in (pipe, classic):
        store = AttentionStore(pipeline=which)
        own = TorchAttnProcessor if name == "SDXL" else TorchJointProcessor
        model.set_attn_processor(own(store))
        run(which)
        assert (store.cur_step, store.images) == (3, 1)
        [heatmaps] = store.heatmaps()
        stores.append(heatmaps)
        store.detach()
    assert stores[0].prompt == stores[1].prompt
    torch.testing.assert_close(stores[0].maps, stores[1].maps, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", GUIDED)
@pytest.mark.slow
def test_generate_draws_what_the_classic_pipeline_draws(name, tmp_path):
    classic, pipe, _ = pair(name)
    options = {"num_inference_steps": 4, "negative_prompt": NEGATIVE, **SIZE, **PIPELINES[name][2]}
    own = sdattn.generate(pipe, PROMPT, seed=3, **options)
    theirs = sdattn.generate(classic, PROMPT, seed=3, **{PIPELINES[name][3]: SCALE}, **options)
    torch.testing.assert_close(own[0].heatmaps.maps, theirs[0].heatmaps.maps, atol=1e-4, rtol=0)
    assert own[0].image.size == (128, 128)
    own.save(tmp_path / "run")
    assert (tmp_path / "run" / "image.png").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"guidance_scale": 7.0}, "pipe.guider.guidance_scale = 7.0"),
        ({"num_inference_step": 3}, "num_inference_steps"),
        ({"ask": "wheel"}, "encode_prompt"),
        ({"output": "images"}, "has no option 'output'"),
    ],
)
def test_options_that_a_modular_pipeline_lacks_are_refused(options, said):
    _, pipe, _ = pair("SDXL")
    with pytest.raises((ValueError, TypeError), match=said):
        sdattn.generate(pipe, PROMPT, **options)


def test_a_negative_prompt_that_the_guider_drops_is_refused():
    _, pipe, _ = pair("SDXL")
    pipe.guider.guidance_scale = 1.0
    with pytest.raises(ValueError, match="pipe.guider.guidance_scale.*1"):
        sdattn.generate(pipe, PROMPT, negative_prompt=NEGATIVE, **SIZE)


@pytest.mark.slow
def test_the_passes_of_a_perturbed_model_are_of_no_prompt():
    """diffusers perturbs attention by the class of its processor, which capture() stands in for."""
    _, pipe, run = pair("Qwen-Image")
    window = {"perturbed_guidance_start": 0.0, "perturbed_guidance_stop": 1.0}
    guider = PerturbedAttentionGuidance(SCALE, perturbed_guidance_layers=[1], **window)
    pipe.update_components(guider=guider)
    plain = run(pipe)
    with sdattn.capture(pipe) as store, sdattn.capture(pipe, branch="unconditional") as other:
        assert torch.equal(run(pipe), plain)
    # the first step has no third pass: diffusers begins after step 0
    assert (len(store.timesteps), store.skipped) == (3, 5)
    assert (len(other.timesteps), other.skipped) == (3, 5)
    pipe.update_components(guider=ClassifierFreeGuidance(SCALE))
    assert not torch.equal(run(pipe), plain)


def test_another_guider_may_be_set_inside():
    _, pipe, run = pair("SD3")
    pipe.update_components(guider=ClassifierFreeGuidance(1.0))
    plain = run(pipe)
    with sdattn.capture(pipe) as expected:
        run(pipe)
    pipe.update_components(guider=ClassifierFreeGuidance(SCALE))
    with sdattn.capture(pipe) as store:
        pipe.update_components(guider=ClassifierFreeGuidance(1.0))
        assert torch.equal(run(pipe), plain)
    same(store, expected, 0)


def test_blocks_of_ones_own_without_a_guider_are_refused_by_name():
    from diffusers import ModularPipeline
    from diffusers.modular_pipelines import FluxAutoBlocks

    pipe = ModularPipeline(blocks=FluxAutoBlocks())
    classic = flux()
    pipe.update_components(
        **{k: v for k, v in classic.components.items() if k in pipe.component_names}
    )
    with pytest.raises(ValueError, match="ModularPipeline.*guidance"), sdattn.capture(pipe):
        pass
