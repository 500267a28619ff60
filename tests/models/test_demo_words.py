"""The words that the demo model knows, and those that it never learnt."""

import html
import warnings
from dataclasses import replace

import pytest
from helpers.demo_words import PROMPT, THING, THIRD

import sdattn
from sdattn.models.demos import demo_named
from sdattn.runs.report import report


@pytest.mark.slow
def test_words_that_it_never_learnt_are_named_in_a_warning_and_on_the_page(demo):
    kinds = ", .*".join(kind[0] for kind in demo_named("demo").words.values())
    told = f"never learnt 'zebra', 'sofa'.*It knows only: {kinds}, "
    with pytest.warns(UserWarning, match=told) as caught:
        run = sdattn.generate(demo, ["a zebra on a sofa", PROMPT], num_inference_steps=1)
    assert [one.filename for one in caught] == [__file__]
    pages = [html.unescape(report(one).decode()) for one in map(run.image_run, (0, 1))]
    assert "never learnt 'zebra', 'sofa'" in pages[0] and "never learnt" not in pages[1]
    other = replace(run[0], settings=replace(run[0].settings, model="owner/name"))
    assert "never learnt" not in report(other).decode()


def test_capitals_and_commas_make_no_word_strange(demo):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prompt = f"On the left a Red {THING}, on the right a {THIRD.upper()}"
        sdattn.generate(demo, prompt, num_inference_steps=1)
