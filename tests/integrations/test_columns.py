"""Columns of words by ComfyUI's tokenizers, on tokenizers of transformers behind a double."""

import pytest
import torch
from helpers import comfy_double as comfy
from helpers.tiny_tokenizers import tiny_t5, tiny_tokenizer

from integrations.comfyui.columns import OMNI, TURN, _after_template, read
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
