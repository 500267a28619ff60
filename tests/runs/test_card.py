"""A run's card: its size, what is on it, and that nothing is cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.small_runs import small_run
from PIL import Image, ImageColor, ImageDraw

from sdattn.figures import card
from sdattn.maps.glow import WORD_COLORS, overlay
from sdattn.maps.heatmap import Heatmap
from sdattn.runs.card import SIZE, draw_card, strongest

pytestmark = pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")
LONG = "a red cat and a dog, " * 12 + "on a sofa"


@pytest.fixture
def written(monkeypatch):
    """What is written on a card: (text, box) of each piece."""
    found = []
    write = ImageDraw.ImageDraw.text

    def text(pen, place, text, *given, **options):
        found.append((text, pen.textbbox(place, text, given[1], anchor=options["anchor"])))
        write(pen, place, text, *given, **options)

    monkeypatch.setattr(ImageDraw.ImageDraw, "text", text)
    return found


def test_it_tells_the_prompt_the_peaks_and_how_it_was_made(written):
    run = small_run(3)
    assert card(run).size == SIZE == (1200, 630)
    said = "".join(text for text, _ in written)
    assert said.startswith("a red cat")
    assert f"peak {run.heatmaps['cat'].peak:.2g}" in said
    assert "demo · seed 3 · 2 steps" in said


@pytest.mark.parametrize("prompt", ["a cat", LONG, "x" * 300, "cat " * 400])
@pytest.mark.parametrize("size", [(96, 64), (48, 480), (480, 48)])
def test_nothing_leaves_it_and_nothing_lies_over_another(written, prompt, size):
    run = small_run(prompt=prompt)
    run = replace(run, image=Image.new("RGB", size))
    maps = [Heatmap(w, torch.rand(size[1] // 8, size[0] // 8), (1,)) for w in ("cat", "y" * 90)]
    draw_card(run, maps, "step 3 of 20", 0.5)
    width, height = SIZE
    for text, (left, top, right, bottom) in written:
        assert left >= 0 and right <= width and top >= 0 and bottom <= height, text
    boxes = [box for text, box in written if text.strip()]
    middles = {((a + c) / 2, (b + d) / 2) for a, b, c, d in boxes}
    assert len(middles) == len(boxes)


def test_a_prompt_is_whole_even_if_it_is_long(written):
    card(small_run(prompt=LONG))
    said = "".join(text for text, _ in written)
    assert LONG.split()[-1] in said and "…" not in said
    assert said.count("dog,") + said.count("dog") >= 12


def test_words_have_their_colours_in_the_prompt_and_over_the_image():
    run = small_run(3)
    [cat] = run.heatmaps.find("cat")
    pixels = np.asarray(draw_card(run, [cat]))
    orange = np.array(ImageColor.getrgb(WORD_COLORS[0]))
    assert (pixels[:110] == orange).all(-1).sum() > 300  # behind the word
    image = run.image.convert("RGB")
    shown = overlay(image, [cat], colors=WORD_COLORS)
    side = [row for row in np.asarray(shown).reshape(-1, 3)]
    assert np.abs(np.mean(side, 0) - pixels[130:400, 480:860].mean((0, 1))).max() < 40


def test_the_strongest_words_that_name_a_thing_are_shown():
    peaks = {"a": 0.9, "red": 0.8, "cat": 0.3, "left": 0.7, "of": 0.6, "dog": 0.5}
    maps = [Heatmap(w, torch.tensor([[p, 0.0]]), (i,)) for i, (w, p) in enumerate(peaks.items())]
    assert [one.label for one in strongest(maps)] == ["dog", "cat"]
    many = []
    for i in range(9):
        peak = torch.tensor([[0.1 + i / 100, 0]])
        many += [Heatmap(f"cat{i}", peak, (2 * i,)), Heatmap("and", peak, (2 * i + 1,))]
    assert [one.label for one in strongest(many)] == [f"cat{i}" for i in range(8, 1, -1)]


def test_too_many_words_are_refused():
    run = small_run(prompt="cat " * 9)
    with pytest.raises(ValueError, match="at most 7"):
        card(run, ["cat"])
    with pytest.raises(KeyError, match="dog"):
        card(run, ["dog"])
