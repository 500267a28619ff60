"""Render the sprites from free emoji sets: one lossless sheet, its table and the attributions.

The sets are npm packages of SVG bodies, fetched with ``npm pack`` and unpacked into one folder:

    for name in noto fluent-emoji-flat twemoji emojione fxemoji; do
        mkdir $name && tar xzf $(npm pack --silent @iconify-json/$name) -C $name
    done
    pip install resvg_py
    python -m demos.scenes.make_sprites FOLDER

Each drawing is cut to its outline and scaled so that its longer side fills a square of ``SIDE``
pixels: a sprite's size in a scene is then the size of what is seen.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from .sprites import ATTRIBUTIONS, SHEET, SIDE, TABLE

FINE = 4  # drawings are rendered so many times larger, then averaged
COLUMNS = 16  # sprites in a row of the sheet
SETS = {  # whose drawings, and the licence that they are under
    "noto": ("Noto Emoji", "Google", "Apache-2.0", "https://github.com/googlefonts/noto-emoji"),
    "fluent-emoji-flat": (
        "Fluent Emoji (flat)",
        "Microsoft Corporation",
        "MIT",
        "https://github.com/microsoft/fluentui-emoji",
    ),
    "twemoji": ("Twemoji", "Twitter, Inc", "CC-BY-4.0", "https://github.com/jdecked/twemoji"),
    "emojione": ("EmojiOne 1", "Emoji One", "CC-BY-4.0", "https://github.com/EmojiTwo/emojitwo"),
    "fxemoji": ("FxEmojis", "Mozilla", "Apache-2.0", "https://github.com/mozilla/fxemoji"),
}
LICENCES = {
    "Apache-2.0": "https://www.apache.org/licenses/LICENSE-2.0",
    "MIT": "https://github.com/microsoft/fluentui-emoji/blob/main/LICENSE",
    "CC-BY-4.0": "https://creativecommons.org/licenses/by/4.0/",
}
# Each noun's icon in the first four sets, and in FxEmojis, which has names of its own; "" where
# FxEmojis has none, or one that shows something else (a bitten apple, a grey star).
NOUNS = {
    "cat": ("cat-face", "cat"),
    "dog": ("dog-face", "dog"),
    "frog": ("frog", "frog"),
    "owl": ("owl", ""),
    "bird": ("bird", ""),
    "fish": ("tropical-fish", "tropicalfish"),
    "turtle": ("turtle", "turtle"),
    "penguin": ("penguin", "penguin"),
    "butterfly": ("butterfly", ""),
    "pizza": ("pizza", "sliceofpizza"),
    "hamburger": ("hamburger", "hamburger"),
    "cake": ("birthday-cake", "birthdaycake"),
    "apple": ("red-apple", ""),
    "banana": ("banana", "banana"),
    "lemon": ("lemon", "lemon"),
    "strawberry": ("strawberry", "strawberry"),
    "mushroom": ("mushroom", "mushroom"),
    "tree": ("deciduous-tree", "deciduoustree"),
    "cactus": ("cactus", "cactus"),
    "tulip": ("tulip", "tulip"),
    "sunflower": ("sunflower", "sunflower"),
    "sun": ("sun", "whitesun"),
    "moon": ("crescent-moon", "crescentmoon"),
    "star": ("star", ""),
    "cloud": ("cloud", "cloud"),
    "car": ("automobile", "automobile"),
    "bus": ("bus", "bus"),
    "rocket": ("rocket", "rocket"),
    "house": ("house", "housebuilding"),
    "balloon": ("balloon", "balloon"),
    "umbrella": ("umbrella", ""),
    "heart": ("red-heart", "redheart"),
    "book": ("closed-book", "closedbook"),
    "ball": ("soccer-ball", "soccerball"),
    "guitar": ("guitar", "guitar"),
}


def svg_of(icons: Mapping[str, Any], name: str) -> str:
    """Return an icon of an Iconify set as a whole SVG.

    Raises:
        SystemExit: the set has no such icon.
    """
    aliases = icons.get("aliases", {})
    while name in aliases:
        name = aliases[name]["parent"]
    if name not in icons["icons"]:
        raise SystemExit(f"{icons['prefix']} has no icon {name!r}. Correct NOUNS in {__file__}.")
    icon = {"left": 0, "top": 0, "width": 16, "height": 16, **icons, **icons["icons"][name]}
    box = "{left} {top} {width} {height}".format(**icon)
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} viewBox="{box}">{icon["body"]}</svg>'


def render(svg: str, side: int = SIDE) -> Image.Image:
    """Return a drawing as RGBA, ``side`` pixels square, its outline touching two sides."""
    import resvg_py

    fine = FINE * side
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=fine, height=fine))
    drawn = Image.open(io.BytesIO(png)).convert("RGBA")
    cut = drawn.crop(drawn.getchannel("A").point(lambda alpha: 255 * (alpha > 127)).getbbox())
    longer = max(cut.size)
    square = Image.new("RGBA", (longer, longer))
    square.paste(cut, ((longer - cut.width) // 2, (longer - cut.height) // 2))
    return square.resize((side, side), Image.Resampling.BOX)  # PIL premultiplies by alpha


def make_sheet(folder: Path) -> tuple[Image.Image, list[dict[str, str]]]:
    """Return the sheet of all sprites, row by row, and a row of the table for each."""
    tiles, table = [], []
    sets = {
        name: json.loads((folder / name / "package" / "icons.json").read_text()) for name in SETS
    }
    for noun, (common, of_firefox) in NOUNS.items():
        for name, icons in sets.items():
            icon = of_firefox if name == "fxemoji" else common
            if icon:
                tiles.append(render(svg_of(icons, icon)))
                row = {"noun": noun, "set": name, "icon": icon, "licence": SETS[name][2]}
                table.append(row)
    rows = -(-len(tiles) // COLUMNS)
    sheet = Image.new("RGBA", (COLUMNS * SIDE, rows * SIDE))
    for index, tile in enumerate(tiles):
        sheet.paste(tile, (index % COLUMNS * SIDE, index // COLUMNS * SIDE))
    return sheet, table


def attributions(table: list[dict[str, str]], folder: Path) -> str:
    """Return the credit that each set's licence asks for, as Markdown."""
    lines = ["# Whose drawings these are", ""]
    lines += [
        "The sprites in `sprites.png` are drawings of free emoji sets, rendered from SVG, cut to",
        "their outline and scaled by `make_sprites.py`. Scenes mirror them, scale them and shift",
        "their hues. `sprites.json` names the set, the icon and the licence of each.",
        "",
    ]
    for name, (title, owner, licence, source) in SETS.items():
        count = sum(row["set"] == name for row in table)
        version = json.loads((folder / name / "package" / "package.json").read_text())["version"]
        package = f"`@iconify-json/{name}` {version}"
        under = f"[{licence}]({LICENCES[licence]})"
        lines.append(f"- **{title}** by {owner}, <{source}>, under {under}:")
        lines.append(f"  {count} drawings, from {package}, changed as said above.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the options and write the three files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a folder for each set, as npm packed it")
    args = parser.parse_args()
    sheet, table = make_sheet(args.folder)
    sheet.save(SHEET, optimize=True)
    TABLE.write_text(json.dumps({"columns": COLUMNS, "sprites": table}, indent=1) + "\n")
    ATTRIBUTIONS.write_text(attributions(table, args.folder))
    print(f"{len(table)} sprites of {len(NOUNS)} nouns, {SHEET.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
