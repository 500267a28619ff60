"""One follower for all that follow a run: what it tells its subscribers, and in which order."""

from threading import Thread, get_ident

import pytest
import torch
from helpers.chain_runs import make_pipe
from helpers.tiny_pipelines import make_small_unet
from torch.utils.checkpoint import checkpoint

from sdattn.follow.follower import Follower, Subscriber
from sdattn.follow.installer import Installation
from sdattn.follow.pass_reader import PassReader
from sdattn.models.denoiser import find_denoiser

SMALL = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"}


class Told(Subscriber):
    """A subscriber that notes what it is told."""

    def __init__(self, follower):
        self.follower, self.notes = follower, []

    def begin_run(self, first):
        self.notes.append("run")

    def begin_pass(self, begun):
        assert self.follower.running is begun and self.follower.in_call
        self.notes.append("direct" if begun.is_direct else "begin")

    def end_pass(self, ended):
        assert not self.follower.in_call
        self.notes.append("end")

    def stray(self, call):
        assert self.follower.running is call
        self.notes.append("stray")


@pytest.fixture
def followed():
    """(pipeline, subscriber), while it is told."""
    pipe = make_pipe(make_small_unet())
    denoiser = find_denoiser(pipe)
    with Installation() as installed:
        follower = Follower(denoiser, PassReader(denoiser), installed, thread=get_ident())
        told = Told(follower)
        follower.subscribe(told)
        follower.follow(pipe.unet)
        yield pipe, told
    assert not pipe.unet._forward_pre_hooks and not pipe.unet.conv_in._forward_pre_hooks


@torch.no_grad()
def by_hand(unet, call=None):
    return (call or unet)(torch.randn(2, 4, 8, 8), 7, torch.randn(2, 77, 32))


def test_a_run_its_passes_and_strays(followed):
    pipe, told = followed

    def callback(pipe, _step, _t, tensors):
        by_hand(pipe.unet)
        return tensors

    pipe("a cat", callback_on_step_end=callback, **SMALL)
    step = ["begin", "end", "stray"]
    assert told.notes == ["run", *step, *step]
    assert str(told.follower.strays).startswith("2 call(s)")
    assert not told.follower.in_call and told.follower.running is None


def test_calls_of_forward_alone_and_of_another_thread(followed):
    pipe, told = followed
    by_hand(pipe.unet, pipe.unet.forward)
    assert told.notes == ["run", "direct", "end"]
    told.notes.clear()
    thread = Thread(target=by_hand, args=[pipe.unet])
    thread.start()
    thread.join()
    assert told.notes == []


def test_a_call_that_runs_again_for_its_gradient_is_none(followed):
    """A model whose whole forward is checkpointed runs a second time in the backward pass."""
    pipe, told = followed
    latents = torch.randn(2, 4, 8, 8).requires_grad_()
    text = torch.randn(2, 77, 32)
    out = checkpoint(lambda x: pipe.unet(x, 7, text).sample, latents, use_reentrant=False)
    out.sum().backward()
    assert latents.grad.abs().max() > 0
    assert told.notes == ["run", "begin", "end"]


def test_a_call_that_breaks_off_or_cannot_be_read(followed):
    pipe, told = followed
    with pytest.raises(RuntimeError):
        pipe.unet(torch.randn(2, 5, 8, 8), 7, torch.randn(2, 77, 32))  # of five channels
    by_hand(pipe.unet)
    assert told.notes == ["run", "begin", "begin", "end"]
    with pytest.raises(KeyError):
        pipe.unet()
    heard = []
    told.failed = heard.append
    with pytest.raises(TypeError):  # the model's own
        pipe.unet()
    assert len(heard) == 1 and told.follower.running is None
