"""Folders of runs with their sheets and gallery, made without the rest of the batch room."""

import json
from html.parser import HTMLParser
from urllib.parse import quote

from helpers.batch_runs import manifest
from sdattn.batch.gallery import gallery_pages
from sdattn.batch.gallery.sheets import make_sheet, tile
from sdattn.files.videos import preview
from sdattn.maps.presets import Preset
from sdattn.runs.drawings import EVERY_MASK
from sdattn.runs.folder import pack_with_page

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "' onmouseover='alert(1)",
    "{{ 7*7 }} {% raw %}",
    "&lt;b&gt; &amp;amp; \\u003c \\",
    "חתול אדום ליד כלב כחול",
    "قطة حمراء بجانب كلب أزرق",
    "a cat\u202e tac a \u2066left\u2069",
    "🐈\u200d⬛ with a 🎈",
    "one\u2028two\u2029three\x7f",
    "  two  spaces\tand a tab ",
    "word " * 400,
    "W" * 2000,
)
PLAIN = Preset("plain", ("up",), refine="self")
USUAL = ("image", "maps")


def row(line, prompt="a red circle", *, item=None, **changes):
    """The row of an item that is nowhere else."""
    item, words = item or f"{line:06d}", prompt.split()
    numbers = [{"word": word, "peak": 0.5, "mean": 0.1} for word in words]
    return {
        "id": item,
        "line": line,
        "prompt": prompt,
        "seed": line - 1,
        "width": 64,
        "height": 64,
        "words": words,
        "statistics": numbers,
        "truncated": [],
        "blanked": False,
        "place": f"shards/{line // 100:06d}/{quote(item, safe='')}",
        "sheet": None,
        "thumb": None,
        **changes,
    }


def failed(line, reason="RuntimeError: no", prompt="a red circle"):
    made = {"id": f"{line:06d}", "line": line, "prompt": prompt, "seed": line - 1}
    return {**made, "failed": reason, "traceback": f"Traceback\n{reason}"}


def row_of(run, line, place, **more):
    """The row of a run as a batch has it."""
    info = pack_with_page(run, ("maps",)).info
    return row(
        line,
        info.prompt,
        seed=info.seed,
        width=run.image.width,
        height=run.image.height,
        words=[*run.heatmaps.words],
        statistics=[word.flat() for word in info.statistics],
        truncated=info.truncated,
        blanked=bool(info.blanked),
        source_prompt=info.edited and info.edited.prompt,
        source_file=info.explained and info.explained.file,
        place=place,
        **more,
    )


def written(root, rows, *, items=None, bad_lines=0, **about):
    """Write the gallery of these rows."""
    told = {"model": "m", "preset": PLAIN.to_json(), "save": [*about.pop("save", USUAL)]}
    told |= {"items": len(rows) if items is None else items, "bad_lines": bad_lines, **about}
    root.mkdir(parents=True, exist_ok=True)
    for name, data in gallery_pages(manifest(**told), lambda: iter(json.loads(json.dumps(rows)))):
        (root / name).write_bytes(data)
    return root


def gallery_of(
    root, runs, *, save=USUAL, sources=None, others=(), format="folder", masks=EVERY_MASK, **about
):
    """Write one shard of runs, with its sheet, and the gallery, with rows of ``others`` last."""
    shard = root / "shards" / "000000"
    shard.mkdir(parents=True)
    sources = sources or [None] * len(runs)
    tiles = [tile(run, save, masks, source=old) for run, old in zip(runs, sources, strict=True)]
    sheet, places = make_sheet(tiles)
    (root / "shards" / "000000-5eed.webp").write_bytes(sheet)
    rows = []
    for line, (run, thumb, old) in enumerate(zip(runs, places, sources, strict=True), 1):
        name = f"{line:06d}-1b2c3d" if format == "folder" else None
        place = f"shards/000000/{name}" if name else "shards/000000-3fa9c1.tar"
        rows.append(row_of(run, line, place, sheet="shards/000000-5eed.webp", thumb=thumb))
        if name is None:
            continue
        beside = {"preview.webp": preview(run.video)} if run.video else {}
        for path, data in pack_with_page(run, save, beside, masks).files.items():
            (shard / name / path).parent.mkdir(parents=True, exist_ok=True)
            (shard / name / path).write_bytes(data)
        if old is not None and "image" in save:
            old.save(shard / name / "source.png")
    return written(root, [*rows, *others], save=save, format=format, **about)


class Data(HTMLParser):
    """The text of a page, and of its element with the id "data" apart."""

    def __init__(self, path):
        super().__init__()
        self.inside, self.data, self.text = "", "", ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.inside = "data" if ("id", "data") in attrs else tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "data":
            self.data += data
        elif self.inside not in ("style", "script"):
            self.text += data


def data_of(path):
    return json.loads(Data(path).data)


def ids_of(path):
    return [one["id"] for one in data_of(path)["rows"]]
