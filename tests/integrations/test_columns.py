"""Columns of words by ComfyUI's tokenizers, on tokenizers of transformers behind a double."""

import math
import sys
import types

import pytest
import torch
from helpers import comfy_double as comfy
from helpers.tiny_tokenizers import tiny_t5, tiny_tokenizer

from integrations.comfyui.columns import OMNI, TURN, _after_template, _distance, read
from integrations.comfyui.layouts import TextFacts
from sdattn import Prompt
from sdattn.errors import InvalidValueError
from sdattn.prompts.tokenizing import Token

PROMPT = "a red-haired cat, on the sofa"
WORDS = ["a", "red-haired", "cat", ",", "on", "the", "sofa"]


def clip_part(**options):
    return comfy.Part(tiny_tokenizer(), 77, **options)


def t5_part(length=40):
    return comfy.Part(tiny_t5(), length)


class Unpadded(comfy.Part):
    """As of Qwen, Gemma and Llama: one chunk, as long as the text."""

    def chunks(self, text):
        (row,) = super().chunks(text)
        return [row[: [word for *_, word in row].index(0, 1) + 1]]


def spelled(part, prompt, word):
    tokens = [prompt.tokens[column] for column in prompt.find(word)[0]]
    return "".join(token.text for token in tokens).replace("</w>", "").replace("\u2581", "")


@pytest.mark.parametrize(
    ("clip", "facts"),
    [
        (comfy.Clip(l=clip_part()), TextFacts(77)),
        (comfy.Clip(l=clip_part(), g=clip_part()), TextFacts(77)),
        (comfy.Clip(l=clip_part(), t5xxl=t5_part()), TextFacts(40, ("l",))),
        (comfy.Clip(l=clip_part(), t5xxl=t5_part()), TextFacts(117)),
    ],
    ids=["CLIP", "two CLIPs", "T5 alone", "CLIP and T5"],
)
def test_each_word_is_found_by_each_encoder(clip, facts):
    prompt = read(clip, PROMPT, facts)
    assert [word.text for word in prompt.words] == WORDS
    assert len(prompt.tokens) == facts.columns
    for word in WORDS:
        assert word.replace("-", "") in spelled(clip, prompt, word).replace("-", "")


def test_chunks_of_a_long_prompt_follow_each_other():
    prompt = read(comfy.Clip(l=clip_part()), " ".join(["cat"] * 80), TextFacts(154))
    columns = [word.columns for word in prompt.words]
    assert columns[74] == (75,) and columns[75] == (78,)


def test_case_and_unknown_characters_do_not_shift_words():
    clip = comfy.Clip(l=clip_part(), t5xxl=t5_part())
    prompt = read(clip, "A CAT \u732b on \u00bd sofa", TextFacts(40, ("l",)))
    for word in ("cat", "\u732b", "on", "sofa"):
        assert prompt.find(word)
    assert spelled(clip, prompt, "sofa") == "sofa"


def test_vectors_of_an_embedding_are_one_word():
    part = clip_part(embeddings={"glow": torch.ones(2, comfy.WIDTH)})
    prompt = read(comfy.Clip(l=part), "a embedding:glow cat", TextFacts(77))
    assert prompt.find("embedding:glow") == [(2, 3)] and prompt.find("cat") == [(4,)]


def test_an_embedding_of_another_width_is_not_counted():
    part = clip_part(embeddings={"glow": torch.ones(2, 3)})
    prompt = read(comfy.Clip(l=part), "a embedding:glow cat", TextFacts(77))
    assert prompt.find("cat") == [(2,)]
    assert prompt.words[1].columns == () and len(prompt.tokens) == 77


@pytest.fixture
def weights(monkeypatch):
    """The module by which the nodes read a prompt's weights."""
    monkeypatch.setitem(sys.modules, "comfy", types.ModuleType("comfy"))
    monkeypatch.setitem(sys.modules, "comfy.sd1_clip", comfy)


@pytest.mark.parametrize(
    "prompt",
    [
        "a (cat:1.3)(sofa:0.7)",
        "a (cat)(sofa)",
        "a ((cat))(sofa:1.2)",
        "a ((cat:1.2)(sofa:0.5):0.9)",
        "a (cat:1.3) (sofa:0.7)",
    ],
)
def test_adjacent_weights_are_of_two_words(weights, prompt):
    part = clip_part(has_weights=True)
    found = read(comfy.Clip(l=part), prompt, TextFacts(77))
    assert [word.text for word in found.words] == ["a", "cat", "sofa"]
    assert found.find("cat") == [(2,)] and found.find("sofa") == [(3, 4, 5, 6)]


def test_a_weight_within_a_word_leaves_it_whole(weights):
    part = clip_part(has_weights=True)
    found = read(comfy.Clip(l=part), "a \\(cat\\) on (cat:1.3)s", TextFacts(77))
    assert [word.text for word in found.words] == ["a", "(", "cat", ")", "on", "cats"]
    assert spelled(part, found, "cats") == "cats"


def test_a_template_is_no_word_and_may_be_cut_off():
    part = clip_part(template="a photo of {} on the sofa")
    whole = read(comfy.Clip(l=part), "on a sofa", TextFacts(77))
    first, *_ = whole.find("on")
    assert len(whole.find("on")) == 1
    rows = read(comfy.Clip(l=part), "on a sofa", TextFacts(77))
    assert rows.tokens[first[0]].special == "" and rows.tokens[1].special == "<template>"


def test_a_template_is_cut_at_its_last_turn_if_that_is_spelled_otherwise():
    """As Qwen-Image's encoder does: before an embedding some versions give no line's end."""
    tokens = [Token(i, text, 0, 0, "<template>") for i, text in enumerate(["<s>", *TURN])]
    word = Token(9, "cat", 0, 3, "")
    assert _after_template(Prompt("cat", (), (*tokens, word))) == 1
    assert _after_template(Prompt("cat", (), (*tokens[:-1], word))) == 3


def test_the_template_is_that_of_captions_where_images_have_some():
    """Both templates give as many columns, so their number does not tell them apart."""

    class Clip(comfy.Clip):
        def tokenize(self, text, return_word_ids=False, llama_template="on a {}"):
            before, after = {"on a {}": ("on a ", ""), OMNI: ("on ", " sofa")}[llama_template]
            return super().tokenize(before + text + after)

    clip = Clip(l=clip_part())
    before = [len(tiny_tokenizer()(text)["input_ids"]) - 1 for text in ("on a", "on")]
    with_captions = TextFacts(77, has_images=True, has_captions=True)
    assert read(clip, "cat", TextFacts(77)).find("cat") == [(before[0],)]
    assert read(clip, "cat", with_captions).find("cat") == [(before[1],)]


def test_concatenated_prompts_are_told_by_a_line():
    prompt = read(comfy.Clip(l=clip_part()), "a cat\n---\na sofa", TextFacts(154))
    assert prompt.find("cat") == [(2,)] and prompt.find("sofa")[0][0] == 79


@pytest.mark.parametrize(
    ("clip", "facts", "cat", "sofa"),  # columns by the tokenizers' pieces
    [
        (comfy.Clip(l=clip_part()), TextFacts(77), (2,), (7, 8, 9, 10)),
        # as many columns as two concatenated prompts have by each encoder alone
        (comfy.Clip(l=clip_part(), t5xxl=t5_part(77)), TextFacts(154), (2, 78), (7, 8, 9, 10, 84)),
    ],
    ids=["CLIP", "CLIP and T5"],
)
def test_a_prompt_with_a_line_of_dashes_is_one_if_it_fits(clip, facts, cat, sofa):
    prompt = read(clip, "a cat\n---\na sofa", facts)
    assert [word.text for word in prompt.words] == ["a", "cat", "---", "a", "sofa"]
    assert prompt.find("cat") == [cat] and prompt.find("sofa") == [sofa]


def test_a_template_that_could_be_cut_off_twice_does_not_make_two_prompts_of_one():
    """One prompt of Z-Image has as many columns as two without their template's start."""

    part = Unpadded(tiny_tokenizer(), 1000, template="o {} o o o o")
    n_columns = len(part.chunks("a\n---\ncat")[0])
    assert n_columns == sum(len(part.chunks(text)[0][2:]) for text in ("a", "cat"))
    prompt = read(comfy.Clip(l=part), "a\n---\ncat", TextFacts(n_columns))
    assert prompt.find("a") == [(2,)] and prompt.find("cat") == [(6,)]


def test_ways_of_tokenizing_are_tried_until_one_fits():
    class Clip(comfy.Clip):
        def tokenize(self, text, return_word_ids=False, llama_template="{}"):
            return super().tokenize(llama_template.format(text))

    clip = Clip(l=Unpadded(tiny_tokenizer(), 1000))
    clip.tokenizer.llama_template_images = "o o {}"
    assert read(clip, "cat", TextFacts(3, has_images=True)).find("cat") == [(1,)]
    assert read(clip, "cat", TextFacts(5, has_images=True)).find("cat") == [(3,)]


def test_states_of_another_size_are_infinitely_far():
    clip = comfy.Clip(l=clip_part())
    states = clip.encode_from_tokens(clip.tokenize("a cat"))
    assert _distance(clip, ["a cat"], states) == 0
    assert _distance(clip, ["a cat"], torch.cat([states + 1, states], 1)) == 0  # filled up before
    for other in (states[:, 1:], states[..., 1:]):
        assert _distance(clip, ["a cat"], other) == math.inf


def test_what_was_encoded_tells_one_long_prompt_from_two_concatenated_ones():
    """Both have two chunks of 77 columns, and their words stand at other places."""
    first, second = " ".join(["cat"] * 50), " ".join(["a"] * 40)
    both = f"{first}\n---\n{second}"
    clip = comfy.Clip(l=clip_part())
    undivided = clip.encode_from_tokens(clip.tokenize(both))
    parts = [clip.encode_from_tokens(clip.tokenize(text)) for text in (first, second)]
    concatenated = torch.cat(parts, 1)
    assert undivided.shape == concatenated.shape
    facts = TextFacts(154)
    for drawn, columns in ((undivided, (54,)), (concatenated, (78,)), (None, (54,))):
        assert read(clip, both, facts, drawn).find("a")[0] == columns
    noisy = concatenated.half().repeat(2, 1, 1)  # in another type, for a batch
    assert read(clip, both, facts, noisy).find("a")[0] == (78,)
    other = torch.zeros(1, 200, comfy.WIDTH + 1)  # which neither encodes to
    assert read(clip, both, facts, other).find("a")[0] == (54,)


def test_texts_that_are_filled_up_on_the_left():
    facts = TextFacts(100, filled_to=100)
    prompt = read(comfy.Clip(t5xxl=t5_part()), "a cat", facts)
    assert prompt.tokens[59].special == "<pad>" and prompt.find("cat")[0][0] >= 60
    with pytest.raises(InvalidValueError, match="cannot be told"):
        read(comfy.Clip(t5xxl=t5_part()), "a cat", TextFacts(100, filled_to=512))


def test_what_does_not_fit_is_refused_with_the_tokens():
    with pytest.raises(InvalidValueError, match=r"154 columns[\s\S]*2 cat</w>"):
        read(comfy.Clip(l=clip_part()), "a cat", TextFacts(154))
    with pytest.raises(InvalidValueError, match="empty"):
        read(comfy.Clip(l=clip_part()), " \n", TextFacts(77))


def test_two_encoders_whose_columns_differ_are_refused():
    has = clip_part(embeddings={"glow": torch.ones(1, comfy.WIDTH)})
    other = clip_part(embeddings={"glow": torch.ones(1, 3)})
    with pytest.raises(InvalidValueError, match="cannot be told"):
        read(comfy.Clip(l=has, g=other), "a embedding:glow cat", TextFacts(77))
