"""Names, places and selections, against the list in the design of SD 1.x."""

from types import SimpleNamespace

import diffusers
import pytest
import torch
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_sdxl_pipeline, make_unet

from sdattn.models.denoiser import find_denoiser
from sdattn.models.layers import select_layers

PLACES_OF_SD1 = (
    [f"down_blocks.{block}.attentions.{i}" for block in (0, 1, 2) for i in (0, 1)]
    + ["mid_block.attentions.0"]
    + [f"up_blocks.{block}.attentions.{i}" for block in (1, 2, 3) for i in (0, 1, 2)]
)


def names(layers):
    return [layer.name for layer in layers]


def test_sd1_has_its_32_layers_in_execution_order(tiny_unet):
    assert names(find_denoiser(tiny_unet).layers) == [
        f"{place}.transformer_blocks.0.attn{i}" for place in PLACES_OF_SD1 for i in (1, 2)
    ]


def test_execution_order_is_the_order_of_calls(tiny_unet):
    import torch

    called = []
    found = find_denoiser(tiny_unet).layers
    for layer in found:
        layer.module.register_forward_hook(lambda *_, name=layer.name: called.append(name))
    tiny_unet(torch.randn(1, 4, 16, 16), 1, torch.randn(1, 77, 32))
    assert called == names(found)


def test_layers_know_kind_level_and_heads(tiny_unet):
    found = {layer.name: layer for layer in find_denoiser(tiny_unet).layers}
    first = found["down_blocks.0.attentions.1.transformer_blocks.0.attn1"]
    assert (first.kind, first.place, first.level, first.heads) == ("self", "down", 0, 2)
    up = found["up_blocks.2.attentions.0.transformer_blocks.0.attn2"]
    assert (up.kind, up.place, up.level, up.heads) == ("cross", "up", 1, 4)
    assert up.grid((9, 17)) == (5, 9)


@pytest.mark.parametrize(
    ("choice", "count"),
    [
        (None, 16),
        ("mid", 1),
        (("down", "mid"), 7),
        ("down_blocks.0", 2),
        ("up_blocks.3.attentions.0.transformer_blocks.0.attn2", 1),
        (16, 5),
        ((8, 12), 5),
        (["mid", 8], 6),
        ([[8, 12]], 5),  # as JSON has a grid
        (lambda layer: layer.heads == 2, 5),
    ],
)
def test_selections(tiny_unet, choice, count):
    chosen = select_layers(find_denoiser(tiny_unet).layers, choice, latent_size=(16, 24))
    assert len(chosen) == count
    assert {layer.kind for layer in chosen} == {"cross"}


def test_kinds(tiny_unet):
    found = find_denoiser(tiny_unet).layers
    assert len(select_layers(found, None, ("self",))) == 16
    assert len(select_layers(found, None, ("cross", "self"))) == 32


@pytest.mark.parametrize(
    "choice", ["attentions.9", "down_blocks.7", "left", 5, (16, 16), lambda _: False]
)
def test_a_choice_that_fits_nothing_lists_what_there_is(tiny_unet, choice):
    with pytest.raises(ValueError, match=r"fits(.|\n)*mid_block\.attentions\.0.*cross 2x3"):
        select_layers(find_denoiser(tiny_unet).layers, choice, latent_size=(16, 24))


@pytest.mark.parametrize("kinds", [("temporal",), (), "cross"])
def test_unknown_kinds_are_refused(tiny_unet, kinds):
    with pytest.raises(ValueError, match="'cross'.*'joint'.*'self'"):
        select_layers(find_denoiser(tiny_unet).layers, None, kinds)


def test_a_kind_that_the_model_does_not_have_lists_what_there_is(tiny_unet):
    with pytest.raises(ValueError, match=r"fits kinds=\('joint',\)(.|\n)*attn2 \(mid, cross\)"):
        select_layers(find_denoiser(tiny_unet).layers, None, ("joint",))


def test_sdxl_has_no_attention_at_full_resolution():
    found = find_denoiser(make_sdxl_pipeline().unet).layers
    assert min(layer.level for layer in found) == 1


def test_a_model_without_a_unet_is_named():
    with pytest.raises(TypeError, match="list.*Pass a pipeline"):
        find_denoiser([])


def test_a_model_of_no_family_is_named_with_those_that_are_supported():
    transformer = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(8, 2), 1)
    with pytest.raises(TypeError, match="(?s)TransformerDecoder.*FLUX"):
        find_denoiser(transformer)
    held = SimpleNamespace(transformer=transformer)
    with pytest.raises(TypeError, match="(?s)TransformerDecoder.*FLUX"):
        find_denoiser(held)
    parts = SimpleNamespace(components={"prior": transformer, "tokenizer": None})
    with pytest.raises(TypeError, match="denoiser.*TransformerDecoder"):
        find_denoiser(parts)


def test_added_key_value_attention_is_named():
    unet = make_unet(
        down_block_types=("SimpleCrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
        up_block_types=("UpBlock2D",) + ("SimpleCrossAttnUpBlock2D",) * 3,
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        attention_head_dim=4,
    )
    with pytest.raises(TypeError, match="kind"):
        list(find_denoiser(unet).layers)


SDXL = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
}
REAL = {  # published configurations: how many layers see the text
    "SD 1.5": (diffusers.UNet2DConditionModel, {"cross_attention_dim": 768}, 16),
    "SDXL": (diffusers.UNet2DConditionModel, SDXL, 70),
    "SD3 medium": (diffusers.SD3Transformer2DModel, {"num_layers": 24}, 24),
    "FLUX.1": (diffusers.FluxTransformer2DModel, {}, 19 + 38),
    "FLUX.2": (diffusers.Flux2Transformer2DModel, {}, 8 + 48),
    "Qwen-Image": (diffusers.QwenImageTransformer2DModel, {}, 60),
    "PixArt": (diffusers.PixArtTransformer2DModel, {"caption_channels": 4096}, 28),
    "Sana": (diffusers.SanaTransformer2DModel, {}, 20),
}


@pytest.mark.parametrize("name", tiered(REAL, quick=2))
def test_models_of_the_published_sizes(name):
    kind, config, count = REAL[name]
    with torch.device("meta"):
        model = kind(**config)
    chosen = select_layers(find_denoiser(model).layers)
    assert len(chosen) == count
    assert {layer.kind for layer in chosen} in ({"cross"}, {"joint"})
