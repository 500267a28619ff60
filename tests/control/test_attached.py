"""A store in anybody's hands: attached in every order, called by anyone's code, and whole, or it
says why not when it is read.

What all followers of a run have in common is in follow/test_followers.py.
"""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from helpers.chain_runs import CROSS, captured, chained, make_pipe, run, same_maps
from helpers.further_rows import FURTHER
from helpers.joint_parity import sharp_inputs, sharp_model
from helpers.rows import Way
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_unet, small_pipeline
from helpers.transformer_rows import TRANSFORMERS
from helpers.unet_rows import UNETS, ip_adapter_weights

import sdattn
from sdattn import AttentionStore, CaptureError, CaptureWarning, TorchAttnProcessor
from sdattn.edit import EmptyControl, register_attention_control
from sdattn.models.denoiser import find_denoiser


def attach(pipe, target=None, **options):
    store = AttentionStore(pipeline=target or pipe, **options)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    return store


def unet_inputs(batch=1):
    return torch.randn(batch, 4, 16, 12), 500, torch.randn(batch, 7, 32)


def told(store, match):
    """What the store did not see is told by whatever reads it."""
    reads = (lambda: store.last_step, lambda: store.steps, store.get_average_attention)
    for read in (*reads, store.get_average_full_attention, store.heatmaps):
        with pytest.raises(CaptureError, match=match):
            read()


def assert_held(unet, before):
    assert all(unet.attn_processors[name] is one for name, one in before.items())
    assert not unet._forward_pre_hooks and not unet._forward_hooks


class CrossProcessor:
    """A processor as people write it first: it shows its cross-attention, and knows no sdattn."""

    def __init__(self, store, place):
        self.maps_go_to, self.place = store, place

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        is_cross = encoder_hidden_states is not None
        text = encoder_hidden_states if is_cross else hidden_states
        query, key, value = attn.to_q(hidden_states), attn.to_k(text), attn.to_v(text)
        query, key, value = map(attn.head_to_batch_dim, (query, key, value))
        probs = attn.get_attention_scores(query, key, attention_mask)
        if is_cross:
            self.maps_go_to(probs, is_cross=True, place_in_unet=self.place)
        hidden_states = attn.batch_to_head_dim(torch.bmm(probs, value))
        return attn.to_out[1](attn.to_out[0](hidden_states))


def written_by_hand(store, unet):
    return {name: CrossProcessor(store, name.split("_")[0]) for name in unet.attn_processors}


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("prompts", [["a red cat"], ["a red cat", "a dog, a cat"]])
def test_processors_of_ones_own_feed_an_attached_store(prompts, scale):
    pipe = make_pipe()
    maps, plain = captured(pipe, prompts, scale)
    store = AttentionStore(pipeline=pipe)
    pipe.unet.set_attn_processor(written_by_hand(store, pipe.unet))
    latents = run(pipe, prompts, scale)
    torch.testing.assert_close(latents, plain, atol=1e-4, rtol=0)
    same_maps(store.heatmaps(), maps.heatmaps(), atol=1e-4)
    assert (store.cur_step, store.images, store.num_att_layers) == (2, len(prompts), 16)
    for held in (store.last_step, store.step_store):
        assert [len(held[key]) for key in CROSS] == [6, 1, 9]
    with pytest.raises(ValueError, match="Asked for the heatmaps of 'a bird'"):
        store.heatmaps(prompt=["a bird"] * len(prompts))


# Each order of doing things, and what the store then is: "whole" (the maps of the last run), "told"
# (a CaptureError when it is read), "empty" (no step has finished).
ORDERS = {
    "attach set run": "whole",
    "set attach run": "whole",
    "attach write run": "whole",
    "write attach run": "whole",
    "attach set run run": "whole",
    "attach set write run": "whole",
    "attach set capture": "whole",
    "attach set back run": "told",
    "attach set run back run": "told",
    "attach set run back": "whole",
    "attach set run back generate knockout capture": "told",
    "attach set run back run set run": "whole",
    "attach set run back run detach": "whole",
    "attach set run knockout": "whole",
    "attach set run register": "whole",
    "attach set register": "empty",
    "attach register": "told",
    "attach set register run": "whole",
    "attach set run edit": "whole",
    "attach set break run": "whole",
    "attach set run break": "empty",
    "attach write break run": "whole",
    "attach set run reset": "empty",
    "attach set run reset run": "whole",
    "attach set run remove run": "whole",
    "attach set remove run": "empty",
    "attach write run remove run generate": "whole",
    "attach set run detach run": "whole",
    "attach set run detach attach run": "whole",
    "attach attach set run": "whole",
    "attach run": "told",
    "run attach set run": "whole",
    "set run": "told",
    "attach set slice run": "told",
    "attach slice set run": "whole",
    "attach set another run": "told",
    "attach set run another run": "whole",
}


class Hand:
    """Does what an order says, on a pipeline and a store; no run of the pipeline may fail."""

    def __init__(self):
        self.pipe, self.store = make_pipe(), AttentionStore()
        self.before = dict(self.pipe.unet.attn_processors)

    def __call__(self, verb):
        pipe, unet, store = self.pipe, self.pipe.unet, self.store
        size = {"height": 64, "width": 64, "num_inference_steps": 2}
        if verb == "run":
            latents = run(pipe, ["a cat"])
            torch.testing.assert_close(latents, EXPECTED["latents"], atol=1e-4, rtol=0)
        elif verb == "break":
            hook = unet.up_blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run(pipe, ["a dog"])
            hook.remove()
        elif verb == "capture":
            with sdattn.capture(pipe) as maps:
                run(pipe, ["a cat"])
            assert len(maps.passes) == 2
        elif verb == "register":
            with register_attention_control(pipe, EmptyControl()):
                run(pipe, ["a dog"])
        else:
            {
                "attach": lambda: store.attach(pipe),
                "set": lambda: unet.set_attn_processor(TorchAttnProcessor(store)),
                "write": lambda: unet.set_attn_processor(written_by_hand(store, unet)),
                "another": lambda: attach(pipe),
                "back": lambda: unet.set_attn_processor(dict(self.before)),
                "slice": pipe.enable_attention_slicing,
                "generate": lambda: sdattn.generate(pipe, "a dog", **size),
                "knockout": lambda: sdattn.knockout(pipe, "a cat", "cat", **size),
                "edit": lambda: sdattn.edit.edit(pipe, "a cat", "a dog", **size),
                "remove": store.remove,
                "detach": store.detach,
                "reset": store.reset,
            }[verb]()


EXPECTED = {}


@pytest.fixture(autouse=True, scope="module")
def expected():
    store, _ = chained(make_pipe(), ["a cat"])
    EXPECTED["latents"], EXPECTED["maps"] = run(make_pipe(), ["a cat"]), store.last_step
    yield
    EXPECTED.clear()


@pytest.mark.parametrize("order", tiered(ORDERS, quick=4))
def test_every_order_of_doing_things(order):
    hand = Hand()
    for verb in order.split():
        hand(verb)
    store, outcome = hand.store, ORDERS[order]
    if outcome == "told":
        told(store, "did not see the whole run")
    elif outcome == "empty":
        with pytest.raises(RuntimeError, match="No step has finished"):
            store.heatmaps()
    else:
        torch.testing.assert_close(store.last_step, EXPECTED["maps"], atol=1e-5, rtol=0)
    if "remove" in order:
        assert_held(hand.pipe.unet, hand.before)


@pytest.mark.slow
def test_attached_for_a_block():
    pipe, store = make_pipe(), AttentionStore()
    before = dict(pipe.unet.attn_processors)
    with pytest.raises(ZeroDivisionError):
        with store.attached(pipe) as held:
            assert held is store
            pipe.unet.set_attn_processor(TorchAttnProcessor(store))
            run(pipe, ["a cat"])
            raise ZeroDivisionError
    assert_held(pipe.unet, before)
    assert (store.attachment, store.cur_step) == (None, 2)
    with pytest.warns(CaptureWarning, match="replaced inside capture"):
        with sdattn.capture(pipe), store.attached(pipe):
            pipe.unet.set_attn_processor(TorchAttnProcessor(store))
            run(pipe, ["a cat"])
    assert_held(pipe.unet, before)
    with store.attached(pipe):
        run(pipe, ["a cat"])
    told(store, "none of the 32 layers")


@pytest.mark.slow
def test_processors_that_were_set_before_the_store_was_attached_stay_and_that_is_said():
    pipe, store = make_pipe(), AttentionStore()
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    store.attach(pipe)
    run(pipe, ["a cat"])
    with pytest.warns(CaptureWarning, match="32 layers keep the processor.*attach first"):
        store.remove()
    held, n = store.last_step, store.nbytes
    run(pipe, ["a dog"])
    assert store.last_step is held
    assert store.nbytes == n  # it no longer looks, so that nothing grows


# -- what it missed --------------------------------------------------------------------------------


def with_ip_adapter(pipe):
    weights = [ip_adapter_weights(pipe.unet)]
    pipe.load_ip_adapter(weights, subfolder=[""], weight_name=[""], image_encoder_folder=None)


REPLACING = {
    "slicing": (lambda pipe: pipe.enable_attention_slicing(), "32 x SlicedAttnProcessor"),
    "fused": (lambda pipe: pipe.fuse_qkv_projections(), "32 x FusedAttnProcessor2_0"),
    "image prompts": (
        with_ip_adapter,
        "16 x TorchAttnProcessor with no controller, 16 x IPAdapterAttnProcessor2_0",
    ),
    "no controller": (
        lambda pipe: pipe.unet.set_attn_processor(TorchAttnProcessor()),
        "32 x TorchAttnProcessor with no controller",
    ),
    "another store": (attach, "32 x TorchAttnProcessor with another AttentionStore"),
}


@pytest.mark.parametrize("way", tiered(REPLACING, quick=2))
def test_replaced_processors_are_named_when_the_store_is_read(way):
    pipe, options = make_pipe(), {}
    store = attach(pipe)
    replace, standing = REPLACING[way]
    replace(pipe)
    if way == "image prompts":
        options = {"ip_adapter_image_embeds": [torch.randn(2, 2, 16)]}
    run(pipe, ["a cat"], **options)
    told(store, f"none of the 32 layers called it.*They hold {standing}\\..*set_attn_processor")
    store.detach()
    assert store.last_step == {}


def test_processors_that_are_set_inside_a_run_missed_its_beginning():
    pipe = small_pipeline()
    store = AttentionStore(pipeline=pipe)

    def late(pipe, step, _t, tensors):
        if step == 0:
            pipe.unet.set_attn_processor(TorchAttnProcessor(store))
        return tensors

    options = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "latent"}
    pipe("a cat", callback_on_step_end=late, **options)
    assert store.cur_step == 2
    told(store, "none of the 8 layers called it in 1 of 3 passes")
    pipe("a cat", **options)
    assert store.cur_step == 3 and store.heatmaps()


@torch.no_grad()
def test_layers_that_a_pass_skips_or_repeats_are_named():
    """As a cache does that hands on what a block made in the step before."""
    unet, inputs = make_unet(), unet_inputs()
    store = AttentionStore(pipeline=unet)
    unet.set_attn_processor(TorchAttnProcessor(store))
    block = unet.up_blocks[1].attentions[0]
    forward = block.forward
    block.forward = lambda hidden_states, *_, **__: (hidden_states,)
    unet(*inputs)
    told(store, "should have 32 calls, but 30 came.*cache")
    store.reset()

    def twice(*args, **kwargs):
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    block.forward = twice
    unet(*inputs)
    told(store, "34 calls came in one pass of 32 layers: some ran twice")
    store.reset()
    block.forward = forward
    unet(*inputs)
    assert [len(store.last_step[key]) for key in CROSS] == [6, 1, 9]
    store.reset()
    name = "up_blocks.1.attentions.0.transformer_blocks.0.attn2"
    unet.set_attn_processor(AttnProcessor2_0())
    unet.get_submodule(name).set_processor(TorchAttnProcessor(store))
    block.forward = lambda hidden_states, *_, **__: (hidden_states,)
    unet(*inputs)
    told(store, "none of the 32.*31 x AttnProcessor2_0, 1 x TorchAttnProcessor with this store")


@torch.no_grad()
def test_a_bare_model_that_changes_its_size_is_told_and_one_that_broke_off_is_not_counted():
    unet = make_unet()
    store = AttentionStore(pipeline=unet)
    unet.set_attn_processor(TorchAttnProcessor(store))
    sample, _, text = unet_inputs()
    unet(sample, 500, text)
    unet(torch.randn(1, 4, 8, 8), 500, text)
    told(store, r"\(16, 12\).*\(8, 8\).*reset")
    store.reset()
    hook = unet.up_blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        unet(sample, 500, text)
    hook.remove()
    assert (store.cur_step, store.cur_att_layer) == (0, 14)
    unet(sample, 500, text)
    assert [len(store.last_step[key]) for key in CROSS] == [6, 1, 9]
    assert (store.cur_step, store.cur_att_layer) == (1, 0)


@torch.no_grad()
@pytest.mark.slow
def test_a_store_that_is_not_attached_says_what_to_type_when_it_is_read():
    unet = make_unet()
    line = r"store\.attach\(pipe\).*unet\.set_attn_processor\(sdattn\.TorchAttnProcessor\(store\)\)"
    for store in (AttentionStore(), AttentionStore(pipeline=make_unet())):  # alone, or elsewhere
        unet.set_attn_processor(TorchAttnProcessor(store))
        unet(*unet_inputs())
        for read in (store.get_average_attention, lambda store=store: store.last_step):
            with pytest.raises(RuntimeError, match=line):
                read()
        with pytest.raises(RuntimeError, match=line):
            sdattn.heatmaps(store, None, {"cat": [2]}, latent_size=(16, 12))


@torch.no_grad()
def test_rows_that_are_not_the_batch_times_the_heads_are_told():
    """A processor that hands over the conditional half alone."""
    pipe = make_pipe()
    store = AttentionStore(pipeline=pipe)

    def half(probs, is_cross, place_in_unet):
        if probs.shape[1] == 6:  # the middle block, of 4 heads, and no layer has 8 or 1
            probs = probs[-1:]
        store(probs, is_cross, place_in_unet)

    pipe.unet.set_attn_processor(written_by_hand(half, pipe.unet))
    run(pipe, ["a cat"])
    told(store, "handed 1 rows for a batch of 2")


# -- whose rows ------------------------------------------------------------------------------------

NAMED = {row.name: row for row in (*FURTHER, *UNETS)}
LAYOUTS = ("InstructPix2Pix", "image to image", "SDXL", "ControlNet", "PAG", "LCM")
LAYOUTS += ("LDM3D", "DiffEdit", "InstructPix2Pix of SDXL", "upscaler", "Semantic guidance")


@pytest.mark.parametrize("guided", tiered([True, False]))
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_prompts_rows_are_those_of_the_pipelines_layout(name, guided):
    """InstructPix2Pix has the prompt first of three; the second half would be something else.
    Semantic guidance adds prompts that edit."""
    row = NAMED[name]
    pipe, way = row.make(), row.fitted(Way(prompts=2, guided=guided))
    for layer in find_denoiser(pipe.unet).layers:
        layer.module.to_q.weight.data *= 4
    with sdattn.capture(pipe, heads="all") as maps:
        row.run(pipe, way)
    store = attach(pipe)
    row.run(pipe, way)
    assert (store.cur_step, store.images) == (len(maps.passes), maps.images)
    kept = [m for key in CROSS for m in store.get_average_full_attention()[key]]
    for layer, ours in zip(maps.layers, kept, strict=True):
        theirs = maps.maps[layer.name].flatten(0, 1).flatten(1, 2)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@torch.no_grad()
def test_a_layer_that_is_run_by_itself_is_edited_too():
    """There is no call of a model to count it in, and nothing that would be left out."""

    class Halved(AttentionStore):
        def forward(self, attn, is_cross, place_in_unet):
            return attn / 2

    pipe = small_pipeline()
    layer = next(one for one in find_denoiser(pipe.unet).layers if one.kind == "cross").module
    hidden, text = torch.randn(1, 12, layer.query_dim), torch.randn(1, 7, layer.cross_attention_dim)
    bias = layer.to_out[0].bias
    whole = layer(hidden, encoder_hidden_states=text) - bias
    pipe.unet.set_attn_processor(TorchAttnProcessor(Halved(pipeline=pipe.unet)))
    found = layer(hidden, encoder_hidden_states=text) - bias
    torch.testing.assert_close(found, whole / 2, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("target", ["unet", "pipeline"])
@pytest.mark.parametrize("batch", tiered([2, 4], quick=2))
@pytest.mark.slow
def test_outside_of_a_pipelines_call_half_of_a_batch_is_not_dropped_unasked(target, batch):
    """Nothing is asked of a call that is over, which was not guided."""
    pipe = make_pipe()
    unet, inputs = pipe.unet, unet_inputs(batch)
    run(pipe, ["a cat"], scale=1.0)
    with sdattn.capture(unet, heads="all") as maps:
        unet(*inputs)
    chosen = unet if target == "unet" else pipe
    store = attach(pipe, chosen)
    unet(*inputs)
    told(store, rf"batch of {batch} outside of its pipeline.*guidance=None \(every row is an im")
    store.detach()
    for guidance, kept in ((None, batch), ("batch", batch // 2)):
        store = attach(pipe, chosen, guidance=guidance)
        unet(*inputs)
        store.detach()
        assert store.images == kept
        every = [m for key in CROSS for m in store.last_step[key]]
        for layer, ours in zip(maps.layers, every, strict=True):
            theirs = maps.maps[layer.name][-kept:].flatten(0, 1).flatten(1, 2)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


# -- gradients and edits ---------------------------------------------------------------------------


def gradients(unet, store):
    """Of a loss on the maps, with respect to the latent and to the text."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(2, 4, 16, 12, generator=generator, requires_grad=True)
    text = torch.randn(2, 7, 32, generator=generator, requires_grad=True)
    for _ in range(2):
        out = unet(latent, 500, text).sample
        maps = [m for key in CROSS for m in store.last_step[key]]
        loss = sum((m[..., 2] ** 2).sum() for m in maps) + out.square().mean()
        found = torch.autograd.grad(loss, [latent, text])
    return list(found), [m.detach() for m in maps]


@pytest.mark.slow
@pytest.mark.parametrize("is_registered", [False, True])
def test_layers_that_run_again_for_a_gradient_count_once(is_registered):
    found = []
    for checkpointing in (False, True):
        unet, store = make_unet(), AttentionStore(save_global_store=False)
        if checkpointing:
            unet.enable_gradient_checkpointing()
        if is_registered:
            with register_attention_control(unet, store):
                found.append(gradients(unet, store))
        else:
            store.attach(unet)
            unet.set_attn_processor(TorchAttnProcessor(store))
            found.append(gradients(unet, store))
        assert (store.cur_step, store.cur_att_layer) == (2, 0)
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


class Halving(AttentionStore):
    def forward(self, attn, is_cross, place_in_unet):
        return attn * 0.5


def test_an_edit_of_layers_that_run_again_is_refused():
    unet = make_unet()
    unet.enable_gradient_checkpointing()
    store = Halving(pipeline=unet, guidance=None)
    unet.set_attn_processor(TorchAttnProcessor(store))
    sample, _, text = unet_inputs()
    out = unet(sample.requires_grad_(), 500, text).sample
    with pytest.raises(RuntimeError, match="gradient.*disable_grad"):
        out.sum().backward()


@torch.no_grad()
def test_an_edit_that_cannot_be_made_is_refused_while_the_model_runs():
    """The image would lack it. A store that only looks says so when it is read."""
    model = sharp_model("FLUX.1")
    given = sharp_inputs("FLUX.1", model)
    model.set_attn_processor(sdattn.TorchJointProcessor(AttentionStore()))
    model(**given)
    model.set_attn_processor(sdattn.TorchJointProcessor(Halving()))
    with pytest.raises(RuntimeError, match="A Halving may edit.*needs to know where they are"):
        model(**given)
    store = Halving(pipeline=model, guidance=None)
    model.set_attn_processor(sdattn.TorchJointProcessor(store))
    model.register_forward_pre_hook(lambda *_: setattr(store.attachment.run, "running", None))
    with pytest.raises(RuntimeError, match="A Halving may edit"):
        model(**given)


# -- which models ----------------------------------------------------------------------------------


def test_only_models_whose_places_are_known_can_be_attached():
    others = [row for row in TRANSFORMERS if row.name in ("PixArt Alpha", "Sana")]
    for row in (TRANSFORMERS[-1], *others):
        with pytest.raises(TypeError, match="UNet.*Stable Diffusion"):
            AttentionStore(pipeline=row.make())
    with pytest.raises(TypeError, match="temporal"):
        AttentionStore().attach(NAMED["AnimateDiff"].make())
    pipe = make_pipeline()
    pipe.__class__ = type("OtherPipeline", (), {"unet": pipe.unet})
    refusal = r"OtherPipeline lays out guidance.*attach\(pipe\.unet\).*guidance='batch'"
    with pytest.raises(ValueError, match=refusal):
        AttentionStore(pipeline=pipe)
