"""The page of a run: its numbers, its size and its command; test_report_browser opens it."""

import base64
import hashlib
import html
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from helpers.demo_words import PROMPT, THIRD
from helpers.page_data import assert_close, data_of, expected_maps, maps_of
from helpers.small_runs import small_run
from helpers.tiers import tiered
from helpers.tiny_tokenizers import tiny_tokenizer

from scripts.benchmarks.random_run import random_run
from sdattn import Heatmaps, generate, read_prompt
from sdattn.prompts.tokens import Word
from sdattn.runs.imagerun import group_heatmaps
from sdattn.runs.report import _first_pins, report


@pytest.fixture(scope="module")
def run(demo):
    """With a step, further texts and what changes without a word."""
    watch = {"steps": "all", "branch": "both"}
    return generate(
        demo, PROMPT, negative_prompt="yellow", ask=f"star {THIRD}", capture_options=watch,
        num_inference_steps=6,
    )  # fmt: skip


def test_the_page_holds_the_values_of_the_run(run):
    one = run.image_run(0)
    data = data_of(report(one))
    wanted = expected_maps(one)
    for name in ("negative", "asked"):
        wanted += [m.values.double().numpy() for m in one.more[name][1]]
    wanted += [one.heatmaps[name].values.double().numpy() for name in ("<sos>", "<eos>", "<pad>")]
    assert_close(maps_of(data), wanted)
    assert data["words"] == PROMPT.split()
    assert data["groups"] == list(group_heatmaps(one))
    times = run.info[0]["timesteps"]
    assert data["steps"] == [f"step {i + 1}, t = {t:g}" for i, t in enumerate(times)]
    assert [text["name"] for text in data["texts"]] == ["negative", "asked", "special"]


class Page(HTMLParser):
    """What a browser finds in a page: tags with their attributes, and the text inside of some."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.inside = [], [], None
        self.feed(page.decode())

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("script", "style", "button"):
            self.inside = tag
            self.texts.append((tag, dict(attributes), ""))

    def handle_data(self, data):
        if self.inside:
            *_, (tag, attributes, text) = self.texts
            self.texts[-1] = tag, attributes, text + data

    def handle_endtag(self, tag):
        if tag == self.inside:
            self.inside = None


def test_a_page_loads_nothing(run):
    """Only the scripts and styles that are there run, by hashes that are computed from the page."""
    page = Page(report(run.image_run(0)))
    [script] = [text for tag, attributes, text in page.texts if tag == "script" and not attributes]
    [style] = [text for tag, _, text in page.texts if tag == "style"]
    of_script, of_style = (
        base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in (script, style)
    )
    policies = [a["content"] for tag, a in page.tags if "Content-Security" in str(a)]
    assert [" ".join(one.split()) for one in policies] == [
        f"default-src 'none'; img-src data: ; style-src 'sha256-{of_style}'; "
        f"script-src 'sha256-{of_script}'; base-uri 'none'; form-action 'none'"
    ]
    loaded = {"src", "href", "srcset", "action", "data", "poster", "style", "background"}
    for tag, attributes in page.tags:
        for name in attributes.keys() & loaded:
            assert attributes[name].startswith(("data:", "#")), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)


@pytest.mark.parametrize("gap", ["cut off", "not captured"])
def test_words_behind_a_gap_keep_their_own_maps(gap):
    run = small_run()
    prompt, maps = run.heatmaps.prompt, run.heatmaps.maps
    if gap == "cut off":  # as where only one of two text encoders reads so far
        a, red, cat = prompt.words
        heatmaps = Heatmaps(replace(prompt, words=(a, replace(red, columns=()), cat)), maps)
    else:
        [columns] = prompt.find("red")
        heatmaps = run.heatmaps.keep([one for one in range(77) if one not in columns])
    page = report(replace(run, heatmaps=heatmaps, more={}))
    words = data_of(page)["words"]
    shown = [(a["data-word"], text) for tag, a, text in Page(page).texts if "data-word" in a]
    assert words[:2] == ["a", "cat"]
    assert shown[:2] == [("0", "a"), ("1", "cat")]


@pytest.mark.parametrize(("number", "told"), [(100, ""), (1_334, " and 1,234 more")])
def test_of_many_words_that_were_cut_off_the_first_are_listed(number, told):
    run = small_run()
    prompt, maps = run.heatmaps.prompt, run.heatmaps.maps
    places = [(i, i + 1) for i in range(len(prompt.text) + 1, len(prompt.text) + 2 * number, 2)]
    late = tuple(Word("x", start, end, ()) for start, end in places)
    longer = replace(prompt, text=prompt.text + " x" * number, words=prompt.words + late)
    page, short = (
        report(replace(run, heatmaps=Heatmaps(one, maps), more={})).decode()
        for one in (longer, prompt)
    )
    shown, told_off = (
        re.sub("<[^>]+>", "", re.split("</(?:p|h1)>", page.split(start)[1])[0])
        for start in ('id="prompt" dir="ltr">', "<strong>Cut off:</strong>")
    )
    assert shown == longer.text
    assert told_off.split("never saw")[1].strip() == ", ".join(["x"] * 100) + told + "."
    assert len(page) - len(short) < 15_000


@pytest.mark.parametrize(
    ("words", "steps", "pixels"),
    tiered([(10, 50, 512), (73, 50, 512), (10, 0, 512), (10, 0, 2500)], quick=0),
)
def test_the_page_of_sd15_is_under_3_mb(words, steps, pixels):
    """Of noise, which does not pack, at SD 1.5's 16 layers."""
    page = report(random_run(words, steps, pixels))
    assert len(page) < 3_000_000
    data = data_of(page)
    assert data["maps"][0][:2] == [64, 64]
    kept = len(data["steps"])
    assert kept == steps if words == 10 else 8 <= kept < steps


@pytest.mark.slow
def test_where_there_are_very_many_cells_neighbours_are_averaged():
    run = random_run(73, 9)
    data, groups = data_of(report(run)), group_heatmaps(run)
    assert data["groups"][0] == "down 64x64"
    rows, cols = data["maps"][73][:2]  # the first word's in the first group
    factor = 64 // rows
    assert factor in (2, 4, 8)
    fine = groups["down 64x64"].occurrences()[0].values.double().numpy()
    coarse = fine.reshape(rows, factor, cols, factor).mean((1, 3))
    np.testing.assert_allclose(maps_of(data)[73], coarse, atol=np.ptp(coarse) / 250)


# The command


def test_the_page_shows_the_command_that_was_typed():
    command = "sdattn generate 'a <b>' --steps 2"
    page = report(small_run(command=command)).decode()
    assert command in html.unescape(page) and command not in page
    assert 'id="command"' not in report(small_run()).decode()  # Python made it


@pytest.mark.parametrize(
    ("peaks", "strange", "first"),
    [
        ({"red": 0.1, "cat": 0.2, "dog": 0.18}, (), ["cat", "dog"]),
        ({"red": 0.3, "cat": 0.2, "dog": 0.07}, (), ["cat", "dog"]),  # over a third as strong
        ({"red": 0.3, "cat": 0.2, "dog": 0.06}, (), ["cat"]),
        ({"red": 0.3, "cat": 0.05, "dog": 0.02}, (), ["red"]),  # on its scale both look bare
        ({"red": 0.1, "cat": 0.2, "dog": 0.18}, ("cat",), ["dog"]),
        ({"red": 0.1, "cat": 0.2, "dog": 0.18}, ("cat", "dog"), ["red"]),
    ],
)
def test_the_first_words_are_things_that_show(peaks, strange, first):
    prompt = read_prompt(tiny_tokenizer(), "a red cat and a dog")
    maps = torch.full((4, 6, len(prompt.tokens)), 1e-4)
    for cell, (word, peak) in enumerate(peaks.items()):
        [columns] = prompt.find(word)
        maps[cell, cell, columns[0]] = peak
    held = Heatmaps(prompt, maps)
    labels = [heatmap.label for heatmap in held.occurrences()]
    assert [labels[i] for i in _first_pins(held, strange)] == first


def test_words_that_did_not_arrive_are_marked_and_the_call_with_more_seeds_is_offered(monkeypatch):
    run = small_run(1, "a red cat and a dog")
    run = replace(run, settings=replace(run.settings, model="mine"))  # which is not calibrated
    monkeypatch.setattr("sdattn.maps.arrival.WEAK", 0.0)
    assert b'class="word missing"' not in report(run)
    monkeypatch.setattr("sdattn.maps.arrival.WEAK", 1e9)
    page = report(run).decode()
    assert page.count('class="word missing"') == 2
    assert "“cat” may be missing: its peak is" in page and "candidates=4)</code>" in page
