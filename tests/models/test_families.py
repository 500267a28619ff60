"""The families of models that the package knows."""

import pytest
import torch
from diffusers import FluxTransformer2DModel
from joint_models import first_map, inputs
from transformer_rows import flux

from sdattn.models.families import registered


def test_every_family_with_joint_attention_says_in_which_order():
    for family in registered():
        joint = "joint" in {kind for _, kind in family.layers.values()}
        assert joint == (family.joined is not None), family.name


class Same(FluxTransformer2DModel):
    pass


class Other(FluxTransformer2DModel):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@torch.no_grad()
def test_a_subclass_is_known_as_long_as_it_leaves_forward_alone():
    model = flux().transformer
    given = inputs("FLUX.1", model)
    expected = first_map(model, given)
    model.__class__ = Same
    assert torch.equal(first_map(model, given), expected)
    model.__class__ = Other
    with pytest.raises(
        TypeError, match=r"Other \(test_joint\) has a forward .* picture first is not"
    ):
        first_map(model, given)
    model.__class__ = type("FluxTransformer2DModel", (Other,), {"__module__": "elsewhere"})
    with pytest.raises(TypeError, match=r"FluxTransformer2DModel \(elsewhere\) has a forward"):
        first_map(model, given)


def test_a_model_of_no_known_family_is_refused_by_name():
    model = flux().transformer
    model.__class__ = type("Joined", (FluxTransformer2DModel.__mro__[1], torch.nn.Module), {})
    with pytest.raises(TypeError, match="Asked to capture a Joined"):
        first_map(model, {})
