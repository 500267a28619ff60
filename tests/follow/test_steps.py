"""A part of a run means the same to captures, knockouts, edits and stores."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.tiers import tiered
from helpers.tiny_pipelines import small_pipeline
from helpers.tiny_tokenizers import tiny_tokenizer

import sdattn
from sdattn import capture
from sdattn.control.removal import Removal
from sdattn.edit import AttentionReplace
from sdattn.follow.run_part import RunPart
from sdattn.keep.keep import Heads, Keep, Steps
from sdattn.prompts.tokens import read_prompt

PARTS = [(0.5, 1.0), (0.0, 0.5), (0.25, 0.75), (0.0, 1.0), (0.1, 0.3)]


def middles(part, passes):
    """The passes whose middles lie in a part, in exact arithmetic."""
    first, last = map(Fraction, map(str, part))
    return [i for i in range(passes) if first <= Fraction(2 * i + 1, 2 * passes) <= last]


@pytest.mark.parametrize("part", PARTS)
def test_a_pass_belongs_to_a_part_where_its_middle_does(part):
    for passes in range(1, 60):
        assert RunPart.of(part).passes(passes) == middles(part, passes)


def captured(pipe, part, passes):
    with capture(pipe, steps=part) as store:
        pipe("a cat", num_inference_steps=passes, output_type="latent", height=64, width=64)
    return [i for i in range(passes) if store.keeps(i)]


def edited(part, passes):
    """Those in which self-attention becomes the source's."""
    prompts = [read_prompt(tiny_tokenizer(8), text) for text in ("a cat", "a dog")]
    control = AttentionReplace(prompts, passes, 0.0, part)
    control.num_att_layers, found = 1, []
    for step in range(passes):
        probs = torch.rand(4, 4, 4)
        control(probs, False, "up")
        found += [step] if torch.equal(probs[3], probs[2]) else []
    return found


def edited_words(part, passes):
    prompts = [read_prompt(tiny_tokenizer(8), text) for text in ("a cat", "a dog")]
    columns = AttentionReplace(prompts, passes, {"default_": 0.0, "dog": part}, 0.0).cross_replace
    return [i for i in range(passes) if columns[i].any()]


def knocked_out(pipe, part, passes):
    """Those whose rows differ where one of them loses a column."""
    seen = []
    removal = Removal(pipe, [(), (2,)], 77, None, part)
    with removal:
        hook = pipe.unet.register_forward_pre_hook(lambda *_: seen.append(bool(removal._edits)))
        latents = torch.randn(1, 4, 8, 8).repeat(2, 1, 1, 1)
        pipe(["a cat"] * 2, num_inference_steps=passes, output_type="latent", latents=latents)
        hook.remove()
    return [i for i, changed in enumerate(seen) if changed]


@pytest.mark.parametrize("part", [(0.5, 1.0), (0.0, 0.5)])
@pytest.mark.parametrize("passes", tiered([3, 7], quick=2))
def test_captures_knockouts_and_edits_mean_the_same_by_a_half(part, passes):
    pipe, expected = small_pipeline(), middles(part, passes)
    assert len(expected) == (passes + 1) // 2  # the pass in the very middle is of both halves
    assert captured(pipe, part, passes) == expected
    assert edited(part, passes) == expected
    assert edited_words(part, passes) == expected
    assert knocked_out(pipe, part, passes) == expected


def test_from_a_point_to_itself_there_is_nothing():
    assert RunPart.of((0.5, 0.5)).passes(5) == []
    assert RunPart.of(0.0).passes(5) == []


@pytest.mark.parametrize(
    "span", [-0.1, 1.1, float("nan"), (0.8, 0.2), (0.1,), "half", None, [0, 2], True, (False, 0.5)]
)
def test_what_is_no_part_is_refused(span):
    with pytest.raises(ValueError, match=r"part of the run from 0 to 1.*For n steps pass n / 4\."):
        RunPart.of(span, 4)


@pytest.mark.parametrize("pair", [(0.5, 1.0), [0.5, 1], (np.float32(0.5), 1)])
def test_a_pair_of_numbers_is_a_part(pair):
    assert Steps.of(pair) == Steps((0.5, 1.0), part=RunPart(0.5, 1.0))
    assert not Steps.of(pair).each


def test_what_was_read_is_taken_as_it_is():
    assert Steps.of(Steps.of([2, 0])) == Steps([2, 0], each=True, numbers=(2, 0))
    assert Heads.of(Heads.of("all")) == Heads("all", each=True)
    for pair in ([0, 1], np.array([0, 1])):
        assert Steps.of(pair) == Steps([0, 1], each=True, numbers=(0, 1))


NUMBERS = [0.5, 3, torch.tensor(1), torch.tensor([]), torch.tensor([[0, 1]]), np.array(2)]
TRUTHS = [True, [True], [0, True], (False, 0.5), torch.tensor([True, False]), [np.True_]]


@pytest.mark.parametrize(
    "heads", [[2, 0], torch.tensor([2, 0]), np.array([2, 0]), range(2, -1, -2)]
)
def test_indices_are_whole_numbers_of_any_library(heads):
    assert Heads.of(heads) == Heads([2, 0], each=True, numbers=(2, 0))
    assert Steps.of(heads) == Steps([2, 0], each=True, numbers=(2, 0))
    assert Keep.of(tokens=heads, among=[heads]).tokens == (2, 0)
    assert Keep.of(tokens=heads, among=[heads]).among == [(2, 0)]
    assert all(type(number) is int for number in Keep.of(tokens=heads).tokens)


@pytest.mark.parametrize("value", [*NUMBERS, *TRUTHS, None, "last step", [], [0, 0], [-1], [0.5]])
def test_what_chooses_no_steps_is_refused(value):
    with pytest.raises(ValueError, match=r'pass "mean", "all", "last", a part .* not empty'):
        Steps.of(value)


@pytest.mark.parametrize("value", [*NUMBERS, *TRUTHS, "all", [], [-1], [0.5], 3])
def test_what_names_no_columns_is_refused(value):
    with pytest.raises(ValueError, match="tokens=.*: pass token columns from 0"):
        Keep.of(tokens=value)
    with pytest.raises(ValueError, match="among=.*: pass a list of columns"):
        Keep.of(among=[value])


@pytest.mark.parametrize("value", [*NUMBERS[1:], *TRUTHS, None, "last"])
def test_what_chooses_no_heads_is_refused(value):
    with pytest.raises(ValueError, match='heads=.*: pass "mean", "all", or a list of indices'):
        Heads.of(value)


def test_what_a_store_could_read_in_two_ways_is_refused():
    pipe, store = small_pipeline(), sdattn.AttentionStore(keep_steps=True)
    store.attach(pipe)
    pipe.unet.set_attn_processor(sdattn.TorchAttnProcessor(store))
    pipe("a cat", num_inference_steps=2, output_type="latent", height=64, width=64)
    with pytest.raises(ValueError, match="two ways"):
        sdattn.heatmaps(store, pipe, "a cat", steps=(0, 1))


def test_the_options_of_a_run_are_refused_before_it():
    with pytest.raises(ValueError, match="two ways"):
        sdattn.generate(small_pipeline(), "a cat", capture_options={"steps": (0, 1)})
