"""A store in anybody's hands: processors that users write, and every order of doing things."""

import pytest
import torch
from helpers.chain_runs import CROSS, captured, chained, make_pipe, run, same_maps
from helpers.joint_parity import sharp_inputs, sharp_model
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_unet

import sdattn
from sdattn import AttentionStore, CaptureError, CaptureWarning, TorchAttnProcessor
from sdattn.edit import EmptyControl, register_attention_control
from sdattn.models.layers import find_layers


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
        elif verb == "another":
            unet.set_attn_processor(TorchAttnProcessor(AttentionStore(pipeline=pipe)))
        elif verb == "register":
            with register_attention_control(pipe, EmptyControl()):
                run(pipe, ["a dog"])
        else:
            {
                "attach": lambda: store.attach(pipe),
                "set": lambda: unet.set_attn_processor(TorchAttnProcessor(store)),
                "write": lambda: unet.set_attn_processor(written_by_hand(store, unet)),
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
        with pytest.raises(CaptureError, match="did not see the whole run"):
            store.last_step  # noqa: B018
        with pytest.raises(CaptureError, match="did not see the whole run"):
            store.heatmaps()
    elif outcome == "empty":
        with pytest.raises(RuntimeError, match="No step has finished"):
            store.heatmaps()
    else:
        for key in CROSS:
            pairs = zip(store.last_step[key], EXPECTED["maps"][key], strict=True)
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    if "remove" in order:
        held = hand.pipe.unet.attn_processors
        assert all(held[name] is one for name, one in hand.before.items())
        assert not hand.pipe.unet._forward_pre_hooks
        assert not hand.pipe.unet._forward_hooks


@pytest.mark.slow
def test_attached_for_a_block():
    pipe = make_pipe()
    before = dict(pipe.unet.attn_processors)
    store = AttentionStore()
    with pytest.raises(ZeroDivisionError):
        with store.attached(pipe) as held:
            assert held is store
            pipe.unet.set_attn_processor(TorchAttnProcessor(store))
            run(pipe, ["a cat"])
            raise ZeroDivisionError
    assert all(pipe.unet.attn_processors[name] is one for name, one in before.items())
    assert (store.attachment, store.cur_step) == (None, 2)
    with pytest.warns(CaptureWarning, match="replaced inside capture"):
        with sdattn.capture(pipe), store.attached(pipe):
            pipe.unet.set_attn_processor(TorchAttnProcessor(store))
            run(pipe, ["a cat"])
    assert all(pipe.unet.attn_processors[name] is one for name, one in before.items())
    with store.attached(pipe):
        run(pipe, ["a cat"])
    with pytest.raises(CaptureError, match="none of the 32 layers"):
        store.heatmaps()


@pytest.mark.slow
def test_processors_that_were_set_before_the_store_was_attached_stay_and_that_is_said():
    pipe = make_pipe()
    store = AttentionStore()
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    store.attach(pipe)
    run(pipe, ["a cat"])
    with pytest.warns(CaptureWarning, match="32 layers keep the processor.*attach first"):
        store.remove()
    held, n = store.last_step, store.nbytes
    run(pipe, ["a dog"])
    assert store.last_step is held
    assert store.nbytes == n  # it no longer looks, so that nothing grows


@torch.no_grad()
@pytest.mark.parametrize("guidance", ["passes", "auto"])
def test_a_unet_whose_forward_is_called_directly(guidance):
    """As DDPM inversion does, which runs the negative prompt and the prompt one after the other."""
    pipe = make_pipe()
    store = AttentionStore(pipeline=pipe, guidance=guidance)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    generator = torch.Generator().manual_seed(0)
    negative, text = torch.randn(2, 1, 7, 32, generator=generator)
    latents = torch.randn(2, 1, 4, 16, 12, generator=generator)
    for timestep, latent in zip((600, 300), latents, strict=True):
        pipe.unet.forward(latent, timestep=timestep, encoder_hidden_states=negative)
        pipe.unet.forward(latent, timestep=timestep, encoder_hidden_states=text)
    assert (store.latent_size, store.levels, store.images) == ((16, 12), 4, 1)
    if guidance == "auto":
        assert store.cur_step == 4
        with pytest.warns(CaptureWarning, match="ran twice at timestep 600.*guidance='passes'"):
            assert store.last_step
        assert store.last_step  # it is said once a run
        return
    assert store.cur_step == 2
    kept = [one for key in CROSS for one in store.get_average_full_attention()[key]]
    with sdattn.capture(pipe.unet, heads="all", steps="all") as maps:
        for timestep, latent in zip((600, 300), latents, strict=True):
            pipe.unet(latent, timestep, text)
    for ours, theirs in zip(kept, maps.maps.values(), strict=True):
        expected = theirs[0].mean(0).flatten(1, 2)
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=0)


@torch.no_grad()
def test_a_registered_controller_sees_a_forward_that_is_called_directly():
    unet, store = make_unet(), AttentionStore(guidance=None)
    with register_attention_control(unet, store):
        unet.forward(torch.randn(1, 4, 16, 12), 500, torch.randn(1, 7, 32))
    assert [len(store.last_step[key]) for key in CROSS] == [6, 1, 9]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["SD3", "FLUX.1"])
def test_joint_layers_that_a_registration_leaves_alone(kind):
    model = sharp_model(kind)
    store = AttentionStore(pipeline=model, guidance=None)
    chosen = [layer.name for layer in find_layers(model) if layer.kind == "joint"][:1]
    given = sharp_inputs(kind, model)
    plain = model(**given).sample
    with register_attention_control(model, store, layers=chosen):
        found = model(**given).sample
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=0)
    assert sum(map(len, store.last_step.values())) == 1
    with register_attention_control(model, EmptyControl(), layers=chosen):
        model(**given)
    with pytest.raises(CaptureError, match="none of the . layers called it"):
        store.last_step  # noqa: B018
    store.detach()
    assert sum(map(len, store.last_step.values())) == 1


class Halving(AttentionStore):
    def forward(self, attn, is_cross, place_in_unet):
        return attn * 0.5


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
    model.register_forward_pre_hook(lambda *_: setattr(store.attachment._follower, "running", None))
    with pytest.raises(RuntimeError, match="A Halving may edit"):
        model(**given)


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
    with pytest.raises(CaptureError, match="handed 1 rows for a batch of 2"):
        store.heatmaps()


class Editor:
    """As MasaCtrl's, whose call takes the query and the key as well."""

    def __call__(self, q, k, v, sim, attn, is_cross, place_in_unet, num_heads, **_):
        return attn


@pytest.mark.parametrize(
    "controller",
    [Editor(), lambda attn, is_cross, place, heads: attn, lambda attn: attn, "no controller"],
)
def test_a_controller_of_other_arguments_is_refused_before_anything_runs(controller):
    unet = make_unet()
    before = dict(unet.attn_processors)
    with pytest.raises(TypeError, match=r"is called as controller\(probs, is_cross, place\)"):
        register_attention_control(unet, controller)
    with pytest.raises(TypeError, match=r"is called as controller\(probs, is_cross, place\)"):
        TorchAttnProcessor(controller)
    assert all(unet.attn_processors[name] is one for name, one in before.items())


def test_the_unconditional_calls_may_be_set():
    store = AttentionStore()
    store.num_att_layers, store.num_uncond_att_layers = 2, 2
    assert store.num_uncond_att_layers == 2
    for number in range(4):
        store(torch.full((3, 4, 5), float(number)), True, "mid")
    assert store.cur_step == 1
    assert [float(m.mean()) for m in store.last_step["mid_cross"]] == [2, 3]
