"""What a word is, and the way from a prompt to what the tokenizer gets."""

from unicodedata import normalize

import pytest

from sdattn.prompts.words import Source, find_part, folded, split_words


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
        (normalize("NFD", "が犬"), [normalize("NFD", "が"), "犬"]),
        (normalize("NFD", "한국 고양이"), [normalize("NFD", "한국"), normalize("NFD", "고양이")]),
        ("แมวสีแดง", ["แมวสีแดง"]),
        ("ဆ\u200bကြောင်", ["ဆ", "ကြောင်"]),
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


FORMS = [
    "café",
    "Ångström",
    "ﬀ ÉCOLE",
    "한국",
    "が",
    "हिन्दी ज़",
    "ệ",
    "ḍ̇",
    "Ω",
    "ΐ",
    "İstanbul",
    "ﬁsh",
    "\u03b1\u0345\u0301",
]


@pytest.mark.parametrize("text", FORMS)
def test_texts_compare_without_case_and_form(text):
    """Unicode's own rule for canonical caseless matching (chapter 3.13, D145)."""

    def by_the_standard(one):
        return normalize("NFD", normalize("NFD", one).casefold())

    assert folded(normalize("NFC", text)) == folded(normalize("NFD", text))
    assert folded(text) == folded(normalize("NFC", text))
    assert folded(text.upper()) == folded(text.upper().lower())
    others = [normalize(form, one) for one in FORMS for form in ("NFC", "NFD")]
    for other in [*others, text.upper(), text.lower()]:
        same = by_the_standard(text) == by_the_standard(other)
        assert (folded(text) == folded(other)) == same


@pytest.mark.parametrize(
    ("text", "part", "spans"),
    [
        ("a dog's doghouse", "DOG", [(2, 5), (8, 11)]),
        ("แมวสีแดง", "แมว", [(0, 3)]),
        ("แมวสีแดง", "ส", []),  # without its vowel
        ("cafe\u0301s", "caf\xe9", [(0, 5)]),
        ("caf\xe9s", "cafe\u0301", [(0, 4)]),
        ("caf\xe9s", "cafe", []),
        ("e\u0301", "\u0301", []),
        ("aaa", "aa", [(0, 2), (1, 3)]),
        ("STRASSE", "ß", [(4, 6)]),
        ("İs", "s", [(1, 2)]),
        ("a cat", "dog", []),
        ("a cat", "", []),
    ],
)
def test_where_a_part_of_a_text_stands(text, part, spans):
    assert find_part(text, part) == spans
    for start, end in spans:
        assert folded(text[start:end]) == folded(part)
