"""The three followers of a run, asked alike: a capture, an attached store, a registered one."""

from contextlib import contextmanager

import torch

import sdattn
from helpers.chain_runs import make_pipe
from helpers.tiny_pipelines import make_small_unet
from sdattn import AttentionStore, TorchAttnProcessor, TorchJointProcessor
from sdattn.edit import register_attention_control
from sdattn.models.denoiser import find_denoiser
from sdattn.models.denoiser_call import unwrapped
from sdattn.models.families.unet import is_unet

PROMPT = "a red cat"
SMALL = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "latent"}


def small_pipe():
    return make_pipe(make_small_unet())


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(pipe, prompt=PROMPT, **options):
    return pipe(prompt, generator=seeded(), **{**SMALL, **options}).images


def called_by_hand(pipe, batch=2, t=7):
    sample = torch.randn(batch, 4, 16, 16, generator=seeded(5))
    text = torch.randn(batch, 77, 32, generator=seeded(6))
    with torch.no_grad():
        return pipe.unet(sample, t, encoder_hidden_states=text).sample


def read(store):
    averages = store.get_average_attention()
    return [one for maps in averages.values() for one in maps] + [store.cur_step]


# Each yields a list that holds maps and the number of passes once its block is left.


@contextmanager
def captured(pipe, guidance="auto"):
    kept = []
    with sdattn.capture(pipe, guidance=guidance) as store:
        yield kept
    kept += [*store.maps.values(), len(store.passes)]


@contextmanager
def attached(pipe, guidance="auto"):
    kept, store = [], AttentionStore(pipeline=pipe, guidance=guidance)
    model = unwrapped(find_denoiser(pipe).model)
    processor = TorchAttnProcessor if is_unet(model) else TorchJointProcessor
    try:
        model.set_attn_processor(processor(store))
        yield kept
        kept += read(store)
    finally:
        store.remove()


@contextmanager
def registered(pipe, guidance="auto"):
    kept, store = [], AttentionStore(guidance=guidance)
    with register_attention_control(pipe, store):
        yield kept
    kept += read(store) if store.cur_step else []


FOLLOWERS = (captured, attached, registered)


def followed(follower, pipe, run):
    """The image of a run and what a follower kept of it. Nothing of the follower is left behind,
    also if the run fails or cannot be read."""
    model = find_denoiser(pipe).model
    before = dict(model.attn_processors)
    try:
        with follower(pipe) as kept:
            image = run()
        return [image, *kept]
    finally:
        assert all(model.attn_processors[name] is one for name, one in before.items())
        assert not model._forward_pre_hooks and not model._forward_hooks
