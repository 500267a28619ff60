"""Pages in a real browser, for the modules that test them.

from helpers.browser import list_troubles, page_opener, start_browser  # noqa: F401  (the fixtures)

def test_a_page(open_page):
    page = open_page(path)                                    # a page of playwright's
    page = open_page(path, viewport={"width": 390, "height": 844}, color_scheme="dark")
"""

import importlib.resources
import shutil
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

NAMES = ("chromium", "google-chrome", "chromium-browser")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip


@pytest.fixture(name="browser", scope="module")
def start_browser():
    """One for a module: a fixture that several modules import is another one in each."""
    api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser: install one of {', '.join(NAMES)}")
    with api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield made
        made.close()


@pytest.fixture(name="troubles")
def list_troubles():
    """What a page did that none may do, a line each. What is left at the end fails the test."""
    found = []
    yield found
    assert not found, found


@pytest.fixture(name="open_page")
def page_opener(browser, troubles):
    """Open a file, or an address, in a browser that knows nothing of earlier pages. No error, no
    dialog and nothing from the network: see ``troubles``."""
    contexts = []

    def opened(place, **options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda one: one.type == "error" and note("console", one.text))
        page.on("pageerror", lambda one: note("error", one))
        page.on("request", lambda one: local(one.url) or note("network", one.url))
        page.on("dialog", lambda one: (note("dialog", one.message), one.dismiss()))
        page.goto(place.as_uri() if isinstance(place, Path) else place)
        return page

    def note(kind, what):
        troubles.append(f"{kind}: {what}")

    def local(address):
        return address.startswith(("file:", "data:", "blob:"))

    yield opened
    for one in contexts:
        one.close()


@pytest.fixture(name="open_bytes")
def bytes_opener(open_page, tmp_path):
    """Open the bytes of a page of a run, or of two, once it is ready."""

    def opened(content, **options):
        (tmp_path / "page.html").write_bytes(content)
        page = open_page(tmp_path / "page.html", **options)
        wait_for(page, "'ready' in document.documentElement.dataset")
        return page

    return opened


def colour(page, place, x, y):
    """RGB of what is seen at a part of an element."""
    shot = Image.open(BytesIO(page.locator(place).screenshot())).convert("RGB")
    return np.array(shot.getpixel((int(x * shot.width), int(y * shot.height))), dtype=int)


def glows(page, place, values):
    """Check that an image is bright with heat at a map's highest value, and less at its lowest."""
    spots = [np.unravel_index(at, values.shape) for at in (values.argmax(), values.argmin())]
    rows, cols = values.shape
    hot, cold = (colour(page, place, (c + 0.5) / cols, (r + 0.5) / rows).mean() for r, c in spots)
    return hot > cold + 15


def wait_for(page, expression, seconds=60):
    """Wait until a page finds an expression true. Playwright's own evaluates it in the page, where
    the policies of our pages forbid it."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not within {seconds} s: {expression}"
        page.wait_for_timeout(20)


LOOKS = [(width, theme) for width in (390, 768, 1280) for theme in ("light", "dark")]


def faults_in_every_look(page):
    """Of a phone, a tablet and a screen, by day and at night: one page changes its clothes, which
    takes a fraction of a page for each."""
    found = []
    for width, theme in LOOKS:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")  # no colours on their way
        assert page.evaluate(
            f"[innerWidth, matchMedia('(prefers-color-scheme: {theme})').matches]"
        ) == [
            width,
            True,
        ]
        found += [f"{width} {theme}: {fault}" for fault in faults_for_people(page)]
    return found


# What moves for a while: between two colours is one that nobody chose.
SETTLE = """Promise.all(document.getAnimations()
  .filter((one) => one.effect.getComputedTiming().endTime < Infinity)
  .map((one) => one.finished.catch(() => null))).then(() => null)"""


def faults_for_people(page):
    """What axe-core finds that keeps people from using a page, once nothing on it moves: its rules'
    names and where."""
    page.evaluate(SETTLE)
    source = importlib.resources.files("axe_playwright_python").joinpath("axe.min.js").read_text()
    page.evaluate(source)
    found = page.evaluate("axe.run()")
    assert found["passes"], "axe looked at nothing"
    broken = ((rule, node) for rule in found["violations"] for node in rule["nodes"])
    return [f"{rule['id']}: {node['html']}" for rule, node in broken]
