"""Drafts of families: against the records of families that are known, and what diffusers' source
says of models that none claims."""

import json

import diffusers
import pytest
import torch
from diffusers import PixArtAlphaPipeline
from helpers.joint_models import MODELS, inputs
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import pixart, sana

from scripts.new_family import draft_family, main
from scripts.trial_call import trial_call
from sdattn import capture
from sdattn.models import register, unregister
from sdattn.models.families import family_of
from sdattn.models.family import Family

KNOWN = {**MODELS, "PixArt": lambda: pixart(PixArtAlphaPipeline), "Sana": sana}
BLOCKS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}
CAPTION = {**BLOCKS, "cross_attention_dim": 16, "caption_channels": 12}


def family_in(draft):
    """The record that a draft's text makes."""
    names = {}
    exec(draft.text, names)
    assert isinstance(names["FAMILY"], Family)
    return names["FAMILY"]


@pytest.mark.parametrize("name", KNOWN)
def test_a_draft_agrees_with_the_record_of_a_known_family(name):
    model = KNOWN[name]().transformer
    draft, known = draft_family(model), family_of(model)
    drafted = family_in(draft)
    for layer in known.find_layers(model):
        if layer.kind == "linear":  # it calls no kernel, so a draft cannot know it
            assert any("kind of transformer_blocks.*.attn1" in line for line in draft.not_known)
            continue
        found = drafted.describe(model, layer.name, layer.module)
        # a layer of the image alone has no text beside it, whatever its block has
        assert (found.place, found.kind) == (
            "block" if layer.kind == "self" else layer.place,
            layer.kind,
        )
    assert drafted.joined == known.joined
    assert drafted.lists(type(model))
    assert draft.closest == known.name
    if name == "Qwen-Image":  # img_shapes is of Qwen alone
        assert drafted.grid is None and any("grid" in line for line in draft.not_known)
    else:
        given = trial_call(model).given
        assert tuple(drafted.grid(model, given)) == tuple(known.grid(model, given))
        assert drafted.grid_argument == known.grid_argument


@torch.no_grad()
def test_a_drafted_record_captures_what_the_known_one_does():
    model = MODELS["SD3"]().transformer
    given, known = inputs("SD3", model), family_of(model)
    with capture(model) as expected:
        model(**given)
    drafted = family_in(draft_family(model))
    unregister(known)
    register(drafted)
    try:
        with capture(model) as found:
            model(**given)
    finally:
        unregister(drafted)
        register(known)
    assert found.maps.keys() == expected.maps.keys()
    assert all(torch.equal(found.maps[name], one) for name, one in expected.maps.items())


def cogvideox():
    return diffusers.CogVideoXTransformer3DModel(
        **{**BLOCKS, "attention_head_dim": 16},
        in_channels=4,
        out_channels=4,
        text_embed_dim=12,
        time_embed_dim=8,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        max_text_seq_length=11,
    )


def latte():
    return diffusers.LatteTransformer3DModel(
        **CAPTION,
        in_channels=4,
        out_channels=8,
        sample_size=8,
        patch_size=2,
        norm_type="ada_norm_single",
        video_length=6,
    )


def stable_audio():
    return diffusers.StableAudioDiTModel(
        **BLOCKS,
        sample_size=96,
        in_channels=6,
        out_channels=6,
        num_key_value_attention_heads=1,
        cross_attention_dim=16,
        cross_attention_input_dim=14,
        time_proj_dim=8,
        global_states_input_dim=10,
    )


def auraflow():
    return diffusers.AuraFlowTransformer2DModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=3,
        num_single_dit_layers=4,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
        pos_embed_max_size=256,
    )


def dit():
    return diffusers.DiTTransformer2DModel(
        **BLOCKS, in_channels=4, sample_size=16, num_embeds_ada_norm=10
    )


FACTS = {
    # CogVideoXAttnProcessor2_0: torch.cat([encoder_hidden_states, hidden_states]); latents are
    # [B, frames, C, rows, cols], patch_size 2, and the model has no frames a patch
    cogvideox: (
        {"transformer_blocks.*.attn1": (3, "double", "joint")},
        "text first",
        ((2, 5, 4, 8, 6), (5, 4, 3)),
    ),
    # LatteTransformer3DModel.forward folds frames into the batch for its transformer_blocks and
    # cells for its temporal_transformer_blocks, which have no attn2
    latte: (
        {
            "transformer_blocks.*.attn1": (3, "block", "self"),
            "transformer_blocks.*.attn2": (3, "block", "cross"),
            "temporal_transformer_blocks.*.attn1": (3, "block", "temporal"),
        },
        None,
        ((2, 4, 5, 8, 6), (4, 3)),
    ),
    # StableAudioDiTModel.forward puts the global states before the latents [B, C, samples]
    stable_audio: (
        {
            "transformer_blocks.*.attn1": (3, "block", "self"),
            "transformer_blocks.*.attn2": (3, "block", "cross"),
        },
        None,
        None,
    ),
    # AuraFlowAttnProcessor2_0 joins [text, image]; eight registers come before the text
    auraflow: (
        {
            "joint_transformer_blocks.*.attn": (3, "double", "joint"),
            "single_transformer_blocks.*.attn": (4, "single", "joint"),
        },
        "text first",
        ((2, 4, 8, 6), (4, 3)),
    ),
    # BasicTransformerBlock without cross_attention_dim; its output is put together as a square,
    # which the trial call's is not
    dit: ({"transformer_blocks.*.attn1": (3, "block", "self")}, None, ((2, 4, 8, 6), (4, 3))),
}


@pytest.mark.parametrize("make", FACTS, ids=lambda make: make.__name__)
def test_a_draft_of_an_unknown_model_has_the_facts_of_its_source(make):
    model = make()
    layers, joined, grid = FACTS[make]
    draft = draft_family(model)
    found = {one.pattern: (one.count, one.place, one.kind) for one in draft.layers}
    assert found == layers
    drafted = family_in(draft)
    assert drafted.joined == draft.joined == joined
    if grid is None:
        assert drafted.grid is None and any("grid" in line for line in draft.not_known)
    else:
        shape, cells = grid
        assert tuple(drafted.grid(model, {"hidden_states": torch.zeros(shape)})) == cells
    for field in ("timestep_unit", "readers", "guidance"):
        assert any(line.startswith(field) for line in draft.not_known)


def test_a_draft_says_what_it_could_not_find_out():
    assert "8 neither, 11 text, 24 image" in draft_family(auraflow()).text
    assert any("tokens of neither" in line for line in draft_family(auraflow()).not_known)
    said = " ".join(draft_family(dit()).not_known)
    assert "the trial call of a small model ended: RuntimeError" in said
    assert "names: forward has no encoder_hidden_states" in said
    draft = draft_family(torch.nn.Linear(2, 2))
    assert draft.layers == () and draft.closest is None
    assert "it is not of diffusers" in draft.not_known[0]


def test_a_model_is_neither_called_nor_changed_and_may_have_no_weights():
    with torch.device("meta"):
        model = cogvideox()
    before = torch.get_rng_state()
    held = list(model.modules())
    draft = draft_family(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(one is other for one, other in zip(model.modules(), held, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in held)
    assert draft.layers[0].said == "queries: 11 text, 144 image; keys: 11 text, 144 image"


@pytest.mark.slow
def test_the_command_prints_a_module_for_an_unknown_model_only(tmp_path, monkeypatch, capsys):
    make_pipeline().save_pretrained(tmp_path)
    monkeypatch.setattr("sys.argv", ["new_family", str(tmp_path)])
    with pytest.raises(SystemExit, match="no denoiser that needs a record"):
        main()
    dit().save_pretrained(tmp_path / "transformer")
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "DiTTransformer2DModel"]
    del index["unet"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    main()
    names = {}
    exec(capsys.readouterr().out, names)  # all of stdout is a module
    assert names["FAMILY"].denoisers == ("DiTTransformer2DModel",)
    assert names["FAMILY"].layers == {"transformer_blocks.*.attn1": ("block", "self")}
