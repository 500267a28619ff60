"""What is known of a call of the denoiser: which parts of it torch.compile has been at."""

import pytest
import torch
from torch import nn

from sdattn.models.denoiser_call import compiled_parts, is_compiled, unwrapped

# of torch, whose compiler imports its own deprecated scripts
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def two_layers():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def test_a_plain_model_has_no_compiled_part():
    model = two_layers()
    assert list(compiled_parts(model)) == []
    assert not is_compiled(model)
    assert unwrapped(model) is model


def test_a_model_behind_torch_compile_is_unwrapped():
    model = two_layers()
    compiled = torch.compile(model)
    assert is_compiled(compiled)
    assert not is_compiled(model)
    assert unwrapped(compiled) is model


def test_a_part_that_compiled_itself_is_named():
    model = two_layers()
    model[1].compile()
    assert list(compiled_parts(model)) == [(model[1], "_compiled_call_impl")]
