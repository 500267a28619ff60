"""Figures for papers: the numbers they draw, their text, their files, and what cannot be drawn."""

import errno
import os
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch
from helpers.demo_words import OTHER, PROMPT, THING
from helpers.tiers import tiered
from matplotlib import pyplot
from matplotlib.font_manager import findfont
from matplotlib.ft2font import FT2Font
from matplotlib.text import Text
from PIL import Image

from sdattn import PRESETS, Heatmaps, generate
from sdattn.figures import KINDS as ALL_KINDS
from sdattn.figures import animate, figure, save_animation, save_figure
from sdattn.figures.lettering import settings
from sdattn.maps.aggregation import aggregate
from sdattn.maps.details import Details
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.prompts.tokens import read_labels
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.info import RunSettings

OPTIONS = {"height": 128, "width": 192, "num_inference_steps": 10}
WORDS = {"a": (1, 6), THING: (3,)}  # and their columns
ROWS = [(word, column) for word, columns in WORDS.items() for column in columns]
KINDS = [kind for kind in ALL_KINDS if kind not in ("frames", "compare")]  # of one image
TIMES = "\N{MULTIPLICATION SIGN}"
PAGE = 7.0, 9.5
ODD = ["שלום", "مرحبا", "🐱", "猫", "$x$", "<script>", "w" * 200, "a\nb\x00", "\ud83d"]


@pytest.fixture(scope="module")
def run(demo):
    return generate(demo, PROMPT, capture_options={"steps": "all", "heads": "all"}, **OPTIONS)


@pytest.fixture(scope="module")
def figures(run):
    image = run.image_run(0)
    return {kind: figure(image, kind, None if kind == "words" else [*WORDS]) for kind in KINDS}


def random_run(words, steps=0, heads=0, grid=(8, 8), size=(64, 64), layers=2):
    """Random maps of these words, on ``grid`` and on half of it, of a grey image of ``size``."""
    chance = torch.Generator().manual_seed(0)
    words = [f"word{i}" for i in range(words)] if isinstance(words, int) else words
    columns = tuple(range(len(words) + 1))
    prompt = read_labels({word: [i] for i, word in enumerate(words, 1)}, len(columns))
    places = {"down_blocks.0.attentions.0": 0, "mid_block.attentions.0": 1}
    places |= {f"up_blocks.3.attentions.{i}": 0 for i in range(layers)}

    def maps(*leading):
        found = {}
        for name, level in places.items():
            shape = *leading, *(side >> level for side in grid), len(columns)
            values = (4 * torch.rand(shape, generator=chance)).softmax(-1)
            name = f"{name}.transformer_blocks.0.attn2"
            found[name] = LayerMap(name.split("_")[0], level, max(heads, 1), values)
        return LayerMaps(found, columns, passes=2)

    held, kept = maps(1), maps(steps) if steps else None
    details = Details(kept, tuple(range(steps)), maps(1, heads) if heads else None)
    made = Heatmaps(prompt, aggregate(held, PRESETS["default"])[0])
    times = [981.25 - i for i in range(steps)]
    settings = RunSettings(prompt=made.prompt.text, seed=0, timesteps=times)
    return ImageRun(Image.new("RGB", size, "grey"), made, held, settings, details)


def panels(drawn):
    return drawn.axes[:-1]


def values(axes):
    (image,) = axes.images
    return np.asarray(image.get_array(), np.float64)


def kept(run, *, cells=(16, 24), place="up"):
    """``{layer: [steps, heads, rows, cols, tokens]}`` of one place and grid, float64."""
    found = {name: maps[0].double().numpy() for name, maps in run.store.maps.items()}
    return {n: m for n, m in found.items() if n.startswith(place) and m.shape[2:4] == cells}


def assert_drawn(axes, wanted):
    assert len(axes) == len(wanted)
    for one, other in zip(axes, wanted, strict=True):
        np.testing.assert_allclose(values(one), other, atol=1e-6, rtol=1e-5)


def assert_one_scale(drawn, of):
    """The panels ``of`` share the norm that their numbers need, and the colour bar has it."""
    low = min(values(axes).min() for axes in of)
    high = max(values(axes).max() for axes in of)
    for axes in of:
        assert axes.images[0].get_clim() == pytest.approx((low, high))
        assert axes.images[0].get_cmap().name == "inferno"
        assert axes.images[0].get_interpolation() == "nearest"
    bar = drawn.axes[-1]
    assert not bar.images
    assert bar.get_ylim() == pytest.approx((low, high))
    shown = [float(one.get_text()) for one in bar.get_yticklabels()]
    assert len(shown) > 1
    np.testing.assert_allclose(shown, bar.get_yticks(), rtol=1e-6)


def assert_own_scales(drawn, of):
    """Each panel is drawn from its smallest to its largest value, which are written below it."""
    for axes in of:
        low, high = values(axes).min(), values(axes).max()
        assert axes.images[0].get_clim() == pytest.approx((low, high))
        assert axes.get_xlabel().split() == [f"{low:.2g}", "to", f"{high:.2g}"]
    bar = drawn.axes[-1]
    assert [one.get_text() for one in bar.get_yticklabels()] == ["lowest", "highest"]
    assert "own scale" in " ".join(bar.get_ylabel().split())


# The numbers


@pytest.mark.slow
def test_words_beside_the_image(run, figures):
    first, *rest = panels(figures["words"])
    pixels = np.asarray(run.images[0].convert("RGB"))
    np.testing.assert_array_equal(first.images[0].get_array(), pixels)
    mean = np.mean([maps[5:].mean((0, 1)) for maps in kept(run).values()], axis=0)
    assert_drawn(rest, [mean[..., column] for column in range(1, 9)])
    assert [one.get_title() for one in (first, *rest)] == ["image", *PROMPT.split()]
    assert_one_scale(figures["words"], rest)


@pytest.mark.slow
def test_steps_are_a_few_from_the_first_to_the_last(run, demo, figures):
    shown = panels(figures["steps"])
    titles = [one.get_title() for one in shown[:8]]
    steps = [int(title.split()[1]) - 1 for title in titles]
    assert (steps[0], steps[-1]) == (0, 9)
    assert set(np.diff(steps)) == {1, 2}
    times = demo.scheduler.timesteps.tolist()
    assert titles == [f"step {i + 1}\nt = {times[i]:g}" for i in steps]
    means = np.mean([maps.mean(1) for maps in kept(run).values()], axis=0)  # [steps, ...]
    assert_drawn(shown, [means[step, ..., column] for _, column in ROWS for step in steps])
    assert [one.get_ylabel() for one in shown[::8]] == [word for word, _ in ROWS]
    assert_one_scale(figures["steps"], shown)


@pytest.mark.slow
def test_layers_by_place_and_grid(run, figures):
    shown, wanted = panels(figures["layers"]), {}
    for place in ("down", "mid", "up"):
        for cells in ((16, 24), (8, 12), (4, 6), (2, 3)):
            if maps := kept(run, cells=cells, place=place):
                title = f"{place}\n{cells[0]}{TIMES}{cells[1]}"
                wanted[title] = np.mean([one[5:].mean((0, 1)) for one in maps.values()], axis=0)
    titles = [one.get_title() for one in shown[: len(wanted)]]
    assert sorted(titles) == sorted(wanted)
    assert [title.split()[0] for title in titles] == ["down"] * 3 + ["mid"] + ["up"] * 3
    assert_drawn(shown, [wanted[title][..., column] for _, column in ROWS for title in titles])
    assert [one.get_ylabel() for one in shown[:: len(wanted)]] == [word for word, _ in ROWS]
    assert_own_scales(
        figures["layers"], shown
    )  # a coarse grid's values are many times a fine one's


@pytest.mark.slow
def test_heads_of_each_layer(run, figures):
    shown, layers = panels(figures["heads"]), kept(run)
    (number,) = {maps.shape[1] for maps in layers.values()}
    wanted = [
        maps[5:, head, ..., column].mean(0)
        for _, column in ROWS
        for maps in layers.values()
        for head in range(number)
    ]
    assert_drawn(shown, wanted)
    assert [one.get_title() for one in shown[:number]] == [f"head {i}" for i in range(number)]
    places = ["up 3.0.0", "up 3.1.0", "up 3.2.0"]  # the block, its attention, its transformer block
    labels = [f"{word}\n{place}" for word, _ in ROWS for place in places]
    assert [one.get_ylabel() for one in shown[::number]] == labels
    assert_one_scale(figures["heads"], shown)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_panels_have_the_shape_of_the_image_and_count_its_pixels(figures, kind):
    across, down = figures[kind].get_size_inches()
    for axes in panels(figures[kind]):
        assert axes.images[0].get_extent() == [0, 192, 128, 0]
        box = axes.get_position()
        assert box.height * down / (box.width * across) == pytest.approx(64 / 96)
        assert axes.get_xlim() == (0, 192)
        assert axes.get_ylim() == (128, 0)


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 0.25])
@pytest.mark.parametrize("kind", tiered(KINDS, quick=0))
def test_constant_maps_have_a_scale_from_zero(tmp_path, kind, value):
    run = random_run(2, steps=2, heads=2)
    for held in (run.layers, run.details.steps, run.details.heads):
        for one in held.layers.values():
            one.maps.fill_(value)
    run.heatmaps.maps.fill_(value)
    drawn = figure(run, kind)
    for axes in panels(drawn)[kind == "words" :]:
        assert (values(axes) == value).all()
        assert axes.images[0].get_clim() == (0, value or 1)
    assert drawn.axes[-1].get_ylim() == (0, 1 if kind == "layers" else value or 1)
    save_figure(drawn, tmp_path / "x.svg")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "kind", "note"),
    [
        ("default", "words", "share of attention"),
        ("daam", "words", "attention, summed over steps"),
        ("daam", "layers", "share of attention"),
        ("ovam", "words", "attention among words, summed over steps, heads and layers"),
        ("ovam", "steps", "attention among words, summed over heads and layers"),
        ("ovam", "layers", "share of attention among words"),
        (
            "attend-and-excite",
            "words",
            f"softmax over words of 100 {TIMES} attention",
        ),
    ],
)
def test_the_colour_bar_says_what_the_values_are(preset, kind, note):
    run = random_run(3, steps=2)
    run.heatmaps.preset = PRESETS[preset]
    bar = figure(run, kind, own_scale=False).axes[-1]
    assert bar.get_ylabel().split() == note.split()


# The page


def boxes_of(drawn):
    """Every text that is shown, and where, in pixels."""
    with settings():  # there are no glyphs of some letters
        drawn.canvas.draw()
        texts = [one for one in drawn.findobj(Text) if one.get_visible() and one.get_text()]
        return [(one.get_text(), one.get_window_extent()) for one in texts]


def assert_on_one_page(width, height):
    assert (width <= PAGE[0] + 1e-6, height <= PAGE[1] + 1e-6) == (True, True)


def assert_legible(drawn):
    """On one page, every text inside, none over another or over a panel."""
    assert_on_one_page(*drawn.get_size_inches())
    texts = boxes_of(drawn)
    for text, box in texts:
        inside = box.x0 >= -1 and box.y0 >= -1
        inside &= box.x1 <= drawn.bbox.width + 1 and box.y1 <= drawn.bbox.height + 1
        assert inside, f"{text!r} leaves the figure: {box} of {drawn.bbox}"
    boxes = [*texts, *((i, axes.get_window_extent()) for i, axes in enumerate(drawn.axes))]
    for (one, box), (other, against) in combinations(boxes, 2):
        across = min(box.x1, against.x1) - max(box.x0, against.x0)
        down = min(box.y1, against.y1) - max(box.y0, against.y0)
        assert across <= 1 or down <= 1, f"{one!r} and {other!r} overlap"


def test_panels_are_as_large_as_the_page_allows():
    drawn = figure(random_run(12, size=(512, 512)), "words")
    width, height = drawn.get_size_inches()
    assert width == pytest.approx(PAGE[0], abs=0.01) or height == pytest.approx(PAGE[1], abs=0.01)
    assert_on_one_page(width, height)


WIDE = {"size": (1536, 512), "grid": (8, 24)}
HIGH = {"size": (512, 1024), "grid": (16, 8)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "words", "options", "number"),
    tiered(
        [
            ("words", ODD, {}, 10),
            ("steps", 1, {"steps": 1}, 1),
            ("layers", 5, WIDE, 5 * 3),
            ("heads", 3, {"heads": 8}, 3 * 2 * 8),
            ("words", 3, {"size": (300, 3000), "grid": (80, 8)}, 4),
            ("words", 73, {}, 74),
            ("words", 12, HIGH, 13),
            ("steps", 4, {"steps": 50}, 4 * 8),
            ("heads", ODD, {"heads": 1}, 9 * 2),
            ("heads", 2, {"heads": 20, "layers": 1, "size": (768, 512), "grid": (8, 12)}, 40),
            ("steps", 1, {"steps": 1, "size": (3000, 300), "grid": (8, 80)}, 1),
        ],
        quick=0,
    ),
)
def test_few_and_many_panels_are_legible(kind, words, options, number):
    drawn = figure(random_run(words, **options), kind)
    assert_legible(drawn)
    assert len(panels(drawn)) == number


@pytest.mark.slow
def test_odd_words_are_shown_as_they_are():
    run = random_run(ODD)
    shown = panels(figure(run, "words"))[1:]
    *titles, long, lines, half = [one.get_title() for one in shown]
    assert titles == ODD[:6]
    assert long.startswith("www") and long.endswith("w…") and len(long) < 40
    assert (lines, half) == ("a b\ufffd", "\ufffd")
    assert not any(one.title.get_parse_math() for one in shown)


def test_a_letter_that_the_font_lacks_comes_from_another():
    letter = "\N{LATIN SMALL LETTER D WITH PALATAL HOOK}"  # of STIX, which comes with matplotlib
    drawn = figure(random_run(["cat", letter]), "words", [letter])
    families = panels(drawn)[1].title.get_fontfamily()
    fonts = [FT2Font(findfont(family)) for family in families]
    assert families[0] == "DejaVu Sans"
    assert [bool(font.get_char_index(ord(letter))) for font in fonts] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "words"), [("words", ODD), ("steps", 2), ("heads", 1)])
def test_fonts_and_sizes_of_the_user_are_taken_over(kind, words):
    run = random_run(words, steps=8, heads=4)
    theirs = {"font.size": 12, "font.family": "serif", "ytick.labelsize": 5}
    with matplotlib.rc_context(theirs):
        drawn = figure(run, kind)
    assert_legible(drawn)
    shown = [*(axes.title for axes in panels(drawn)), drawn.axes[-1].yaxis.label]
    shown = [text for text in shown if text.get_text()]
    assert {text.get_fontsize() for text in shown} == {12}
    assert {text.get_fontname() for text in shown} == {"DejaVu Serif"}
    assert {text.get_fontsize() for text in drawn.axes[-1].get_yticklabels()} == {5}


# How it looks


@pytest.mark.slow
@pytest.mark.parametrize("width", [3.25, 6.875, 12])
@pytest.mark.parametrize("kind", ["words", "layers"])
def test_a_figure_is_as_wide_as_it_is_asked_to_be(tmp_path, kind, width):
    run = random_run(2, size=(96, 64), grid=(8, 12))
    drawn = figure(run, kind, width=width)
    assert drawn.get_figwidth() == pytest.approx(width)
    save_figure(drawn, tmp_path / "x.png", dpi=100)
    with Image.open(tmp_path / "x.png") as image:
        assert image.width == pytest.approx(100 * width, abs=1)
    boxes = [axes.get_window_extent() for axes in panels(drawn)]
    assert {round(box.height / box.width, 2) for box in boxes} == {0.67}
    assert len({round(box.width) for box in boxes}) == 1  # panels of one size


def test_colours_axes_and_bar_are_those_that_were_asked_for():
    run = random_run(2)
    drawn = figure(run, "words", cmap="viridis", show_axes=False, colorbar=False)
    assert len(drawn.axes) == 3 and drawn.get_supxlabel() == drawn.get_supylabel() == ""
    for axes in drawn.axes:
        assert not any(spine.get_visible() for spine in axes.spines.values())
        assert not axes.get_xticks().size and not axes.get_yticks().size
    assert {axes.images[0].get_cmap().name for axes in drawn.axes[1:]} == {"viridis"}
    assert_one_scale_of(drawn.axes[1:])
    bar = figure(run, "words", cmap="viridis").axes[-1]
    assert bar.get_ylim() == pytest.approx(drawn.axes[1].images[0].get_clim())
    assert_own_scales(own := figure(run, "words", own_scale=True), panels(own)[1:])
    assert_one_scale(shared := figure(run, "layers", own_scale=False), panels(shared))


def assert_one_scale_of(of):
    assert len({axes.images[0].get_clim() for axes in of}) == 1


def test_a_resolution_that_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dpi=0"):
        save_figure(figure(random_run(1), "words"), tmp_path / "x.png", dpi=0)


# Runs compared


def test_runs_that_share_a_seed_are_numbered():
    one = random_run(["cat"])
    again, other = (replace(one, settings=replace(one.settings, seed=seed)) for seed in (0, 2))
    shown = panels(figure(one, "compare", others=[again, other]))
    assert [axes.get_ylabel() for axes in shown[::2]] == ["run 1", "run 2", "run 3"]


def test_runs_are_compared_row_by_row_on_one_scale():
    one, other = random_run(["cat", "dog"]), random_run(["cat", "owl"])
    other = replace(other, settings=replace(other.settings, seed=7))
    other.heatmaps.maps.mul_(0.5)
    drawn = figure(one, "compare", others=[other])
    shown = panels(drawn)
    titles = [axes.get_title() for axes in shown]
    assert titles == ["image", "cat", "dog", "image", "cat", "owl"]
    assert [axes.get_ylabel() for axes in shown] == ["seed 0", "", "", "seed 7", "", ""]
    wanted = [run.heatmaps[word].values for run, word in
              ((one, "cat"), (one, "dog"), (other, "cat"), (other, "owl"))]  # fmt: skip
    maps = [axes for axes in shown if axes.get_title() != "image"]
    assert_drawn(maps, wanted)
    assert_one_scale(drawn, maps)
    assert_legible(drawn)
    some = panels(figure(one, "compare", ["cat", "owl"], others=[other]))
    assert [axes.get_title() for axes in some] == ["image", "cat", "image", "cat", "owl"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: replace(run, image=Image.new("RGB", (64, 128))), "belong to an image"),
        (lambda run: setattr(run.heatmaps, "preset", PRESETS["daam"]) or run, "two presets"),
    ],
)
def test_runs_that_do_not_compare_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        figure(random_run(1), "compare", others=[change(random_run(1))])


# Axes of the user


@pytest.mark.slow
def test_axes_of_the_user_are_drawn_into(run):
    """The same images, titles and scale; the figure stays the user's."""
    image = run.image_run(0)
    theirs = matplotlib.figure.Figure((12, 5), layout="constrained")
    axes = theirs.subplots(len(ROWS), 8)
    assert figure(image, "steps", [*WORDS], axes=axes) is theirs
    assert theirs.get_size_inches().tolist() == [12, 5]
    assert theirs.axes[:-1] == list(axes.flat)
    for mine, other in zip(axes.flat, panels(figure(image, "steps", [*WORDS])), strict=True):
        np.testing.assert_array_equal(values(mine), values(other))
        assert mine.images[0].get_extent() == other.images[0].get_extent()
        assert (mine.get_title(), mine.get_ylabel()) == (other.get_title(), other.get_ylabel())
        assert mine.title.get_fontsize() == 12  # "large" of 10 points, matplotlib's own
    assert_one_scale(theirs, list(axes.flat))
    assert theirs.axes[-1].get_ylabel() == "share of attention"
    theirs.canvas.draw()
    assert {mine.get_window_extent().height for mine in axes.flat} != {0}


# The files


def all_bytes(drawn, folder):
    paths = [folder / f"x.{kind}" for kind in ("pdf", "svg", "png")]
    for path in paths:
        save_figure(drawn, path)
    return [path.read_bytes() for path in paths]


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiered(["steps", "words"], quick=0))
def test_a_figure_gives_the_same_bytes_whatever_its_user_has_set(run, tmp_path, kind):
    open_before = pyplot.get_fignums()
    drawn = figure(run.image_run(0), kind, [THING])
    found = all_bytes(drawn, tmp_path)
    theirs = {"savefig.dpi": 50, "svg.fonttype": "path", "image.origin": "lower"}
    theirs |= {"savefig.bbox": "tight", "axes.grid": True, "xtick.direction": "in"}
    with matplotlib.rc_context(theirs):
        assert all_bytes(figure(run.image_run(0), kind, [THING]), tmp_path) == found
    with matplotlib.rc_context({**theirs, "font.size": 20, "font.family": "serif"}):
        before = matplotlib.rcParams.copy()
        assert all_bytes(drawn, tmp_path) == found  # text was settled when it was drawn
        larger = figure(run.image_run(0), kind, [THING])
        assert matplotlib.rcParams.copy() == before
        found = all_bytes(larger, tmp_path)
        assert all_bytes(figure(run.image_run(0), kind, [THING]), tmp_path) == found
    assert all_bytes(larger, tmp_path) == found
    assert pyplot.get_fignums() == open_before


@pytest.mark.slow
def test_files_are_of_the_kind_that_their_names_say(figures, tmp_path):
    for name in ("x.pdf", "new/folder/x.SVG", "x.png"):
        save_figure(figures["words"], tmp_path / name)
    data = (tmp_path / "x.pdf").read_bytes()
    assert data.startswith(b"%PDF-") and b"/FontFile2" in data and b"/Type3" not in data
    assert b"CreationDate" not in data
    across, down = figures["words"].get_size_inches()
    with Image.open(tmp_path / "x.png") as image:
        assert image.format == "PNG"
        assert image.size == pytest.approx((300 * across, 300 * down), abs=1)
        assert image.info["dpi"] == pytest.approx((300, 300), abs=0.1)
    root = ElementTree.parse(tmp_path / "new/folder/x.SVG").getroot()
    assert root.tag.endswith("}svg")
    assert sorted(os.listdir(tmp_path)) == ["new", "x.pdf", "x.png"]


@pytest.mark.slow
def test_text_stays_text(tmp_path):
    words = [*ODD[:6], f"{THING} & {OTHER}"]
    save_figure(figure(random_run(words, steps=2), "steps"), tmp_path / "x.svg")
    elements = list(ElementTree.parse(tmp_path / "x.svg").getroot().iter())
    texts = {"".join(one.itertext()).strip() for one in elements if one.tag.endswith("}text")}
    assert {*words, "step 1", "step 2", "t = 981.2", "x (pixels)", "share of attention"} <= texts
    assert not any(one.tag.endswith("script") for one in elements)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x", "x.jpg", "pdf", "x.gif"])
def test_other_formats_are_refused(figures, tmp_path, name):
    with pytest.raises(ValueError, match=r"\.pdf.*\.svg"):
        save_figure(figures["words"], tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("at", ["fsync", "replace"])
@pytest.mark.parametrize("name", ["x.png", "x.webp"])
def test_a_failure_leaves_the_old_file(figures, tmp_path, monkeypatch, at, name):
    path = tmp_path / name
    path.write_bytes(b"old")

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, at, fail)
    with pytest.raises(OSError, match="No space left"):
        if name == "x.png":
            save_figure(figures["words"], path)
        else:
            save_animation([Image.new("RGB", (8, 8))] * 2, path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [name]


# What cannot be drawn


def axes(number):
    return np.ravel(matplotlib.figure.Figure().subplots(1, number))


@pytest.mark.parametrize(
    ("kind", "words", "options", "error", "message"),
    [
        ("word", None, {}, ValueError, "'word'.*words"),
        ("steps", None, {}, ValueError, "capture_options={'steps': 'all'}"),
        ("heads", None, {}, ValueError, "capture_options={'heads'.*'all'}"),
        ("words", ["cow"], {}, KeyError, "'cow'.*prompt"),
        ("layers", ["word1", "cow"], {}, KeyError, "'cow'.*prompt"),
        ("words", "word1", {}, ValueError, "words='word1'"),
        ("words", None, {"cmap": "viridiss"}, ValueError, "cmap=.*Did you mean 'viridis'"),
        ("words", None, {"width": 0.2}, ValueError, "width=0.2.*inches"),
        ("words", None, {"width": "1col"}, ValueError, "width='1col'.*inches"),
        ("layers", None, {"width": 1}, ValueError, r"page of 1 x 9\.5.*larger `width`"),
        ("words", None, {"others": [random_run(1)]}, ValueError, "`others`"),
        ("compare", None, {}, ValueError, "`others`"),
        ("compare", ["cow"], {"others": [random_run(1)]}, KeyError, "'cow'"),
        ("words", None, {"axes": axes(2)}, ValueError, "2 axes.*3 panels"),
        ("words", None, {"axes": axes(4)}, ValueError, "4 axes.*3 panels"),
    ],
)
def test_what_cannot_be_asked_for(kind, words, options, error, message):
    with pytest.raises(error, match=message):
        figure(random_run(2), kind, words, **options)


def test_text_that_leaves_no_room_is_refused():
    with matplotlib.rc_context({"font.size": 60}):
        with pytest.raises(ValueError, match="1.*rows.*8"):
            figure(random_run(1, steps=8), "steps")


@pytest.mark.slow
def test_too_many_panels_are_refused():
    run = random_run(73, heads=8)
    with pytest.raises(ValueError, match="146.*rows.*8"):
        figure(run, "heads")
    assert len(panels(figure(run, "heads", ["word1", "word72"]))) == 2 * 2 * 8


def test_values_that_are_not_finite_are_refused():
    run = random_run(2)
    run.heatmaps.maps[3, 4, 1] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        figure(run, "words")


def test_a_run_without_a_word_is_refused():
    run = random_run(2)
    bare = Heatmaps(run.heatmaps.prompt, run.heatmaps.maps[..., :1], [0])
    with pytest.raises(ValueError, match="word.*'word0 word1'"):
        figure(replace(run, heatmaps=bare), "words")


@pytest.mark.parametrize("kind", ["words", "steps", "layers", "heads"])
def test_a_run_of_one_image_is_its_images(run, kind):
    of_image = figure(run[0], kind, [THING])
    whole = figure(run, kind, [THING])
    for one, other in zip(of_image.axes, whole.axes, strict=True):
        assert [t.get_text() for t in one.texts] == [t.get_text() for t in other.texts]
        for ours, theirs in zip(one.images, other.images, strict=True):
            assert np.array_equal(ours.get_array(), theirs.get_array())


def test_an_animation_of_a_run_of_one_image_is_its_images(run):
    for ours, theirs in zip(animate(run, [THING]), animate(run[0], [THING]), strict=True):
        assert np.array_equal(ours, theirs)


def test_runs_to_compare_with_are_taken_likewise(run):
    assert len(figure(run, "compare", [THING], others=[run[0], run]).axes) == 7


@pytest.mark.parametrize("number", [0, 2])
def test_one_of_several_images_is_asked_for(run, number):
    several = replace(run, image_runs=[run[0]] * number)
    for draw in (
        lambda: figure(several, "words"),
        lambda: figure(run, "compare", others=[several]),
        lambda: animate(several),
    ):
        with pytest.raises(ValueError, match=rf"has {number} images.*run\[0\]"):
            draw()


@pytest.mark.parametrize("other", [None, "outputs/run", [], {}, 3], ids=str)
def test_what_is_no_run_is_told(run, other):
    for draw in (
        lambda: figure(other, "words"),
        lambda: figure(run, "compare", others=[other]),
        lambda: animate(other),
    ):
        with pytest.raises(TypeError, match="is no run. Pass what `generate"):
            draw()
