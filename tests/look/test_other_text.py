"""Another text than the prompt, against softmax(q k^T) from the layers' own inputs."""

import math

import pytest
import torch
from diffusers import PixArtSigmaPipeline
from diffusers.models.attention_processor import AttnProcessor, FusedAttnProcessor2_0
from helpers.capture_runs import assert_untouched
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline, make_unet
from helpers.transformer_rows import pixart
from helpers.unet_rows import lora

from sdattn import TorchAttnProcessor, capture, generate, heatmaps
from sdattn.attention.calls import ALL, AttentionCall
from sdattn.look.other_text import OtherTextCall, encode_text
from sdattn.models.denoiser import find_denoiser

PROMPT = "a red cat"
SMALL = {"num_inference_steps": 2, "height": 64, "width": 96, "guidance_scale": 5.0}
MID = "mid_block.attentions.0.transformer_blocks.0.attn2"


def run(pipe, prompt=PROMPT, **options):
    settings = {**SMALL, "generator": torch.Generator().manual_seed(0), "output_type": "np"}
    return pipe(prompt, **{**settings, **options}).images


def fuse(unet):
    for layer in find_denoiser(unet).layers:
        layer.module.fuse_projections()
    unet.set_attn_processor(FusedAttnProcessor2_0())


SETUPS = {
    "own": lambda unet: None,
    "AttnProcessor": lambda unet: unet.set_attn_processor(AttnProcessor()),
    "TorchAttnProcessor": lambda unet: unet.set_attn_processor(TorchAttnProcessor()),
    "fused": fuse,
}
PIPES = {"LoRA": lora("loaded"), "LoRA, fused": lora("fused"), "SDXL": make_sdxl_pipeline}


@pytest.mark.parametrize("name", [*SETUPS, *PIPES])
@pytest.mark.slow
def test_the_runs_own_prompt_gives_the_runs_own_maps(name):
    pipe = PIPES.get(name, make_pipeline)()
    SETUPS.get(name, SETUPS["own"])(pipe.unet)
    before, processors = run(pipe), pipe.unet.attn_processors
    states = encode_text(pipe, PROMPT)
    with capture(pipe) as store, capture(pipe, text_states=states) as asked:
        during = run(pipe)
    assert (before == during).all()
    assert list(asked.maps) == list(store.maps)
    for layer, maps in store.maps.items():
        assert maps.std() > 1e-4
        torch.testing.assert_close(asked.maps[layer], maps, atol=1e-6, rtol=0)
    assert_untouched(pipe.unet, processors)
    assert (before == run(pipe)).all()


@pytest.mark.parametrize("norm_cross", [False, True])
@pytest.mark.parametrize("texts", [1, 2])
@torch.no_grad()
def test_another_text_gets_the_softmax_of_its_own_keys(texts, norm_cross):
    """One text for both images, or one each, of another length than the prompt's."""
    unet = make_unet()
    inputs = torch.randn(2, 4, 16, 24), 500, torch.randn(2, 77, 32)
    states, queries = torch.randn(texts, 9, 32), {}
    cross = [layer for layer in find_denoiser(unet).layers if layer.kind == "cross"]
    for layer in cross:
        if norm_cross:
            layer.module.norm_cross = torch.nn.LayerNorm(32, eps=0.5)
        layer.module.register_forward_pre_hook(
            lambda module, args, name=layer.name: queries.update({name: module.to_q(args[0])})
        )
    with capture(unet, text_states=states, heads="all") as store:
        unet(*inputs)
    assert (store.n_text, store.n_keys, store.images) == (9, 9, 2)
    assert store.nbytes == store.expected_nbytes
    for layer in cross:
        module, found = layer.module, store.maps[layer.name]
        assert found.shape == (2, layer.heads, *layer.grid((16, 24)), 9)
        for image in range(2):
            own = states[image % texts].double()
            if norm_cross:
                variance, mean = torch.var_mean(own, -1, correction=0, keepdim=True)
                own = (own - mean) / (variance + 0.5).sqrt()
            q = queries[layer.name][image].double()
            k = own @ module.to_k.weight.double().T
            d = q.shape[-1] // layer.heads
            for head in range(layer.heads):
                part = slice(head * d, (head + 1) * d)
                expected = (q[:, part] @ k[:, part].T / math.sqrt(d)).softmax(-1)
                torch.testing.assert_close(
                    found[image, head].flatten(0, 1).double(), expected, atol=1e-6, rtol=0
                )


@pytest.mark.parametrize(("texts", "expected"), [(1, [0] * 6), (2, [0, 0, 0, 1, 1, 1])])
def test_each_frame_of_a_video_asks_its_images_text(texts, expected):
    key = torch.arange(float(texts)).reshape(-1, 1, 1, 1).expand(-1, 2, 5, 4)
    call = AttentionCall(torch.zeros(6, 2, 3, 4), key)  # two images of three frames
    asked = OtherTextCall(call, 3).of_rows(ALL)
    assert asked.key.shape == (6, 2, 5, 4) and asked.key[:, 0, 0, 0].tolist() == expected


def test_of_a_guided_batch_the_prompts_rows_are_asked():
    """As without the capture's knowledge of guidance: rows 2 and 3 of a bare model.

    Two rows are asked there and four here, and products of other shapes may round otherwise: a few
    units of float32's 6e-8 of shares below 1. Rows of the other branch differ by 1e-3.
    """
    pipe = make_pipeline()
    states = encode_text(pipe, "a dog")
    with (
        capture(pipe, text_states=states) as store,
        capture(pipe.unet, text_states=states) as every,
    ):
        run(pipe, [PROMPT, "dog"], negative_prompt=["red", "cat"])
    assert (store.images, every.images) == (2, 4)
    for name, maps in store.maps.items():
        torch.testing.assert_close(maps, every.maps[name][2:], atol=1e-6, rtol=0)
    assert (store.maps[MID] - every.maps[MID][:2]).abs().max() > 1e-4


def test_clip_skip_is_heeded():
    pipe = make_sdxl_pipeline()
    states = [encode_text(pipe, PROMPT, options) for options in ({}, {"clip_skip": 1})]
    assert states[0].shape == (1, 77, 64)
    assert (states[0] - states[1]).abs().max() > 1e-3
    with capture(pipe) as store, capture(pipe, text_states=states[1]) as asked:
        run(pipe, clip_skip=1)
    for name, maps in store.maps.items():
        torch.testing.assert_close(asked.maps[name], maps, atol=1e-6, rtol=0)


# -- what cannot be asked -------------------------------------------------------------------------


TAKES = r"this model takes \[1 or images, tokens, 32\]. Encode the text with its own"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 77, 33), TAKES),
        ((77, 32), TAKES),
        ((1, 1, 77, 32), TAKES),
        ((3, 5, 32), "text_states.*3.*run"),
    ],
)
def test_states_of_another_width_or_number_are_refused(tiny_unet, shape, message):
    before = tiny_unet.attn_processors
    with pytest.raises(ValueError, match=message):
        with capture(tiny_unet, text_states=torch.rand(shape)):
            tiny_unet(torch.randn(2, 4, 16, 16), 1, torch.randn(2, 77, 32))
    assert_untouched(tiny_unet, before)


def test_a_transformer_without_a_stream_for_the_text_cannot_be_asked():
    pipe = pixart(PixArtSigmaPipeline)
    with pytest.raises(TypeError, match="another text.*PixArtTransformer2DModel"):
        with capture(pipe, text_states=torch.rand(1, 5, 64)):
            pass
    ran = []
    pipe.transformer.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(TypeError, match="UNets of Stable Diffusion 1"):
        generate(pipe, PROMPT, ask="dog", num_inference_steps=1)
    assert not ran


def test_a_processor_without_to_q_is_named_and_left_as_it_was(tiny_unet):
    class Hiding:
        def __call__(self, attn, hidden_states, **_):
            return hidden_states

    tiny_unet.set_attn_processor(Hiding())
    before = tiny_unet.attn_processors
    with pytest.raises(RuntimeError, match="processor Hiding.*to_q"):
        with capture(tiny_unet, text_states=torch.rand(1, 5, 32)):
            tiny_unet(torch.randn(1, 4, 16, 16), 1, torch.randn(1, 77, 32))
    assert_untouched(tiny_unet, before)


def test_nothing_is_left_behind_where_the_layer_fails(tiny_unet):
    before = tiny_unet.attn_processors
    with pytest.raises(RuntimeError), capture(tiny_unet, text_states=torch.rand(1, 5, 32)):
        tiny_unet(torch.randn(1, 4, 16, 16), 1, torch.randn(1, 77, 31))  # the prompt's width
    assert_untouched(tiny_unet, before)


# -- generate(ask=...) ----------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_pipeline, make_sdxl_pipeline])
@pytest.mark.slow
def test_asked_words_stand_against_each_other(make):
    """The softmax over <sos>, the words and the first <eos>, then as the default preset has it."""
    pipe, options = make(), {**SMALL, "num_inference_steps": 4}
    prompts = [PROMPT, "dog and more"]
    found = generate(pipe, prompts, ask="dog, cat", seed=5, **options)  # without the comma
    plain = generate(pipe, prompts, seed=5, **options)
    for i in range(2):
        assert found.images[i].tobytes() == plain.images[i].tobytes()
        assert torch.equal(found.heatmaps[i].maps, plain.heatmaps[i].maps)
        assert found.info[i] == {**plain.info[i], "asked": "dog cat"}
    generators = [torch.Generator().manual_seed(5 + i) for i in range(2)]
    states = encode_text(pipe, "dog cat")
    with capture(pipe, text_states=states, steps="all", heads="all") as store:
        pipe(prompts, generator=generators, **options)
    maps = {name: one.double()[..., :4] for name, one in store.maps.items() if "up_b" in name}
    finest = max(one.shape[3:5] for one in maps.values())
    among = [one / one.sum(-1, keepdim=True) for one in maps.values() if one.shape[3:5] == finest]
    assert len(among) == (3 if make is make_pipeline else 6)
    expected = sum(one[:, 2:].mean((1, 2)) for one in among) / len(among)
    for asked, one in zip(found.asked_heatmaps, expected, strict=True):
        assert asked.words == ("dog", "cat")
        torch.testing.assert_close(asked["dog"].values.double(), one[..., 1], atol=1e-6, rtol=0)
        torch.testing.assert_close(asked["cat"].values.double(), one[..., 2], atol=1e-6, rtol=0)
        torch.testing.assert_close(asked["<sos>"].values.double(), one[..., 0], atol=1e-6, rtol=0)
        assert asked.columns == (0, 1, 2, 3)
        torch.testing.assert_close(asked.maps.sum(-1), torch.ones(asked.maps.shape[:2]))


def test_a_store_that_was_asked_is_read_like_any_other():
    pipe = make_pipeline()
    with capture(pipe, text_states=encode_text(pipe, "dog cat")) as store:
        run(pipe)
    [found] = heatmaps(store, pipe, "dog cat")
    assert found.words == ("dog", "cat")
    layers = [store.maps[name][0] for name in store.maps if name.startswith("up_blocks.3")]
    torch.testing.assert_close(found["cat"].values, torch.stack(layers).mean(0)[..., 2])


@pytest.mark.slow
def test_asked_maps_are_refined_along_the_same_image():
    """On one grid: affinity @ maps."""
    pipe = make_pipeline()
    plain = generate(pipe, PROMPT, ask="dog cat", **SMALL)
    sharper = generate(pipe, PROMPT, ask="dog cat", refine="self", **SMALL)
    affinity, size = sharper.layers.affinity[0].double(), (8, 12)
    assert sharper.layers.affinity_grid == size
    maps = plain.asked_heatmaps[0].maps.double()
    expected = (affinity @ maps.flatten(0, 1)).unflatten(0, size)
    torch.testing.assert_close(sharper.asked_heatmaps[0].maps.double(), expected, atol=1e-6, rtol=0)


def test_an_empty_question_is_refused_before_the_model_runs():
    pipe, ran = make_pipeline(), []
    pipe.unet.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match="is empty"):
        generate(pipe, PROMPT, ask=" ", **SMALL)
    assert not ran
