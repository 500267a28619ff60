"""TorchAttnProcessor against diffusers' AttnProcessor2_0, and what it says to a controller."""

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from helpers.tiny_pipelines import small_pipeline

from sdattn import AttentionStore, TorchAttnProcessor, TorchJointProcessor

CONFIGURATIONS = {
    "cross": {"cross_attention_dim": 12},
    "self": {},
    "bias": {"cross_attention_dim": 12, "bias": True},
    "masked": {"cross_attention_dim": 12},
    "masked by query": {"cross_attention_dim": 12},
    "masked by head": {"cross_attention_dim": 12},
    "group norm": {"norm_num_groups": 4},
    "residual": {"residual_connection": True, "rescale_output_factor": 1.7},
    "norm cross layer": {"cross_attention_dim": 12, "cross_attention_norm": "layer_norm"},
    "norm cross group": {
        "cross_attention_dim": 12,
        "cross_attention_norm": "group_norm",
        "cross_attention_norm_num_groups": 3,
    },
    "q/k norm": {"cross_attention_dim": 12, "qk_norm": "rms_norm"},
    "spatial norm": {"spatial_norm_dim": 6},
}


def inputs(name, generator, dtype=torch.float32):
    hidden = torch.randn(2, 15, 32, generator=generator, dtype=dtype)
    text = torch.randn(2, 7, 12, generator=generator, dtype=dtype)
    given = {"encoder_hidden_states": text}
    if "cross_attention_dim" not in CONFIGURATIONS[name]:
        given = {}
    if name == "spatial norm":
        hidden = torch.randn(2, 32, 3, 5, generator=generator, dtype=dtype)
        given = {"temb": torch.randn(2, 6, 3, 5, generator=generator, dtype=dtype)}
    if name.startswith("masked"):
        rows = {"masked": (2, 1), "masked by query": (2, 15), "masked by head": (8, 15)}[name]
        mask = torch.rand(*rows, 7, generator=generator) < 0.3
        mask[..., 0] = False
        given["attention_mask"] = torch.zeros(mask.shape, dtype=dtype).masked_fill(mask, -10000.0)
    return hidden, given


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_agrees_with_todays_default_processor(name):
    torch.manual_seed(0)
    layer = Attention(query_dim=32, heads=4, dim_head=4, **CONFIGURATIONS[name]).eval()
    for norm in (layer.norm_q, layer.norm_k):
        if norm is not None:
            norm.weight.data.uniform_(0.5, 1.5)
    hidden, given = inputs(name, torch.Generator().manual_seed(1))
    expected = AttnProcessor2_0()(layer, hidden, **given)
    found = TorchAttnProcessor()(layer, hidden, **given)
    assert found.shape == hidden.shape
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_four_dimensional_input_comes_back_in_its_shape():
    torch.manual_seed(0)
    layer = Attention(query_dim=16, heads=4, dim_head=4, residual_connection=True).eval()
    hidden = torch.randn(2, 16, 3, 5)
    expected = AttnProcessor2_0()(layer, hidden)
    torch.testing.assert_close(TorchAttnProcessor()(layer, hidden), expected, atol=1e-5, rtol=0)


def test_works_in_a_module_that_diffusers_does_not_know():
    class Layer(torch.nn.Module):
        heads = 2

        def __init__(self):
            super().__init__()
            self.to_q, self.to_k, self.to_v = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))
            self.to_out = torch.nn.Linear(8, 8)

    torch.manual_seed(0)
    layer, hidden, text = Layer(), torch.randn(1, 5, 8), torch.randn(1, 3, 8)
    q, k, v = layer.to_q(hidden).double(), layer.to_k(text).double(), layer.to_v(text).double()
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        weights = (q[..., head] @ k[..., head].mT / 2).softmax(-1)  # sqrt(4) = 2
        heads.append(weights @ v[..., head])
    expected = layer.to_out(torch.cat(heads, -1).float())
    torch.testing.assert_close(TorchAttnProcessor()(layer, hidden, text), expected)


@pytest.fixture
def cross():
    torch.manual_seed(0)
    return Attention(query_dim=16, heads=4, dim_head=4, cross_attention_dim=12).eval()


def test_a_controller_sees_probabilities_row_by_batch_and_head(cross):
    seen = []

    def look(probs, is_cross, place):
        seen.append((probs, is_cross, place))

    hidden, text = torch.randn(2, 15, 16), torch.randn(2, 7, 12)
    plain = TorchAttnProcessor()(cross, hidden, text)
    watched = TorchAttnProcessor(look, "mid")(cross, hidden, text)
    [(probs, is_cross, place)] = seen
    assert (is_cross, place) == (True, "mid")
    assert probs.shape == (8, 15, 7)
    assert probs.is_contiguous()
    q = cross.to_q(hidden)[1, :, 8:12].double()
    k = cross.to_k(text)[1, :, 8:12].double()
    torch.testing.assert_close(probs[1 * 4 + 2].double(), (q @ k.T / 2).softmax(-1))
    assert torch.equal(watched, plain)


@pytest.mark.parametrize("way", ["returns", "in place"])
@torch.no_grad()
def test_a_controller_edits(cross, way):
    """All attention on key 0 makes every query's value that of key 0."""

    def edit(probs, is_cross, place):
        target = probs.clone() if way == "returns" else probs
        target.zero_()[..., 0] = 1
        return target if way == "returns" else None

    hidden, text = torch.randn(2, 15, 16), torch.randn(2, 7, 12)
    found = TorchAttnProcessor(edit)(cross, hidden, text)
    expected = cross.to_out[0](cross.to_v(text[:, :1])).expand(2, 15, 16)
    torch.testing.assert_close(found, expected)


def test_a_controller_that_changes_the_shape_is_refused(cross):
    with pytest.raises(ValueError, match=r"given attention \[4, 15, 7\].*returned \[4, 15, 6\]"):
        TorchAttnProcessor(lambda p, *_: p[..., 1:])(
            cross, torch.randn(1, 15, 16), torch.randn(1, 7, 12)
        )


def test_a_mask_that_does_not_fit_is_refused(cross):
    with pytest.raises(ValueError, match="mask.*7 keys"):
        TorchAttnProcessor()(
            cross, torch.randn(2, 15, 16), torch.randn(2, 7, 12), torch.zeros(2, 1, 5)
        )


@pytest.mark.parametrize("processor", [TorchAttnProcessor, TorchJointProcessor])
def test_a_pipeline_or_its_model_is_refused_at_once(processor):
    """Both can be called with three arguments, as a store can."""
    pipe = small_pipeline()
    for wrong in (pipe, pipe.unet):
        with pytest.raises(TypeError, match=f"{type(wrong).__name__}.*AttentionStore"):
            processor(wrong)
    processor(AttentionStore())


def test_gradients_reach_the_input(cross):
    hidden = torch.randn(1, 15, 16, requires_grad=True)
    kept = []
    TorchAttnProcessor(lambda p, *_: kept.append(p))(cross, hidden, torch.randn(1, 7, 12))
    kept[0][..., 3].sum().backward()
    assert hidden.grad.abs().sum() > 0
