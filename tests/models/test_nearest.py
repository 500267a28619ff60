"""The family that an unknown model is most like, named in the refusal."""

import inspect

import diffusers
import pytest
import torch
from helpers.joint_rows import hidream
from helpers.nearest_once import make, traits_once  # noqa: F401
from helpers.padded_rows import hunyuan_dit
from torch import nn

from sdattn.models import Family, register, unregister
from sdattn.models.families import registered
from sdattn.models.layers import find_denoiser
from sdattn.models.nearest import folded, nearest, without_values

# of diffusers' own class for Chroma
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

# What each grew out of, as its source says: a processor imported from that family's file, blocks
# copied from it ("Copied from diffusers.models.transformers.…"), or a name.
KIN = {
    "BriaFiboTransformer2DModel": "Bria",
    "HunyuanVideoFramepackTransformer3DModel": "HunyuanVideo",
    "GlmImageTransformer2DModel": "CogView4",
    "SanaVideoTransformer3DModel": "Sana",
    "DiTTransformer2DModel": "PixArt",  # its BasicTransformerBlock with ada_norm_zero
    "AllegroTransformer3DModel": "PixArt",  # its adaLN-single and caption projection
    "UNet2DModel": "UNets",
}


WITH_ARGUMENTS = {
    "HiDreamImageTransformer2DModel": hidream,
    "HunyuanDiT2DModel": hunyuan_dit,
}


@pytest.mark.parametrize("name", KIN)
def test_kin_is_named(name):
    model = without_values(getattr(diffusers, name), {})
    with pytest.raises(TypeError, match="Asked to capture") as refused:
        find_denoiser(model)
    said = str(refused.value)
    assert f"The nearest is {KIN[name]}" in said
    assert "docs/contributing/family.md" in said
    for family in registered():  # all that are supported are listed as well
        assert family.name in said


def test_the_reason_is_what_both_have():
    model = without_values(diffusers.GlmImageTransformer2DModel, {})
    family, reason = nearest(model, registered())
    kin = without_values(diffusers.CogView4Transformer2DModel, {})
    assert family.name == "CogView4"
    assert "attention at transformer_blocks.*.attn1" in reason
    for one in (model, kin):
        assert {"crop_coords", "target_size"} < set(inspect.signature(one.forward).parameters)
    assert "crop_coords" in reason and "target_size" in reason
    assert "timestep" not in reason  # which nearly all have


@pytest.mark.parametrize(
    "family", [one for one in registered() if one.denoisers], ids=lambda one: one.name
)
def test_a_family_is_nearest_to_itself(family):
    for name in family.denoisers:
        model = without_values(getattr(diffusers, name), {})
        if model is None:  # its arguments have no defaults
            model = find_denoiser(WITH_ARGUMENTS[name]()).model
        assert nearest(model, registered())[0] is family


def test_what_is_like_none_gets_no_family():
    layer = nn.TransformerDecoderLayer(8, 2)
    for model in (nn.Linear(2, 2), nn.TransformerDecoder(layer, 1), [], None):
        assert nearest(model, registered()) is None
        with pytest.raises(TypeError, match="docs/contributing/family.md") as refused:
            find_denoiser(model)
        assert "nearest" not in str(refused.value)


class Own(nn.Module):
    def forward(self, hidden_states, encoder_hidden_states, timestep, curvature):
        return hidden_states


def test_a_family_from_outside_is_compared_by_its_arguments():
    family = Family(name="Own", denoisers=(Own,), grid=lambda *_: (1, 1))
    other = type("Unlike", (nn.Module,), {"forward": Own.forward})()
    register(family)
    try:
        found, reason = nearest(other, registered())
    finally:
        unregister(family)
    assert (found, reason) == (family, "forward(curvature)")


def test_looking_for_the_nearest_leaves_the_random_numbers_alone(monkeypatch):
    monkeypatch.setattr("sdattn.models.nearest._of_family", make)  # which makes models
    before = torch.get_rng_state()
    nearest(without_values(diffusers.DiTTransformer2DModel, {}), registered())
    assert torch.equal(torch.get_rng_state(), before)


def test_paths_are_folded_at_numbers_alone():
    assert folded("down_blocks.0.attentions.1.attn2") == "down_blocks.*.attentions.*.attn2"
    assert folded("blocks.10.attn1.to_out.0") == "blocks.*.attn1.to_out.*"
    assert folded("0.attn") == "*.attn"
