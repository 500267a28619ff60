"""`sdattn explain` of an image."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.command_lines import said
from helpers.demo_words import THING
from PIL import Image

from demos.scenes.shapes import random_scene
from sdattn import load_run
from sdattn.files.images import open_image
from sdattn.runs.explaining import explain


@pytest.fixture
def explained(invoke, tmp_path):
    """Run ``sdattn explain`` in a folder with images: (exit code, stdout, stderr)."""
    scene = random_scene(np.random.default_rng(0))
    Image.fromarray(scene.draw()).save("My photo.png")
    (tmp_path / "half.png").write_bytes((tmp_path / "My photo.png").read_bytes()[:200])
    (tmp_path / "notes.png").write_text("words")

    return partial(invoke, "explain")


@pytest.mark.slow
def test_the_command_writes_a_run(explained, demo):
    code, out, err = explained("My photo.png", f"a red {THING}", "--device", "cpu", "--seed", "2")
    assert code == 0, err
    folder = "outputs/My-photo-explained-2"
    for text in (folder, THING, "lowest", "reconstruction "):
        assert text in out
    saved = load_run(folder)
    with Image.open("My photo.png") as image:
        run = explain(demo, image, f"a red {THING}", seed=2)
    assert saved.info["explained"] == run.info[0]["explained"]
    assert saved.image.tobytes() == run.images[0].tobytes()
    torch.testing.assert_close(
        saved.heatmaps[THING].values, run.heatmaps[0][THING].values, atol=1e-3, rtol=0
    )


@pytest.mark.slow
def test_the_part_that_the_model_saw_is_said(explained):
    Image.new("RGB", (150, 120)).save("odd.png")
    code, out, err = explained("odd.png", f"a red {THING}", "--device", "cpu")
    assert code == 0, err
    with Image.open(next(Path("outputs").glob("odd*/image.png"))) as image:
        width, height = image.size
    assert (width, height) != (150, 120)
    assert f"the middle {width}x{height} of 150x120 pixels" in " ".join(out.split())


@pytest.mark.slow
def test_the_command_with_choices_of_its_own(explained):
    options = ("--device", "cpu", "--out", "run", "--force")
    assert explained("My photo.png", f"a {THING}", "--timesteps", "30, 600", *options)[0] == 0
    assert json.loads(Path("run/run.json").read_text())["explained"]["timesteps"] == [600, 30]
    assert explained("My photo.png", f"a {THING}", "--invert", "--steps", "2", *options)[0] == 0
    assert json.loads(Path("run/run.json").read_text())["explained"]["way"] == "inversion"


@pytest.mark.slow
def test_the_command_takes_a_model_of_flow_matching(explained):
    options = ("--model", "demo-mmdit", "--device", "cpu", "--out", "run", "--force")
    more = ("--refine", "self", "--ask", "star", "--preset", "columns")
    code, out, err = explained("My photo.png", "a red circle", *options, *more)
    assert code == 0, err
    assert "circle" in out and "star" in out
    told = load_run("run").info
    assert told["explained"]["timesteps"] == [250, 150, 50]
    assert (told["preset"]["name"], told["preset"]["refine"]) == ("columns", "self")
    assert told["explained"]["reconstruction_psnr"] > 20


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nothing.png", "a cat"), 2, "nothing.png"),
        (("notes.png", "a cat"), 2, "notes.png is not a readable image."),
        (("half.png", "a cat"), 2, "half.png is not a readable image: "),
        ((".", "a cat"), 2, "is a folder"),
        (("My photo.png", " "), 2, "is empty"),
        (("My photo.png", "a cat", "--timesteps", "0"), 2, "1 to 999"),
        (("My photo.png", "a cat", "--invert", "--model", "demo-mmdit"), 2, "--invert: a Stable"),
        (("My photo.png", "a cat", "--timesteps", "1,two"), 2, "not a list of whole numbers"),
        (("My photo.png", "a cat", "--timesteps", "5", "--invert"), 2, "pass --steps"),
        (("My photo.png", "a cat", "--steps", "5"), 2, "needs --invert"),
        (("My photo.png",), 2, "Missing argument"),
    ],
)
def test_commands_that_cannot_be(explained, tmp_path, arguments, code, message):
    found, _, err = explained(*arguments, *(("--device", "cpu") if code == 2 else ()))
    assert found == code
    assert message in said(err)
    assert "Traceback" not in err
    assert not list((tmp_path / "outputs").glob("*"))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "MPO", "WEBP", "BMP", "GIF", "TIFF"])
def test_photos_are_read(tmp_path, kind):
    photo = Image.new("RGB", (16, 8), (200, 30, 40))
    photo.save(tmp_path / "photo", kind)
    read = open_image(tmp_path / "photo").convert("RGB")
    assert read.size == photo.size
    assert abs(np.asarray(read, int) - np.asarray(photo, int)).max() <= 8


@pytest.mark.parametrize("kind", ["EPS", "PDF", "PCX", "ICNS"])
def test_what_is_no_photo_is_not_opened(tmp_path, kind):
    """Pillow starts Ghostscript for EPS, whatever the file is called."""
    Image.new("RGB", (64, 64)).save(tmp_path / "photo.png", kind)
    with pytest.raises(ValueError, match="photo.png.*Pass PNG"):
        open_image(tmp_path / "photo.png")
