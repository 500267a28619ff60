"""`sdattn show` of a saved run: figures, moving images, and phrases on its page."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.command_lines import said
from helpers.demo_words import OTHER, PROMPT, THING
from helpers.tiers import tiered
from helpers.video_runs import disc_run
from PIL import Image

from sdattn import generate, load_run
from sdattn.cli.show import _load
from sdattn.runs.folder import save_run

BEGINS = {
    "pdf": rb"%PDF-1\.\d",
    "svg": rb"<\?xml .*<svg ",
    "png": rb"\x89PNG\r\n\x1a\n",
    "gif": rb"GIF89a",
    "webp": rb"RIFF....WEBP",
}


@pytest.fixture(scope="module")
def folders(demo, tmp_path_factory):
    """A run that kept its steps and heads, and one that kept neither."""
    folder = tmp_path_factory.mktemp("runs")
    for name, options in (("kept", {"steps": "all", "heads": "all"}), ("means", {"steps": "mean"})):
        run = generate(demo, PROMPT, num_inference_steps=2, capture_options=options)
        run.save(folder / name)
    return folder


def assert_is(path, kind):
    assert re.match(BEGINS[kind], Path(path).read_bytes(), re.S)


@pytest.mark.parametrize(
    ("kind", "suffix"),
    tiered(
        [("words", "pdf"), ("steps", "svg"), ("words", "png"), ("layers", "PDF"), ("heads", "svg")],
        quick=0,
    ),
)
def test_a_figure_is_written(invoke, folders, kind, suffix):
    name = f"new/x.{suffix}"
    code, out, err = invoke("show", folders / "kept", THING, "--figure", kind, "-o", name)
    assert (code, out, err) == (0, f"{name}\n", "")
    assert_is(name, suffix.lower())
    assert os.listdir("new") == [f"x.{suffix}"]


def test_a_figure_looks_as_it_is_typed(invoke, folders):
    how = ("--words", f"red {THING}, {OTHER}", "--figure", "words", "--width", "1col")
    how += ("--dpi", "100", "--colormap", "gray", "--no-axes", "--no-colorbar", "-o", "x.png")
    assert invoke("show", folders / "kept", *how)[0] == 0
    with Image.open("x.png") as image:
        assert image.width == 325
        assert np.ptp(np.asarray(image.convert("RGB"), int)[:, 250:], axis=-1).max() == 0
    code, _, err = invoke("show", folders / "kept", "--figure", "words", "--colormap", "grey-",
                          "-o", "y.png")  # fmt: skip
    assert code == 2 and "--colormap grey-" in err


def test_runs_are_compared_in_a_figure(invoke, folders):
    how = (THING, "--figure", "compare", "--with", folders / "means", "-o", "x.svg")
    assert invoke("show", folders / "kept", *how)[0] == 0
    titles = re.findall(r"<text[^>]*>([a-z0-9 ]+)</text>", Path("x.svg").read_text())
    assert titles.count("image") == titles.count(THING) == 2


def test_a_card_and_an_animation_are_named_after_the_run(invoke, folders):
    for kind, name in (("card", "kept-card.png"), ("animation", "kept-animation.gif")):
        code, out, err = invoke("show", folders / "kept", "--figure", kind)
        assert (code, out, err) == (0, f"{name}\n", "")
        assert_is(name, name[-3:])
    with Image.open("kept-card.png") as card:
        assert card.size == (1200, 630)
    assert sorted(os.listdir()) == ["kept-animation.gif", "kept-card.png"]


@pytest.mark.parametrize("kind", ["gif", "webp"])
def test_an_animation_is_written(invoke, folders, kind):
    name = f"x.{kind}"
    code, out, err = invoke("show", folders / "kept", THING, "--animate", "-o", name)
    assert (code, out, err) == (0, f"{name}\n", "")
    assert_is(name, kind)
    with Image.open(name) as video:
        assert video.n_frames == 2
    assert os.listdir() == [name]


FIGURES = "Name a file that ends in .pdf or .svg or .png"
VIDEOS = "Name a file that ends in .gif or .webp or .mp4, not x.png."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--figure", "words", "--animate", "-o", "x.gif"), "Pass --figure or --animate"),
        (("--figure", "words"), FIGURES),
        (("--figure", "words", "-o", "x.gif"), FIGURES),
        (("--figure", "words", "-o", "x"), FIGURES),
        (("--figure", "words", "-o", "x.jpg"), f"{FIGURES}, not x.jpg."),
        (
            ("--figure", "word", "-o", "x.pdf"),
            "'word' is not one of 'words', 'steps'",
        ),
        (("--figure",), "--figure"),
        (("--figure", "compare", "-o", "x.pdf"), "by --with"),
        (("--figure", "words", "--with", "run", "-o", "x.pdf"), "by --with"),
        (("--width", "3"), "for a --figure"),
        (("--figure", "words", "--width", "wide", "-o", "x.pdf"), "none of 1col, 2col"),
        (("--figure", "words", "--dpi", "3", "-o", "x.pdf"), "--dpi"),
        (("--animate", "-o", "x.png"), VIDEOS),
        (("--figure", "animation", "-o", "x.png"), VIDEOS),
        (("--figure", "card", "-o", "x.pdf"), "ends in .png, not x.pdf."),
        (("--figure", "card", "--dpi", "100"), "for papers"),
    ],
)
def test_wrong_usage_is_exit_code_2(invoke, folders, arguments, message):
    code, out, err = invoke("show", folders / "kept", *arguments)
    assert (code, out) == (2, "")
    assert message in said(err)
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        ("means", ("--figure", "steps", "-o", "x.pdf"), "`sdattn generate` and --keep steps."),
        ("means", ("--figure", "heads", "-o", "x.pdf"), "`sdattn generate` and --keep heads."),
        ("means", ("--animate", "-o", "x.gif"), "no single steps"),
        ("kept", ("cow", "--figure", "layers", "-o", "x.pdf"), "'cow' is not in the prompt"),
        ("kept", ("cow", "--animate", "-o", "x.webp"), "'cow' is not in the prompt"),
        ("nowhere", ("--figure", "words", "-o", "x.pdf"), "There is no folder"),
    ],
)
def test_failures_say_why_in_one_line(invoke, folders, run, arguments, message):
    code, out, err = invoke("show", folders / run, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("sdattn: ") and err.count("\n") == 1
    assert message in err
    assert os.listdir() == []


@pytest.mark.parametrize("more", [(), ("-o", "x"), ("--figure", "words", "-o", "x.pdf")])
def test_a_run_without_items_is_told_from_a_batch(invoke, folders, more):
    run = folders / "kept"
    for command in (("show", run), ("diff", run, run)):
        code, _, err = invoke(*command, "--item", "1", *(more if command[0] == "show" else ()))
        assert code == 2 and "single run, which has no items. Leave --item 1 out" in said(err)


@pytest.mark.parametrize(
    "how", [("--figure", "words", "-o", "x.png"), ("--animate", "-o", "x.gif")]
)
@pytest.mark.slow
def test_a_file_is_only_replaced_with_force(invoke, folders, how):
    Path(how[-1]).write_text("mine")
    code, _, err = invoke("show", folders / "kept", THING, *how)
    assert code == 2 and "--force" in err and Path(how[-1]).read_text() == "mine"
    assert invoke("show", folders / "kept", THING, *how, "--force")[0] == 0
    assert_is(how[-1], how[-1][-3:])


def test_masks_are_those_of_the_maps(invoke, folders):
    run = load_run(folders / "kept")
    assert invoke("show", folders / "kept", THING, "--masks", "-o", "drawn")[0] == 0
    mask = Image.open(f"drawn/masks/01-{THING}.png")
    expected = run.heatmaps[THING].mask((run.image.height, run.image.width)).numpy()
    assert (np.asarray(mask) == expected * 255).all() and expected.any() and not expected.all()


@pytest.mark.parametrize(("typed", "threshold"), [("0.2", 0.2), ("otsu", "otsu")])
def test_masks_are_cut_at_the_threshold_that_is_typed(invoke, folders, typed, threshold):
    run = load_run(folders / "kept")
    how = ("--masks", "--threshold", typed, "-o", "drawn")
    assert invoke("show", folders / "kept", THING, *how)[0] == 0
    with Image.open(f"drawn/masks/01-{THING}.png") as mask:
        cut = np.asarray(mask) == 255
    size = run.image.height, run.image.width
    assert (cut == run.heatmaps[THING].mask(size, threshold).numpy()).all()
    assert (cut != run.heatmaps[THING].mask(size).numpy()).any()


def test_a_threshold_that_cannot_be_is_refused_as_it_is_typed(invoke, folders):
    code, _, err = invoke("show", folders / "kept", "--masks", "--threshold", "7", "-o", "drawn")
    assert code == 2 and "--threshold 7" in err
    code, _, err = invoke("show", folders / "kept", "--threshold", "0.5", "-o", "drawn")
    assert code == 2 and "--threshold needs --masks" in err and os.listdir() == []


@pytest.mark.slow
def test_a_file_that_cannot_be_written_leaves_nothing(invoke, folders):
    os.mkdir("x.png")
    code, _, err = invoke("show", folders / "kept", "--figure", "words", "-o", "x.png", "--force")
    assert code == 2
    assert err.startswith("sdattn: ") and err.count("\n") == 1
    assert os.listdir() == ["x.png"] and os.listdir("x.png") == []


@pytest.mark.slow
def test_the_page_holds_the_phrase_that_was_asked_for(invoke, folders):
    for asked in ((), (f"red {THING}", "blue")):
        assert invoke("show", folders / "kept", *asked, "--out", "drawn", "--force")[0] == 0
        page = Path("drawn/report.html").read_text()
        found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
        data = json.loads(found[1])
        assert data["words"][:8] == PROMPT.split()
        more = data["words"][8:] + [word for one in data["texts"] for word in one["words"]]
        assert [word for word in more if word[0] != "<"] == [*asked[:1]]  # "blue" is a word of it
    assert sorted(os.listdir("drawn/heatmaps"))[-2:] == ["07-blue.png", f"08-{OTHER}.png"]


@pytest.mark.slow
def test_a_figure_of_an_item_of_a_batch(invoke):
    Path("prompts.txt").write_text(f"a star\n{PROMPT}\n")
    options = ("--model", "demo", "--steps", "1", "--device", "cpu", "--save", "image,maps")
    assert invoke("batch", "prompts.txt", "--out", "run", *options)[0] == 0
    before = sorted(str(path) for path in Path("run").rglob("*"))
    arguments = "--item", "000002", "--figure", "words", "-o", "x.svg"
    assert invoke("show", "run", *arguments)[0] == 0
    assert f">{OTHER}<" in Path("x.svg").read_text()
    assert sorted(str(path) for path in Path("run").rglob("*")) == before
    [item] = map(str, Path("run").glob("shards/000000/000002-*"))
    for shown, message in (
        (("run",), "Name one of its items"),
        ((item,), "--out"),
        (("run", "--item", "000002"), "Say where to draw item 000002"),
    ):
        code, _, err = invoke("show", *shown)
        assert code == 2 and message in said(err)
    assert sorted(str(path) for path in Path("run").rglob("*")) == before
    code, _, err = invoke("show", "run", "--item", "7", "--animate", "-o", "x.gif")
    assert code == 2 and "7" in err
    assert not os.path.exists("x.gif")


def test_what_is_drawn_into_the_run_has_the_runs_own_numbers(invoke, folders, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(folders / "kept", run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    number = PROMPT.split().index(THING) + 1
    assert invoke("show", run, THING, "--masks")[0] == 0
    changed = {p for p in run.rglob("*") if p.is_file() and p.read_bytes() != before.get(p)}
    assert changed == {run / f"masks/{number:02d}-{THING}.png", run / "run.json"}
    assert invoke("show", run, f"red {THING}", THING)[0] == 0  # a phrase comes after the words
    drawn = sorted(path.name for path in (run / "heatmaps").iterdir())
    assert drawn[-1] == f"{len(PROMPT.split()) + 1:02d}-red-{THING}.png"
    assert drawn[:-1] == sorted(path.name for path in before if path.parent.name == "heatmaps")
    load_run(run)  # its checksums are those of the files
    files = json.loads((run / "run.json").read_bytes())["files"]
    for name, digest in files.items():
        assert hashlib.sha256((run / name).read_bytes()).hexdigest() == digest
    mask = run / f"masks/{number:02d}-{THING}.png"
    half = mask.read_bytes()
    assert invoke("show", run, THING, "--masks", "--threshold", "0.2")[0] == 0
    assert mask.read_bytes() != half
    (run / "heatmaps" / drawn[0]).unlink()
    (run / "report.html").write_text("mine")
    assert invoke("show", run)[0] == 0  # what is missing is drawn again, and nothing else
    assert (run / "heatmaps" / drawn[0]).is_file()
    assert (run / "report.html").read_text() == "mine"
    assert invoke("show", run, "--force")[0] == 0
    assert (run / "report.html").read_text() != "mine"


def test_frames_count_from_1_to_the_last(invoke, tmp_path):
    run = disc_run(frames=5)
    save_run(tmp_path / "run", run)
    there = load_run(tmp_path / "run").video
    for number in (1, 5):
        shown = _load(tmp_path / "run", None, number).image
        assert np.array_equal(shown, there[number - 1])
    for number, told in ((0, "greater than or equal to 1"), (6, "has 5 frames, 1 to 5")):
        of_words = ("--figure", "words", "-o", "words.pdf")
        code, _, err = invoke("show", tmp_path / "run", "--frame", number, *of_words)
        assert code == 2 and told in said(err)
