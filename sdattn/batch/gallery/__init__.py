"""``index.html`` of a batch run, its items to browse: images, maps and what failed. Pages are made
from rows alone, and the same rows give the same bytes anywhere; images and maps are in the shards'
sheets, see :mod:`sdattn.batch.gallery.sheets`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...maps.presets import Preset
from ...models.demos import demo_named
from ...prompts.words import is_content_word, name_things
from ...runs.report.images import colour_tables
from ...runs.report.pages import page

EACH = 10_000  # items per page: a browser searches this many instantly
_HERE = Path(__file__).parent
# A card opens the first of these that was saved
_OPENS = ("report.html", "grid.png", "video", "image.png")


@dataclass(frozen=True, kw_only=True)
class About:
    """Facts of a run that its pages state: numbers of its items and of lines that could not be
    read; what it saved, in which format, and that of its videos, None for images."""

    model: str
    preset: Preset
    items: int
    bad_lines: int
    save: Sequence[str]
    format: str = "folder"
    video_format: str | None = None


def gallery_pages(
    about: About, rows: Callable[[], Iterator[Mapping[str, Any]]]
) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of ``index.html``, ``index-2.html`` and so on, ``EACH`` items per page.

    ``rows`` is called twice and returns the rows of whole and of failed items in the order of the
    list. ``"sheet"`` is the path of the shard's sheet, or None; ``"thumb"`` the item's place in it.
    """
    spans: list[tuple[int, int]] = []  # the first and the last line of each page
    failed = items = 0
    for items, row in enumerate(rows(), 1):
        if items % EACH == 1 or EACH == 1:
            spans.append((row["line"], row["line"]))
        spans[-1] = spans[-1][0], row["line"]
        failed += "failed" in row
    is_video, in_folders = about.video_format is not None, about.format == "folder"
    saved = {*about.save, "image"} if is_video else {*about.save}  # a video has one next to it
    opens = [name for name in _OPENS if in_folders and name.partition(".")[0] in saved]
    data = {
        "opens": opens[0].replace("video", f"video.{about.video_format}") if opens else None,
        "has_files": "image.png" in opens,
        "plays": "video" in opens,
        "unit": about.preset.unit,
        "colours": colour_tables()["inferno"],
    }
    values = {
        "about": about,
        "failed": failed,
        "done": items - failed,
        "demo": demo_named(about.model),
        "spans": spans,
        "has_command": not in_folders and {"image", "maps"} <= saved,  # else it could draw nothing
    }
    every = rows()
    for number in range(1, max(len(spans), 1) + 1):
        sheets: dict[str, int] = {}
        data["rows"] = [_compact(about, row, sheets) for row in islice(every, EACH)]
        data["sheets"] = [*sheets]
        made = page(
            "gallery", home=_HERE, images_from="'self' file:", data=data, number=number, **values
        )
        yield "index.html" if number == 1 else f"index-{number}.html", made


def _compact(about: About, row: Mapping[str, Any], sheets: dict[str, int]) -> dict[str, Any]:
    """Return a row for gallery.js, without what is empty; the seed is text: JavaScript's integers
    end at 2**53."""
    found = {"id": row["id"], "prompt": row["prompt"], "seed": str(row["seed"])}
    if "failed" in row:
        return {**found, "failed": row["failed"]}
    words, demo = row["words"], demo_named(about.model)
    strange = demo.strange(filter(is_content_word, words)) if demo else []
    found |= {
        "place": row["place"],
        "words": [*dict.fromkeys(words)],
        "best": _best(words, strange, row["statistics"]),
        "size": [row["width"], row["height"]],
        "cut": row["truncated"],
        "blanked": row["blanked"],
        "strange": strange,
        "source": row.get("source_prompt"),
        "file": row.get("source_file"),
    }
    found = {name: value for name, value in found.items() if value not in (None, [], False)}
    if row["thumb"]:
        found |= {"thumb": row["thumb"], "sheet": sheets.setdefault(row["sheet"], len(sheets))}
    return found


def _best(
    words: Sequence[str], strange: Sequence[str], statistics: Sequence[Mapping[str, Any]]
) -> str | None:
    """Return the word whose map rises highest above its mean among those that name a thing, else
    among content words; None if the model never learnt any of these."""
    rises = {one["word"]: one["peak"] - one["mean"] for one in reversed(statistics)}
    for among in ([words[i] for i in name_things(words)], filter(is_content_word, words)):
        if known := [word for word in among if word not in strange]:
            return max(known, key=lambda word: rises[word])
    return None
