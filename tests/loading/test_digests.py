"""Which model it is: a checksum of its configuration and weights."""

from copy import copy

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPAGPipeline
from helpers.batch_draws import SMALL
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline, make_unet, make_vae
from helpers.tiny_tokenizers import tiny_tokenizer

from sdattn import generate, load_pipeline
from sdattn.loading.digests import digest_model


@pytest.mark.slow
def test_a_digest_sees_every_weight():
    pipe = make_pipeline()
    before, seen = digest_model(pipe), set[str]()
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    assert len(modules) == 3
    for part in modules:
        tensors = [one for one in part.state_dict().values() if one.is_floating_point()]
        for one in tensors[:: len(tensors) // 6]:
            bits = one.view(-1).view(torch.int32)
            bits[len(bits) // 2] ^= 1
            seen.add(digest_model(pipe))
            bits[len(bits) // 2] ^= 1
    assert len(seen) >= 18
    assert before not in seen
    assert digest_model(pipe) == before


@pytest.mark.parametrize("dim", [0, 1])
def test_a_digest_sees_weights_that_change_places(dim):
    pipe = make_pipeline()
    before = digest_model(pipe)
    weight = pipe.unet.get_submodule("mid_block.resnets.0.time_emb_proj").weight
    weight.data = weight.data.flip(dim)
    assert digest_model(pipe) != before


def other_activation():
    pipe = make_pipeline()
    assert pipe.text_encoder.config.hidden_act == "quick_gelu"
    pipe.text_encoder.config.hidden_act = "gelu"
    return pipe


def other_scheduler():
    config = make_pipeline().scheduler.config
    return make_pipeline(
        scheduler=DDIMScheduler.from_config(config, prediction_type="v_prediction")
    )


def other_scale():
    vae = make_vae()
    vae.register_to_config(scaling_factor=0.5)
    return make_pipeline(vae=vae)


CHANGES = {
    "a transformers model": other_activation,
    "the scheduler": other_scheduler,
    "the VAE": other_scale,
    "the UNet": lambda: make_pipeline(unet=make_unet(norm_eps=1e-3)),
    "the tokenizer": lambda: make_pipeline(tokenizer=tiny_tokenizer(merges=("d o", "do g</w>"))),
    "the pipeline": lambda: make_pipeline(StableDiffusionPAGPipeline, pag_applied_layers=["mid"]),
}


@pytest.mark.parametrize("part", tiered(CHANGES, quick=2))
@pytest.mark.slow
def test_a_digest_sees_every_configuration(part):
    assert digest_model(CHANGES[part]()) != digest_model(make_pipeline())


def test_a_digest_sees_the_pipelines_own_configuration():
    pipe = make_sdxl_pipeline()
    before = digest_model(pipe)
    pipe.register_to_config(force_zeros_for_empty_prompt=False)  # of prompts that are empty
    assert digest_model(pipe) != before


@pytest.mark.slow
def test_a_digest_is_the_same_wherever_a_model_lies(model, tmp_path):
    pipe = load_pipeline(model, device="cpu")
    digest = digest_model(pipe)
    pipe.save_pretrained(tmp_path / "copy")
    assert digest_model(load_pipeline(model, device="cpu")) == digest
    generate(pipe, ["a cat", "a dog"], **SMALL)
    assert digest_model(pipe) == digest  # tokenizers remember how they were used last
    assert digest_model(load_pipeline(tmp_path / "copy", device="cpu")) == digest
    half = [load_pipeline(model, device="cpu", dtype=torch.bfloat16) for _ in range(2)]
    assert digest_model(half[0]) == digest_model(half[1]) != digest
    turned = copy(pipe)
    parts = dict(reversed(pipe.components.items()))
    turned.__class__ = type(type(pipe).__name__, (type(pipe),), {"components": parts})
    assert [*turned.components] != [*pipe.components]
    assert digest_model(turned) == digest
