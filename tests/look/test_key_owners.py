"""Self-attention whose keys are another image's: `queries=` and `refine="self"` refuse it."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from helpers.tiny_pipelines import small_pipeline
from torch.nn.functional import scaled_dot_product_attention

import sdattn
from sdattn.look.key_owners import rows_apart

INPUTS = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0)), 5
TEXT = torch.randn(2, 77, 32, generator=torch.Generator().manual_seed(1))


def by_head(attn, tensor):
    return tensor.unflatten(-1, (attn.heads, -1)).transpose(1, 2)


class Shared:
    """Self-attention whose rows read the keys and values that ``chosen`` picks.

    Args:
        chosen: rows of the batch.
        parts: "kv", "k" or "v".
        before: whether the rows are chosen before the projections.
        kernel: whether torch's attention is called, or probabilities are multiplied.
    """

    def __init__(self, chosen, parts="kv", before=False, kernel=True):
        self.chosen, self.parts, self.before, self.kernel = chosen, parts, before, kernel

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, **_):
        query, made = attn.to_q(hidden_states), []
        for part, project in (("k", attn.to_k), ("v", attn.to_v)):
            rows = self.chosen if part in self.parts else [0, 1]
            made.append(
                project(hidden_states[rows]) if self.before else project(hidden_states)[rows]
            )
        query, key, value = (by_head(attn, part) for part in (query, *made))
        if self.kernel:
            out = scaled_dot_product_attention(query, key, value)
        else:
            scores = query @ key.mT / query.shape[-1] ** 0.5
            out = torch.bmm(scores.softmax(-1).flatten(0, 1), value.flatten(0, 1)).view_as(query)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))


def with_self_attention(processor):
    pipe = small_pipeline()
    names = pipe.unet.attn_processors
    pipe.unet.set_attn_processor({n: processor if "attn1" in n else p for n, p in names.items()})
    return pipe


@pytest.mark.parametrize(
    ("dtype", "error", "is_other"),
    [
        (torch.float32, 5e-4, False),
        (torch.float32, 5e-3, True),
        (torch.bfloat16, 5e-3, False),
        (torch.float16, 5e-3, False),
        (torch.bfloat16, 1e-1, True),
    ],
)
def test_rounding_in_a_half_type_is_no_other_row(dtype, error, is_other):
    own = torch.linspace(-1, 1, 2 * 3 * 8).view(2, 3, 8).to(dtype)
    used = own.clone()
    used[1, 2, 7] -= error  # relative to the largest, 1
    apart = rows_apart({"keys": (used, own)})["keys"]
    assert apart[0, 0] == 0 and apart[0, 1] > 1 and apart[1, 0] > 1
    assert bool(apart[1, 1] > 1) == is_other


def spots(unet, **options):
    with sdattn.capture(unet, queries=[(4, 5)], **options) as store:
        unet(*INPUTS, TEXT)
    return store.spots()


@pytest.mark.parametrize(
    ("shared", "owner"),
    [
        (Shared([0, 0]), r"row 1 .* row 0's"),
        (Shared([1, 0], kernel=False), r"row 0 .* row 1's"),
        (Shared([0, 0], before=True), r"row 1 .* row 0's"),
        (Shared([0, 0], before=True, kernel=False), r"row 1 .* row 0's"),
        (Shared([1, 1], "k"), r"row 0 .* row 1's"),
        (Shared([1, 1], "v"), r"row 0 .* row 1's"),
    ],
)
def test_another_row_s_keys_are_refused_by_name(shared, owner):
    unet = with_self_attention(shared).unet
    with pytest.raises(sdattn.CaptureError, match=owner):
        spots(unet)


@pytest.mark.parametrize("order", [[[0, 0], [0, 1]], [[0, 1], [0, 0]]], ids=["first", "later"])
def test_keys_that_are_shared_in_some_passes_alone_are_refused(order):
    """MasaCtrl begins in a later step, others end in one; over all passes the keys are nobody's."""
    shared = Shared(order[0])
    unet = with_self_attention(shared).unet
    with pytest.raises(sdattn.CaptureError, match=r"row 1 .* none of its batch"):
        with sdattn.capture(unet, queries=[(4, 5)]):
            for shared.chosen in order:
                unet(*INPUTS, TEXT)


@pytest.mark.parametrize("kernel", [True, False])
def test_rows_that_read_their_own_keys_are_shown(kernel):
    own = spots(with_self_attention(Shared([0, 1], kernel=kernel)).unet)
    plain = spots(with_self_attention(AttnProcessor2_0()).unet)
    for found, expected in zip(own, plain, strict=True):
        torch.testing.assert_close(found[0].map, expected[0].map)


def test_values_of_another_run_are_refused_without_an_owner():
    class Kept:
        def __call__(self, attn, hidden_states, **_):
            query, key, own = (part(hidden_states) for part in (attn.to_q, attn.to_k, attn.to_v))
            parts = (by_head(attn, part) for part in (query, key, own.flip(1) + 1))
            out = scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
            return attn.to_out[1](attn.to_out[0](out))

    with pytest.raises(sdattn.CaptureError, match=r"row 0 .* none of its batch"):
        spots(with_self_attention(Kept()).unet)


def test_keys_of_several_images_are_told_as_keys():
    class Joined:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, **_):
            query = by_head(attn, attn.to_q(hidden_states))
            both = hidden_states.flatten(0, 1).expand(2, -1, -1)
            key, value = by_head(attn, attn.to_k(both)), by_head(attn, attn.to_v(both))
            out = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
            return attn.to_out[1](attn.to_out[0](out))

    with pytest.raises(sdattn.CaptureError, match=r"keys.*share keys"):
        spots(with_self_attention(Joined()).unet)


def test_maps_are_not_refined_along_another_row_s_keys():
    pipe = with_self_attention(Shared([0, 0]))
    layers = sdattn.maps.aggregation.refining(pipe)
    with sdattn.capture(pipe.unet, kinds=("cross", "self"), layers=layers) as store:
        pipe.unet(*INPUTS, TEXT)
    with pytest.raises(sdattn.CaptureError, match=r"row 1 .* row 0's"):
        store.layer_maps(sdattn.maps.presets.preset_of("default", "self"))


def test_merged_tokens_are_refused_before_a_cell_is_looked_for():
    class Merged:
        def __call__(self, attn, hidden_states, **_):
            few = hidden_states[:, ::4]
            query, key, value = (
                by_head(attn, part(few)) for part in (attn.to_q, attn.to_k, attn.to_v)
            )
            out = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
            return attn.to_out[1](attn.to_out[0](out)).repeat_interleave(4, 1)

    with pytest.raises(sdattn.CaptureError, match=r"queries.*merges"):
        spots(with_self_attention(Merged()).unet)


def test_a_gradient_through_checkpointed_layers_is_refused_at_the_entry():
    unet = small_pipeline().unet.train()
    unet.enable_gradient_checkpointing()
    with (
        pytest.raises(ValueError, match="disable_gradient_checkpointing"),
        sdattn.capture(unet, grad=True),
    ):
        pytest.fail("the block was entered")


@pytest.mark.parametrize("nested", [True, False])
def test_a_capture_is_entered_once(nested):
    unet = small_pipeline().unet
    before = dict(unet.attn_processors)
    capture = sdattn.capture(unet)
    with capture as store:
        unet(*INPUTS, TEXT)
        if nested:
            with pytest.raises(sdattn.CaptureError, match=r"capture\(\) again"):
                capture.__enter__()
    if not nested:
        with pytest.raises(sdattn.CaptureError, match=r"capture\(\) again"), capture:
            pytest.fail("the block was entered")
    assert store.maps
    assert unet.attn_processors == before
