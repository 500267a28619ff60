"""Words and their columns, against tokenizing each word on its own."""

import re
import warnings
from itertools import product
from unicodedata import normalize

import pytest
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline
from helpers.tiny_tokenizers import TINY_TOKENIZERS, tiny_t5, tiny_tokenizer

from sdattn.prompts.matching import matches
from sdattn.prompts.tokens import (
    Prompt,
    TruncationWarning,
    Word,
    join_prompts,
    read_labels,
    read_pieces,
    read_prompt,
    read_source,
    split_words,
)
from sdattn.prompts.words import Source


def lengths(tokenizer, words):
    """How many tokens each word makes by itself."""
    return [len(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in words]


def test_words_of_several_pieces_and_repeats(tokenizer):
    read = read_prompt(tokenizer, "a cat, a turquoise Cat")
    assert lengths(tokenizer, ["a", "cat", ",", "a", "turquoise", "cat"]) == [1, 1, 1, 1, 9, 1]
    assert read.find("turquoise") == [tuple(range(5, 14))]
    assert read.find("a") == [(1,), (4,)]
    assert read.find("CAT") == [(2,), (14,)]
    assert read.find("turquoise   cat") == [tuple(range(5, 15))]
    assert read.find("cat , a") == [(2, 3, 4)]


def test_special_columns_go_by_name(tokenizer):
    read = read_prompt(tokenizer, "a cat")
    assert read.find("<sos>") == read.find("<|startoftext|>") == [(0,)]
    assert read.find("<eos>") == read.find("<|endoftext|>") == [(3,)]
    assert read.find("<pad>") == [tuple(range(4, 77))]


@pytest.mark.parametrize("prompt", ["", "   ", "\n\t"])
def test_an_empty_prompt_is_refused(tokenizer, prompt):
    with pytest.raises(ValueError, match="is empty"):
        read_prompt(tokenizer, prompt)


@pytest.mark.parametrize("word", ["dog", "ca", "red cat", "", "  "])
def test_a_word_that_is_not_there_is_refused_with_those_that_are(tokenizer, word):
    with pytest.raises(KeyError, match="a, cat|no word"):
        read_prompt(tokenizer, "a cat").find(word)


ACCENTS = [
    "a café",
    "une Crème brûlée",
    "Việt phở",
    "が犬",
    "高気圧のガス",
    "한국 고양이",
    "naïve Ångström",
]


@pytest.mark.parametrize("text", ACCENTS)
def test_accents_match_in_either_form(text, tokenizer):
    for prompt, word in product(("NFC", "NFD"), repeat=2):
        read = read_prompt(tokenizer, normalize(prompt, text))
        assert len(read.words) == len(read_prompt(tokenizer, normalize(word, text)).words)
        for one in read.words:
            for asked in (one.text.upper(), one.text):
                assert one.columns in read.find(normalize(word, asked))
    forms = [read_prompt(tokenizer, normalize(form, text)) for form in ("NFC", "NFD")]
    assert matches(*forms) == [(i, i) for i in range(len(forms[0].words))]


PARTS = [
    ("a dog's bowl", "dog", "<characters 2:5>"),
    ("red rainbows", "Rain", "<characters 4:8>"),
    ("แมวสีแดง", "สีแดง", "<characters 3:8>"),
    ("ແມວສີແດງ", "ແມວ", "<characters 0:3>"),
    ("ឆ្មាក្រហម", "ក្រហម", "<characters 4:9>"),
    ("ကြောင်နီ", "နီ", "<characters 6:8>"),
    ("a red dog's bowl", "red dog", "<characters 2:9>"),
]


@pytest.mark.parametrize(("prompt", "part", "name"), PARTS)
def test_a_part_of_a_word_is_asked_for_by_its_characters(prompt, part, name, tokenizer):
    read = read_prompt(tokenizer, prompt)
    with pytest.raises(KeyError, match=re.escape(name)) as caught:
        read.find(part)
    start = prompt.casefold().index(part.casefold())
    characters = set(range(start, start + len(part)))
    expected = []
    for column, token in enumerate(read.tokens):
        if not token.special and characters & set(range(token.start, token.end)):
            expected.append(column)
    assert read.find(name) == [tuple(expected)]
    assert str(expected) in str(caught.value)
    assert "'<columns 1:3>'" in str(caught.value)
    assert read.label(name) == prompt[start : start + len(part)]


def test_columns_and_characters_that_do_not_exist_are_refused(tokenizer):
    read = read_prompt(tokenizer, "a dog's bowl")
    assert read.find("<columns 1:3>") == [(1, 2)]
    assert read.label("<columns 1:3>") == "<columns 1:3>"
    assert read.find("<characters 3:4>") == read.find("<characters 2:5>")  # one token, "dog"
    assert read.find("<columns 0:77>") == [tuple(range(77))]
    found = read.find("<characters 0:12>")[0]
    assert found == tuple(sorted(c for word in read.words for c in word.columns))
    for name in ("<characters 5:5>", "<characters 5:2>", "<characters 0:13>", "<columns 3:78>"):
        with pytest.raises(KeyError, match="count from 0"):
            read.find(name)
    with pytest.raises(KeyError, match="a space"):
        read.find("<characters 1:2>")
    for name in ("<characters -1:2>", "<characters 1>", "<columns a:b>", "<letters 0:1>"):
        with pytest.raises(KeyError, match="not in the prompt|not next to each other"):
            read.find(name)


def test_a_special_token_inside_has_no_characters():
    read = read_pieces(["<s>", "▁a", "<x>", "▁dog", "</s>"])
    assert read.find("<characters 0:5>") == [(1, 3)]


def test_a_part_of_what_was_cut_off_is_refused(tokenizer):
    with pytest.warns(TruncationWarning):
        read = read_prompt(tokenizer, "a dog's bowl", max_length=4)
    with pytest.raises(KeyError, match="cut off"):
        read.find("bow")
    with pytest.raises(KeyError, match="cut off"):
        read.find("<characters 8:11>")


def test_each_text_encoder_has_its_own_special_columns_and_parts(tokenizer):
    one = read_prompt(tokenizer, "a dog's bowl")
    both = join_prompts([one, one], ["CLIP", "T5"])
    for name in ("<eos>", "<sos>", "<characters 2:5>"):
        (found,) = one.find(name)
        shifted = tuple(77 + column for column in found)
        assert both.find(name) == [found + shifted]
        parts = both.by_encoder()
        assert [own for _, own in parts.values()] == [range(77), range(77, 154)]
        assert parts["CLIP"][0].find(name) == [found]
        assert parts["T5"][0].find(name) == [shifted]


def test_words_that_are_not_together_are_asked_for_one_by_one(tokenizer):
    with pytest.raises(KeyError, match="'Cat A' are in the prompt, but.*alone: 'cat', 'a'"):
        read_prompt(tokenizer, "a cat").find("Cat A")


def test_words_that_were_cut_off_are_named():
    tokenizer = tiny_tokenizer(max_length=8)
    with pytest.warns(TruncationWarning, match="8 tokens.*: dog, red, b$"):
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


def test_no_warning_where_nothing_is_lost(tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_prompt(tokenizer, "cat " * 75)


@pytest.mark.parametrize("kind", TINY_TOKENIZERS)
def test_a_text_around_the_prompt_is_template(kind):
    """Against the prompt's own tokens, which a space or a sign keeps apart from what is around."""
    tokenizer = TINY_TOKENIZERS[kind]()
    source = Source.of("a red Cat").lower().within("the dog on\n", "\n!")
    read = read_source(tokenizer, source, keep=lambda n: range(2, n))
    ids = tokenizer(source.text)["input_ids"][2:]
    assert [token.id for token in read.tokens] == ids
    assert read.text == "a red Cat"
    assert [(word.text, word.start, word.end) for word in read.words] == split_words("a red Cat")
    for word in read.words:
        assert tokenizer.decode([ids[i] for i in word.columns]).strip() == word.text.lower()
    with pytest.raises(KeyError, match="'dog'.*prompt"):
        read.find("dog")
    (template,) = read.find("<template>")
    assert not {i for word in read.words for i in word.columns} & set(template)


TOY = ["<cat-toy>", "<cat-toy>_1", "<cat-toy>_2", "sks", "<one>"]


@pytest.mark.parametrize("kind", tiered(["clip", "t5", "gemma", "qwen", "mistral"], quick=2))
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
    tokenizer = TINY_TOKENIZERS[kind]()
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
    with pytest.warns(TruncationWarning, match=": <one>, <cat-toy>$"):
        read = read_prompt(tokenizer, "cat <cat-toy> <one> <cat-toy>", max_length=5)
    assert read.find("cat <cat-toy>") == [(1, 2, 3)]
    assert read.find("<cat-toy>") == [(2, 3)]


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
        with pytest.raises(KeyError, match="prompt.*cat, Red dog"):
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
    with pytest.raises(ValueError, match="0 to 9"):
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
    with pytest.raises(ValueError, match="text"):
        join_prompts([])


@pytest.mark.parametrize(
    "pieces",
    [
        ["<s>", "▁a", "▁red", "▁umb", "rella", "</s>"],
        ["<s>", "a", "Ġred", "Ġumb", "rella", "</s>"],
        ["<|startoftext|>", "a</w>", "red</w>", "umb", "rella</w>", "<|endoftext|>"],
        ["[CLS]", "a", "red", "umb", "##rella", "[SEP]"],
    ],
)
def test_pieces_are_joined_to_words_by_any_tokenizers_marks(pieces):
    prompt = read_pieces(pieces)
    assert prompt.text == "a red umbrella"
    assert [(word.text, word.columns) for word in prompt.words] == [
        ("a", (1,)),
        ("red", (2,)),
        ("umbrella", (3, 4)),
    ]
    assert [token.special for token in prompt.tokens] == [pieces[0], "", "", "", "", pieces[-1]]


@pytest.mark.parametrize(
    "pieces", [["▁um", "<x>", "▁cat"], ["um", "<x>", "cat</w>"], ["um", "<x>", "cat", "##s"]]
)
def test_a_special_piece_ends_the_word_before_it(pieces):
    first, second = read_pieces(pieces).words
    assert (first.text, first.columns) == ("um", (0,))
    assert second.text in ("cat", "cats") and second.columns == tuple(range(2, len(pieces)))


def test_pieces_without_marks_are_words_each():
    assert read_pieces(["a", "red", "", "cat"]).find("cat") == [(3,)]
    with pytest.raises(ValueError, match="is empty"):
        read_pieces(["<s>", "</s>"])


def test_columns_without_a_tokenizer_have_no_token():
    tokens = read_labels({"red dog": [2]}, 4).tokens
    assert [(token.id, token.text) for token in tokens] == [
        *((-1, "[0]"), (-1, "[1]"), (-1, "red dog"), (-1, "[3]")),
    ]
