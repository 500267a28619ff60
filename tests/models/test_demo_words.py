"""The words that the demo model knows, and those that it never learnt."""

import html
import warnings
from dataclasses import replace

import pytest

import sdattn
from sdattn.runs.report import report

PROMPT = "a red circle left of a blue square"


def test_words_that_it_never_learnt_are_named_in_a_warning_and_on_the_page(demo):
    told = r"never learnt 'cat', 'sofa'.*It knows only: red, .*circle, .*gray, .*above, "
    with pytest.warns(UserWarning, match=told) as caught:
        run = sdattn.generate(demo, ["a cat on a sofa", PROMPT], num_inference_steps=1)
    assert [one.filename for one in caught] == [__file__]
    pages = [html.unescape(report(one).decode()) for one in map(run.image_run, (0, 1))]
    assert "never learnt 'cat', 'sofa'" in pages[0] and "never learnt" not in pages[1]
    other = replace(run[0], settings=replace(run[0].settings, model="owner/name"))
    assert "never learnt" not in report(other).decode()


def test_capitals_and_commas_make_no_word_strange(demo):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdattn.generate(
            demo, "On the left a Red circle, on the right a RING", num_inference_steps=1
        )
