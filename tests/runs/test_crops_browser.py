"""The page of a run of a crop in a browser: heat lies in the dashed frame, as on an overlay."""

from io import BytesIO

import numpy as np
import pytest
from helpers.browser import (  # noqa: F401
    faults_in_every_look,
    list_troubles,
    page_opener,
    start_browser,
    wait_for,
)
from helpers.tiny_pipelines import make_pipeline, make_small_unet
from PIL import Image

from sdattn import generate
from sdattn.runs.report import report

pytestmark = pytest.mark.slow

SIZE, LARGE = (320, 256), {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def run():
    from diffusers import StableDiffusionInpaintPipeline

    pipe = make_pipeline(StableDiffusionInpaintPipeline, unet=make_small_unet())
    numbers, mask = np.random.default_rng(0), Image.new("L", SIZE)
    mask.paste(255, (200, 150, 240, 190))  # cropped to 178, 142, 262, 198
    image = Image.fromarray(numbers.integers(0, 256, (*SIZE[::-1], 3), np.uint8))
    about = {"image": image.resize((32, 26)).resize(SIZE), "mask_image": mask, "strength": 1.0}
    about |= {"height": 64, "width": 96, "padding_mask_crop": 8, "num_inference_steps": 2}
    return generate(pipe, "a red cat", **about)


@pytest.fixture
def page(run, tmp_path, open_page):
    path = tmp_path / "report.html"
    path.write_bytes(report(run[0]))
    opened = open_page(path, viewport=LARGE)
    wait_for(opened, "'ready' in document.documentElement.dataset")
    opened.keyboard.press("Escape")
    opened.locator(".word").nth(2).click()
    opened.mouse.move(1, 1)
    return opened


def parts(inner, outer):
    """Where a box lies in another, as parts of its sides."""
    left, top = inner["x"] - outer["x"], inner["y"] - outer["y"]
    found = left, top, left + inner["width"], top + inner["height"]
    return [at / outer[side] for at, side in zip(found, ("width", "height") * 2, strict=True)]


def test_the_heat_lies_in_the_crop_as_on_an_overlay(run, page):
    heat, stage = page.locator("#heat").bounding_box(), page.locator("#image").bounding_box()
    wanted = [178 / 320, 142 / 256, 262 / 320, 198 / 256]
    assert parts(heat, stage) == pytest.approx(wanted, abs=2e-3)
    with page.expect_download() as waiting:
        page.locator("#save").click()
    saved = Image.open(waiting.value.path()).convert("RGB").crop((0, 0, 512, 410))
    whole = run.heatmaps[0]["cat"].overlay(run.images[0].resize((512, 410)))
    apart = np.abs(np.asarray(saved, int) - np.asarray(whole, int)[:410])
    assert np.median(apart[227:317, 285:419]) <= 12  # greys have other weights in a browser
    outside = np.asarray(saved, int).copy()
    outside[226:318, 284:420] = 0
    assert np.ptp(outside, axis=-1).max() <= 2  # grey: no heat
    shot = Image.open(BytesIO(page.locator("#heated").screenshot())).convert("RGB")
    inside = [np.ptp(shot.getpixel((int(x * shot.width), int(y * shot.height))))
              for x, y in ((0.6, 0.6), (0.68, 0.66), (0.75, 0.7))]  # fmt: skip
    assert max(inside) > 10


def test_a_spot_outside_the_crop_has_no_words(run, page):
    box = page.locator("#heated").bounding_box()

    def click(x, y):
        page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])
        return page.locator("#spot-where").inner_text()

    assert "outside the part that was drawn" in click(0.2, 0.2)
    assert page.locator("#spot-words li").count() == 0
    middle = ((178 + 262) / 2 + 3) / 320, ((142 + 198) / 2 + 3) / 256
    assert "row 5 of 8, column 7 of 12" in click(*middle)
    told = page.locator("#spot-words li", has_text="cat").locator(".number").inner_text()
    assert float(told) == pytest.approx(float(run.heatmaps[0]["cat"].values[4, 6]), rel=0.05)
    page.locator("#stage").focus()
    page.keyboard.press("ArrowRight")
    assert "column 8 of 12" in page.locator("#spot-where").inner_text()


def test_anyone_can_use_it(page):
    assert not faults_in_every_look(page)
