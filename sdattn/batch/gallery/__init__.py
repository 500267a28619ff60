"""``index.html`` of a batch run, its items to browse: images, maps and what failed. The same
rows give the same bytes; images and maps are in the shards' sheets, see :mod:`.sheets`."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ...maps.presets import Preset
from ...models.demos import Demo, demo_named
from ...prompts.words import folded, is_content_word, name_things, split_words
from ...runs.report.pages import look_data, page
from ..records import ItemRow, Manifest

EACH = 10_000  # items per page: a browser searches this many instantly
_KEYS = (
    "id",
    "place",
    "prompt",
    "source_prompt",
    "source_file",
    "truncated",
    "blanked",
    "failed",
    "score",
    "missing",
)
_OPENS = ("report.html", "grid.png", "video", "image.png")  # a card the first that was saved


def gallery_pages(
    manifest: Manifest, rows: Callable[[], Iterator[ItemRow]]
) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of ``index.html``, ``index-2.html`` and so on, ``EACH`` items per page.
    ``rows`` is called twice and returns the rows of whole and of failed items in the order of the
    list. ``"sheet"`` is the path of the shard's sheet, or None; ``"thumb"`` the item's place in it.
    """
    spans: list[tuple[int, int]] = []  # the first and the last line of each page
    failed = items = 0
    for items, row in enumerate(rows(), 1):
        if items > EACH * len(spans):
            spans.append((row["line"], row["line"]))
        spans[-1] = spans[-1][0], row["line"]
        failed += "failed" in row
    settings = manifest.settings
    saved = {*settings.save} if settings.format == "folder" else set()  # a browser opens no other
    saved |= {"image"} if "video" in saved else set()
    opens = [name for name in _OPENS if name.partition(".")[0] in saved]
    names = [name.replace("video", f"video.{settings.video_format}") for name in opens]
    preset = Preset.from_json(settings.preset)
    demo = demo_named(settings.model)
    data: dict[str, Any] = {"opens": names, "unit": preset.unit}
    data["look"] = look_data()
    told: dict[str, Any] = {"settings": settings, "input": manifest.input, "preset": preset}
    told |= {"spans": spans, "failed": failed, "done": items - failed, "demo": demo}
    every = rows()
    for number in range(1, max(len(spans), 1) + 1):
        sheets: dict[str, int] = {}
        data["rows"] = [_compact(row, sheets, demo) for row in islice(every, EACH)]
        told |= {"number": number, "data": {**data, "sheets": [*sheets]}}
        name = "index.html" if number == 1 else f"index-{number}.html"
        yield name, page("gallery", home=Path(__file__).parent, images_from="'self' file:", **told)


def _compact(row: ItemRow, sheets: dict[str, int], demo: Demo | None) -> ItemRow:
    """Return a row for gallery.js, without what is empty; the seed is text: JavaScript's integers
    end at 2**53."""
    made = {name: row.get(name) for name in _KEYS} | {"seed": str(row["seed"])}
    if "failed" not in row:
        content = filter(is_content_word, row["words"])
        made["strange"] = strange = demo.strange(content) if demo else []
        made |= {"words": [*dict.fromkeys(row["words"])], "best": _best(row, strange)}
        made["size"] = [row["width"], row["height"]]
    if chosen := row.get("candidates"):
        made["candidates"] = [{**one, "seed": str(one["seed"])} for one in chosen]
    made = {name: value for name, value in made.items() if value not in (None, [], False)}
    if row.get("thumb"):
        made |= {"thumb": row["thumb"], "sheet": sheets.setdefault(row["sheet"], len(sheets))}
        ranges = zip(made.get("words") or (), row["thumb"].get("ranges", ()), strict=False)
        peaks = [peak for word, (_, peak, _) in ranges if is_content_word(word)]
        made["top"] = max(peaks, default=0)
    return made


def _best(row: ItemRow, strange: Sequence[str]) -> str | None:
    """Return the word whose map rises highest above its mean: among an edit's new things, else
    words that name a thing, else content words; None if the model never learnt any of these."""
    words = row["words"]
    source = row.get("source_prompt") or ""
    things = [words[i] for i in name_things(words)]
    old = {folded(word) for word, _, _ in split_words(source)}
    new = [word for word in things if folded(word) not in old]
    rises = {word["word"]: word["peak"] - word["mean"] for word in reversed(row["statistics"])}
    for group in (new, things, filter(is_content_word, words)):
        if known := [word for word in group if word not in strange]:
            return max(known, key=lambda word: rises[word])
    return None
