"""``index.html`` of a batch run: what it holds."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from helpers.browser import list_troubles, page_opener, start_browser, wait_for  # noqa: F401
from helpers.galleries import FAILED, HOSTILE, UNREAD, Data, data_of, ids_of, row, written

from sdattn.batch import gallery


class Inline(HTMLParser):
    """The policies of a page, its tags, and what its styles and scripts, not its data, hold."""

    def __init__(self, path):
        super().__init__(convert_charrefs=True)
        self.policies, self.tags, self.scripts, self.styles, self.links = [], [], [], [], []
        self.inside = None
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attrs = dict(attrs)
        if tag == "link":
            self.links.append(attrs["href"])
        if attrs.get("http-equiv") == "Content-Security-Policy":
            self.policies.append(attrs["content"])
        kinds = {"style": self.styles, "script": self.scripts}
        self.inside = kinds.get(tag) if attrs.get("id") != "data" else None
        if self.inside is not None:
            self.inside.append("")

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside is not None:
            self.inside[-1] += data


def digest_of(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def pages_of(path):
    """What the links between pages read."""
    [inside] = re.findall("<nav.*</nav>", path.read_text(), re.DOTALL)
    return " ".join(re.sub("<[^>]*>", " ", inside).replace("\u2013", "-").split())


def text_of(path):
    return " ".join(Data(path).text.split())


# What is written


def test_a_page_holds_what_the_rows_say(tmp_path):
    rows = [row(n, one, seed=2**63 - n, truncated=["late"]) for n, one in enumerate(HOSTILE, 1)]
    rows[2] |= {"blanked": True, "item": "c"}
    found = data_of(written(tmp_path / "run", rows) / "index.html")["rows"]
    names = ("id", "place", "prompt", "seed", "words", "width", "height", "truncated", "blanked")
    for one, values in zip(rows, found, strict=True):
        expected = {**one, "seed": str(one["seed"]), "blanked": int(one["blanked"])}
        assert dict(zip(names, values, strict=True)) == {name: expected[name] for name in names}


def test_the_policy_allows_our_script_and_images_beside_the_page(tmp_path):
    """The whole of it, with the hashes of what is in the page."""
    page = Inline(written(tmp_path / "run", [row(1)]) / "index.html")
    [policy] = page.policies
    rules = dict(one.strip().split(" ", 1) for one in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "img-src": "data: 'self' file:",
        "style-src": "".join(f"'{digest_of(one)}'" for one in page.styles),
        "script-src": "".join(f"'{digest_of(one)}'" for one in page.scripts),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert (len(page.scripts), len(page.styles)) == (1, 1)
    assert page.tags.count("script") == 2
    assert not {"iframe", "object", "base"} & {*page.tags}
    assert all(one.startswith("data:") for one in page.links)


@pytest.mark.parametrize(
    ("save", "format", "opens", "images"),
    [
        (["image", "overlays", "grid", "report"], "folder", "report.html", True),
        (["image", "grid", "maps"], "folder", "grid.png", True),
        (["image", "maps"], "folder", "image.png", True),
        (["grid", "maps"], "folder", "grid.png", False),
        (["maps", "masks"], "folder", None, False),
        (["image", "maps", "grid", "report"], "webdataset", None, False),
    ],
)
def test_what_a_card_opens_follows_from_what_was_saved(tmp_path, save, format, opens, images):
    page = written(tmp_path / "run", [row(1)], save=save, format=format) / "index.html"
    found = data_of(page)
    assert (found["opens"], found["has_images"]) == (opens, images)
    assert ("are in shards" in text_of(page)) == (format == "webdataset")
    assert ("did not save its images" in text_of(page)) == (format == "folder" and not images)


def test_a_command_is_offered_where_it_can_draw(tmp_path):
    for save, offered in ((["image", "maps"], True), (["image"], False), (["maps"], False)):
        page = written(tmp_path / "run", [row(1)], save=save, format="webdataset") / "index.html"
        assert ("run its command" in text_of(page)) == offered


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([FAILED, {**FAILED, "id": "y"}], "2 items failed, see errors.jsonl."),
        ([UNREAD], "1 line could not be read, see errors.jsonl."),
        ([FAILED, UNREAD], "1 item failed and 1 line could not be read, see errors.jsonl."),
        ([], None),
    ],
)
def test_what_failed_is_told(tmp_path, errors, told):
    text = text_of(written(tmp_path / "run", [row(1)], errors=errors) / "index.html")
    assert told in text if told else "errors" not in text


def test_the_head_tells_of_the_run(tmp_path):
    root, rows = tmp_path / "run", [row(line) for line in range(1, 1235)]
    text = text_of(written(root, rows, model="some/<model>") / "index.html")
    assert "1,234 items · model some/<model> · preset plain, refined" in text
    text = text_of(written(root, rows[:1], input={"items": 7}) / "index.html")
    assert "1 of 7 items · model" in text
    text = text_of(written(root, rows[:2], input={"items": 1}) / "index.html")  # after --force
    assert "2 items · model" in text


def test_an_empty_run_has_a_page_that_says_so(tmp_path):
    page = written(tmp_path / "run", [], errors=[FAILED], input={"items": 1}) / "index.html"
    assert "0 of 1 item · model" in text_of(page)
    assert "1 item failed" in text_of(page) and "No item has been drawn yet." in text_of(page)
    assert data_of(page)["rows"] == []


def test_the_same_run_gives_the_same_bytes_anywhere(tmp_path):
    pages = [written(tmp_path / name, [row(1)]) / "index.html" for name in ("here", "there")]
    assert pages[0].read_bytes() == pages[1].read_bytes()


# Pages


def test_a_larger_run_has_pages_that_link_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "EACH", 4)
    rows = [row(line) for line in (1, 2, 5, 6, 7, 8, 9, 10, 1200)]
    root = written(tmp_path / "run", rows)
    names = ["index.html", "index-2.html", "index-3.html"]
    assert sorted(path.name for path in root.glob("*.html")) == sorted(names)
    assert [ids_of(root / name) for name in names] == [
        ["000001", "000002", "000005", "000006"],
        ["000007", "000008", "000009", "000010"],
        ["001200"],
    ]
    for name in names:
        links = re.findall('<a class="button" href="([^"]*)"( aria-current="page")?>', (
            (root / name).read_text()
        ))  # fmt: skip
        assert [link[0] for link in links] == names
        assert [link[0] for link in links if link[1]] == [name]
        assert pages_of(root / name) == "Lines 1-6 7-10 1,200-1,200"
        assert "9 items · model" in text_of(root / name)


def test_many_pages_link_the_ends_and_their_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "EACH", 1)
    root = written(tmp_path / "run", [row(line) for line in range(1, 31)])
    assert pages_of(root / "index.html") == "Lines 1-1 2-2 3-3 … 30-30"
    assert pages_of(root / "index-15.html") == "Lines 1-1 … 13-13 14-14 15-15 16-16 17-17 … 30-30"
    assert pages_of(root / "index-29.html") == "Lines 1-1 … 27-27 28-28 29-29 30-30"


def test_a_page_as_large_as_the_run_is_the_only_one(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "EACH", 3)
    root = written(tmp_path / "run", [row(line) for line in (1, 2, 3)])
    assert [path.name for path in root.glob("*.html")] == ["index.html"]
    assert "<nav" not in (root / "index.html").read_text()


def test_pages_of_an_earlier_larger_run_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "EACH", 2)
    root, rows = tmp_path / "run", [row(line) for line in range(1, 24)]
    written(root, rows)
    assert len([*root.glob("index-*.html")]) == 11
    mine = ("index-old.html", "index-02.html", "index-4.html.bak", "other.html")
    for name in mine:
        (root / name).write_text("mine")
    written(root, rows[:5])
    expected = {"index.html", "index-2.html", "index-3.html", *mine}
    assert {path.name for path in root.iterdir()} >= expected
    assert {path.name for path in root.glob("*.html*")} == expected
    assert ids_of(root / "index-3.html") == ["000005"]


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    root = written(tmp_path / "run", [row(1)])
    before = (root / "index.html").read_bytes()

    def refuse(*_):
        raise OSError("full")

    with monkeypatch.context() as patches:
        patches.setattr("sdattn.files.writing.os.replace", refuse)
        with pytest.raises(OSError, match="full"):
            written(root, [row(1), row(2)])
    assert (root / "index.html").read_bytes() == before
    assert not [*(root / ".batch" / "tmp").iterdir()]
