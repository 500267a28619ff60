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


class Changed:
    """Self-attention whose keys and values are projected from ``states(hidden states)``, and then
    changed by ``change(key, value)``; by torch's attention, or a product with probabilities."""

    def __init__(self, change=lambda *both: both, states=lambda hidden: hidden, kernel=True):
        self.change, self.states, self.kernel = change, states, kernel

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, **_):
        states = self.states(hidden_states)
        changed = self.change(attn.to_k(states), attn.to_v(states))
        query, key, value = (by_head(attn, x) for x in (attn.to_q(hidden_states), *changed))
        if self.kernel:
            out = scaled_dot_product_attention(query, key, value)
        else:
            scores = query @ key.mT / query.shape[-1] ** 0.5
            out = torch.bmm(scores.softmax(-1).flatten(0, 1), value.flatten(0, 1)).view_as(query)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))


def shared(rows, parts="kv", **options):
    """Projected keys and values, or some of both, of other rows than each row's own."""

    def change(key, value):
        return key[rows] if "k" in parts else key, value[rows] if "v" in parts else value

    return Changed(change, **options)


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
    ("processor", "owner"),
    [
        (shared([0, 0]), r"row 1 .* row 0's"),
        (shared([1, 0], kernel=False), r"row 0 .* row 1's"),
        (Changed(states=lambda hidden: hidden[[0, 0]]), r"row 1 .* row 0's"),
        (Changed(states=lambda hidden: hidden[[0, 0]], kernel=False), r"row 1 .* row 0's"),
        (shared([1, 1], "k"), r"row 0 .* row 1's"),
        (shared([1, 1], "v"), r"row 0 .* row 1's"),
        # values of another run have no owner, and keys of several images are told as keys
        (Changed(lambda key, value: (key, value.flip(1) + 1)), "row 0 .* none of its batch"),
        (Changed(states=lambda hidden: hidden.flatten(0, 1).expand(2, -1, -1)), "keys.*share keys"),
    ],
)
def test_another_row_s_keys_are_refused_by_name(processor, owner):
    unet = with_self_attention(processor).unet
    with pytest.raises(sdattn.CaptureError, match=owner):
        spots(unet)


@pytest.mark.parametrize("order", [[[0, 0], [0, 1]], [[0, 1], [0, 0]]], ids=["first", "later"])
def test_keys_that_are_shared_in_some_passes_alone_are_refused(order):
    """MasaCtrl begins in a later step, others end in one; over all passes the keys are nobody's."""
    rows = []
    unet = with_self_attention(Changed(lambda *both: (part[rows[-1]] for part in both))).unet
    with pytest.raises(sdattn.CaptureError, match=r"row 1 .* none of its batch"):
        with sdattn.capture(unet, queries=[(4, 5)]):
            for chosen in order:
                rows.append(chosen)
                unet(*INPUTS, TEXT)


@pytest.mark.parametrize("kernel", [True, False])
def test_rows_that_read_their_own_keys_are_shown(kernel):
    own = spots(with_self_attention(Changed(kernel=kernel)).unet)
    plain = spots(with_self_attention(AttnProcessor2_0()).unet)
    for found, expected in zip(own, plain, strict=True):
        torch.testing.assert_close(found[0].map, expected[0].map)


def test_maps_are_not_refined_along_another_row_s_keys():
    pipe = with_self_attention(shared([0, 0]))
    layers = sdattn.maps.aggregation.refining(pipe)
    with sdattn.capture(pipe.unet, kinds=("cross", "self"), layers=layers) as store:
        pipe.unet(*INPUTS, TEXT)
    with pytest.raises(sdattn.CaptureError, match=r"row 1 .* row 0's"):
        store.layer_maps(sdattn.maps.presets.preset_of("default", "self"))


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
