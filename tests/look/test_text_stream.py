"""Another text in joint attention: a stream beside the prompt's that the image never sees."""

import pytest
import torch
from helpers.joint_models import MODELS, N_TEXT, inputs
from helpers.joint_parity import spans_of
from helpers.matrix_oracle import recorded
from helpers.tiers import tiered
from helpers.transformer_rows import flux, qwen_image, sd3

from sdattn import capture, generate
from sdattn.models.denoiser import find_denoiser

STREAMS = ("SD3", "FLUX.1", "FLUX.2")
PROMPT = "a red cat on the sofa"
STEPS = {"num_inference_steps": 2, "max_sequence_length": 16, "height": 128, "width": 128}


def other_states(model, texts=1):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(texts, N_TEXT, model.config.joint_attention_dim, generator=generator)


def by_hand(kind, model, given, states):
    """What the image would pay to the states, block by block, float64 ``[N, T]`` each: blocks are
    run one after the other on the image that came into each of them in the model's own run."""
    seen = []
    hooks = [
        block.register_forward_pre_hook(lambda _, args, named: seen.append(named), with_kwargs=True)
        for block in model.transformer_blocks
    ]
    model(**given)
    for hook in hooks:
        hook.remove()
    text = model.context_embedder(states)
    with recorded(model, ("joint",)) as record:
        for block, named in zip(model.transformer_blocks, seen, strict=True):
            text, _ = block(**{**named, "encoder_hidden_states": text})
    image, columns = spans_of(kind)
    return [probs[0, :, image, columns].mean(0) for [probs] in record.values()]


@pytest.mark.parametrize("kind", STREAMS)
@torch.no_grad()
def test_each_block_shows_what_the_image_would_pay_to_it(kind):
    model = MODELS[kind]().transformer
    given, states = inputs(kind, model), other_states(model)
    wanted = by_hand(kind, model, given, states)
    with capture(model) as own, capture(model, text_states=states) as asked:
        model(**given)
    assert len(asked.maps) == len(wanted) == len(model.transformer_blocks)
    for (name, found), answer in zip(asked.maps.items(), wanted, strict=True):
        torch.testing.assert_close(found[0].flatten(0, 1).double(), answer, atol=1e-6, rtol=1e-5)
        assert (found - own.maps[name]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("options", [{}, {"refine": "self"}, {"heads": "all", "tokens": [2, 0]}])
@torch.no_grad()
def test_the_prompt_itself_gives_the_maps_of_the_prompt(kind, options):
    model = MODELS[kind]().transformer
    given = inputs(kind, model)
    states = given["encoder_hidden_states"]
    with capture(model, **options) as own, capture(model, text_states=states, **options) as asked:
        model(**given)
    for name, found in asked.maps.items():
        torch.testing.assert_close(found, own.maps[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("asked_first", [True, False])
@torch.no_grad()
def test_nothing_else_changes(kind, asked_first):
    """Neither the model's output nor what another capture holds, inside or outside."""
    model = MODELS[kind]().transformer
    given, states = inputs(kind, model), other_states(model)
    plain = model(**given).sample
    with capture(model) as alone:
        model(**given)
    order = [{"text_states": states}, {}][:: 1 if asked_first else -1]
    with capture(model, **order[0]) as first, capture(model, **order[1]) as second:
        assert torch.equal(model(**given).sample, plain)
    own = second if asked_first else first
    assert own.maps.keys() == alone.maps.keys()
    for name, found in own.maps.items():
        assert torch.equal(found, alone.maps[name])
    assert not any(block._forward_hooks for block in model.transformer_blocks)
    assert torch.equal(model(**given).sample, plain)


@torch.no_grad()
def test_only_chosen_layers_are_kept_and_the_text_goes_through_all():
    model = MODELS["SD3"]().transformer
    given, states = inputs("SD3", model), other_states(model)
    last = f"transformer_blocks.{len(model.transformer_blocks) - 1}.attn"
    with capture(model, text_states=states, layers=[last]) as some:
        model(**given)
    assert list(some.maps) == [last]
    answer = by_hand("SD3", model, given, states)[-1]
    torch.testing.assert_close(
        some.maps[last][0].flatten(0, 1).double(), answer, atol=1e-6, rtol=1e-5
    )


def test_a_loss_on_the_maps_reaches_the_latents():
    model = MODELS["FLUX.1"]().transformer
    given, states = inputs("FLUX.1", model), other_states(model)
    given["hidden_states"].requires_grad_()
    with capture(model, text_states=states, grad=True) as store:
        model(**given)
    sum(maps[..., 1].sum() for maps in store.maps.values()).backward()
    assert given["hidden_states"].grad.abs().max() > 0
    with capture(model, text_states=states) as store:
        model(**given)
    assert not any(maps.requires_grad for maps in store.maps.values())


# -- generate(ask=...) ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sd3, flux])
@pytest.mark.parametrize("refine", tiered([None, "self"], quick=2))
@pytest.mark.slow
def test_a_run_answers_for_each_image(make, refine):
    """Under guidance as well, in one batch or in turn, and several prompts together."""
    pipe = make()
    # FLUX has blocks of one stream too, in which no other text can be asked about
    options = {**STEPS, "seed": 3, "refine": refine, "capture_options": {"layers": ["double"]}}
    prompts = [PROMPT, "a dog"]
    plain = generate(pipe, prompts, **options)
    run = generate(pipe, prompts, ask=PROMPT, **options)
    alone = generate(pipe, prompts, ask="the dog, sofa", **options)
    for before, after in zip(plain.images, run.images, strict=True):
        assert before.tobytes() == after.tobytes()
    assert [h.prompt.text for h in alone.asked_heatmaps] == ["the dog sofa"] * 2
    assert list(alone.asked_heatmaps[0]) == ["the", "dog", "sofa"]
    # of the first image the prompt itself was asked
    for word, heatmap in run.asked_heatmaps[0].items():
        own = run.heatmaps[0][word].values
        torch.testing.assert_close(heatmap.values, own, atol=1e-6, rtol=1e-4)
    word = run.asked_heatmaps[1]["cat"].values
    assert (word - run.asked_heatmaps[0]["cat"].values).abs().max() > 1e-6


# -- what cannot be asked -------------------------------------------------------------------------


def test_another_number_of_columns_or_texts_is_refused():
    model = MODELS["FLUX.1"]().transformer
    given = inputs("FLUX.1", model)
    for states in (other_states(model)[:, :5], other_states(model, texts=2)):
        with pytest.raises(ValueError, match="1.*7.*columns"):
            with capture(model, text_states=states):
                model(**given)
    assert not any(block._forward_hooks for block in model.transformer_blocks)
    with pytest.raises(ValueError, match=r"\[1 or images, tokens, 32\]"):
        with capture(model, text_states=torch.zeros(1, 7, 9)):
            pass
    with pytest.raises(ValueError, match="text_states"):
        with capture(model, text_states=other_states(model), kinds=("self",)):
            pass


def test_models_without_such_a_stream_are_refused_by_name():
    pipe = qwen_image()
    assert find_denoiser(pipe).family.text_stream is None
    with pytest.raises(TypeError, match="QwenImageTransformer2DModel.*3.*FLUX"):
        generate(pipe, PROMPT, ask="dog", num_inference_steps=1)


def test_blocks_whose_hooks_keep_state_are_refused():
    from diffusers import FirstBlockCacheConfig

    pipe = flux()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(RuntimeError, match="block.*disable_cache"):
        generate(pipe, PROMPT, ask="dog", **STEPS)
    pipe.transformer.disable_cache()
    assert generate(pipe, PROMPT, ask="dog", **STEPS).asked_heatmaps
