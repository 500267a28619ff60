"""The sheet of sprites, its table and its attributions."""

import colorsys
import json
import re

import numpy as np
import pytest

from demos.scenes.make_sprites import SETS, attributions
from demos.scenes.sprites import (
    ATTRIBUTIONS,
    COLOURABLE,
    COLOURS,
    MOTLEY,
    TABLE,
    colourable,
    coloured,
    hands,
)

pytestmark = pytest.mark.slow


def rows():
    return json.loads(TABLE.read_text())["sprites"]


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


@pytest.mark.parametrize("noun", COLOURABLE)
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
