"""register_attention_control: any controller of the contract, in UNets and in joint attention.

What all followers of a run have in common is in follow/test_followers.py.
"""

import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from helpers.foreign_code import MasaEditor
from helpers.joint_parity import sharp_inputs, sharp_model
from helpers.rows import Way
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_small_unet, make_unet
from helpers.transformer_rows import TRANSFORMERS, own_norms
from helpers.unet_rows import UNETS

import sdattn
from sdattn import (
    AttentionStore,
    CaptureError,
    CaptureWarning,
    TorchAttnProcessor,
    capture,
    read_prompts,
)
from sdattn.edit import (
    AttentionControlEdit,
    AttentionReplace,
    EmptyControl,
    LocalBlend,
    register_attention_control,
)
from sdattn.models.denoiser import find_denoiser

NOISE = torch.Generator().manual_seed(5)
INPUTS = (
    torch.randn(2, 4, 16, 12, generator=NOISE),
    500,
    3 * torch.randn(2, 7, 32, generator=NOISE),
)
RUN = {"num_inference_steps": 2, "output_type": "latent"}
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
        for layer in find_denoiser(pipe.transformer).layers:
            layer.module.to_q.weight.data *= 4
    return pipe


def assert_held(model, before):
    assert all(model.attn_processors[name] is one for name, one in before.items())
    assert not model._forward_pre_hooks


# -- what a controller is shown, and what becomes of it --------------------------------------------


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
    row, pipe = NAMED[name], sharp(name)
    model = find_denoiser(pipe).model
    before = dict(model.attn_processors)
    plain = row.run(pipe, WAY)
    images = []
    for controller in (None, EmptyControl(), lambda attn, *_: attn):
        with register_attention_control(pipe, controller):
            images.append(row.run(pipe, WAY))
    assert abs(images[0] - plain).max() < 1e-4
    assert (images[1] == images[0]).all() and (images[2] == images[0]).all()
    assert_held(model, before)


@pytest.mark.parametrize("name", tiered([*NAMES, *UNET_NAMES], quick=2))
def test_every_way_of_editing_is_understood(name):
    row, pipe, images = NAMED[name], sharp(name), []
    controllers = [Foreign(way) for way in ("returns", "in place", "none")]
    plain = row.run(pipe, WAY)
    for controller in controllers:
        with register_attention_control(pipe, controller):
            images.append(row.run(pipe, WAY))
    assert (images[0] == images[1]).all() and (images[0] == images[2]).all()
    assert abs(images[0] - plain).max() > 1e-4
    layers = find_denoiser(pipe).layers
    calls = [(la.place, kind) for la in layers for kind in IS_CROSS[la.kind]]
    for controller in controllers:
        assert controller.num_att_layers == len(calls)
        # two steps; of the prompt's passes alone, where guidance runs in turn
        assert controller.cur_step == 2
        assert [call[:2] for call in controller.calls] == calls * 2
        finest = max(shape[1] for _, _, shape in controller.calls)
        assert finest == {"Stable Diffusion 1.x": 96}.get(name, 24)


@pytest.mark.parametrize("is_attached", [False, True])
@pytest.mark.parametrize("name", tiered([UNET_NAMES[0], *NAMES], quick=3))
def test_a_store_keeps_the_prompts_rows(name, is_attached):
    row, pipe = NAMED[name], sharp(name)
    with capture(pipe, heads="all", steps="last") as captured:
        row.run(pipe, WAY)
    store = AttentionStore(pipeline=pipe) if is_attached else AttentionStore()
    with register_attention_control(pipe, store):
        row.run(pipe, WAY)
    assert (store.cur_step, store.images) == (2, 1)
    assert store.latent_size == captured.latent_size
    kept = [one for key, maps in store.last_step.items() if "cross" in key for one in maps]
    for ours, theirs in zip(kept, captured.maps.values(), strict=True):
        torch.testing.assert_close(ours, theirs[0].flatten(1, 2), atol=2e-4, rtol=0)


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
    assert_held(model, before)


class Whole(AttentionControlEdit):
    """All columns are the source's, also those of the template that Qwen puts around a prompt."""

    def replace_cross_attention(self, attn_base, attn_replace):
        return attn_base.expand_as(attn_replace)


@pytest.mark.parametrize("name", ["Stable Diffusion 3", "FLUX.1", "Qwen-Image"])
def test_prompt_to_prompt_makes_the_targets_attention_the_sources(name):
    """Self-attention and the shared words' columns: two prompts that differ in one word."""
    row, pipe, texts = NAMED[name], sharp(name), ["a red cat", "a red dog"]
    options = {"prompt": texts, "negative_prompt": [""] * 2}
    if name == "FLUX.1":
        options |= {"negative_prompt": None, "true_cfg_scale": 1.0}
    length = {} if name == "Qwen-Image" else {"max_sequence_length": 24}
    kind = Whole if name == "Qwen-Image" else AttentionReplace
    prompts = read_prompts(pipe, texts, **length)
    control = kind(prompts, 2, 1.0, 1.0, guidance="batch", max_self_queries=24)
    seen = {}
    with register_attention_control(pipe, control):
        for layer in find_denoiser(pipe.transformer).layers:
            note = lambda call, name=layer.name: seen.setdefault(name, call.probs)  # noqa: E731
            layer.module.processor.watchers.append(note)
        with capture(pipe) as store:
            row.run(pipe, WAY, **options, output_type="latent")
    assert (control.cur_step, control.images, store.images) == (2, 2, 2)
    assert len(seen) == len(find_denoiser(pipe.transformer).layers)
    for probs in seen.values():  # in the prompts' pass
        rows = slice(0, 24) if name == "Stable Diffusion 3" else slice(store.n_text, None)
        # a word swap maps columns one to one, so that the whole row is the source's
        torch.testing.assert_close(probs[-1][:, rows], probs[-2][:, rows], atol=1e-5, rtol=0)


def test_a_controllers_dtype_is_brought_back():
    unet = make_unet().to(torch.bfloat16)
    inputs = INPUTS[0].bfloat16(), INPUTS[1], INPUTS[2].bfloat16()
    with register_attention_control(unet, lambda attn, *_: attn.float()):
        assert unet(*inputs).sample.dtype == torch.bfloat16


# -- beginning and end of a registration -----------------------------------------------------------


@torch.no_grad()
def test_registering_before_every_run_as_the_notebooks_do():
    unet = make_unet()
    before = dict(unet.attn_processors)
    stores = [AttentionStore(), AttentionStore()]
    handles = []
    for store in stores:
        handles.append(register_attention_control(unet, store))
        unet(*INPUTS)
    assert [store.cur_step for store in stores] == [1, 1]
    assert len(unet._forward_pre_hooks) == 1
    handles[0].remove()  # superseded: of no effect
    held = unet.attn_processors.values()
    assert all(isinstance(one, TorchAttnProcessor) for one in held)
    handles[1].remove()
    handles[1].remove()
    assert_held(unet, before)
    gone = [weakref.ref(handle) for handle in handles]
    del handles, held
    gc.collect()
    assert [one() for one in gone] == [None, None]


@torch.no_grad()
def test_processors_set_meanwhile_stay_when_the_controller_is_removed():
    unet = make_unet()
    layer = unet.mid_block.attentions[0].transformer_blocks[0].attn2
    handle = register_attention_control(unet, AttentionStore())
    unet(*INPUTS)
    mine = TorchAttnProcessor()
    layer.set_processor(mine)
    with pytest.raises(RuntimeError, match="1 processors were set since"):
        handle.remove()
    assert layer.processor is mine
    assert not unet._forward_pre_hooks
    others = [one for one in unet.attn_processors.values() if one is not mine]
    assert not any(isinstance(one, TorchAttnProcessor) for one in others)


def test_processors_with_weights_of_their_own_are_refused():
    unet = make_unet()
    layer = unet.mid_block.attentions[0].transformer_blocks[0].attn2
    layer.set_processor(IPAdapterAttnProcessor2_0(16, cross_attention_dim=32))
    with pytest.raises(ValueError, match=r"IPAdapterAttnProcessor2_0, whose weights.*unload"):
        register_attention_control(unet, None)
    with pytest.raises(TypeError, match="Linear.*family"):
        register_attention_control(torch.nn.Linear(1, 1), None)


@pytest.mark.parametrize(
    "controller",
    [MasaEditor(), lambda attn, is_cross, place, heads: attn, lambda attn: attn, "no controller"],
)
def test_a_controller_of_other_arguments_is_refused_before_anything_runs(controller):
    unet = make_unet()
    before = dict(unet.attn_processors)
    for use in (TorchAttnProcessor, lambda it: register_attention_control(unet, it)):
        with pytest.raises(TypeError, match=r"is called as controller\(probs, is_cross, place\)"):
            use(controller)
    assert_held(unet, before)


# -- some of the layers ----------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("watched", ["bare", "attached", "captured"])
@pytest.mark.slow
def test_layers_of_a_resolution_are_those_that_call(watched):
    unet, held, text = make_unet(), {}, torch.randn(1, 7, 32)
    before = dict(unet.attn_processors)
    unet.register_forward_hook(lambda *_: held.update(unet.attn_processors))
    target = unet if watched == "attached" else None
    store = AttentionStore(pipeline=target, guidance=None)
    with register_attention_control(unet, store, layers=(8, 6)):
        with capture(unet) if watched == "captured" else nullcontext():
            for rows in (16, 16, 32)[: 2 if watched == "captured" else 3]:  # a capture is of one
                store.reset()
                unet(torch.randn(1, 4, rows, rows * 3 // 4), 500, text)
                sizes = [len(one[0]) for maps in store.last_step.values() for one in maps]
                assert sizes == [8 * 6] * 5 and store.num_att_layers == 10  # and self-attention
                own = sum(isinstance(one, TorchAttnProcessor) for one in held.values())
                assert watched == "captured" or own == 10 < len(held)
    assert all(unet.attn_processors[name] is before[name] for name in before)


@torch.no_grad()
def test_a_resolution_that_no_layer_has_is_refused_in_the_first_pass():
    unet = make_unet()
    with register_attention_control(unet, EmptyControl(), layers=5):
        with pytest.raises(ValueError, match="5"):
            unet(*INPUTS)


@torch.no_grad()
def test_one_layer_that_other_code_computes_keeps_nobody_from_the_others():
    unet = make_small_unet()
    attn = unet.get_submodule("mid_block.attentions.0.transformer_blocks.0.attn2")
    attn.forward = lambda states, *_, **__: states
    seen = []

    def controller(probs, is_cross, place):
        seen.append((place, is_cross))
        return probs

    with register_attention_control(unet, controller):
        unet(*INPUTS)
    assert ("mid", True) not in seen and len(seen) == 7  # of eight


@torch.no_grad()
@pytest.mark.parametrize("kind", ["SD3", "FLUX.1"])
def test_joint_layers_that_a_registration_leaves_alone(kind):
    model = sharp_model(kind)
    store = AttentionStore(pipeline=model, guidance=None)
    chosen = [layer.name for layer in find_denoiser(model).layers if layer.kind == "joint"][:1]
    given = sharp_inputs(kind, model)
    plain = model(**given).sample
    with register_attention_control(model, store, layers=chosen):
        shown = model(**given).sample
    torch.testing.assert_close(shown, plain, atol=1e-4, rtol=0)
    assert sum(map(len, store.last_step.values())) == 1
    with register_attention_control(model, EmptyControl(), layers=chosen):
        model(**given)
    with pytest.raises(CaptureError, match="none of the . layers called it"):
        store.last_step  # noqa: B018
    store.detach()
    assert sum(map(len, store.last_step.values())) == 1


# -- a controller and its run ----------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [["a cat"], ["a cat", "a dog"]])
def test_a_batch_without_guidance_is_refused_before_any_layer(prompts):
    pipe, store = make_pipeline(), AttentionStore()
    with register_attention_control(pipe, store):
        with pytest.raises(ValueError, match="guidance.*guidance=None"):
            pipe(prompts, guidance_scale=1.0, num_inference_steps=1)
    assert store.cur_att_layer == 0


@pytest.mark.parametrize(
    ("name", "options", "run", "message"),
    [
        (UNET_NAMES[0], {}, {"guidance_scale": 1.0}, "has no guidance"),
        (UNET_NAMES[0], {"guidance": None}, {"guidance_scale": 4.0}, "guidance=None.*run"),
        (UNET_NAMES[0], {}, {"prompt": ["a cat"] * 3}, "2 prompts.*batch.*3"),
        (UNET_NAMES[0], {"blend": 1}, {"num_images_per_prompt": 2}, "num_images_per_prompt=1"),
        ("FLUX.1", {"guidance": "passes"}, {}, "prompt first"),
        ("FLUX.1", {}, {"prompt": "a cat"}, "2 prompts.*batch.*1"),
    ],
)
def test_an_edit_and_its_run_must_agree(name, options, run, message):
    pipe, length = sharp(name), {"max_sequence_length": 24} if name == "FLUX.1" else {}
    prompts = read_prompts(pipe, ["a cat", "a dog"], **length)
    if "blend" in options:
        options = {"local_blend": LocalBlend(prompts, ["cat", "dog"], 1)}
    control = AttentionReplace(prompts, 1, **options)
    with pytest.raises(ValueError, match=message):
        with register_attention_control(pipe, control):
            pipe(**{"prompt": ["a cat", "a dog"], "num_inference_steps": 1, **length, **run})
    assert control.cur_att_layer == 0


def test_blending_that_never_began_is_a_warning():
    pipe = make_pipeline()
    prompts = read_prompts(pipe, ["a cat", "a dog"])
    control = AttentionReplace(prompts, 1, local_blend=LocalBlend(prompts, ["cat", "dog"], 1))
    with pytest.warns(CaptureWarning, match=r"step_end\(controller\)"):
        with register_attention_control(pipe, control):
            pipe(["a cat", "a dog"], num_inference_steps=1, output_type="latent")


@pytest.mark.parametrize(("made", "is_told"), [(50, True), (2, False)])
@pytest.mark.slow
def test_a_controller_for_a_longer_run_is_told(made, is_told):
    pipe, texts = make_pipeline(), ["a cat", "a dog"]
    replace = AttentionReplace(read_prompts(pipe, texts), made)
    with register_attention_control(pipe, replace), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipe(texts, guidance_scale=5.0, **RUN)
    longer = [str(one.message) for one in told if "made for 50 passes" in str(one.message)]
    assert bool(longer) == is_told and all("has 2" in text for text in longer)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((8, ["up_cross"], True, 0), "places are .*without a kind. Did you mean 'up'"),
        ((8, ["up"], True, 3), "select=3.*0 to 0.*1 image"),
    ],
)
@pytest.mark.slow
def test_what_a_store_has_not_is_refused_by_name(asked, message):
    pipe, store = make_pipeline(), AttentionStore()
    with register_attention_control(pipe, store):
        pipe("a cat", **RUN)
    with pytest.raises(ValueError, match=message):
        sdattn.aggregate_attention(store, *asked)
