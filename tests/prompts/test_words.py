"""What a word is, and the way from a prompt to what the tokenizer gets."""

import pytest

from sdattn.prompts.tokens import (
    split_words,
)
from sdattn.prompts.words import Source


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
