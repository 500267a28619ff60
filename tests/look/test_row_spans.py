"""Rows of joint attention with texts of their own lengths, against each row alone in float64."""

from types import SimpleNamespace

import pytest
import torch
from helpers.joint_video_rows import hunyuan_video15
from helpers.matrix_oracle import recorded, softmax_in_float64

from sdattn import capture
from sdattn.attention.calls import AttentionCall
from sdattn.follow.call_layout import CallLayout
from sdattn.look.joint import Joint
from sdattn.look.joint_checks import check_order
from sdattn.look.output_space import OutputSpace
from sdattn.look.row_orders import RowOrder
from sdattn.look.sdpa import SdpaWatch
from sdattn.look.view import View
from sdattn.models.denoiser_call import DenoiserCall

CELLS, LENGTH, HEADS, WIDTH = 5, 13, 2, 4
SPANS = (
    (slice(3, 8), slice(0, 3)),  # text first, then nobody's
    (slice(6, 11), slice(0, 6)),
    (slice(0, 5), slice(7, 11)),  # the image first, with a gap behind it
)
LONGEST = 6


def call_of(mask=None, scale=None, length=LENGTH):
    """A call of torch's attention, as a watch sees it, with its output."""
    generator = torch.Generator().manual_seed(0)
    shape = len(SPANS), HEADS, length, WIDTH
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    with SdpaWatch() as watch:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return watch.calls[0]


def masks():
    generator = torch.Generator().manual_seed(1)
    short = torch.arange(LENGTH) < torch.tensor([[8], [11], [11]])
    return {
        "none": None,
        "of keys": short[:, None, None],
        "added": torch.randn(3, 1, LENGTH, LENGTH, generator=generator),
        "of one row for all": torch.randn(LENGTH, LENGTH, generator=generator),
    }


@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("scale", [None, 0.3])
def test_each_row_shows_its_own_text_and_nothing_behind_it(mask, scale):
    call = call_of(masks()[mask], scale)
    order = RowOrder(SPANS, LENGTH)
    ordered = order(call)
    found = View().of(ordered).every_head(None)
    whole = softmax_in_float64(call.query, call.key, call.mask, call.scale)
    assert found.shape == (3, HEADS, CELLS, LONGEST)
    for row, (image, text) in enumerate(SPANS):
        own = whole[row, :, image, text]
        n_text = own.shape[-1]
        torch.testing.assert_close(found[row, ..., :n_text].double(), own, atol=1e-6, rtol=0)
        assert not found[row, ..., n_text:].any()
    for rows in (slice(1, 3), (2, 0)):
        sums = View().of(ordered, rows).add_to(None, [0, 4])
        picked = found[rows] if isinstance(rows, slice) else found[list(rows)]
        torch.testing.assert_close(sums, picked.sum(1)[..., [0, 4]], atol=1e-6, rtol=0)


def test_outputs_come_in_the_same_order():
    call, order = call_of(), RowOrder(SPANS, LENGTH)
    ordered = order(call)
    found = OutputSpace(*(ordered.output[:, :, part] for part in (order.image, order.text)))
    for row, (image, text) in enumerate(SPANS):
        cells, words = call.output[row, :, image].double(), call.output[row, :, text].double()
        expected = cells @ words.mT / WIDTH
        n_text = words.shape[1]
        probs = found.every_head(None)[row]
        torch.testing.assert_close(probs[..., :n_text].double(), expected, atol=1e-6, rtol=0)
        assert not probs[..., n_text:].any()


def test_only_the_rows_that_are_kept_count():
    own, other = (slice(1, 6), slice(0, 1)), (slice(3, 8), slice(0, 3))
    call = DenoiserCall(0.0, (1, 5), 3, None, spans=lambda _: [other, own, other])
    assert CallLayout().spans(call, (1, 5), (0, 2)) == (other,)
    of_each = CallLayout().spans(call, (1, 5), (1, 2))
    assert of_each == (own, own, other)


@pytest.mark.parametrize("text_first", [False, True])
def test_a_part_of_the_texts_stream_must_lie_where_it_is_said_to(text_first):
    generator = torch.Generator().manual_seed(1)
    own, cells = (torch.randn(1, n, 8, generator=generator) for n in (6, 4))
    joined = torch.cat((own, cells) if text_first else (cells, own), 1)
    value = joined.unflatten(-1, (2, 4)).transpose(1, 2)  # [B, heads, tokens, d]
    seen, attn = AttentionCall(value, value), SimpleNamespace(heads=2)
    image, text = (slice(6, 10), slice(1, 4)) if text_first else (slice(0, 4), slice(5, 8))
    seen.value = value
    check_order(seen, image, text, attn, {"add_v_proj": [own]}, "Mine")
    seen.value = value.roll(1, 2)
    with pytest.raises(RuntimeError, match="Mine does not join text and image in the order"):
        check_order(seen, image, text, attn, {"add_v_proj": [own]}, "Mine")


def test_masks_are_read_again_when_one_changes_or_is_another():
    masks, reads, read = (torch.ones(1, 4), torch.ones(1, 2)), [], CallLayout()

    def spans(cells):
        reads.append(cells)
        n = int(sum(mask.sum() for mask in masks))
        return [(slice(0, cells), slice(cells, cells + n))]

    def call_of(*masks):
        return DenoiserCall(0.0, (1, 5), 1, None, spans=spans, spans_of=masks)

    for expected, changed in ((6, masks[1]), (5, masks[0]), (4, None)):
        for _ in range(2):
            found = read.spans(call_of(*masks), (1, 5), (0,))
            assert found == ((slice(0, 5), slice(5, 5 + expected)),)
        if changed is not None:
            changed[0, -1] = 0
    assert len(reads) == 3
    read.spans(call_of(masks[0].clone(), masks[1]), (1, 5), (0,))
    assert len(reads) == 4


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("shown", [(4, 2), (3, 2)], ids=["alike", "apart"])
def test_an_image_stands_before_the_text_of_hunyuan_video15(image, shown):
    """transformer_hunyuan_video15.py, ``forward``: the video, what is valid of image, ByT5 and
    Qwen, then the rest."""
    model, generator = hunyuan_video15().transformer, torch.Generator().manual_seed(2)

    def noise(*shape):
        return torch.randn(*shape, generator=generator)

    mask, glyph_mask = torch.zeros(2, 6), torch.zeros(2, 3)
    for row, n in enumerate(shown):
        mask[row, :n], glyph_mask[row, : 5 - max(shown)] = 1, 1
    given = {
        "hidden_states": noise(2, 5, 2, 2, 3),
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_hidden_states": noise(2, 6, 16),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": noise(2, 3, 32),
        "encoder_attention_mask_2": glyph_mask,
        "image_embeds": noise(2, 5, 8) * image,
    }
    with torch.no_grad(), recorded(model) as record:
        plain = model(**given).sample
    with torch.no_grad(), capture(model) as store:
        assert torch.equal(model(**given).sample, plain)
    start, lengths = 12 + 5 * image, (mask.sum(1) + glyph_mask.sum(1)).int().tolist()
    for name, maps in store.maps.items():
        expected = torch.zeros(2, 12, max(lengths), dtype=torch.double)
        for row, n in enumerate(lengths):
            probs = record[name][0][row].mean(0)
            expected[row, :, :n] = probs[:12, start : start + n]
        found = maps.flatten(1, -2).double()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert set(store.maps) == {f"transformer_blocks.{i}.attn" for i in range(2)}


def test_rows_of_another_length_have_an_order_of_their_own():
    joint = Joint(lambda: SPANS)
    for length in (LENGTH, LENGTH - 2, LENGTH):
        call = call_of(length=length)
        found = View().of(joint.placed(call, None)).every_head(None)
        whole = softmax_in_float64(call.query, call.key, None, None)
        for row, (image, text) in enumerate(SPANS):
            own = whole[row, :, image, text]
            shown = found[row, ..., : own.shape[-1]].double()
            torch.testing.assert_close(shown, own, atol=1e-6, rtol=0)
