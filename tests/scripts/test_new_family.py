"""Drafts of families: against the records of families that are known, and what diffusers' source
says of models that none claims."""

import json

import diffusers
import pytest
import torch
from diffusers import PixArtAlphaPipeline
from helpers.joint_models import MODELS, inputs
from helpers.joint_video_rows import hunyuan_video
from helpers.padded_rows import lumina2
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import pixart, sana
from helpers.unclaimed import UNCLAIMED

from scripts.new_family import draft_family, main
from scripts.trial_call import trial_calls
from sdattn import capture
from sdattn.models import register, unregister
from sdattn.models.denoiser import find_denoiser
from sdattn.models.families import family_of
from sdattn.models.family import Family

KNOWN = {
    **MODELS,
    "PixArt": lambda: pixart(PixArtAlphaPipeline),
    "Sana": sana,
    "Lumina 2": lumina2,
    "HunyuanVideo": hunyuan_video,
}
BLOCKS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}


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
    for layer in find_denoiser(model).layers:
        if layer.kind == "linear":  # it makes no attention call, so a draft cannot know it
            assert any("kind of transformer_blocks.*.attn1" in line for line in draft.not_known)
            continue
        found = drafted.describe(model, layer.name, layer.module)
        # a layer of the image alone has no text beside it, whatever its block has
        assert (found.place, found.kind) == (
            "block" if layer.kind == "self" else layer.place,
            layer.kind,
        )
    assert (drafted.joined, drafted.video) == (known.joined, known.video)
    assert drafted.lists(type(model))
    assert draft.closest == known.name
    if name == "Qwen-Image":  # img_shapes is of Qwen alone
        assert drafted.grid is None and any("grid" in line for line in draft.not_known)
    else:
        layout = 1 if known.video else 0  # an image's latents come first
        given = list(trial_calls(model))[layout]
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


def unclaimed(name, **more):
    return getattr(diffusers, name)(**UNCLAIMED[name].config | more)


# By diffusers' source; the text's place and the grid are in helpers.unclaimed
LAYERS = {
    "EasyAnimateTransformer3DModel": {"transformer_blocks.*.attn1": (2, "double", "joint")},
    "MotifVideoTransformer3DModel": {
        "transformer_blocks.*.attn": (1, "double", "joint"),
        "single_transformer_blocks.*.attn": (1, "single", "joint"),
    },
    "AllegroTransformer3DModel": {
        "transformer_blocks.*.attn1": (2, "block", "self"),
        "transformer_blocks.*.attn2": (2, "block", "cross"),
    },
    # Frames are rows of the batch in transformer_blocks, cells in temporal_transformer_blocks
    "LatteTransformer3DModel": {
        "transformer_blocks.*.attn1": (2, "block", "self"),
        "transformer_blocks.*.attn2": (2, "block", "cross"),
        "temporal_transformer_blocks.*.attn1": (2, "block", "temporal"),
    },
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_draft_of_an_unknown_model_has_the_facts_of_its_source(name):
    truth, model = UNCLAIMED[name], unclaimed(name)
    if name.startswith("Latte"):  # its frames are fixed, and those of a trial call are 6
        model = unclaimed(name, video_length=6)
    draft = draft_family(model)
    found = {one.pattern: (one.count, one.place, one.kind) for one in draft.layers}
    assert found == LAYERS[name]
    drafted = family_in(draft)
    orders = {0: "text first", -7: "image first"}
    assert drafted.joined == (orders[truth.text.start] if "joint" in str(found) else None)
    assert drafted.grid(model, truth.call()) == truth.grid
    assert drafted.video == (len(truth.grid) == 3)
    of_rows = ["frame_rows"] if name.startswith("Latte") else []
    open_fields = [line.partition(":")[0] for line in draft.not_known]
    assert open_fields == [*of_rows, "timestep_unit", "readers", "guidance"]


def test_a_draft_says_what_it_could_not_find_out():
    draft = draft_family(
        diffusers.DiTTransformer2DModel(
            **BLOCKS, in_channels=4, sample_size=16, num_embeds_ada_norm=10
        )
    )  # it takes square images alone
    failed = [line for line in draft.not_known if "[1, 4, 8, 12] ended: RuntimeError" in line]
    assert len(failed) == 1 and "kind of transformer_blocks.*.attn1" in draft.text
    assert family_in(draft).layers == {} and family_in(draft).grid is None
    draft = draft_family(unclaimed("LuminaNextDiT2DModel"))
    assert "its argument encoder_mask cannot be made up" in draft.not_known[0]
    draft = draft_family(torch.nn.Linear(2, 2))
    assert draft.layers == () and draft.closest is None
    assert "it is not of diffusers" in draft.not_known[0]


class ManyRegisters(diffusers.AuraFlowTransformer2DModel):
    """AuraFlow, whose eight registers before the text are 25 here."""

    def forward(self, hidden_states, encoder_hidden_states, timestep):
        self.register_tokens = torch.nn.Parameter(torch.zeros(1, 25, 16))
        return super().forward(hidden_states, encoder_hidden_states, timestep)


@pytest.mark.parametrize("kind", [diffusers.AuraFlowTransformer2DModel, ManyRegisters])
def test_with_tokens_of_neither_text_nor_image_the_order_stays_open(kind):
    """24 cells and the registers are 32 queries, or 49, which make a square by chance; no image
    changes the registers, so they are no cells."""
    model = kind(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=12,
        caption_projection_dim=16,
    )
    draft = draft_family(model)
    text = "25:36" if kind is ManyRegisters else "8:19"
    assert f"text {text}" in draft.text
    assert draft.joined is None and '# not known: joined="text first" or the reverse' in draft.text
    assert draft.fields["patch"] == "2" and "shape[2] // 2" in draft.fields["grid"]


def test_a_module_without_a_processor_is_named_but_not_listed():
    draft = draft_family(
        diffusers.MochiTransformer3DModel(
            **BLOCKS, in_channels=4, text_embed_dim=16, pooled_projection_dim=8, time_embed_dim=4
        )
    )
    assert {one.pattern: (one.count, one.kind) for one in draft.layers} == {
        "transformer_blocks.*.attn1": (3, "joint"),
        "time_embed.pooler": (0, None),
    }
    assert draft.joined == "image first"
    assert any("pooler" in line and "no processor" in line for line in draft.not_known)


def test_a_model_is_neither_called_nor_changed_and_may_have_no_weights():
    with torch.device("meta"):
        model = unclaimed("EasyAnimateTransformer3DModel")
    before = torch.get_rng_state()
    held = list(model.modules())
    draft_family(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(one is other for one, other in zip(model.modules(), held, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in held)


@pytest.mark.slow
def test_the_command_prints_a_module_for_an_unknown_model_only(tmp_path, monkeypatch, capsys):
    make_pipeline().save_pretrained(tmp_path)
    monkeypatch.setattr("sys.argv", ["new_family", str(tmp_path)])
    with pytest.raises(SystemExit, match="no denoiser that needs a record"):
        main()
    unclaimed("EasyAnimateTransformer3DModel").save_pretrained(tmp_path / "transformer")
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "EasyAnimateTransformer3DModel"]
    del index["unet"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    main()
    names = {}
    exec(capsys.readouterr().out, names)  # all of stdout is a module
    assert names["FAMILY"].denoisers == ("EasyAnimateTransformer3DModel",)
    assert names["FAMILY"].layers == {"transformer_blocks.*.attn1": ("double", "joint")}
