"""The page of two images: its numbers, its links, its text; test_pair_browser opens it."""

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
from helpers.page_data import assert_close, data_of, maps_of, values_of
from helpers.small_runs import edited, small_run

from sdattn import diff
from sdattn.prompts.tokens import Word
from sdattn.runs.editrun import EditRun
from sdattn.runs.info import Captured
from sdattn.runs.report.pages import indices_by_span, pieces
from sdattn.runs.run import Run


def compared(a="a red cat", b="a red dog", **options):
    return diff(*(Run([small_run(i, text)], None, None) for i, text in ((1, a), (2, b))), **options)


def linked(data, other=1):
    """(word of the first, word of the other) of each link, by the page's own numbers."""
    a, b = data["sides"][0]["words"], data["sides"][other]["words"]
    name = lambda words, at: None if at is None else words[at]  # noqa: E731
    return [(name(a, i), name(b, j)) for i, j in data["links"][other - 1]]


def test_the_page_holds_the_maps_of_both_runs_and_their_links():
    found = compared()
    data = data_of(found.page())
    assert linked(data) == [("a", "a"), ("red", "red"), ("cat", None), (None, "dog")]
    shown = maps_of(data)
    for half, side in enumerate(data["sides"]):
        own = found.heatmaps[half]
        words = [heatmap.label for heatmap in own.occurrences()]
        assert side["words"] == words
        assert_close(shown[side["start"] :][: len(words)], values_of(own))
    assert data["top"] == max(heatmaps.top for heatmaps in found.heatmaps)
    assert data["unit"] == "share of attention"
    assert sorted(data["first"][0]) == [2, 3]  # what only one of them has


def test_two_seeds_open_with_the_strongest_thing():
    data = data_of(compared("a cat, a red dog", "a cat, a red dog").page())
    peaks = [max(data["maps"][i][3], data["maps"][i + 6][3]) for i in range(6)]
    assert data["first"] == [[max((1, 5), key=lambda i: peaks[i])]]


def test_the_runs_are_a_and_b_and_no_setting_is_code():
    """As in the terminal; the settings of a mapping are told one by one."""
    runs = [small_run(i, "a red cat") for i in (1, 2)]
    kept = None, Captured(steps="all", heads="mean")
    runs = [
        replace(run, settings=replace(run.settings, captured=one))
        for run, one in zip(runs, kept, strict=True)
    ]
    names = "capture/d", "other/d"
    found = diff(*(Run([run], None, None) for run in runs), names=names)
    page = found.page().decode()
    assert [side["name"] for side in data_of(found.page())["sides"]] == ["A", "B"]
    assert page.count("capture/d") == 1  # in the table of what differs
    assert found.told_settings()["captured"] == ("-", "steps all, heads mean")
    assert "{'" not in page.split('id="data"')[0].split("<body>")[1]
    assert "&#39;steps&#39;" not in page


def test_an_edit_links_a_word_with_the_word_in_its_place():
    texts = ("a red cat", "a red dog", "a big red cat")
    runs = [small_run(i, text) for i, text in enumerate(texts)]
    words = [["cat"], ["dog"], ["big"]]
    data = data_of(EditRun(runs, None, None, words, edited(weights={"dog": 2.0})).page())
    assert [side["name"] for side in data["sides"]] == ["source", "target-1", "target-2"]
    assert linked(data, 1) == [("a", "a"), ("red", "red"), ("cat", "dog")]
    assert linked(data, 2) == [("a", "a"), (None, "big"), ("red", "red"), ("cat", "cat")]
    assert data["first"][0] == [2]
    shown = maps_of(data)
    dog = runs[1].heatmaps["dog"].values.numpy()
    np.testing.assert_allclose(shown[data["sides"][1]["start"] + 2], dog, atol=np.ptp(dog) / 255)


def test_what_differs_is_text_and_loads_nothing():
    hostile = "</script><script>alert(1)</script> cat"
    page = compared(b=hostile, names=("<b>one</b>", "two")).page().decode()
    assert page.count("<script") == 2 and "<b>" not in page
    assert "&lt;b&gt;one&lt;/b&gt;" in page and '<td dir="auto">1</td>' in page  # the seed
    assert "default-src 'none'; img-src data: ; style-src 'sha256-" in unescape(page)
    assert not re.search(r"(src|href)=[\"'](?!data:)", page)


@pytest.mark.parametrize("words", [["red cat"], ["red", "red cat"]])
def test_phrases_stand_in_the_text_or_below_it(words):
    found = compared(b="a red cat", words=words)
    page = found.page().decode()
    assert page.count('class="word"') == 2 * len(words)
    assert ('<p class="chips"' in page) == (len(words) == 2)  # "red" is inside "red cat"
    assert linked(data_of(found.page())) == [(word, word) for word in words]


def test_words_stand_where_they_are_written_and_cut_off_words_apart():
    heatmaps = small_run(0, "a red cat, a red").heatmaps
    maps = heatmaps.occurrences()
    spans = indices_by_span(heatmaps.prompt, maps)
    text = heatmaps.prompt.text
    assert {text[start:end]: maps[n].label for (start, end), n in spans.items()} == {
        word: word for word in ("a", "red", "cat", ",")
    }
    assert sorted(spans.values()) == [0, 1, 2, 3, 4, 5]
    cut = replace(heatmaps.prompt, words=(*heatmaps.prompt.words[:5], Word("red", 13, 16, ())))
    parts = pieces(cut, {span: n for span, n in spans.items() if n < 5})
    assert "".join(part.text for part in parts) == text
    assert [part.number for part in parts if part.number is not None] == [0, 1, 2, 3, 4]
    assert [part.text for part in parts if part.cut] == ["red"]


def test_two_words_of_one_token_have_each_a_place():
    """As ideographs have that the tokenizer does not part."""
    heatmaps = small_run(0, "a red cat").heatmaps
    first, second, third = heatmaps.prompt.words
    prompt = replace(heatmaps.prompt, words=(first, second, replace(third, columns=second.columns)))
    maps = [heatmaps["red"], heatmaps["red"]]
    assert indices_by_span(prompt, maps) == {(2, 5): 0, (6, 9): 1}
