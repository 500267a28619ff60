"""The branch of each call by its guider, against the text that the model got."""

from typing import ClassVar

import pytest
import torch
from diffusers import guiders
from diffusers.hooks import LayerSkipConfig
from helpers.modular_pipelines import modular
from helpers.tiers import tiered
from helpers.transformer_rows import qwen_image

from sdattn.follow.pass_reader import PassReader
from sdattn.models.denoiser import find_denoiser
from sdattn.models.guidance import GuidanceWatch, makes_negative

PROMPT, NEGATIVE = "a red cat", "a red dog, cat"
SKIPPED = LayerSkipConfig([1], "transformer_blocks", skip_attention=False, skip_ff=True)
ALWAYS = {"skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
LATE = [0, 1], [0, 1, None], [0, 1, None]  # perturbed only after the first step
# by name: a guider, and of each step the prompts in order, 0 the prompt and 1 the negative one
GUIDERS = {
    "guidance": (guiders.ClassifierFreeGuidance(4.0), [[0, 1]] * 3),
    "none": (guiders.ClassifierFreeGuidance(1.0), [[0]] * 3),
    "disabled": (guiders.ClassifierFreeGuidance(4.0, enabled=False), [[0]] * 3),
    "from the second step": (guiders.ClassifierFreeGuidance(4.0, start=0.4), [[0], [0, 1], [0, 1]]),
    "momentum": (
        guiders.AdaptiveProjectedGuidance(4.0, adaptive_projected_guidance_momentum=-0.5),
        [[0, 1]] * 3,
    ),
    "tangential": (guiders.TangentialClassifierFreeGuidance(4.0), [[0, 1]] * 3),
    "skipped layers": (guiders.SkipLayerGuidance(4.0, skip_layer_config=SKIPPED, **ALWAYS), LATE),
    "skipped layers alone": (
        guiders.SkipLayerGuidance(1.0, skip_layer_config=SKIPPED, **ALWAYS),
        ([0], [0, None], [0, None]),
    ),
    "smoothed": (
        guiders.SmoothedEnergyGuidance(4.0, seg_guidance_layers=[1], seg_guidance_start=0.0),
        LATE,
    ),
    "autoguidance": (
        guiders.AutoGuidance(4.0, auto_guidance_config=SKIPPED),
        [[0, None]] * 3,  # the negative prompt, through a worse model
    ),
}


@pytest.mark.parametrize("name", tiered(GUIDERS, quick=2))
def test_each_call_is_of_the_branch_whose_text_it_gets(name):
    guider, expected = GUIDERS[name]
    pipe = modular(qwen_image(), "QwenImageModularPipeline")
    pipe.update_components(guider=guider)
    reader, calls = PassReader(find_denoiser(pipe)), []

    def note(model, args, kwargs):
        calls.append((reader.read(model, args, kwargs).order, kwargs["encoder_hidden_states"]))

    pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    pipe(
        prompt=PROMPT,
        negative_prompt=NEGATIVE,
        num_inference_steps=3,
        height=128,
        width=128,
        output_type="pt",
    )
    branches = {0: ("conditional",), 1: ("unconditional",), None: (None,)}
    assert [order for order, _ in calls] == [branches[one] for step in expected for one in step]
    prompt = calls[0][1]
    for order, text in calls:
        is_prompt = text.shape == prompt.shape and torch.equal(text, prompt)
        assert is_prompt or order != ("conditional",)
        assert not is_prompt or order != ("unconditional",)
    assert reader.watch.in_turn
    assert makes_negative(guider) == (name not in ("none", "disabled", "skipped layers alone"))


class ModularPipeline:
    """A modular pipeline as far as guidance goes."""

    def __init__(self, guider):
        self.guider = guider


def watch_of(guider):
    watch = GuidanceWatch(pipe := ModularPipeline(guider))
    watch.kept = pipe  # which it holds weakly
    return watch


def test_asking_changes_nothing_of_the_guider():
    guider, _ = GUIDERS["momentum"]
    guider.set_state(step=0, num_inference_steps=3, timestep=torch.tensor(1.0))
    guider.prepare_inputs({})
    before = dict(vars(guider))
    watch = watch_of(guider)
    orders = [watch.order(None, number) for number in (0, 1)]
    assert orders == [("conditional",), ("unconditional",)]
    assert makes_negative(guider)
    after = vars(guider)
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_a_prediction_that_is_not_known_is_refused_by_its_name():
    class Another(guiders.ClassifierFreeGuidance):
        _input_predictions: ClassVar = ["pred_cond", "pred_elsewhere"]

    guider = Another(4.0)
    guider.set_state(step=0, num_inference_steps=3, timestep=torch.tensor(1.0))
    watch = watch_of(guider)
    assert watch.order(None, 0) == ("conditional",)
    with pytest.raises(ValueError, match="pred_elsewhere of a Another"):
        watch.order(None, 1)
    with pytest.raises(ValueError, match="Call 3 .* nothing"):
        watch.order(None, 2)


def test_guidance_that_has_ended_makes_a_negative_prompt_in_the_next_run():
    guider = guiders.ClassifierFreeGuidance(4.0, stop=0.5)
    guider.set_state(step=2, num_inference_steps=3, timestep=torch.tensor(1.0))
    assert guider.num_conditions == 1
    assert makes_negative(guider)
