"""What a notebook shows: words as text, values as pictures, pages in a frame."""

import base64
import io
from html.parser import HTMLParser

import pytest
from PIL import Image
from tiny_pipelines import make_pipeline

from sdattn import generate
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


def test_heatmaps_show_a_picture_for_each_word(run):
    heatmaps = run.heatmaps[0]
    seen = Elements(heatmaps._repr_html_())
    words = [one.label for one in heatmaps.occurrences()]
    pictures = seen.of("img")
    assert [one["alt"] for one in pictures] == words
    assert not seen.of("script")
    assert PROMPT in seen.text
    for word, one in zip(words, pictures, strict=True):
        kind, data = one["src"].split(";base64,")
        assert kind == "data:image/webp"
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        assert image.size == (160, 107)  # of 16x24 cells
        highest = min(heatmaps.find(word), key=lambda m: m.columns).values.max()
        assert f"peak {highest:.2g}" in seen.text


def test_a_run_shows_the_pages_of_its_first_images(run):
    seen = Elements(run._repr_html_())
    frames = seen.of("iframe")
    assert [frame["srcdoc"] for frame in frames] == [
        report(run.image_run(i)).decode() for i in range(4)
    ]
    assert {frame["sandbox"] for frame in frames} == {"allow-scripts"}
    assert not seen.of("script")
    assert len(seen.of("img")) == 4 * (1 + len(run.heatmaps[0].occurrences()))
    assert "2 more images" in "".join(seen.text)
