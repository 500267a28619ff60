"""``index.html`` of a batch run: its items to browse, each linked to its report.

Pages, one per ``EACH`` items, are made from ``metadata.jsonl`` and ``errors.jsonl`` alone: no item
is opened, and the same run gives the same bytes anywhere.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ...files.addresses import AnyPath
from ...files.paths import file_name
from ...runs.report.pages import page
from ..storage.folder import BatchFolder
from ..storage.manifest import BatchSettings
from ..storage.rows import rows_in

EACH = 10_000  # items per page: a browser searches this many instantly
_HERE = Path(__file__).parent
_IMAGES = "'self' file:"  # next to the page, from a server and from a disk
# A card opens the first of these that was saved
_OPENS = ("report.html", "grid.png", "video", "image.png")
_NEAR = 2  # linked pages on either side


class _Span(NamedTuple):
    """A page's items: their number, and the lines of the first and the last."""

    items: int
    first: int
    last: int


def write_gallery(folder: BatchFolder) -> None:
    """Write ``index.html``, and ``index-2.html`` and so on if one page cannot hold all items;
    remove pages of an earlier, larger run."""
    path, manifest = folder.root / "metadata.jsonl", folder.manifest
    spans = list(_spans(path)) or [_Span(0, 0, 0)]
    total = sum(span.items for span in spans)
    about = {
        "settings": manifest.settings,
        "wanted": max(total, manifest.input.items),
        "total": total,
        "failed": sum(1 for _ in rows_in(folder.root / "errors.jsonl")),
        "bad_lines": manifest.input.bad_lines,
        **_cards(manifest.settings),
    }
    rows = rows_in(path)
    for number in range(1, len(spans) + 1):
        here = [_compact(row) for row in islice(rows, EACH)]
        data = {"opens": about["opens"], "has_images": about["has_images"], "rows": here}
        data |= {"videos": True} if about["videos"] else {}
        if about["overlays"]:
            # the spelling of words in the names of their overlays, if it differs
            words = ((word, file_name(word)) for row in here for word in row[4])
            data["files"] = {word: name for word, name in words if name != word}
        links = _links(number, spans)
        made = page("gallery", home=_HERE, images_from=_IMAGES, data=data, pages=links, **about)
        folder.storage.write(_name(number), [made])
    for old in folder.root.glob("index-*.html"):
        found = re.fullmatch(r"index-([1-9][0-9]*)\.html", old.name)
        if found and int(found[1]) > len(spans):
            old.unlink()


def _name(number: int) -> str:
    return "index.html" if number == 1 else f"index-{number}.html"


def _spans(path: AnyPath) -> Iterator[_Span]:
    rows = rows_in(path)
    while lines := [row["line"] for row in islice(rows, EACH)]:
        yield _Span(len(lines), lines[0], lines[-1])


def _cards(settings: BatchSettings) -> dict[str, Any]:
    """Return the contents of the items' cards: an image, a file to open, a command."""
    save, in_folders = settings.save, settings.format == "folder"
    has_video = in_folders and "video" in save
    save = [*save, "image"] if has_video else save  # a video has an image next to it
    saved = [name for name in _OPENS if in_folders and name.partition(".")[0] in save]
    opens = next(iter(saved), None)
    return {
        "has_images": "image.png" in saved,
        "opens": f"video.{settings.video_format}" if opens == "video" else opens,
        "videos": has_video,
        "overlays": in_folders and "overlays" in save,
        "in_shards": not in_folders,
        # else `sdattn show` has nothing to draw
        "can_show": "maps" in save and not {"image", "video"}.isdisjoint(save),
    }


def _compact(row: Mapping[str, Any]) -> list[Any]:
    """Return a row for gallery.js; the seed is text: JavaScript's integers end at 2**53."""
    seen = row["id"], row["place"], row["prompt"], str(row["seed"]), row["words"]
    size, blanked = (row["width"], row["height"]), int(row.get("blanked", False))
    source = [row["source_prompt"]] if "source_prompt" in row else []
    if "source_file" in row:  # with the word whose map rises highest above its mean
        rises = [word["peak"] - word["mean"] for word in row["statistics"]]
        source = [None, row["source_file"], rises.index(max(rises)) if rises else -1]
    return [*seen, *size, row["truncated"], blanked, *source]


def _links(number: int, spans: list[_Span]) -> list[dict[str, object]]:
    """Return the pages that a page links: the first, the last and those nearby."""
    last = len(spans)
    near = {1, last, *range(max(1, number - _NEAR), min(last, number + _NEAR) + 1)}
    return [
        {"name": _name(n), "here": n == number, "gap": n - 1 not in near, **span._asdict()}
        for n, span in enumerate(spans, 1)
        if n in near
    ]
