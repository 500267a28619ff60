"""Controllers that hold prompts, in runs of these and of other prompts."""

import pytest
import torch
from helpers.edit_rows import made
from helpers.refusals import refused_unrun
from helpers.tiny_pipelines import small_pipeline

import sdattn
from sdattn import TorchAttnProcessor
from sdattn.edit import (
    AttentionRefine,
    AttentionReplace,
    AttentionReweight,
    EmptyControl,
    LocalBlend,
    register_attention_control,
    step_end,
)

OWN = ["a red cat", "a red dog"]
RUN = {"num_inference_steps": 2, "output_type": "latent"}
SIZE = {"height": 32, "width": 32}
# What is drawn, and whether it is the controller's own
RUNS = {
    "own": (OWN, {}, True),
    "own, in other letters": (["A red  Cat", "a red dog"], {}, True),
    "two images of each": (OWN, {"num_images_per_prompt": 2}, True),
    "each twice": ([OWN[0], OWN[0], OWN[1], OWN[1]], {}, True),
    "other words": (["a red cat", "a dog cat"], {}, False),
    "all others": (["o dog", "o cat"], {}, False),
    "in another order": ([OWN[1], OWN[0]], {}, False),
    "the source alone, twice": (OWN[0], {"num_images_per_prompt": 2}, False),
    "one after the other": ([*OWN, *OWN], {}, False),
}


def edits(prompts, **options):
    replace = AttentionReplace(prompts, 2, **options)
    yield replace
    yield AttentionRefine(prompts, 2, **options)
    yield AttentionReweight(prompts, 2, weights={"dog": 2.0}, controller=replace, **options)


def run(pipe, texts, **options):
    return pipe(texts, **{**RUN, **SIZE, **options})


@pytest.mark.parametrize("name", RUNS)
def test_a_registered_controller_edits_runs_of_its_own_prompts_alone(name):
    pipe, (texts, options, is_own) = small_pipeline(), RUNS[name]
    for control in edits(sdattn.read_prompts(pipe, OWN)):
        with register_attention_control(pipe, control):
            if is_own:
                run(pipe, texts, **options)
                assert control.cur_step == 2
                continue
            with pytest.raises(ValueError, match="was made for.*'a red dog'.*and this run draws"):
                run(pipe, texts, **options)
            assert not control.cur_step


@pytest.mark.parametrize("name", RUNS)
def test_so_does_one_that_is_attached(name):
    pipe, (texts, options, is_own) = small_pipeline(), RUNS[name]
    control = AttentionReplace(sdattn.read_prompts(pipe, OWN), 2, pipeline=pipe)
    pipe.unet.set_attn_processor(TorchAttnProcessor(control))
    if is_own:
        run(pipe, texts, **options)
        assert control.cur_step == 2
    else:
        with pytest.raises(ValueError, match="was made for.*and this run draws"):
            run(pipe, texts, **options)
    control.remove()


def test_each_run_is_compared_with_them():
    pipe = small_pipeline()
    control = AttentionReplace(sdattn.read_prompts(pipe, OWN), 2)
    with register_attention_control(pipe, control):
        run(pipe, OWN)
        control.reset()
        with pytest.raises(ValueError, match="this run draws"):
            run(pipe, OWN[::-1])
        control.reset()
        run(pipe, OWN)
    assert control.cur_step == 2


@pytest.mark.parametrize("name", ["SDXL", "SD3", "FLUX, true CFG"])
def test_in_other_families_too(name):
    pipe, options = made(name)
    read = sdattn.read_prompts(pipe, OWN, **options)
    control = AttentionReplace(read, 3)
    with register_attention_control(pipe, control):
        with pytest.raises(ValueError, match="this run draws"):
            pipe(OWN[::-1], **options)
    control.reset()
    with register_attention_control(pipe, control):
        pipe(OWN, **options)
    assert control.cur_step == 3


def test_prompts_that_were_read_otherwise_are_named_as_such():
    pipe = small_pipeline()
    other = small_pipeline()
    other.tokenizer.add_tokens(["dog"])  # as one token, which is three letters elsewhere
    read = sdattn.read_prompts(other, OWN)
    control = AttentionReplace(read, 2)
    with register_attention_control(pipe, control), pytest.raises(ValueError, match="other tokens"):
        run(pipe, OWN)


def test_where_the_prompts_of_a_run_are_unknown_nothing_is_refused():
    pipe = small_pipeline()
    read = sdattn.read_prompts(pipe, OWN)
    states = pipe.encode_prompt(OWN, "cpu", 1, True)
    control = AttentionReplace(read, 2)
    with register_attention_control(pipe, control):
        run(pipe, None, prompt_embeds=states[0], negative_prompt_embeds=states[1])
    bare = AttentionReplace(read, 2)
    with register_attention_control(pipe.unet, bare), torch.no_grad():
        for step in (500, 1):
            pipe.unet(torch.randn(4, 4, 16, 16), step, torch.cat(states[::-1]))
    assert control.cur_step == bare.cur_step == 2


def test_a_controller_without_prompts_runs_on_any():
    pipe = small_pipeline()
    plain = run(pipe, OWN[::-1], generator=torch.Generator().manual_seed(0)).images
    with register_attention_control(pipe, EmptyControl()):
        found = run(pipe, OWN[::-1], generator=torch.Generator().manual_seed(0)).images
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=0)


def test_the_encoders_are_listened_to_while_a_controller_needs_it():
    pipe = small_pipeline()
    control = AttentionReplace(sdattn.read_prompts(pipe, OWN), 2)
    before = len(pipe.text_encoder._forward_pre_hooks)
    with register_attention_control(pipe, control):
        assert len(pipe.text_encoder._forward_pre_hooks) == before + 1
        run(pipe, OWN)
    assert len(pipe.text_encoder._forward_pre_hooks) == before


@pytest.mark.parametrize("part", ["local_blend", "controller"])
def test_the_parts_of_an_edit_have_the_same_prompts(part):
    pipe = small_pipeline()
    read, turned = (sdattn.read_prompts(pipe, texts) for texts in (OWN, OWN[::-1]))
    words = {"words": ["dog", "cat"], "num_steps": 2}
    wrong = {
        "local_blend": LocalBlend(turned, **words),
        "controller": AttentionReplace(turned, 2),
    }
    with refused_unrun(pipe, f"`{part}` was made for.*Make both with the same prompts"):
        kind = AttentionReplace if part == "local_blend" else AttentionReweight
        kind(read, 2, **{part: wrong[part]})
    words["words"] = ["cat", "dog"]
    again = sdattn.read_prompts(pipe, OWN)  # equal, and other objects
    right = LocalBlend(again, **words)
    control = AttentionReweight(
        read, 2, weights={"dog": 2.0}, local_blend=right, controller=AttentionReplace(again, 2)
    )
    with register_attention_control(pipe, control):
        run(pipe, OWN, callback_on_step_end=step_end(control))
    assert right.counter == 2
