"""The bridges of docs/editing.md, "Your code, our store", run as they stand there.

Attend-and-Excite and LEDITS++ are those of diffusers; helpers/foreign_code.py has the rest, written
from their signatures.
"""

import re
import sys

import pytest
import torch
from diffusers import LEditsPPPipelineStableDiffusion, StableDiffusionAttendAndExcitePipeline
from helpers.bridges import BRIDGES, SECTION, WORDS, bridge, close, cross, same
from helpers.chain_runs import make_pipe
from helpers.foreign_code import (
    FROM_WHERE,
    ConsiStoryStore,
    DatasetDiffusionStore,
    InfEditProcessor,
    InfEditStore,
    MasaEditor,
    MasaProcessor,
    drawn,
    plain,
    register,
)
from helpers.tiny_pipelines import make_pipeline

import sdattn
from sdattn import AttentionStore, CaptureWarning, TorchAttnProcessor
from sdattn.edit import register_attention_control


def test_every_bridge_has_a_title_and_six_lines_at_most():
    assert list(BRIDGES) == [
        "BoxDiff", "Attend-and-Excite", "InfEdit", "MasaCtrl", "DDPM_inversion", "LEDITS++", "A",
    ]  # fmt: skip
    assert len(BRIDGES) == len(re.findall(r"```python", SECTION)) - 1  # the first is the setup
    assert max(len([line for line in code.splitlines() if line]) for code in BRIDGES.values()) <= 6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.meshgrid:UserWarning")  # of the pipeline
def test_attend_and_excite_of_diffusers(monkeypatch):
    """And SynGen, which is made of it. Its processors show maps with a gradient alone."""
    module = sys.modules[StableDiffusionAttendAndExcitePipeline.__module__]

    def ran():
        pipe = make_pipeline(StableDiffusionAttendAndExcitePipeline)
        latents = pipe(
            "a cat and a dog",
            token_indices=[2, 5],
            max_iter_to_alter=2,
            thresholds={0: 0.05, 1: 0.5},
            attn_res=(4, 4),
            height=128,
            width=128,
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).images
        return latents, pipe.attention_store.aggregate_attention(FROM_WHERE), pipe.attention_store

    expected, maps, theirs = ran()
    monkeypatch.setattr(
        module, "AttentionStore", bridge("Attend-and-Excite", make_pipe())["excite_store"]
    )
    latents, ours, store = ran()
    assert isinstance(store, AttentionStore)
    assert store.attn_res == theirs.attn_res == (4, 4)
    close(latents, expected)
    torch.testing.assert_close(ours, maps, atol=1e-6, rtol=0)
    for place in FROM_WHERE:
        found = [m for m in store.attention_store[f"{place}_cross"] if m.shape[1] == 16]
        same({place: found}, {place: theirs.attention_store[place]}, exact=False)


@pytest.mark.slow
def test_infedit():
    pipe, theirs = make_pipe(), InfEditStore()
    register(pipe.unet, theirs, InfEditProcessor)
    expected = drawn(pipe, WORDS)
    pipe = make_pipe()
    ours = bridge("InfEdit", pipe)["store"]
    for count in (None, 6):  # a step of 16 calls is not two of 6
        register(pipe.unet, ours, InfEditProcessor)
        ours.num_att_layers = count or ours.num_att_layers
        ours.reset()
        close(drawn(pipe, WORDS), expected)
        assert (ours.cur_step, ours.num_att_layers) == (2, 16)
        same(ours.get_average_attention(), theirs.get_average_attention())
    assert ours.self_attn_forward(1, 2, 3, 4) == (1, 2, 3)


@pytest.mark.slow
def test_masactrl():
    pipe, theirs = make_pipe(), MasaEditor()
    with pytest.raises(TypeError, match="MasaEditor.*is_cross"):
        register_attention_control(pipe, theirs)
    register(pipe.unet, theirs, MasaProcessor)
    expected = drawn(pipe, WORDS)
    close(expected, plain(WORDS))
    names = bridge("MasaCtrl", pipe := make_pipe())
    register(pipe.unet, names["editor"], MasaProcessor)
    close(drawn(pipe, WORDS), expected)
    store, held = names["store"], names["store"].last_step
    assert store.cur_step == 2
    last = [m[len(m) // 2 :] for m in theirs.cross_attns[16:]]
    same({"cross": [m for key in held for m in held[key]]}, {"cross": last})
    selfs = [m for key, kept in store.get_average_attention().items() for m in kept]
    assert len(selfs) == len(theirs.self_attns)  # of two steps: 16 of either kind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "takes"),
    [
        (ConsiStoryStore, r"attn, is_cross, place_in_unet, attn_heads"),
        (DatasetDiffusionStore, r"attn, heads, is_cross, place_in_unet"),
    ],
)
def test_stores_that_take_the_heads(theirs, takes):
    pipe = make_pipe()
    before = pipe.unet.attn_processors
    with pytest.raises(TypeError, match=rf"{theirs.__name__} is called as.*\({takes}\)"):
        register_attention_control(pipe, theirs())
    with pytest.raises(TypeError, match=rf"{theirs.__name__} is called as.*\({takes}\)"):
        TorchAttnProcessor(theirs())
    assert all(pipe.unet.attn_processors[name] is before[name] for name in before)
    called = theirs()
    if theirs is ConsiStoryStore:
        named = bridge("A", pipe, yours=lambda a, c, p, _: called(a, c, p, 2))["three"]
    else:

        def named(attn, is_cross, place):
            called(attn, 2, is_cross, place)

    with register_attention_control(pipe, named):
        close(drawn(pipe, WORDS), plain(WORDS))
    assert len(called.maps) == 64


@pytest.mark.slow
def test_ledits(monkeypatch):
    """Its store is called with more arguments, and keeps a list of steps."""
    theirs = sys.modules[LEditsPPPipelineStableDiffusion.__module__].LeditsAttentionStore

    def ran(pipe, watch=None):
        noise = torch.Generator().manual_seed(4)
        pipe.init_latents = torch.randn(1, 4, 16, 16, generator=noise)
        pipe.zs = torch.randn(3, 1, 4, 16, 16, generator=noise)
        pipe.scheduler.set_timesteps(3)
        pipe.inversion_steps, pipe.batch_size = pipe.scheduler.timesteps, 1
        pipe.height = pipe.width = 128
        pipe.eta = 1.0
        options = {"use_cross_attn_mask": True, "store_averaged_over_steps": False}
        options["attn_store_steps"] = [0, 1, 2]
        return pipe(editing_prompt=["a cat", "a red dog"], output_type="latent", **options).images

    pipe = make_pipeline(LEditsPPPipelineStableDiffusion)
    expected = ran(pipe)
    with pytest.warns(CaptureWarning, match="replaced inside"):  # in every call of the pipeline
        with sdattn.capture(pipe.unet, steps="all", heads="all") as maps:
            assert torch.equal(ran(pipe), expected)
    names = bridge("LEDITS++", make_pipeline(unet=pipe.unet))
    monkeypatch.setattr(theirs, "__call__", names["shown_too"](theirs.__call__))
    assert torch.equal(ran(pipe), expected)
    store, held = names["store"], pipe.attention_store
    assert (store.cur_step, store.images) == (3, 3)
    for step in range(3):
        for key, kept in cross(held.get_attention(step)).items():
            ours = [m for m in store.steps[step][key] if m.shape[1] <= held.max_size]
            heads = [m.unflatten(0, (3, -1))[1:].flatten(0, 1) for m in ours]  # edits' rows
            same({key: heads}, {key: [m[0] for m in kept]})
    # it shows all but the middle
    seen = [m for name, m in maps.maps.items() if not name.startswith("mid")]
    found = [m for key in cross(store.last_step) for m in store.last_step[key]]
    for one, other in zip(seen, found, strict=True):
        last = one[:, -1].flatten(0, 1).flatten(1, 2)
        torch.testing.assert_close(last, other, atol=1e-5, rtol=0)
