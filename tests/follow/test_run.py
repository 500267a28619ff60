"""One follower for all that follow a run: what it tells its subscribers, and in which order."""

from threading import Thread

import pytest
import torch
from helpers.chain_runs import make_pipe
from helpers.tiny_pipelines import make_small_unet
from torch.utils.checkpoint import checkpoint

from sdattn.follow.run import Subscriber, follow
from sdattn.models.denoiser import find_denoiser

SMALL = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent"}


class Told(Subscriber):
    """A subscriber that notes what it is told."""

    def __init__(self, run):
        self.run, self.notes = run, []

    def begin_run(self, first):
        self.notes.append("run")

    def begin_pass(self, begun):
        assert self.run.running is begun and self.run.is_open()
        self.notes.append("direct" if begun.is_direct else "begin")

    def end_pass(self, ended):
        assert not self.run.is_open()
        self.notes.append("end")

    def stray(self, call):
        assert self.run.running is call and not self.run.is_open()
        self.notes.append("stray")


@pytest.fixture
def followed():
    """(pipeline, subscriber), while it is told."""
    pipe = make_pipe(make_small_unet())
    denoiser = find_denoiser(pipe)
    run = follow(denoiser, branch="conditional", guidance="batch")
    told = Told(run)
    run.subscribe(told)
    with run.installed:
        run.watch(pipe.unet)
        yield pipe, told
    assert not pipe.unet._forward_pre_hooks and not pipe.unet.conv_in._forward_pre_hooks


@torch.no_grad()
def by_hand(unet, call=None):
    return (call or unet)(torch.randn(2, 4, 8, 8), 7, torch.randn(2, 77, 32))


def test_a_run_its_passes_and_strays(followed):
    pipe, told = followed
    other = type(pipe)(**pipe.components, requires_safety_checker=False)

    def callback(_pipe, step, _t, tensors):
        if not step:
            other("a dog", **SMALL)
        return tensors

    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    pipe("a cat", callback_on_step_end=callback, **SMALL)
    step = ["begin", "end"]
    assert told.notes == ["run", *step, "stray", "stray", *step]
    assert told.run.doubts.strays().startswith("2 call(s)")
    assert not told.run.doubts.step_calls()
    assert not told.run.in_call and told.run.running is None


def test_a_call_of_a_callback_is_a_second_one_of_its_step(followed):
    pipe, told = followed

    def callback(pipe, _step, _t, tensors):
        by_hand(pipe.unet)
        return tensors

    pipe("a cat", callback_on_step_end=callback, **SMALL)
    assert told.notes == ["run", *["begin", "end"] * 4]
    assert "2 times in a step" in told.run.doubts.step_calls()
    assert not told.run.doubts.strays()


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
    assert len(heard) == 1 and told.run.running is None


def test_a_call_that_cannot_be_read_is_not_taken_for_one_that_broke_off(followed):
    pipe, told = followed
    with pytest.raises(RuntimeError):
        pipe.unet(torch.randn(2, 5, 8, 8), 7, torch.randn(2, 77, 32))  # of five channels
    assert told.run.running is not None
    heard, running = [], []
    told.failed = heard.append
    pipe.unet.mid_block.register_forward_hook(
        lambda *_: running.append((told.run.running, told.run.is_open()))
    )
    with torch.no_grad():
        pipe.unet(torch.randn(3, 4, 8, 8), 7, torch.randn(3, 77, 32))  # three rows have no halves
    assert len(heard) == 1 and running == [(None, False)]
    assert told.notes == ["run", "begin"]
