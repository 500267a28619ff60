"""A call of the denoiser: its arguments, and which parts of it torch.compile has been at."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from diffusers import UNet2DConditionModel
from helpers.tiny_pipelines import make_pipeline
from torch import nn

import sdattn
from sdattn.models.denoiser_call import (
    arguments,
    compiled_parts,
    grid_of_ids,
    grid_of_patches,
    is_compiled,
    unwrapped,
)

# of torch, whose compiler imports its own deprecated scripts
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def two_layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_plain_model_has_no_compiled_part():
    model = two_layers()
    assert list(compiled_parts(model)) == []
    assert not is_compiled(model)
    assert unwrapped(model) is model


@pytest.mark.slow
def test_a_model_behind_torch_compile_is_unwrapped():
    model = two_layers()
    compiled = torch.compile(model)
    assert is_compiled(compiled)
    assert not is_compiled(model)
    assert unwrapped(compiled) is model


@pytest.mark.slow
def test_a_part_that_compiled_itself_is_named():
    model = two_layers()
    model[1].compile()
    assert list(compiled_parts(model)) == [(model[1], "_compiled_call_impl")]


class Around(UNet2DConditionModel):
    """A subclass that hands everything on, as a mixin that times it does."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def wrapped(model):
    """As DeepCache and ParaAttention do: the object's own forward no longer names its arguments."""
    inner = model.forward

    def forward(*args, **kwargs):
        return inner(*args, **kwargs)

    model.forward = forward


def with_another_class(model):
    model.__class__ = Around


@pytest.mark.parametrize("change", [wrapped, with_another_class])
@pytest.mark.slow
def test_a_forward_that_does_not_name_its_arguments_is_read_by_its_class(change):
    pipe = make_pipeline()
    options = {"num_inference_steps": 2, "height": 64, "width": 96, "output_type": "latent"}
    maps = []
    for _ in range(2):
        with sdattn.capture(pipe) as store:
            pipe("a red cat", generator=torch.Generator().manual_seed(0), **options)
        maps.append(store.maps)
        change(pipe.unet)
    assert maps[0].keys() == maps[1].keys()
    assert all(torch.equal(maps[0][name], maps[1][name]) for name in maps[0])
    given = arguments(pipe.unet, (1, 2), {"encoder_hidden_states": 3, "of_the_wrapper": 4})
    assert given == {"sample": 1, "timestep": 2, "encoder_hidden_states": 3}


def test_a_forward_is_inspected_once_and_the_one_in_its_place_anew(monkeypatch):
    class Model(nn.Module):
        def forward(self, sample, timestep):
            return sample

    model, asked, before = Model(), [], inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda one: asked.append(one) or before(one))
    assert [arguments(model, (1, 2), {}) for _ in "ab"] == [{"sample": 1, "timestep": 2}] * 2
    own = asked.count(Model.forward)
    monkeypatch.setattr(Model, "forward", lambda self, latents, timestep: latents)
    assert arguments(model, (1,), {"timestep": 2}) == {"latents": 1, "timestep": 2} and own == 1


def ids_of(image, rows, cols):
    """``img_ids`` of packed patches, (image, row, col), row by row."""
    return torch.cartesian_prod(torch.tensor([image]), torch.arange(rows), torch.arange(cols))


@pytest.mark.parametrize("batched", [False, True])
def test_the_grid_of_ids_is_that_of_the_image_that_is_made(batched):
    """Reference images, of the same size or another, follow it under numbers of their own."""
    ids = torch.cat([ids_of(0, 3, 5), ids_of(1, 4, 2), ids_of(2, 3, 5)])
    given = {"img_ids": ids[None] if batched else ids}
    assert grid_of_ids(None, given) == (3, 5)
    assert grid_of_ids(None, given, made=1) == (4, 2)
    with pytest.raises(ValueError, match="do not form a grid"):
        grid_of_ids(None, {"img_ids": ids[1:]})


@pytest.mark.parametrize("frames", [4, 5, 7])
def test_a_grid_has_the_patches_that_a_convolution_makes_of_any_number_of_frames(frames):
    """As Wan's and HunyuanVideo's models cut their latents; a frame left over is in no patch."""
    latent = torch.zeros(1, 2, frames, 6, 9)
    patches = torch.nn.Conv3d(2, 1, kernel_size=(2, 2, 3), stride=(2, 2, 3))(latent)
    model = SimpleNamespace(config=SimpleNamespace(patch_size=(2, 2, 3)))
    assert grid_of_patches(model, {"hidden_states": latent}) == patches.shape[2:]
