"""Joint attention that attends to one row of the batch at a time (Mochi): each row's calls against
a softmax in float64, the whole pipeline against each row alone, layers without set_processor."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from diffusers.models.attention_processor import MochiAttnProcessor2_0
from helpers.joint_models import attending
from helpers.joint_video_rows import mochi
from helpers.matrix_oracle import softmax_in_float64
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from sdattn import CaptureWarning, capture
from sdattn.attention.calls import AttentionCall
from sdattn.look.attended import softmax_of
from sdattn.look.joint_checks import check_order
from sdattn.look.output_space import OutputSpace
from sdattn.look.row_orders import RowCalls, as_one_call, with_every_query
from sdattn.look.sdpa import SdpaWatch
from sdattn.look.view import View
from sdattn.models.denoiser import find_denoiser
from sdattn.models.facts import cell_size, default_frames, default_size, frame_rate, frame_unit

CELLS, HEADS, WIDTH = 5, 2, 8
MASK = torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 1, 0, 1, 1, 0], [0] * 6]).bool()
IMAGE, TEXT = slice(0, CELLS), slice(CELLS, CELLS + MASK.shape[1])
SIZE = {"height": 64, "width": 96, "num_frames": 7, "num_inference_steps": 2}
SIZE |= {"max_sequence_length": 12, "output_type": "latent"}
TWO = ["a red cat", "dog, dog and cat"]
FIRST = "transformer_blocks.0.attn1"


@pytest.mark.parametrize("gives_logsumexp", [True, False])
def test_a_call_in_which_the_last_tokens_ask_alone_stands_for_one_of_all(gives_logsumexp):
    """Qwen-Image 2.1's: five cells ask, four tokens of text only answer."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, HEADS, CELLS, WIDTH, generator=generator)
    key = torch.randn(2, HEADS, 4 + CELLS, WIDTH, generator=generator)
    expected = softmax_in_float64(query, key, None, None)
    call = AttentionCall(query, key, key, output=expected.float() @ key)
    if gives_logsumexp:
        call.logsumexp = (query @ key.mT / WIDTH**0.5).logsumexp(-1)
    whole = with_every_query(call)
    assert whole.shape == (2, HEADS, 4 + CELLS, 4 + CELLS)
    assert torch.equal(whole.output[:, :, 4:], call.output)
    image, text = slice(4, 4 + CELLS), slice(0, 4)
    for keys in (text, image):
        found = softmax_of(whole, image, keys).probs(slice(None), None)
        torch.testing.assert_close(found.double(), expected[..., keys], atol=1e-6, rtol=0)


def calls_of(scale=None):
    """As MochiAttnProcessor2_0 makes them, seen by a watch."""
    generator = torch.Generator().manual_seed(0)
    with SdpaWatch() as watch:
        for row in MASK:
            shape = 1, HEADS, CELLS + int(row.sum()), WIDTH
            query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
            scaled_dot_product_attention(query, key, value, scale=scale)
    return watch.calls


@pytest.mark.parametrize("mask", [MASK, MASK.float()], ids=["bool", "numbers"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_each_row_shows_its_own_tokens_at_their_columns(mask, scale):
    calls = calls_of(scale)
    assert calls[0].logsumexp is not None  # the kernel's is taken over
    for known in (True, False):
        for call in calls:
            call.logsumexp = call.logsumexp if known else None
        seen = RowCalls(calls, CELLS, mask)
        assert seen.shape == (4, HEADS, 11, 11) and (seen.logsumexp is not None) == known
        seen.spans = IMAGE, TEXT
        found = View().of(seen).every_head(None)
        expected = torch.zeros(4, HEADS, CELLS, 6, dtype=torch.float64)
        for row, (call, taken) in enumerate(zip(calls, MASK, strict=True)):
            whole = softmax_in_float64(call.query, call.key, None, scale)
            expected[row][..., taken] = whole[0, :, :CELLS, CELLS:]
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
        sums = View().of(seen, (3, 1)).add_to(None, [0, 4]).double()
        torch.testing.assert_close(sums, expected[[3, 1]].sum(1)[..., [0, 4]], atol=1e-6, rtol=0)


def test_outputs_of_tokens_that_a_row_has_not_are_zero():
    calls = calls_of()
    seen = RowCalls(calls, CELLS, MASK)
    found = OutputSpace(seen.output[:, :, IMAGE], seen.output[:, :, TEXT]).every_head(None)
    for row, (call, taken) in enumerate(zip(calls, MASK, strict=True)):
        cells, words = call.output[0].double().split([CELLS, int(taken.sum())], dim=1)
        expected = cells @ words.mT / WIDTH
        torch.testing.assert_close(found[row][..., taken].double(), expected, atol=1e-6, rtol=0)
        assert not found[row][..., ~taken].any()


def test_the_texts_values_must_lie_at_their_columns():
    calls, projected = calls_of(), torch.randn(4, 6, HEADS * WIDTH)
    for call, words, taken in zip(calls, projected, MASK, strict=True):
        call.value[0, :, CELLS:] = words[taken].unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)
    attn, given = SimpleNamespace(heads=HEADS), {"add_v_proj": [projected]}
    check_order(RowCalls(calls, CELLS, MASK), IMAGE, TEXT, attn, given, "Mine")
    calls[2].value = calls[2].value.roll(1, 2)
    with pytest.raises(RuntimeError, match="Mine does not join text and image in the order"):
        check_order(RowCalls(calls, CELLS, MASK), IMAGE, TEXT, attn, given, "Mine")


def test_only_calls_of_a_row_each_are_joined():
    calls, states = calls_of(), {"hidden_states": torch.zeros(4, CELLS, 3)}
    given = {**states, "encoder_hidden_states": torch.zeros(4, 6, 3), "attention_mask": MASK}
    [joined] = as_one_call(calls, given)
    assert isinstance(joined, RowCalls)
    for other in (
        {**given, "attention_mask": None},
        {**given, "attention_mask": MASK[:, None]},
        {**given, "encoder_hidden_states": None},
        {**given, "hidden_states": torch.zeros(4, CELLS + 3, 3)},
    ):
        assert as_one_call(calls, other) is calls
    assert len(as_one_call(calls[:3], given)) == 3


# -- the pipeline ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pipe():
    return mochi()


@pytest.mark.parametrize("options", [{}, {"refine": "self"}, {"space": "output"}], ids=str)
def test_prompts_of_unlike_lengths_have_the_maps_that_each_has_alone(pipe, options):
    latents = torch.randn(2, 4, 2, 8, 12, generator=torch.Generator().manual_seed(3))
    with capture(pipe, **options) as both:
        pipe(TWO, latents=latents, **SIZE)
    for i, prompt in enumerate(TWO):
        with capture(pipe, **options) as alone:
            pipe(prompt, latents=latents[i : i + 1], **SIZE)
        n_text = len(pipe.tokenizer(prompt)["input_ids"])
        for name, maps in alone.maps.items():
            torch.testing.assert_close(both.maps[name][i], maps[0], atol=2e-5, rtol=1e-3)
            assert maps[..., :n_text].flatten(1, 3).abs().amax(1).all()
            assert not maps[..., n_text:].any()


def test_a_negative_prompt_that_is_masked_away_has_empty_columns():
    pipe = mochi(force_zeros_for_empty_prompt=True)
    with capture(pipe, branch="both") as store:
        pipe("a red cat", **SIZE)
    assert store.passes[0].branches == ("unconditional", "conditional")
    for maps in store.maps.values():
        assert not maps[0].any() and maps[1].any()


# -- processors -----------------------------------------------------------------------------------


def held(pipe):
    return [layer.module.processor for layer in find_denoiser(pipe.transformer).layers]


def test_layers_without_set_processor_hold_what_they_held(pipe):
    layer = find_denoiser(pipe.transformer).layers[0].module
    assert not hasattr(layer, "set_processor")
    before = held(pipe)
    first, second = capture(pipe), capture(pipe, layers=FIRST)
    stores = [first.__enter__(), second.__enter__()]
    with pytest.raises(ZeroDivisionError), capture(pipe):
        assert all(one is not own for one, own in zip(held(pipe), before, strict=True))
        1 / 0  # noqa: B018
    pipe("a red cat", **SIZE)
    for watch in (first, second):
        watch.__exit__(None, None, None)
    assert all(one is own for one, own in zip(held(pipe), before, strict=True))
    assert torch.equal(stores[0].maps[FIRST], stores[1].maps[FIRST])


class Weighted(nn.Module):
    """A processor that is a module, with weights of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner_processor = inner

    def __call__(self, attn, *states, **more):
        return self.inner_processor(attn, *states, **more)


@pytest.mark.parametrize("inside", [False, True])
def test_a_module_for_a_processor_is_watched_and_put_back(inside):
    def drawn(pipe):
        pipe(TWO, generator=torch.Generator().manual_seed(0), **SIZE)

    pipe, told = mochi(), nullcontext()
    with capture(pipe) as expected:
        drawn(pipe)
    layer = pipe.transformer.get_submodule(FIRST)
    weighted = Weighted(layer.processor)
    if not inside:
        del layer.processor
        layer.processor = weighted
    before = layer.processor
    with capture(pipe) as store:
        if inside:
            layer.processor = weighted
            told = pytest.warns(CaptureWarning, match="1 attention processors were replaced")
        with told:
            drawn(pipe)
    assert layer.processor is before
    assert ("processor" in layer._modules) == (not inside)
    for name, maps in expected.maps.items():
        torch.testing.assert_close(store.maps[name], maps, atol=1e-6, rtol=0)


def text_first(query, key, value, **options):
    video = 2 * 4 * 6
    turned = [part.roll(-video, dims=2) for part in (query, key, value)]
    return scaled_dot_product_attention(*turned, **options).roll(video, dims=2)


def multiplied(query, key, value, **options):
    return torch.softmax(query @ key.mT, dim=-1) @ value


@pytest.mark.parametrize("attend", [text_first, multiplied])
def test_rows_that_cannot_be_known_are_refused_by_name(attend):
    pipe = mochi()
    layer = pipe.transformer.transformer_blocks[0].attn1
    layer.processor = attending(MochiAttnProcessor2_0, attend)
    said = "from the processor Odd is not what any attention"
    with pytest.raises(RuntimeError, match=said), capture(pipe):
        pipe(TWO, **SIZE)


def test_sizes_and_frames_are_those_of_the_pipeline(pipe):
    assert default_size(pipe) == (480, 848) and cell_size(pipe) == 16
    assert (frame_unit(pipe), default_frames(pipe), frame_rate(pipe, {})) == (6, 19, 30)
