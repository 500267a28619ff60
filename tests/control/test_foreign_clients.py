"""Code of public editing repositories on our store, each against a store of its own.

helpers/foreign_code.py has theirs, written from their signatures. What needs more than an option is
in test_foreign_bridges.py.
"""

import pytest
import torch
from helpers.bridges import WORDS, bridge, close, same
from helpers.chain_runs import make_pipe
from helpers.foreign_code import (
    FROM_WHERE,
    Both,
    ExciteStore,
    ForkStore,
    aggregate_attention,
    drawn,
    plain,
    register,
    states,
    two_passes_a_step,
)
from helpers.tiers import tiered

import sdattn
from sdattn import AttentionStore, CaptureWarning, TorchAttnProcessor
from sdattn.edit import register_attention_control


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [WORDS, ["a cat", "a red dog"]])
def test_forks_of_prompt_to_prompt(prompts):
    """local-prompt-mixing and PnPInversion: AttentionStore(low_resource), False."""
    pipe, theirs, ours = make_pipe(), ForkStore(False), AttentionStore(guidance="batch")
    register(pipe.unet, Both(theirs, ours))
    close(drawn(pipe, prompts), plain(prompts))
    assert (ours.cur_step, ours.num_att_layers) == (2, 32)
    same(ours.get_average_attention(), theirs.get_average_attention())
    for select in range(len(prompts)):
        for res, is_cross in ((4, True), (8, True), (4, False)):
            args = res, ["down", "up"], is_cross, select
            expected = aggregate_attention(theirs, *args, prompts)
            assert torch.equal(sdattn.aggregate_attention(ours, *args, prompts), expected)
            assert torch.equal(sdattn.aggregate_attention(ours, *args, prompts=prompts), expected)
            assert torch.equal(aggregate_attention(ours, *args, prompts), expected)
            assert torch.equal(
                ours.aggregate_attention(args[1], res, is_cross, select, prompts), expected
            )
    registered = AttentionStore(guidance="batch")
    with register_attention_control(pipe := make_pipe(), registered):
        close(drawn(pipe, prompts), plain(prompts))
    same(registered.get_average_attention(), theirs.get_average_attention(), exact=False)


@pytest.mark.parametrize("n", tiered([1, 2]))
@pytest.mark.parametrize("called", tiered(["unet(...)", "unet.forward(...)"]))
@pytest.mark.slow
def test_two_passes_a_step(called, n):
    """DDPM_inversion and PnPInversion, whose LOW_RESOURCE is a global."""
    pipe, theirs, ours = make_pipe(), ForkStore(True), AttentionStore(guidance="passes")
    by_count = AttentionStore(guidance=None)
    register(pipe.unet, Both(theirs, ours, by_count))
    by_count.num_uncond_att_layers = by_count.num_att_layers

    def ran(pipe):
        return two_passes_a_step(pipe, pipe.unet.forward if "." in called[:5] else pipe.unet, n)

    latents = ran(pipe)
    for store in (ours, by_count):
        assert (store.cur_step, store.num_uncond_att_layers) == (2, 32)
        same(store.get_average_attention(), theirs.get_average_attention())
    pipe = make_pipe()
    drawn(pipe, WORDS)  # a guided call before says nothing of the loop
    for target in (pipe, pipe.unet):
        attached = AttentionStore(guidance="passes")
        with attached.attached(target):
            pipe.unet.set_attn_processor(TorchAttnProcessor(attached))
            close(ran(pipe), latents)
        assert (attached.cur_step, attached.images) == (2, n)
        same(attached.get_average_attention(), theirs.get_average_attention(), exact=False)
    registered = AttentionStore(guidance="passes")
    with register_attention_control(pipe, registered):  # warns of nothing: it saw the passes
        close(ran(pipe), latents)
    same(registered.get_average_attention(), theirs.get_average_attention(), exact=False)


@pytest.mark.parametrize(
    ("way", "called", "n"),
    [
        ("attached", "forward", 1),
        ("attached", "__call__", 1),
        ("registered", "forward", 1),
        ("registered", "forward", 2),
        ("registered", "__call__", 2),  # one row is refused, as prompt-to-prompt has no half of it
    ],
)
def test_two_passes_a_step_of_which_nobody_told_are_warned_of_once(way, called, n):
    pipe, store = make_pipe(), AttentionStore()
    if way == "attached":
        store.attach(pipe.unet)
        pipe.unet.set_attn_processor(TorchAttnProcessor(store))
        two_passes_a_step(pipe, getattr(pipe.unet, called), n)
    else:
        with register_attention_control(pipe, store):
            two_passes_a_step(pipe, getattr(pipe.unet, called), n)
    with pytest.warns(CaptureWarning, match="timestep.*guidance='passes'") as told:
        assert store.last_step
        assert store.get_average_attention()
    assert len(told) == 1


def test_the_bridge_of_ddpm_inversion():
    pipe, theirs = make_pipe(), ForkStore(True)
    before = pipe.unet.attn_processors
    names = bridge("DDPM_inversion", pipe)
    after = pipe.unet.attn_processors
    assert all(after[name] is before[name] for name in before)
    register(pipe.unet, theirs)
    for text in (names["negative"], names["text"]):
        pipe.unet.forward(names["latents"], 500, encoder_hidden_states=text)
    same(names["store"].get_average_attention(), theirs.get_average_attention(), exact=False)


def excited(pipe, store, loss, guided=True, steps=2):
    """BoxDiff's loop: the latents go down the gradient of a loss on the maps, then a guided pass.

    Returns the latents and the gradient of the last step.
    """
    negative, text, latents = states()
    pipe.scheduler.set_timesteps(steps)
    for t in pipe.scheduler.timesteps:
        latents = latents.detach().requires_grad_()
        pipe.unet(latents, t, encoder_hidden_states=text)
        [gradient] = torch.autograd.grad(loss(store), latents)
        with torch.no_grad():
            latents = latents - 20 * gradient
            if not guided:
                continue
            both = torch.cat([negative, text])
            without, noise = pipe.unet(torch.cat([latents] * 2), t, both).sample.chunk(2)
            latents = pipe.scheduler.step(without + 4 * (noise - without), t, latents).prev_sample
    return latents, gradient


def box_loss(store):
    maps = aggregate_attention(store, 4, FROM_WHERE, True, 0, [""])
    return 1 - maps[..., 3].max() + maps[:2, :2, 5].sum()


def our_box_loss(store):
    maps = store.aggregate_attention(FROM_WHERE, res=4)
    return 1 - maps[..., 3].max() + maps[:2, :2, 5].sum()


@pytest.mark.slow
@pytest.mark.parametrize("save", [False, True])
def test_boxdiff_and_attend_and_excite(save):
    pipe, theirs, ours = make_pipe(), ExciteStore(save), AttentionStore(save_global_store=save)
    register(pipe.unet, Both(theirs, ours))
    guided = not save  # sums are of passes of one size
    latents, gradient = excited(pipe, theirs, box_loss, guided)
    assert gradient.abs().max() > 1e-4
    assert ours.cur_step == 2 + 2 * guided  # a pass is a step, as there
    same(ours.get_average_attention(), theirs.get_average_attention())
    if save:
        same(ours.global_store, theirs.global_store)
        assert ours.get_average_global_attention()["mid_cross"][0].requires_grad is False
    for loss in (box_loss, our_box_loss):  # and alone, by their processors and by ours
        for put in (register, register_attention_control):
            pipe, alone = make_pipe(), AttentionStore(save_global_store=save)
            put(pipe.unet, alone)
            found = excited(pipe, alone, loss, guided)
            close(found[0], latents)
            torch.testing.assert_close(found[1], gradient, atol=1e-6, rtol=1e-3)


def test_the_bridge_of_boxdiff():
    pipe, theirs = make_pipe(), ExciteStore(False)
    names = bridge("BoxDiff", pipe)
    register(pipe.unet, theirs)
    latents = names["latents"].detach().requires_grad_()
    pipe.unet(latents, 500, encoder_hidden_states=names["text"])
    loss = 1 - aggregate_attention(theirs, 4, FROM_WHERE, True, 0, [""])[..., 3].max()
    expected = torch.autograd.grad(loss, latents)[0]
    torch.testing.assert_close(names["gradient"], expected, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize(
    ("given", "named", "told"),
    [
        ((False,), {}, "save_global_store=False.*guidance='batch'"),
        ((True,), {}, "save_global_store=True.*'passes'"),
        (((16, 16),), {}, "attn_res.*SynGen"),
        ((16,), {}, "attn_res"),
        (({"res": 16},), {}, "dictionary of Dataset-Diffusion"),
        ((), {"low_resource": True}, "low_resource=True.*guidance='batch'"),
        ((), {"attn_res": (16, 16)}, "attn_res=.*aggregate_attention"),
        ((), {"max_resolution": 16}, "max_resolution=16.*max_queries"),
        ((), {"average": True}, "average=True.*guidance"),
        ((), {"stpes": 3}, "no option stpes="),
        ((make_pipe,), {}, "Pass options by name: pipeline, guidance"),
    ],
)
def test_their_constructors_are_refused_by_what_they_mean(given, named, told):
    with pytest.raises(TypeError, match=told):
        AttentionStore(*given, **named)
