"""MultiHeadAttention against torch's own module and float64, and in the hands of processors."""

import copy

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from helpers.tiny_pipelines import make_unet
from torch import nn

import sdattn
from sdattn.attention import MultiHeadAttention, padding_mask

CELLS, WORDS = torch.randn(2, 12, 32), torch.randn(2, 7, 16)


def theirs(ours):
    """torch's module with the weights of ours."""
    states = ours.to_k.in_features
    other = nn.MultiheadAttention(
        32, ours.heads, bias=True, batch_first=True, kdim=states, vdim=states
    ).eval()
    q, k, v = (part.weight.data for part in (ours.to_q, ours.to_k, ours.to_v))
    with torch.no_grad():
        if other._qkv_same_embed_dim:
            other.in_proj_weight.copy_(torch.cat([q, k, v]))
        else:
            for own, weight in zip("qkv", (q, k, v), strict=True):
                getattr(other, f"{own}_proj_weight").copy_(weight)
        biases = [getattr(part, "bias", None) for part in (ours.to_q, ours.to_k, ours.to_v)]
        other.in_proj_bias.copy_(torch.cat([torch.zeros(32) if b is None else b for b in biases]))
        other.out_proj.load_state_dict(ours.to_out[0].state_dict())
    return other


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cross", [None, 16, 32])
@pytest.mark.parametrize("masked", [None, "boolean", "added", "causal", "padding"])
def test_it_is_torchs_module(bias, cross, masked):
    torch.manual_seed(0)
    ours = MultiHeadAttention(32, heads=4, cross_attention_dim=cross, bias=bias).eval()
    states = None if cross is None else torch.randn(2, 7, cross)
    keys = CELLS if states is None else states
    size = 12, keys.shape[1]
    given, expected = {}, {}
    if masked == "boolean":
        mask = torch.rand(size) < 0.6
        mask[:, 0] = True
        given, expected = {"attention_mask": mask}, {"attn_mask": ~mask}
    elif masked == "added":
        mask = torch.randn(size)
        given, expected = {"attention_mask": mask}, {"attn_mask": mask}
    elif masked == "causal":
        given = {"is_causal": True}
        expected = {"attn_mask": torch.ones(size, dtype=torch.bool).triu(1)}
    elif masked == "padding":
        keep = torch.arange(size[1]) < torch.tensor([[4], [6]])
        given = {"attention_mask": padding_mask(keep.long())}
        expected = {"key_padding_mask": ~keep}
    output, weights = ours(CELLS, states, **given)
    there, shares = theirs(ours)(CELLS, keys, keys, average_attn_weights=False, **expected)
    torch.testing.assert_close(output, there, atol=1e-6, rtol=0)
    torch.testing.assert_close(weights, shares, atol=1e-6, rtol=0)


def test_masks_as_the_seeds_write_them():
    """0 is masked, in integers; a query that may attend to nothing has zeros, not NaN."""
    ours = MultiHeadAttention(32, heads=4, cross_attention_dim=16).eval()
    mask = torch.ones(2, 1, 12, 7, dtype=torch.int64)
    mask[0, :, :, 3:] = 0
    mask[1, :, 5] = 0
    output, weights = ours(CELLS, WORDS, mask)
    q = ours.to_q(CELLS).double().unflatten(-1, (4, 8)).transpose(1, 2)
    k = ours.to_k(WORDS).double().unflatten(-1, (4, 8)).transpose(1, 2)
    expected = (q @ k.mT / 8**0.5).masked_fill(mask == 0, -torch.inf).softmax(-1).nan_to_num(0)
    torch.testing.assert_close(weights.double(), expected, atol=1e-6, rtol=0)
    assert weights[1, :, 5].eq(0).all()
    assert torch.equal(output[1, 5], ours.to_out[0].bias)
    causal = ours(CELLS, WORDS, mask, is_causal=True)[1]
    both = (mask != 0) & torch.ones(12, 7, dtype=torch.bool).tril()
    assert causal.eq(0)[(~both).expand(2, 4, 12, 7)].all()
    added = torch.zeros(12, 7).masked_fill(mask[0, 0] == 0, -torch.inf)
    one = ours(CELLS, WORDS, added, is_causal=True)[1][0]
    torch.testing.assert_close(one, causal[0])


def test_dropout_of_the_weights_and_of_the_output():
    torch.manual_seed(0)
    ours = MultiHeadAttention(32, heads=4, attention_dropout=0.5, bias=True)
    output, weights = ours(CELLS)
    kept = ours.eval()(CELLS)[1]
    dropped = weights == 0
    assert 0.4 < dropped.float().mean() < 0.6
    torch.testing.assert_close(weights[~dropped], 2 * kept[~dropped])
    values = ours.to_v(CELLS).unflatten(-1, (4, 8)).transpose(1, 2)
    used = ours.to_out[0]((weights @ values).transpose(1, 2).flatten(2))
    torch.testing.assert_close(output, used, atol=1e-6, rtol=0)
    lossy = MultiHeadAttention(32, heads=4, dropout=0.5)
    zeros = lossy(CELLS)[0].eq(0).float().mean()
    assert 0.4 < zeros < 0.6
    assert lossy.eval()(CELLS)[0].ne(0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MultiHeadAttention(10, heads=3), "10.*3 heads.*dim_head"),
        (lambda: MultiHeadAttention(8, heads=2, dropout=2.0), "dropout=2.0: pass shares"),
        (lambda: MultiHeadAttention(32)(CELLS, WORDS), "self-attention .* given some"),
        (lambda: MultiHeadAttention(32, cross_attention_dim=16)(CELLS), "cross-.* given none"),
        (
            lambda: MultiHeadAttention(32)(CELLS, attention_mask=torch.ones(2, 5)),
            r"mask.*\[2, 5\].*12",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_gradients_and_copies():
    ours = MultiHeadAttention(32, heads=2, dim_head=5, cross_attention_dim=16).double()
    inputs = CELLS[:1, :3].double().requires_grad_(), WORDS[:1].double().requires_grad_()
    assert torch.autograd.gradcheck(lambda *given: ours(*given)[0], inputs)
    again = copy.deepcopy(ours)
    assert torch.equal(again(*inputs)[1], ours(*inputs)[1])


@torch.no_grad()
def test_processors_and_controllers_work_in_it():
    ours = MultiHeadAttention(32, heads=4, cross_attention_dim=16).eval()
    mask = torch.rand(2, 12, 7) < 0.7
    mask[..., 0] = True
    plain, weights = ours(CELLS, WORDS, mask)
    ours.set_processor(AttnProcessor2_0())
    output, none = ours(CELLS, WORDS, mask)
    torch.testing.assert_close(output, plain, atol=1e-6, rtol=0)
    assert none is None
    with sdattn.capture(ours, heads="all") as store:
        ours(CELLS, WORDS, mask)
    torch.testing.assert_close(store.maps[""][:, :, 0], weights, atol=1e-6, rtol=0)

    def first_only(probs, is_cross, _place):
        assert is_cross
        return torch.zeros_like(probs).index_fill(-1, torch.tensor([0]), 1.0)

    ours.set_processor(sdattn.TorchAttnProcessor(first_only))
    edited, shown = ours(CELLS, WORDS)
    assert shown[..., 0].eq(1).all()
    assert ours.watchers == []  # else the weights of every call would be kept
    expected = ours.to_out[0](ours.to_v(WORDS[:, :1])).expand_as(edited)
    torch.testing.assert_close(edited, expected, atol=1e-6, rtol=0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.looks = MultiHeadAttention(32, heads=4)
        self.reads = MultiHeadAttention(32, heads=2, cross_attention_dim=16)

    def forward(self, cells, words):
        cells = cells + self.looks(cells)[0]
        return cells + self.reads(cells, words)[0]


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, cells, words):
        for block in self.blocks:
            cells = block(cells, words)
        return cells


@torch.no_grad()
def test_capture_on_a_model_of_ones_own():
    torch.manual_seed(0)
    toy = Toy().eval()
    states = []
    for block in toy.blocks:
        block.reads.register_forward_pre_hook(lambda _module, args: states.append(args[0]))
    plain = toy(CELLS, WORDS)
    before = [block.reads.processor for block in toy.blocks]
    with sdattn.capture(toy, latent_size=(3, 4)) as store:
        watched = toy(CELLS, WORDS)
    assert torch.equal(watched, plain)
    assert [block.reads.processor for block in toy.blocks] == before
    assert list(store.maps) == ["blocks.0.reads", "blocks.1.reads"]
    for i, block in enumerate(toy.blocks):
        q = block.reads.to_q(states[i]).double().unflatten(-1, (2, 16)).transpose(1, 2)
        k = block.reads.to_k(WORDS).double().unflatten(-1, (2, 16)).transpose(1, 2)
        expected = (q @ k.mT / 4).softmax(-1).mean(1).unflatten(1, (3, 4))
        found = store.maps[f"blocks.{i}.reads"]
        assert found.shape == (2, 3, 4, 7)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
    [first, second] = sdattn.heatmaps(store, None, {"cat": [2], "red dog": [4, 5]})
    assert first["cat"].values.shape == (3, 4)
    both = (store.maps["blocks.0.reads"] + store.maps["blocks.1.reads"])[1] / 2
    torch.testing.assert_close(second["red dog"].values, both[..., [4, 5]].sum(-1))


@torch.no_grad()
def test_without_a_size_queries_are_a_sequence():
    toy = Toy().eval()
    with sdattn.capture(toy, kinds=("self", "cross"), steps="all", heads="all") as store:
        toy(CELLS, WORDS)
        toy(words=WORDS, cells=CELLS)
    assert store.maps["blocks.1.reads"].shape == (2, 2, 2, 1, 12, 7)
    assert store.maps["blocks.0.looks"].shape == (2, 2, 4, 1, 12, 12)
    torch.testing.assert_close(
        store.maps["blocks.0.looks"].sum(-1), torch.ones(2, 2, 4, 1, 12), atol=1e-5, rtol=0
    )
    assert store.latent_size is None
    assert "1x12" in store.report()


def test_models_with_other_attention_too_are_refused():
    class Mixed(Toy):
        def __init__(self):
            super().__init__()
            self.other = nn.Module()
            self.other.to_q = nn.Linear(4, 4)

    for model in (Mixed(), nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="family.*MultiHeadAttention"):
            with sdattn.capture(model):
                pass
    with pytest.raises(ValueError, match=r"latent_size=\(8, 8\).*UNet2D"):
        with sdattn.capture(make_unet(), latent_size=(8, 8)):
            pass
