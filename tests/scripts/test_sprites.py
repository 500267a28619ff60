"""The sheet of sprites, its table and its attributions."""

import colorsys
import json
import re

import numpy as np
import pytest
from PIL import Image

from scripts.scenes.make_sprites import NOUNS, SETS, attributions, svg_of
from scripts.scenes.sprites import (
    ATTRIBUTIONS,
    COLOURABLE,
    COLOURS,
    MOTLEY,
    SHEET,
    SIDE,
    TABLE,
    colourable,
    coloured,
    hands,
    nouns,
    sprites,
)

pytestmark = pytest.mark.slow


def rows():
    return json.loads(TABLE.read_text())["sprites"]


def test_the_sheet_is_small_and_the_table_has_a_row_for_each_of_its_drawings():
    with Image.open(SHEET) as sheet:
        across, down = (length // SIDE for length in sheet.size)
        filled = [
            sheet.crop((x * SIDE, y * SIDE, (x + 1) * SIDE, (y + 1) * SIDE)).getextrema()[3][1]
            for y in range(down)
            for x in range(across)
        ]
        assert sheet.mode == "RGBA" and sheet.format == "PNG"
    assert SHEET.stat().st_size <= 2_000_000
    assert [alpha > 0 for alpha in filled] == [index < len(rows()) for index in range(len(filled))]


def test_thirty_nouns_and_more_are_there_in_four_or_five_hands_each():
    assert 30 <= len(nouns()) <= 40 and nouns() == tuple(NOUNS)
    for noun, drawn in hands().items():
        assert len(drawn) in (4, 5), noun
        images = [one.pixels.tobytes() for one in drawn.values()]
        assert len(set(images)) == len(images)
    assert len(sprites()) == len(rows())


def test_each_drawing_fills_its_square_and_nothing_is_beyond_its_outline():
    for sprite in sprites():
        alpha = sprite.pixels[..., 3]
        assert alpha.shape == (SIDE, SIDE)
        seen = np.argwhere(alpha > 100)
        assert max(np.ptp(seen, axis=0)) >= SIDE - 4, sprite.noun  # the longer side
        assert 0.08 < (alpha > 127).mean() < 0.99, sprite.noun


def test_each_set_is_credited_with_its_licence_and_the_number_of_its_drawings():
    text = ATTRIBUTIONS.read_text()
    free = {"Apache-2.0", "MIT", "CC-BY-4.0"}
    assert {row["licence"] for row in rows()} == free
    for name, (title, owner, licence, source) in SETS.items():
        mine = [row for row in rows() if row["set"] == name]
        assert {row["licence"] for row in mine} == {licence}
        [credit] = re.findall(rf"- \*\*{re.escape(title)}\*\*.*?said above\.", text, re.DOTALL)
        for said in (owner, source, licence, f"{len(mine)} drawings", "changed", f"json/{name}`"):
            assert said in credit
    assert {row["set"] for row in rows()} == set(SETS)


def test_attributions_are_what_the_script_writes(tmp_path):
    for name, version in re.findall(r"@iconify-json/(\S+)` (\S+),", ATTRIBUTIONS.read_text()):
        package = tmp_path / name / "package"
        package.mkdir(parents=True)
        (package / "package.json").write_text(json.dumps({"version": version}))
    assert attributions(rows(), tmp_path) == ATTRIBUTIONS.read_text()


def test_an_icon_is_found_by_its_other_name_too_and_one_that_is_missing_is_named():
    icons = {
        "prefix": "set",
        "height": 24,
        "icons": {"cat": {"body": "<path/>", "width": 32}},
        "aliases": {"kitty": {"parent": "puss"}, "puss": {"parent": "cat"}},
    }
    assert svg_of(icons, "kitty") == svg_of(icons, "cat")
    assert 'viewBox="0 0 32 24"><path/></svg>' in svg_of(icons, "cat")
    with pytest.raises(SystemExit, match="no icon 'dog'"):
        svg_of(icons, "dog")


@pytest.mark.parametrize("noun", COLOURABLE)
@pytest.mark.weekly
def test_a_drawing_in_another_colour_keeps_its_outline_and_takes_the_hue(noun):
    for hand in colourable(noun):
        own = hands()[noun][hand].pixels
        assert coloured(noun, hand, None) is own
        for colour, (hue, *_) in COLOURS.items():
            new = coloured(noun, hand, colour)
            assert (new[..., 3] == own[..., 3]).all()
            changed = (new[..., :3] != own[..., :3]).any(-1) & (own[..., 3] > 127)
            assert changed.mean() > 0.04, (noun, hand, colour)
            hues = [colorsys.rgb_to_hsv(*pixel) for pixel in (new[changed][:, :3] / 255).tolist()]
            vivid = [one[0] for one in hues if one[1] > 0.2 and one[2] > 0.2]
            away = abs(np.array(vivid) - hue)
            assert np.minimum(away, 1 - away).max() < 0.03


def test_what_has_no_colour_of_its_own_takes_none():
    for noun, hand in (("penguin", "noto"), *MOTLEY):
        with pytest.raises(ValueError, match=r"car \(noto"):
            coloured(noun, hand, "blue")
