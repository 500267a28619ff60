"""Words and their columns, against tokenizing each word on its own."""

import itertools
import warnings

import pytest
from tiny_pipelines import make_pipeline
from tiny_tokenizers import tiny_gemma, tiny_mistral, tiny_qwen, tiny_t5, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.processors import ByteLevel, TemplateProcessing
from transformers import PreTrainedTokenizerFast

try:
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy
except ImportError:  # transformers 4
    from transformers import BertTokenizer as BertTokenizerLegacy

from sdattn.prompts.chunks import read_long_prompt
from sdattn.prompts.tokens import (
    Prompt,
    TruncationWarning,
    Word,
    join_prompts,
    read_labels,
    read_prompt,
    read_source,
    split_words,
)
from sdattn.prompts.words import Source

KINDS = {
    "clip": tiny_tokenizer,
    "t5": tiny_t5,
    "gemma": tiny_gemma,
    "qwen": tiny_qwen,
    "qwen-left": lambda: tiny_qwen("left"),
    "mistral": tiny_mistral,
    "mistral-right": lambda: tiny_mistral("right"),
}


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


def slow_tokenizer(folder, max_length):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary += ["a", "cat", "tur", "##quo", "##ise", "dog", ",", "'", "s"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizerLegacy(str(folder / "vocab.txt"), model_max_length=max_length)
    assert not tokenizer.is_fast
    return tokenizer


def test_a_slow_tokenizer_gives_the_same_columns(tmp_path):
    tokenizer = slow_tokenizer(tmp_path, 12)
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


def test_a_slow_tokenizer_knows_templates_and_added_tokens(tmp_path):
    tokenizer = slow_tokenizer(tmp_path, 20)
    tokenizer.add_tokens(["<toy>", "<toy>_1"])
    read = read_prompt(tokenizer, "a <toy>, cat")
    assert [(word.text, word.columns) for word in read.words] == [
        ("a", (1,)),
        ("<toy>", (2, 3)),
        (",", (4,)),
        ("cat", (5,)),
    ]
    source = Source.of("turquoise dog").within("dog, cat ", ", a cat")
    read = read_source(tokenizer, source, padding="max_length", max_length=14, truncation=True)
    assert read.find("turquoise dog") == [(4, 5, 6, 7)]
    assert read.find("<template>") == [(1, 2, 3, 8, 9, 10)]
    assert read.find("<eos>") == [(11,)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "prompt",
    [
        "a red cat on the sofa",
        "  A turquoise Cat, a dog (on a  cat's SOFA)! ",
        "un café crème, 😀 cat\n",
        "一只 cat 红色的猫",
    ],
)
def test_every_tokenizer_spells_a_word_by_its_columns(kind, prompt):
    tokenizer = KINDS[kind]()
    read = read_prompt(tokenizer, prompt, max_length=77)
    assert len(read.tokens) == 77
    ids = tokenizer(prompt, padding="max_length", max_length=77)["input_ids"]
    assert [token.id for token in read.tokens] == ids
    for word in read.words:
        assert prompt[word.start : word.end] == word.text
        spelled = tokenizer.decode([ids[i] for i in word.columns])
        assert "<unk>" in spelled or "".join(spelled.split()).lower() == word.text.lower()
    # No token of the prompt is left over, but for white space.
    owned = {column for word in read.words for column in word.columns}
    for i, token in enumerate(read.tokens):
        assert token.special or i in owned or not prompt[token.start : token.end].strip()


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("clip", ["<sos>"], ["<eos>", "<pad>", "<pad>", "<pad>"]),
        ("t5", [], ["<eos>", "<pad>", "<pad>", "<pad>", "<pad>"]),
        ("gemma", ["<pad>"] * 4 + ["<sos>"], []),
        ("qwen", [], ["<pad>"] * 5),
        ("qwen-left", ["<pad>"] * 5, []),
        ("mistral", ["<pad>"] * 4 + ["<sos>"], []),
        ("mistral-right", ["<sos>"], ["<pad>"] * 4),
    ],
)
def test_special_columns_of_every_tokenizer(kind, before, after):
    read = read_prompt(KINDS[kind](), "a red cat", max_length=8)
    assert [token.special for token in read.tokens] == [*before, "", "", "", *after]
    assert read.find("a red cat") == [(len(before), len(before) + 1, len(before) + 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_tokenizer_tells_what_it_cut_off(kind):
    tokenizer = KINDS[kind]()
    added = tokenizer.num_special_tokens_to_add()
    prompt = " ".join(["a", *["cat"] * (5 - added), "dog", "red"])
    with pytest.warns(TruncationWarning, match="reads 6 tokens.* never saw: dog, red$"):
        read = read_prompt(tokenizer, prompt, max_length=6)
    assert [word.text for word in read.truncated] == ["dog", "red"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_around_the_prompt_is_template(kind):
    """Against the prompt's own tokens, which a space or a sign keeps apart from what is around."""
    tokenizer = KINDS[kind]()
    source = Source.of("a red Cat").lower().within("the dog on\n", "\n!")
    read = read_source(tokenizer, source, keep=lambda n: range(2, n))
    ids = tokenizer(source.text)["input_ids"][2:]
    assert [token.id for token in read.tokens] == ids
    assert read.text == "a red Cat"
    assert [(word.text, word.start, word.end) for word in read.words] == split_words("a red Cat")
    for word in read.words:
        assert tokenizer.decode([ids[i] for i in word.columns]).strip() == word.text.lower()
    with pytest.raises(KeyError, match="'dog' is not in the prompt"):
        read.find("dog")
    (template,) = read.find("<template>")
    assert not {i for word in read.words for i in word.columns} & set(template)


def test_a_source_remembers_where_its_characters_came_from():
    source = Source.of("  İn a <toy> <toy>\n").lower().strip()
    source = source.replace("<toy>", "<toy> <toy>_1").within("say ", ".")
    assert source.text == "say i̇n a <toy> <toy>_1 <toy> <toy>_1."
    assert len(source.origins) == len(source.text)
    for start, end, expected in [(4, 6, "İ"), (6, 7, "n"), (10, 15, "<toy>"), (16, 23, ">")]:
        span = source.span(start, end)
        assert source.prompt[slice(*span)] == expected
    assert source.span(24, 29) == (13, 18)
    assert source.span(0, 4) is None
    assert source.span(len(source.text) - 1, len(source.text)) is None


TOY = ["<cat-toy>", "<cat-toy>_1", "<cat-toy>_2", "sks", "<one>"]


@pytest.mark.parametrize("kind", ["clip", "t5", "gemma", "qwen", "mistral"])
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("a <cat-toy>, red", ["a", "<cat-toy>", ",", "red"]),
        ("<cat-toy><one>sks dog", ["<cat-toy>", "<one>", "sks", "dog"]),
        ("(<one>)<cat-toy>'s sofa", ["(", "<one>", ")", "<cat-toy>", "'", "s", "sofa"]),
        ("red <cat-toy> on a <cat-toy>!", ["red", "<cat-toy>", "on", "a", "<cat-toy>", "!"]),
        ("a sks's cat asks", ["a", "sks's", "cat", "asks"]),
        ("a <cat toy> <", ["a", "<", "cat", "toy", ">", "<"]),
        ("a <cat-toy>_1 <one>", ["a", "<cat-toy>_1", "<one>"]),
    ],
)
def test_textual_inversions_are_words(kind, prompt, words):
    """Against what diffusers itself makes of the prompt."""
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens(TOY)
    pipe = make_pipeline()
    read = read_prompt(tokenizer, prompt, max_length=60)
    converted = pipe.maybe_convert_prompt(prompt, tokenizer)
    ids = tokenizer(converted, padding="max_length", max_length=60)["input_ids"]
    assert [token.id for token in read.tokens] == ids
    assert [word.text for word in read.words] == words
    vectors = {"<cat-toy>": TOY[:3]}
    for word in read.words:
        assert prompt[word.start : word.end] == word.text
        spelled = tokenizer.convert_ids_to_tokens([ids[i] for i in word.columns])
        if word.text in TOY:
            assert [one for one in spelled if one in TOY] == vectors.get(word.text, [word.text])
        elif "sks" not in word.text:
            assert not set(TOY) & set(spelled)
        assert word.columns in read.find(word.text)
    assert read.find(prompt) == [tuple(sorted({i for word in read.words for i in word.columns}))]


def test_textual_inversions_that_were_cut_off_have_their_name(tokenizer):
    tokenizer.add_tokens(TOY)
    with pytest.warns(TruncationWarning, match="never saw: <one>, <cat-toy>$"):
        read = read_prompt(tokenizer, "cat <cat-toy> <one> <cat-toy>", max_length=5)
    assert read.find("cat <cat-toy>") == [(1, 2, 3)]
    assert read.find("<cat-toy>") == [(2, 3)]


def test_added_tokens_may_take_the_space_before_them(tokenizer):
    tokenizer.add_tokens([AddedToken("<toy>", lstrip=True, rstrip=True)])
    read = read_prompt(tokenizer, "a  <toy> cat")
    assert [(word.text, word.start) for word in read.words] == [("a", 0), ("<toy>", 3), ("cat", 9)]
    assert read.find("<toy>") == [(2,)]


def chunked_ids(tokenizer, text, ends):
    """77 columns a chunk, the text cut at ``ends``."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    bounds = itertools.pairwise([0, *ends, len(ids)])
    chunks = [[518, *ids[start:end], 519] for start, end in bounds]
    return [one for chunk in chunks for one in [*chunk, *[519] * (77 - len(chunk))]]


def test_long_prompts_in_chunks_of_their_own(tokenizer):
    text = "cat dog " * 70  # ends a chunk with a word however it is cut
    read = read_long_prompt(tokenizer, text, 154)
    assert [token.id for token in read.tokens] == chunked_ids(tokenizer, text, [75])
    assert read.find("cat") == [(i + 1 + i // 75 * 2,) for i in range(0, 140, 2)]
    text = "cat dog " * 72 + "turquoise red"  # token 150 is within "turquoise"
    read = read_long_prompt(tokenizer, text, 231, split="tokens")
    assert [token.id for token in read.tokens] == chunked_ids(tokenizer, text, [75, 150])
    assert read.find("<sos>") == [(0, 77, 154)]
    assert read.find("<eos>") == [(76, 153, 159)]
    assert read.find("turquoise red") == [(*range(147, 153), *range(155, 159))]


def test_long_prompts_with_one_start_and_one_end(tokenizer):
    text = "cat dog " * 50
    for n_chunks in (2, 3):
        read = read_long_prompt(tokenizer, text, 75 * n_chunks + 2)
        ids = tokenizer(text, padding="max_length", max_length=75 * n_chunks + 2)["input_ids"]
        assert [token.id for token in read.tokens] == ids
        assert read.find("<sos>") == [(0,)]
        assert read.find("<eos>") == [(101,)]
        assert read.find("<pad>") == [tuple(range(102, 75 * n_chunks + 2))]
    tokenizer.pad_token = "!"  # SD 2.x: the end comes last
    read = read_long_prompt(tokenizer, text, 152)
    assert read.find("<eos>") == [(151,)]
    assert read.find("<pad>") == [tuple(range(101, 151))]


def test_long_prompts_that_end_their_chunks_with_a_sentence(tokenizer):
    """Compel's ``SplitLongTextMode``; the ends were made with compel 2.5.1."""
    text = "cat dog. " * 30  # 3 tokens a sentence: 75 is an end anyhow
    assert read_long_prompt(tokenizer, text, 154) == read_long_prompt(
        tokenizer, text, 154, split="sentences"
    )
    text = "cat dog. cat, " * 10 + "red turquoise " * 6 + "cat"  # 50 + 60 + 1 tokens
    for split, ends in {"tokens": [75], "sentences": [48], "phrases": [50], "words": [71]}.items():
        read = read_long_prompt(tokenizer, text, 154, split=split)
        assert [token.id for token in read.tokens] == chunked_ids(tokenizer, text, ends), split
    with pytest.raises(ValueError, match=r"'cat' is at \(49,\) where.*\(78,\) .*split=\"tokens\""):
        read_long_prompt(tokenizer, text, 154)
    with pytest.raises(ValueError, match="split='brutal': pass one of tokens, sentences"):
        read_long_prompt(tokenizer, text, 154, split="brutal")


def test_long_prompts_that_are_not_long_have_empty_chunks(tokenizer):
    read = read_long_prompt(tokenizer, "a cat", 154)  # beside a long negative prompt
    assert [token.id for token in read.tokens] == chunked_ids(tokenizer, "a cat", [2])
    assert read.find("<eos>") == [(3, 78)]
    assert read_long_prompt(tokenizer, "a cat", 77) == read_prompt(tokenizer, "a cat")


def test_long_prompts_can_be_too_long(tokenizer):
    text = "cat " * 160
    for columns, seen in [(154, 150), (152, 150)]:
        with pytest.warns(TruncationWarning, match=f"reads {columns} tokens.*saw: (cat, )+cat$"):
            read = read_long_prompt(tokenizer, text, columns)
        assert len(read.seen) == seen
    for columns in (76, 100, 153, 0, -77):
        with pytest.raises(ValueError, match=f"on {columns} token columns.*or labels"):
            read_long_prompt(tokenizer, text, columns)


def test_long_prompts_know_textual_inversions(tokenizer):
    tokenizer.add_tokens(TOY)
    read = read_long_prompt(tokenizer, "cat " * 74 + "<cat-toy> dog", 154, split="tokens")
    assert read.find("<cat-toy>") == [(75, 78, 79)]
    assert read.find("dog") == [(80,)]


def test_labels_are_words():
    read = read_labels({"cat": [2], "Red  dog": [5, 4, 5], "<toy>": range(7, 9)}, 10)
    assert read.text == "cat Red dog <toy>"
    assert read.words == (
        Word("cat", 0, 3, (2,)),
        Word("Red dog", 4, 11, (4, 5)),
        Word("<toy>", 12, 17, (7, 8)),
    )
    assert len(read.tokens) == 10
    assert [read.text[token.start : token.end] for token in read.tokens[2:6]] == [
        "cat",
        "",
        "Red dog",
        "Red dog",
    ]
    assert read.find("red dog") == [(4, 5)]
    assert read.find("cat red dog <toy>") == [(2, 4, 5, 7, 8)]
    for missing in ("dog", "<eos>", "<pad>", "red dog <"):
        with pytest.raises(KeyError, match="not in the prompt. Its words are: cat, Red dog"):
            read.find(missing)


@pytest.mark.parametrize(
    "labels",
    [
        {"cat": [10]},
        {"cat": [-1]},
        {"cat": [1.0]},
        {"cat": [True]},
        {"cat": ["1"]},
        {"cat": "12"},
        {"cat": 3},
        {"cat": None},
        {"cat": []},
        {"": [1]},
        {"  ": [1]},
        {3: [1]},
        {"dog": [1], "cat": [1, 99]},
    ],
)
def test_labels_that_cannot_be(labels):
    with pytest.raises(ValueError, match="whole numbers from 0 to 9, for text states of 10 col"):
        read_labels(labels, 10)


def test_no_labels_are_refused():
    with pytest.raises(ValueError, match="There are no labels"):
        read_labels({}, 10)


def test_joined_prompts_lie_behind_each_other(tokenizer):
    text = "a red-haired cat, a café"
    clip, t5 = read_prompt(tokenizer, text), read_prompt(tiny_t5(), text, max_length=50)
    joined = join_prompts([clip, t5])
    assert joined.tokens == clip.tokens + t5.tokens
    assert joined.text == text
    for word in joined.words:
        (first,), (second,) = [
            {w.columns for w in p.words if w.start == word.start} for p in (clip, t5)
        ]
        assert word.columns == first + tuple(77 + column for column in second)
    assert join_prompts([clip]) == clip


def test_joined_prompts_agree_on_what_a_word_is(tokenizer):
    """An embedding that one tokenizer only was taught."""
    clip = read_prompt(tokenizer, "a <one>, cat")
    tokenizer.add_tokens(TOY)
    taught = read_prompt(tokenizer, "a <one>, cat")
    for parts in ([clip, taught], [taught, clip]):
        joined = join_prompts(parts)
        assert [word.text for word in joined.words] == ["a", "<one>,", "cat"]
        assert len(joined.find("<one>,")[0]) == len(clip.find("<one>,")[0]) + 2


def test_joined_prompts_lose_what_all_parts_lost(tokenizer):
    text = "cat " * 10 + "dog"
    with pytest.warns(TruncationWarning):
        parts = [read_prompt(tokenizer, text, max_length=n) for n in (6, 12, 8)]
    joined = join_prompts(parts)
    assert [word.text for word in joined.truncated] == ["dog"]
    assert joined.words[4].columns == (6 + 5, 18 + 5)
    assert joined.words[9].columns == (6 + 10,)
    empty = Prompt(text, (), parts[0].tokens)
    assert join_prompts([parts[1], empty]).words == parts[1].words


def test_only_readings_of_one_text_are_joined(tokenizer):
    with pytest.raises(ValueError, match=r"readings of \['a', 'b'\]"):
        join_prompts([read_prompt(tokenizer, "a"), read_prompt(tokenizer, "b")])
    with pytest.raises(ValueError, match="Pass readings of one text"):
        join_prompts([])


def test_a_piece_without_width_is_no_template():
    """RoBERTa's tokenizer cuts the spaces off its offsets, so a lone space spans nothing."""
    tokenizer = tiny_qwen()
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    read = read_prompt(tokenizer, "cat  dog", max_length=4)
    assert [(token.text, token.special) for token in read.tokens[:3]] == [
        ("cat", ""),
        ("Ġ", ""),
        ("Ġdog", ""),
    ]
    assert [(word.text, word.columns) for word in read.words] == [("cat", (0,)), ("dog", (2,))]
    with pytest.raises(KeyError, match="<template>"):
        read.find("<template>")
