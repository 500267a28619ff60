"""What a notebook shows: words as text, values as images, pages in a frame."""

import base64
import io
from html.parser import HTMLParser

import pytest
import torch
from helpers.small_runs import small_run
from helpers.tiny_pipelines import make_pipeline
from PIL import Image

from sdattn import Heatmap, Knockout, generate
from sdattn.runs.diff.comparison import Comparison
from sdattn.runs.diff.matching import match_words
from sdattn.runs.report import report

SMALL = {"height": 128, "width": 192, "num_inference_steps": 2}
PROMPT = '"><script>alert(1)</script> a cat & חתול'


class Elements(HTMLParser):
    """The elements of a piece of HTML and the text between them."""

    def __init__(self, text):
        super().__init__()
        self.found, self.text = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


@pytest.fixture(scope="module")
def run():
    return generate(make_pipeline(), PROMPT, num_images_per_prompt=6, **SMALL)


@pytest.mark.slow
def test_heatmaps_show_an_image_for_each_word(run):
    heatmaps = run.heatmaps[0]
    seen = Elements(heatmaps._repr_html_())
    words = [one.label for one in heatmaps.occurrences()]
    images = seen.of("img")
    assert [one["alt"] for one in images] == words
    assert not seen.of("script")
    assert PROMPT in seen.text
    for word, one in zip(words, images, strict=True):
        kind, data = one["src"].split(";base64,")
        assert kind == "data:image/webp"
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        assert image.size == (160, 107)  # of 16x24 cells
        highest = min(heatmaps.find(word), key=lambda m: m.columns).values.max()
        assert f"peak {highest:.2g}" in seen.text


@pytest.mark.slow
def test_a_run_shows_the_pages_of_its_first_images(run):
    seen = Elements(run._repr_html_())
    frames = seen.of("iframe")
    assert [frame["srcdoc"] for frame in frames] == [
        report(run.image_run(i)).decode() for i in range(4)
    ]
    assert {frame["sandbox"] for frame in frames} == {"allow-scripts allow-downloads"}
    assert not seen.of("script")
    cards = [opened(one) for one in seen.of("img")]  # below the frames, where these are removed
    assert [one.size for one in cards] == [(1200, 630)] * 4
    places = [one["style"] for one in seen.of("div") if "grid-area" in one["style"]]
    assert len(places) == 8 and all(place.startswith("grid-area:1/1") for place in places)
    assert "2 more images" in "".join(seen.text)


WORD = "<script>alert(2)</script>"
HARMLESS = {"p", "bdi", "div", "figure", "figcaption", "img", "br", "span"}


def test_a_knockout_shows_both_images_and_where_they_differ():
    values = torch.tensor([[0.0, 0.25, 0.0], [0.0, 0.0, 0.5]])
    images = Image.new("RGB", (96, 64), "red"), Image.new("RGB", (96, 64), "blue")
    found = Knockout(PROMPT, WORD, (2,), 7, *images, Heatmap(WORD, values, (2,)))
    seen = Elements(found._repr_html_())
    assert {tag for tag, _ in seen.found} <= HARMLESS
    assert PROMPT in seen.text and f"without “{WORD}”" in seen.text and "0 to 0.5" in seen.text
    colours = [opened(one).getpixel((20, 80)) for one in seen.of("img")]  # of a cell of 0
    assert colours[0] == pytest.approx((255, 0, 0), abs=6)
    assert colours[1] == pytest.approx((0, 0, 255), abs=6)
    assert len(colours) == 3
    assert repr(found) == (
        f"Knockout({WORD!r} of {PROMPT!r}, seed 7, changes by 0 to 0.5)"
    )  # one line


def opened(image):
    return Image.open(io.BytesIO(base64.b64decode(image["src"].partition(",")[2]))).convert("RGB")


@pytest.mark.slow
def test_a_comparison_shows_its_sheet_and_its_numbers():
    a, b = small_run(1), small_run(2, prompt="a red dog")
    words = match_words(a.heatmaps, b.heatmaps)
    options = {"prompt": ("a red cat", "a red dog"), "negative_prompt": (None, WORD)}
    maps = a.heatmaps, b.heatmaps
    found = Comparison((PROMPT, "B"), (PROMPT, WORD), a.image, b.image, words, options, maps)
    seen = Elements(found._repr_html_())
    [frame] = seen.of("iframe")
    assert frame["srcdoc"] == found.page().decode() and frame["sandbox"].startswith("allow-scripts")
    still = {"table", "thead", "tbody", "tr", "th", "td", "details", "summary"}
    assert {tag for tag, _ in seen.found} <= HARMLESS | still | {"iframe"}
    assert {f"A: {PROMPT}", PROMPT, "B: B"} <= {*seen.text}  # a name, a prompt
    assert seen.text.count(WORD) == 2  # a prompt and a setting
    [image] = seen.of("img")
    assert opened(image).size == found.sheet().size
    assert seen.found.index(("img", image)) < seen.found.index(("iframe", frame))  # lies over it
    red = words[1]
    largest = f"{red.largest[0]:+.2g}"
    numbers = [f"{number:.2g}" for number in (red.mean_a, red.mean_b, red.correlation)]
    at = seen.text.index("red")
    assert seen.text[at : at + 5] == ["red", *numbers, largest]
    assert repr(found).endswith("4 words, 2 in both, differ in prompt, negative_prompt)")
    assert "\n" not in repr(found)
