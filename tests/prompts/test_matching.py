"""Words of two prompts that correspond, against trying all and counting by hand."""

from itertools import pairwise

import pytest
from helpers.tiny_tokenizers import tiny_tokenizer

from sdattn.prompts.matching import blended_words, edited_words, is_swap, linked, matches
from sdattn.prompts.tokens import read_prompt


def read(text):
    return read_prompt(tiny_tokenizer(24), text)


def longest_by_trying_all(a, b):
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + longest_by_trying_all(a[1:], b[1:])
    return max(longest_by_trying_all(a[1:], b), longest_by_trying_all(a, b[1:]))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("a cat a dog a red cat", "a dog a cat"),
        ("red red cat", "cat red red"),
        ("a b c d e", "e d c b a"),
        ("a cat", "A CAT"),
        ("cat", "dog"),
    ],
)
def test_matches_are_the_longest_shared_sequence(source, target):
    found = matches(read(source), read(target))
    ours, theirs = source.lower().split(), target.lower().split()
    assert all(ours[i] == theirs[j] for i, j in found)
    assert all(p[0] < q[0] and p[1] < q[1] for p, q in pairwise(found))
    assert len(found) == longest_by_trying_all(ours, theirs)


def test_what_counts_as_a_swap():
    assert is_swap(read("a red cat"), read("a red dog"))
    assert is_swap(read("cat"), read("dog"))
    assert not is_swap(read("a cat"), read("a red cat"))
    assert not is_swap(read("red cat a"), read("a red cat"))  # shifted by one


def test_what_an_edit_is_about():
    prompts = [read("a red cat"), read("a red dog"), read("a pale red cat")]
    assert edited_words(prompts, 0) == ["cat"]  # not in all targets
    assert edited_words(prompts, 1) == ["dog"]
    assert edited_words(prompts, 2, ["red", "dog"]) == ["pale", "red"]


def test_where_an_edit_may_change_the_image():
    prompts = [read("a red cat"), read("a red dog")]
    assert blended_words(prompts, ["cat"]) == [["cat"], ["dog"]]
    assert blended_words(prompts, "cat") == [["cat"], ["dog"]]
    assert blended_words(prompts, ["cat", "dog"]) == [["cat"], ["dog"]]
    assert blended_words(prompts, ["cat", "red"]) == [["cat", "red"], ["dog", "red"]]
    assert blended_words(prompts, []) == []
    with pytest.raises(KeyError, match="'bird'.*prompts.*a, red, cat, dog"):
        blended_words(prompts, ["cat", "bird"])
    with pytest.raises(KeyError, match="is in 'a cat'"):
        blended_words([read("a cat"), read("a red cat")], ["red"])


def test_the_words_of_each_prompt_as_a_run_records_them():
    prompts = [read("a red cat"), read("a red dog")]
    for each in ([["cat"], ["dog"]], (("cat",), ("dog",)), ["cat", ["dog"]], [["cat"], "dog"]):
        assert blended_words(prompts, each) == [["cat"], ["dog"]]
    assert blended_words(prompts, [["red", "cat"], ["red"]]) == [["red", "cat"], ["red"]]
    assert blended_words(prompts, blended_words(prompts, "cat")) == [["cat"], ["dog"]]
    with pytest.raises(KeyError, match="'dog' is not in the prompt"):
        blended_words(prompts, [["dog"], ["cat"]])
    for each in ([["cat"]], [["cat"], ["dog"], ["red"]]):
        with pytest.raises(ValueError, match="each of the 2 prompts"):
            blended_words(prompts, each)
    with pytest.raises(ValueError, match="lists of each prompt's"):
        blended_words(prompts, [["cat"], []])


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("a red cat", "a red dog", [("a", "a"), ("red", "red"), ("cat", "dog")]),
        ("a cat", "a big red cat", [("a", "a"), (None, "big"), (None, "red"), ("cat", "cat")]),
        ("red big cat", "cat", [("red", None), ("big", None), ("cat", "cat")]),
        ("a cat", "the cat here", [("a", "the"), ("cat", "cat"), (None, "here")]),
        ("cat", "dog", [("cat", "dog")]),
        ("red", "a dog", [("red", None), (None, "a"), (None, "dog")]),
    ],
)  # fmt: skip
def test_words_that_stand_for_each_other(source, target, expected):
    ours, theirs = read(source), read(target)
    named = [
        (None if i is None else ours.words[i].text, None if j is None else theirs.words[j].text)
        for i, j in linked(ours, theirs)
    ]
    assert named == expected


def test_in_place_the_nth_word_stands_for_the_nth():
    ours, theirs = read("red cat dog"), read("cat dog red")
    assert linked(ours, theirs, in_place=True) == [(0, 0), (1, 1), (2, 2)]
    assert linked(ours, theirs) == [(0, None), (1, 0), (2, 1), (None, 2)]
