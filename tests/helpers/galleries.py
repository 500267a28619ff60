"""Runs that are only rows, with their gallery, and what its pages hold."""

import json
from html.parser import HTMLParser

from helpers.batch_runs import manifest
from helpers.browser import list_troubles, page_opener, start_browser, wait_for  # noqa: F401
from sdattn.batch.gallery import write_gallery
from sdattn.batch.storage.folder import BatchFolder
from sdattn.maps.presets import Preset

USUAL = ("grid", "image", "maps", "overlays")
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


def row(line, prompt="a red circle", *, item=None, **changes):
    item = item or f"{line:06d}"
    place = f"items/{line // 1000:04d}/{item}"
    made = {"file_name": f"{place}/image.png", "id": item, "line": line, "prompt": prompt}
    made |= {"negative_prompt": None, "seed": line - 1, "width": 64, "height": 64}
    made |= {"words": prompt.split(), "truncated": [], "blanked": False, "place": place}
    return {**made, "fingerprint": "f", **changes}


def written(root, rows, *, errors=(), input=(), **settings):
    """A run of these rows, without items, and its gallery."""
    bad = sum("id" not in one for one in errors)
    told = {"items": len(rows), "bad_lines": bad, **dict(input), "save": [*USUAL], **settings}
    folder = BatchFolder(root)
    folder.temporary.mkdir(parents=True, exist_ok=True)
    folder.write_manifest(manifest(**told, preset=PLAIN.to_json()))
    for name, lines in (("metadata", rows), ("errors", errors)):
        text = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in lines)
        (root / f"{name}.jsonl").write_text(text, encoding="utf-8")
    write_gallery(folder)
    return root


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
    return [one[0] for one in data_of(path)["rows"]]


FAILED, UNREAD = {"id": "x", "line": 8, "reason": "no"}, {"line": 9, "reason": "no", "text": "?"}
