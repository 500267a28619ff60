"""register_attention_control in transformers of joint attention, and what UNets share with them."""

import pytest
import torch
from helpers.rows import Way
from helpers.tiers import tiered
from helpers.transformer_rows import TRANSFORMERS, own_norms
from helpers.unet_rows import UNETS

from sdattn import AttentionStore, TorchAttnProcessor, TorchJointProcessor, capture, read_prompts
from sdattn.edit import (
    AttentionControlEdit,
    AttentionReplace,
    EmptyControl,
    register_attention_control,
)
from sdattn.models.layers import find_denoiser, find_layers

UNET_NAMES = ("Stable Diffusion 1.x", "SDXL")
NAMED = {row.name: row for row in TRANSFORMERS if row.joint}
NAMED |= {row.name: row for row in UNETS if row.name in UNET_NAMES}
NAMES = (
    "Stable Diffusion 3",
    "Stable Diffusion 3.5 (dual attention, normed)",
    "FLUX.1",
    "FLUX.2",
    "FLUX.2 klein",
    "Qwen-Image",
)
WAY = Way(size=(64, 96))
IS_CROSS = {"joint": (False, True), "self": (False,), "cross": (True,)}  # of a layer's calls


def sharp(name):
    pipe = NAMED[name].make()
    if name in UNET_NAMES:
        return pipe
    own_norms(pipe.transformer)
    if name == "Stable Diffusion 3":
        for layer in find_layers(pipe.transformer):
            layer.module.to_q.weight.data *= 4
    return pipe


class Foreign:
    """As it is written elsewhere: counts calls, edits, and returns in one of three ways."""

    def __init__(self, way):
        self.way, self.num_att_layers, self.cur_step, self.calls = way, -1, 0, []

    def __call__(self, attn, is_cross, place_in_unet):
        self.calls.append((place_in_unet, is_cross, tuple(attn.shape)))
        if len(self.calls) % self.num_att_layers == 0:
            self.cur_step += 1
        if is_cross and self.way == "returns":
            return attn.flip(-1)
        if is_cross:
            attn.copy_(attn.flip(-1))
        return None if self.way == "none" else attn


@pytest.mark.parametrize("name", tiered([*UNET_NAMES, *NAMES], quick=2))
@pytest.mark.slow
def test_plain_attention_is_that_of_diffusers(name):
    row = NAMED[name]
    pipe = sharp(name)
    model = find_denoiser(pipe).model
    before = dict(model.attn_processors)
    plain = row.run(pipe, WAY)
    found = []
    for controller in (None, EmptyControl(), lambda attn, *_: attn):
        with register_attention_control(pipe, controller):
            found.append(row.run(pipe, WAY))
    assert abs(found[0] - plain).max() < 1e-4
    assert (found[1] == found[0]).all()
    assert (found[2] == found[0]).all()
    after = model.attn_processors
    assert all(after[key] is before[key] for key in before)
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("name", tiered([*NAMES, *UNET_NAMES], quick=2))
def test_every_way_of_editing_is_understood(name):
    row, images, controllers = NAMED[name], [], []
    pipe = sharp(name)
    plain = row.run(pipe, WAY)
    for way in ("returns", "in place", "none"):
        controllers.append(Foreign(way))
        with register_attention_control(pipe, controllers[-1]):
            images.append(row.run(pipe, WAY))
    assert (images[0] == images[1]).all()
    assert (images[0] == images[2]).all()
    assert abs(images[0] - plain).max() > 1e-4
    layers = find_layers(find_denoiser(pipe).model)
    calls = [(la.place, kind) for la in layers for kind in IS_CROSS[la.kind]]
    for controller in controllers:
        assert controller.num_att_layers == len(calls)
        # two steps; of the prompt's passes alone, where guidance runs in turn
        assert controller.cur_step == 2
        assert [call[:2] for call in controller.calls] == calls * 2
        finest = max(shape[1] for _, _, shape in controller.calls)
        assert finest == {"Stable Diffusion 1.x": 96}.get(name, 24)


@pytest.mark.parametrize("first", ["capture", "controller"])
@pytest.mark.parametrize("name", tiered(["FLUX.1", "Stable Diffusion 1.x", "Stable Diffusion 3"]))
def test_capture_sees_the_edited_maps_in_any_order_of_nesting(name, first):
    def on_two(attn, is_cross, _place):
        """All of the text's share on its third column."""
        if is_cross:
            attn[..., 2] = attn.sum(-1)
            attn[..., [0, 1]] = attn[..., 3:] = 0

    row, pipe = NAMED[name], sharp(name)
    model = find_denoiser(pipe).model
    before = dict(model.attn_processors)
    with register_attention_control(pipe, on_two):
        without = row.run(pipe, WAY)
    if first == "capture":
        with capture(pipe) as store, register_attention_control(pipe, on_two):
            with pytest.warns(UserWarning, match="were replaced inside capture"):
                watched = row.run(pipe, WAY)
    else:
        with register_attention_control(pipe, on_two), capture(pipe) as store:
            watched = row.run(pipe, WAY)
    assert (without == watched).all()
    for maps in store.maps.values():
        assert maps[..., 2].min() > 0
        assert not maps[..., 3:].any() and not maps[..., :2].any()
    after = model.attn_processors
    assert all(after[key] is before[key] for key in before)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("name", tiered(NAMES, quick=2))
def test_a_store_keeps_the_prompts_rows(name, attached):
    row, pipe = NAMED[name], sharp(name)
    with capture(pipe, heads="all", steps="last") as captured:
        row.run(pipe, WAY)
    store = AttentionStore(pipeline=pipe) if attached else AttentionStore()
    with register_attention_control(pipe, store):
        row.run(pipe, WAY)
    assert store.cur_step == 2
    assert store.images == 1
    assert store.latent_size == (4, 6)
    found = [one for key, maps in store.last_step.items() if "cross" in key for one in maps]
    for ours, theirs in zip(found, captured.maps.values(), strict=True):
        torch.testing.assert_close(ours, theirs[0].flatten(1, 2), atol=2e-4, rtol=0)


def test_a_store_is_told_of_the_passes_that_it_is_shown_alone():
    """Qwen-Image runs the prompt and the negative prompt in turn."""
    row, pipe, told = NAMED["Qwen-Image"], sharp("Qwen-Image"), []

    class Told(AttentionStore):
        def begin_pass(self, batch, latent_size, levels, prompts=None, places=()):
            told.append(prompts)
            super().begin_pass(batch, latent_size, levels, prompts, places)

    with register_attention_control(pipe, Told()):
        row.run(pipe, WAY)
    assert told == [slice(0, 1)] * 2


class Whole(AttentionControlEdit):
    """All columns are the source's, also those of the template that Qwen puts around a prompt."""

    def replace_cross_attention(self, attn_base, attn_replace):
        return attn_base.expand_as(attn_replace)


@pytest.mark.parametrize("name", ["Stable Diffusion 3", "FLUX.1", "Qwen-Image"])
def test_prompt_to_prompt_makes_the_targets_attention_the_sources(name):
    """Self-attention and the shared words' columns: two prompts that differ in one word."""
    row, pipe = NAMED[name], sharp(name)
    texts = ["a red cat", "a red dog"]
    options = {"prompt": texts, "negative_prompt": [""] * 2}
    if name == "FLUX.1":
        options["negative_prompt"] = None
    length = {} if name == "Qwen-Image" else {"max_sequence_length": 24}
    kind = Whole if name == "Qwen-Image" else AttentionReplace
    control = kind(
        read_prompts(pipe, texts, **length), 2, 1.0, 1.0, guidance="batch", max_self_queries=24
    )
    if name == "FLUX.1":
        options["true_cfg_scale"] = 1.0
    seen = {}

    def watch(layer):
        def look(call):
            seen.setdefault(layer.name, []).append(call.probs)

        return look

    with register_attention_control(pipe, control):
        for layer in find_layers(pipe.transformer):
            layer.module.processor.watchers.append(watch(layer))
        with capture(pipe) as store:
            row.run(pipe, WAY, **options, output_type="latent")
    assert control.cur_step == 2
    assert control.images == 2
    assert store.images == 2
    for calls in seen.values():
        for probs in calls[:1]:  # the prompts' pass
            source, target = probs[-2], probs[-1]
            n_text = store.n_text
            rows = slice(n_text, None) if name != "Stable Diffusion 3" else slice(0, 24)
            # a word swap maps columns one to one, so that the whole row is the source's
            torch.testing.assert_close(target[:, rows], source[:, rows], atol=1e-5, rtol=0)


def test_the_processors_are_of_the_layers_kinds():
    name = "Stable Diffusion 3.5 (dual attention, normed)"
    pipe = sharp(name)
    handle = register_attention_control(pipe, EmptyControl())
    for layer in find_layers(pipe.transformer):
        kind = TorchJointProcessor if layer.kind == "joint" else TorchAttnProcessor
        assert isinstance(layer.module.processor, kind)
    with pytest.warns(UserWarning, match="saw nothing"):
        handle.remove()


@pytest.mark.parametrize(
    ("options", "run", "message"),
    [
        ({"guidance": "passes"}, {}, "prompt first"),
        ({}, {"prompt": "a red cat"}, "2 prompts.*batch.*1"),
    ],
)
def test_an_edit_and_its_run_must_agree(options, run, message):
    row, pipe = NAMED["FLUX.1"], sharp("FLUX.1")
    prompts = read_prompts(pipe, ["a red cat", "a red dog"], max_sequence_length=24)
    with pytest.raises(ValueError, match=message):
        with register_attention_control(pipe, AttentionReplace(prompts, 2, **options)):
            row.run(pipe, WAY, **run)
