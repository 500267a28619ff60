"""Words and their columns, against tokenizing each word on its own."""

import warnings

import pytest
from conftest import tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from sdattn.tokens import TruncationWarning, read_prompt, split_words


def lengths(tokenizer, words):
    """How many tokens each word makes by itself."""
    return [len(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in words]


@pytest.mark.parametrize(
    "prompt",
    [
        "a red cat",
        "A turquoise  circle,\tleft of it (a DOG)!",
        'the cat\'s red-haired dog; 8k, "art"',
        "un café crème à côté",
        "a cat 😀😀 and 👩‍🚀, ok",
        "一只红色的猫",
        "कुत्ता और cat",
        "path/to\\cat <b>&amp;",
    ],
)
def test_words_own_the_tokens_that_they_make(tokenizer, prompt):
    read = read_prompt(tokenizer, prompt)
    spelled = [word.text for word in read.words]
    assert "".join(spelled) == "".join(prompt.split())
    # CLIP splits at every change between letters, digits and signs, so a word's own tokens are
    # the sum over such runs, and consecutive words fill consecutive columns.
    owned = [column for word in read.words for column in word.columns]
    assert owned == list(range(1, 1 + len(owned)))
    ids = tokenizer(prompt)["input_ids"]
    assert [read.tokens[column].id for column in owned] == ids[1:-1]
    assert [read.tokens[i].special for i in (0, len(owned) + 1)] == ["<sos>", "<eos>"]
    assert {token.special for token in read.tokens[len(owned) + 2 :]} == {"<pad>"}


def test_words_of_several_pieces_and_repeats(tokenizer):
    read = read_prompt(tokenizer, "a cat, a turquoise Cat")
    assert lengths(tokenizer, ["a", "cat", ",", "a", "turquoise", "cat"]) == [1, 1, 1, 1, 9, 1]
    assert read.find("turquoise") == [tuple(range(5, 14))]
    assert read.find("a") == [(1,), (4,)]
    assert read.find("CAT") == [(2,), (14,)]
    assert read.find("turquoise   cat") == [tuple(range(5, 15))]
    assert read.find("cat , a") == [(2, 3, 4)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("girl's rock'n'roll", ["girl's", "rock'n'roll"]),
        ("red-haired - not -so", ["red-haired", "-", "not", "-", "so"]),
        ("'quoted' words", ["'", "quoted", "'", "words"]),
        ("(cat:1.3)", ["(", "cat", ":", "1", ".", "3", ")"]),
        ("红猫cat", ["红", "猫", "cat"]),
        ("हिन्दी", ["हिन्दी"]),
        ("👩‍🚀 ❤️", ["👩‍🚀", "❤️"]),
        ("", []),
        (" \t\n", []),
    ],
)
def test_what_a_word_is(text, words):
    found = split_words(text)
    assert [word for word, _, _ in found] == words
    assert all(text[start:end] == word for word, start, end in found)


def test_special_columns_go_by_name(tokenizer):
    read = read_prompt(tokenizer, "a cat")
    assert read.find("<sos>") == read.find("<|startoftext|>") == [(0,)]
    assert read.find("<eos>") == read.find("<|endoftext|>") == [(3,)]
    assert read.find("<pad>") == [tuple(range(4, 77))]


@pytest.mark.parametrize("prompt", ["", "   ", "\n\t"])
def test_an_empty_prompt_is_refused(tokenizer, prompt):
    with pytest.raises(ValueError, match="is empty"):
        read_prompt(tokenizer, prompt)


@pytest.mark.parametrize("word", ["dog", "ca", "red cat", "cat a", "", "  "])
def test_a_word_that_is_not_there_is_refused_with_those_that_are(tokenizer, word):
    with pytest.raises(KeyError, match="a, cat|no word in it"):
        read_prompt(tokenizer, "a cat").find(word)


def test_words_that_were_cut_off_are_named():
    tokenizer = tiny_tokenizer(max_length=8)
    with pytest.warns(TruncationWarning, match="reads 8 tokens.* never saw: dog, red, b$"):
        read = read_prompt(tokenizer, "cat cat cat cat cat cat dog red b")
    assert [word.text for word in read.truncated] == ["dog", "red", "b"]
    assert len(read.tokens) == 8
    with pytest.raises(KeyError, match="was cut off"):
        read.find("dog")
    assert read.find("cat") == [(i,) for i in range(1, 7)]


def test_a_prompt_of_2000_characters_keeps_its_first_words(tokenizer):
    prompt = "cat dog " * 250
    with pytest.warns(TruncationWarning):
        read = read_prompt(tokenizer, prompt)
    assert len(read.seen) == 75
    assert len(read.truncated) == 425


def test_a_tokenizer_that_adds_an_end_only():
    """T5's habit: no start token, an end token, another token for padding."""
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "a": 2, "cat": 3, "?": 4}, "?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", model_max_length=6
    )
    read = read_prompt(tokenizer, "a cat")
    assert [token.special for token in read.tokens] == ["", "", "<eos>", "<pad>", "<pad>", "<pad>"]
    assert read.find("a cat") == [(0, 1)]


def test_a_slow_tokenizer_gives_the_same_columns(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary += ["a", "cat", "tur", "##quo", "##ise", "dog", ",", "'", "s"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerLegacy(str(tmp_path / "vocab.txt"), model_max_length=12)
    assert not tokenizer.is_fast
    read = read_prompt(tokenizer, "a cat's turquoise, dog")
    assert [(word.text, word.columns) for word in read.words] == [
        ("a", (1,)),
        ("cat's", (2, 3, 4)),
        ("turquoise", (5, 6, 7)),
        (",", (8,)),
        ("dog", (9,)),
    ]
    with pytest.warns(TruncationWarning, match="never saw: cat, dog"):
        short = read_prompt(tokenizer, "a cat turquoise, dog a turquoise a cat dog", max_length=14)
    assert [word.columns for word in short.words][-4:] == [(9, 10, 11), (12,), (), ()]


def test_no_warning_where_nothing_is_lost(tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_prompt(tokenizer, "cat " * 75)
