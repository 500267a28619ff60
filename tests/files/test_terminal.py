"""Text of foreign files is printed, and obeyed by no terminal."""

import io
import json
import re
import shutil
import sys
import unicodedata

import pytest
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline
from rich.table import Table
from rich.text import Text

from sdattn import generate
from sdattn.cli.console import Console
from sdattn.files.records import sealed
from sdattn.files.terminal import visible

HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\r\x08\u202ecat\u2069\x7f"
TURNS = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}  # of Unicode's annex 9


def obeyed(text):
    """The characters that a terminal would obey, by Unicode's tables."""
    return [
        one
        for one in text
        if (unicodedata.category(one) in ("Cc", "Cs") and one not in "\n\t")
        or unicodedata.bidirectional(one) in TURNS
    ]


@pytest.fixture
def run(tmp_path):
    """A run whose prompt, words and settings command the terminal."""
    folder = tmp_path / "run"
    generate(make_pipeline(), "a red cat", num_inference_steps=1).save(folder)
    said = (folder / "run.json").read_text()
    spelled = json.dumps(HOSTILE)[1:-1]
    said = said.replace('"cat"', f'"{spelled}"').replace(
        '"scheduler": "', f'"scheduler": "{spelled}'
    )
    (folder / "run.json").write_bytes(sealed(json.loads(said)))
    return folder


@pytest.mark.slow
def test_what_is_obeyed_is_written_out_and_all_else_stays():
    for one in map(chr, range(sys.maxunicode + 1)):
        shown = visible(one)
        assert (shown == one) != bool(obeyed(one))
        assert shown == one or shown == repr(one)[1:-1]


@pytest.mark.parametrize("way", tiered(["show", "no such word", "diff", "no such phrase"], quick=2))
@pytest.mark.slow
def test_what_a_foreign_run_says_is_not_obeyed(invoke, run, tmp_path, way):
    shutil.copytree(run, tmp_path / "other")
    arguments = {
        "show": ("show", run, "-o", "drawn"),
        "no such word": ("show", run, "dog", "-o", "drawn"),
        "diff": ("diff", run, tmp_path / "other"),
        "no such phrase": ("diff", run, run, "dog"),
    }[way]
    code, out, err = invoke(*arguments)
    assert code == (2 if way.startswith("no") else 0), err
    assert obeyed(out + err) == []
    assert r"\x1b" in out + err


def test_styles_of_ours_are_still_shown():
    table = Table("word")
    table.add_row(Text(HOSTILE))
    shown = []
    for text in ("plain", HOSTILE):
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=200)
        console.print(table if text is HOSTILE else Text("plain", style="bold"))
        shown.append(file.getvalue())
    assert shown[0] == "\x1b[1mplain\x1b[0m\n"
    assert obeyed(re.sub(r"\x1b\[[0-9;]*m", "", shown[1])) == []
    assert r"\x1b[2J" in shown[1]
