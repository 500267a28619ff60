"""Processors that change their probabilities: what is shown is what was used, or it is refused.

Each processor here keeps a copy of the probabilities it multiplied its values with; that is the
oracle. Most are written as the processors of prompt-to-prompt code are: diffusers' own, with a line
more.
"""

import inspect
from contextlib import nullcontext

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from helpers.explicit_processors import Explicit, Returns, sharpened
from helpers.matrix import ROWS, few_are_quick
from helpers.reads import reads_by_call
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_unet
from torch.nn.functional import scaled_dot_product_attention

from sdattn import CaptureError, TorchAttnProcessor, capture
from sdattn.look.unknown_processors import is_plain
from sdattn.models.denoiser import find_denoiser

MID = "mid_block.attentions.0.transformer_blocks.0.attn2"


class InPlace(Explicit):
    """The community pipeline's P2PCrossAttnProcessor: the controller edits what it is shown."""

    def edited(self, probs):
        probs.copy_(sharpened(probs))
        return probs


class Later(Explicit):
    """It begins to edit in its second call."""

    def edited(self, probs):
        return sharpened(probs) if self.used else probs


class Temperature(Explicit):
    def probabilities(self, attn, query, key, mask):
        return (query @ key.mT * (attn.scale / 0.2)).softmax(-1)

    def product(self, attn, probs, value):
        return probs @ value


class Einsum(Explicit):
    """As in the code of the original Stable Diffusion."""

    def probabilities(self, attn, query, key, mask):
        scores = torch.einsum("b i d, b j d -> b i j", query, key) * attn.scale
        return sharpened(scores.softmax(dim=-1))

    def product(self, attn, probs, value):
        return torch.einsum("b i j, b j d -> b i d", probs, value)


class ByHead(Returns):
    """Four axes, and a product by a method."""

    def product(self, attn, probs, value):
        probs, value = (part.unflatten(0, (-1, attn.heads)) for part in (probs, value))
        return probs.matmul(value).flatten(0, 1)


class Sliced(Returns):
    """A few rows at a time."""

    def product(self, attn, probs, value):
        return torch.cat([*map(torch.bmm, probs.split(3), value.split(3))])


class Stores(Explicit):
    """It looks at one softmax and uses another kernel's, with a scale of its own."""

    def attend(self, attn, query, key, value, mask):
        attn.get_attention_scores(query, key)
        query, key, value = (one.unflatten(0, (-1, attn.heads)) for one in (query, key, value))
        scale = 3 * attn.scale
        self.used.append((query.double() @ key.double().mT * scale).softmax(-1).flatten(0, 1))
        return scaled_dot_product_attention(query, key, value, scale=scale).flatten(0, 1)


class Folded(Explicit):
    """Torch's attention with a scale of its own, and heads among the rows; see CALLS in
    test_sdpa.py for other axes."""

    def attend(self, attn, query, key, value, mask):
        scale = 3 * attn.scale
        self.used.append((query.double() @ key.double().mT * scale).softmax(-1))
        return scaled_dot_product_attention(query, key, value, scale=scale)


class Unseen(Explicit):
    """diffusers' softmax, and a product that no one can tell for one."""

    def product(self, attn, probs, value):
        return (probs[..., None] * value[:, None]).sum(-2)


class UnseenEdited(Unseen):
    edited = Returns.edited


class Mixes(Explicit):
    """It changes what its probabilities made of the values."""

    def product(self, attn, probs, value):
        return super().product(attn, probs, value) + 0.5 * value.mean(1, keepdim=True)


class MixesOnce(Mixes):
    """In its second call alone."""

    def product(self, *given):
        return (Mixes if len(self.used) == 2 else Explicit).product(self, *given)


class NoProjection(Explicit):
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        text = encoder_hidden_states
        query, key, value = attn.to_q(hidden_states), attn.to_k(text), attn.to_v(text)
        return torch.nn.functional.linear(
            scaled_dot_product_attention(query, key, value), attn.to_out[0].weight
        )


SHOWN = (Explicit, InPlace, Sliced, Returns, Later, Temperature, Einsum, ByHead, Stores, Folded)


def ran(unet, passes=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, 4, 16, 24, generator=generator).to(dtype)
    text = torch.randn(2, 77, 32, generator=generator).to(dtype)
    return torch.stack([unet(sample, 500 - i, text).sample for i in range(passes)])


def watched_mid(kind, dtype=torch.float32):
    """A UNet, and the processor of that kind in its middle."""
    unet = make_unet().to(dtype)
    processor = unet.get_submodule(MID).processor = kind()
    return unet, processor


def expected(processor, calls):
    """``[images, N, T]`` in float64: the mean over some of its calls, and over its heads."""
    used = torch.stack([processor.used[i] for i in calls]).double()
    return used.unflatten(1, (2, -1)).mean((0, 2))


@pytest.fixture(scope="module")
def plain():
    with torch.no_grad(), capture(unet := make_unet(), layers="mid") as store:
        ran(unet, 2)
    return store.maps[MID].flatten(1, 2).double()


@pytest.mark.parametrize("dtype", tiered([torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("kind", tiered([*SHOWN, Unseen], quick=3))
@torch.no_grad()
def test_what_is_shown_is_what_was_used(kind, dtype, plain):
    unet, processor = watched_mid(kind, dtype)
    before = ran(unet, 2, dtype)
    processor.used.clear()
    with capture(unet, layers="mid") as outer, capture(unet, kinds=("cross", "self")) as inner:
        during = ran(unet, 2, dtype)
    assert torch.equal(before, during)
    assert unet.get_submodule(MID).processor is processor
    rounded = kind is Unseen and dtype == torch.bfloat16  # computed anew from its query and key
    for store in (outer, inner):
        found = store.maps[MID].flatten(1, 2).double()
        near = {"atol": 1e-5, "rtol": 4e-3 if rounded else 0}
        torch.testing.assert_close(found, expected(processor, (0, 1)), **near)
        if dtype == torch.float32:
            assert (found.sum(-1) - 1).abs().max() < 1e-5
    assert kind in (Explicit, Unseen) or (expected(processor, (0, 1)) - plain).abs().max() > 1e-3


@pytest.mark.parametrize("change", ["scale", "get_attention_scores"])
@torch.no_grad()
def test_a_plain_processor_in_a_layer_with_a_scale_or_scores_of_its_own(change):
    unet, processor = watched_mid(Explicit)
    layer = unet.get_submodule(MID)
    if change == "scale":
        layer.scale *= 4
    else:
        own = layer.get_attention_scores
        layer.get_attention_scores = lambda *given: sharpened(own(*given))
    ran(unet)
    layer.processor = AttnProcessor()
    with capture(unet) as store:
        ran(unet)
    found = store.maps[MID].flatten(1, 2).double()
    torch.testing.assert_close(found, expected(processor, (0,)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", [UnseenEdited, Mixes, NoProjection])
@torch.no_grad()
def test_what_made_something_else_of_the_values_is_refused_at_once(kind):
    unet, processor = watched_mid(kind)
    with pytest.raises(RuntimeError, match=f"processor.*{kind.__name__}"):
        with capture(unet):
            ran(unet, 5)
    assert len(processor.used) <= 1
    assert unet.get_submodule(MID).processor is processor
    with capture(unet, layers=["down", "up"]) as store:  # as the message says
        ran(unet)
    assert MID not in store.maps


@pytest.mark.parametrize("replaced", [False, True])
@torch.no_grad()
def test_what_begins_later_is_refused_at_the_end(replaced):
    unet, processor = watched_mid(MixesOnce)
    told = pytest.warns(match="1 attention processors were replaced") if replaced else nullcontext()
    with pytest.raises(CaptureError, match=f"{MID}.*MixesOnce"), told, capture(unet):
        ran(unet, 3)
        if replaced:
            unet.get_submodule(MID).set_processor(AttnProcessor2_0())
            ran(unet)
    assert len(processor.used) == 3


@torch.no_grad()
def test_nothing_is_read_back_after_the_first_pass():
    unet, _ = watched_mid(Returns)
    with reads_by_call(unet) as plain:
        ran(unet, 2)
    with reads_by_call(unet) as watched, capture(unet):
        ran(unet, 2)
    assert watched[1] == plain[1]
    assert watched[0] == plain[0] + 1  # that the probabilities made the output


def test_a_gradient_goes_through_what_was_used():
    unet, processor = watched_mid(Returns)
    text = torch.randn(2, 77, 32, requires_grad=True)
    with capture(unet, layers="mid", grad=True) as store:
        unet(torch.randn(2, 4, 16, 24), 5, text)
    (slope,) = torch.autograd.grad(store.maps[MID][..., 5].sum(), text)
    kept = [one.requires_grad for one in processor.used]
    assert kept == [True]
    assert slope.abs().sum() > 0


@torch.no_grad()
def test_one_that_shows_its_probabilities_twice_is_named():
    class Two(TorchAttnProcessor):
        def __call__(self, *args, **kwargs):
            super().__call__(*args, **kwargs)
            return super().__call__(*args, **kwargs)

    unet, _ = watched_mid(Two)
    with pytest.raises(RuntimeError, match="Two.*2"), capture(unet):
        ran(unet)


@pytest.mark.parametrize("row", few_are_quick(ROWS), ids=str)
def test_the_processors_of_every_pipeline_are_plain(row):
    """They pay nothing for the others, which rotate their queries. Joint attention is seen in a way
    of its own."""
    layers = find_denoiser(row.make()).layers
    watched = [one.module for one in layers if one.kind in ("cross", "self")]
    for one in watched:
        taken = inspect.signature(one.processor.__call__).parameters
        rotates = {"image_rotary_emb", "query_rotary_emb", "rotary_emb", "freqs_cis"} & taken.keys()
        assert is_plain(one, one.processor) != bool(rotates)
    for one in watched:
        one.set_processor(Explicit())
    assert not any(is_plain(one, one.processor) for one in watched)


class Holds(torch.nn.Module):
    """StyleAligned's: a module that holds the processor which does the work."""

    def __init__(self):
        super().__init__()
        self.processor = AttnProcessor2_0()

    def __call__(self, attn, *args, **kwargs):
        return self.processor(attn, *args, **kwargs)


class HoldsAModule(Holds):
    """One that holds such a one."""

    def __init__(self):
        super().__init__()
        self.processor = Holds()


class SharesKeys(Holds):
    """StyleAligned's for self-attention: keys and values of all rows, for each row."""

    def __call__(self, attn, hidden_states, *_, **__):
        q, k, v = (to(hidden_states) for to in (attn.to_q, attn.to_k, attn.to_v))
        k, v = (part.flatten(0, 1).expand(len(q), -1, -1) for part in (k, v))
        q, k, v = (part.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for part in (q, k, v))
        out = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return attn.to_out[0](out)


HELD = {
    "each its own": lambda names: {name: Holds() for name in names},
    "one for all": lambda names: dict.fromkeys(names, Holds()),
    "two deep": lambda names: {name: HoldsAModule() for name in names},
}


@torch.no_grad()
@pytest.mark.parametrize("held", HELD)
def test_a_processor_that_holds_one_is_no_layer(held):
    unet = make_unet()
    given = torch.randn(2, 4, 16, 16), 5, torch.randn(2, 7, 32)
    with capture(unet, kinds=("cross", "self")) as expected:
        plain = unet(*given).sample
    unet.set_attn_processor(HELD[held](unet.attn_processors))
    with capture(unet, kinds=("cross", "self")) as store, capture(unet):
        assert len(find_denoiser(unet).layers) == 32
        assert torch.equal(unet(*given).sample, plain)
    assert list(store.maps) == list(expected.maps)
    for name, maps in expected.maps.items():
        torch.testing.assert_close(store.maps[name], maps, atol=1e-6, rtol=0)


@torch.no_grad()
def test_style_aligned_shows_what_it_used():
    """In its self-attention each row has the keys of all rows; a spot has no place in another."""
    unet = make_unet()
    given = torch.randn(2, 4, 16, 16), 5, torch.randn(2, 7, 32)
    names = unet.attn_processors
    unet.set_attn_processor({n: SharesKeys() if "attn1" in n else Holds() for n in names})
    with capture(unet) as store, capture(unet, kinds=("self",)) as other:
        unet(*given)
    assert len(store.maps) == len(other.maps) == 16
    for maps in [*store.maps.values(), *other.maps.values()]:
        torch.testing.assert_close(maps.sum(-1), torch.ones_like(maps[..., 0]))
    keys = [maps.shape[-1] for maps in other.maps.values()]
    assert keys == [2 * maps[0, ..., 0].numel() for maps in other.maps.values()]
    with pytest.raises((CaptureError, ValueError)), capture(unet, queries=[(0, 0)]):
        unet(*given)
