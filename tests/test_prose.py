"""Plain sentences: turns of phrase that docs/contributing asks to avoid, counted room by room.

The counts may only fall. After a rewrite, lower the room's numbers in MOST, or delete them at 0.
"""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
CODE = re.compile(r"```.*?```|``.*?``|`[^`\n]*`|\"[^\"\n]*\"", re.DOTALL)  # and quoted names
PATTERNS = {
    "first word": re.compile(r"\A\s*(?:What|Whether|Of|Those|Where|Have)\b"),  # docstrings only
    "a: of b": re.compile(r"^\s+[*\w, ]+: of ", re.MULTILINE),  # docstrings only
    "those of": re.compile(r"\bth(?:ose|at) of\b", re.IGNORECASE),
    "picture": re.compile(r"\b(?:pictures?|films?)\b", re.IGNORECASE),
    "cannot be": re.compile(r"\b(?:that|which|value) cannot be(?=[.,;:]| in |\Z)"),
    "is none": re.compile(r"\b(?:that|which|if it|call) (?:is|are) none\b(?! of)"),
    "one's own": re.compile(r"\bone's own\b"),
    "pay to": re.compile(r"\b(?:pays?|paid) to\b"),
    "all but one": re.compile(r"\ball words but\b"),
    "Of": re.compile(r"(?:\A|\n\s*\n|[.!?:|]|\n *[-*]|\n *\d\.)[\s*]*(?:Of|Behind|Beside)\b"),
}
NAMES = re.compile(r"\b(?:wanted|rests|heard|travels)\b")  # in code and comments
MOST = {
    "models": {"picture": 1},
    "runs": {"those of": 1},
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def texts(path):
    """Yield (is it a docstring, text) for each docstring and message of a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield False, source
        return
    tree = ast.parse(source)
    docs = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, DOCUMENTED)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value in docs, node.value


def counted(paths):
    """Return how often each pattern occurs in the files, code and quoted names left out."""
    found = Counter()
    for path in paths:
        if path.suffix == ".py":
            found["name"] += len(NAMES.findall(path.read_text(encoding="utf-8")))
        for is_docstring, text in texts(path):
            prose = CODE.sub("`x`", text)
            for name, pattern in PATTERNS.items():
                if is_docstring or name not in ("first word", "a: of b"):
                    found[name] += len(pattern.findall(prose))
    return found


def rooms():
    """Return the files to read, by room: rooms of sdattn, and the pages."""
    found = {"docs": PAGES}
    for path in (ROOT / "sdattn").rglob("*.py"):
        parts = path.relative_to(ROOT / "sdattn").parts
        found.setdefault(parts[0] if len(parts) > 1 else path.stem, []).append(path)
    return found


@pytest.mark.parametrize("room", sorted(rooms()))
def test_phrases_to_avoid_only_become_fewer(room):
    allowed = MOST.get(room, {})
    found = counted(rooms()[room])
    assert {name: n for name, n in found.items() if n > allowed.get(name, 0)} == {}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Whether a layer ran.", "first word"),
        ("Read.\n\nArgs:\n    heads: of the layer.\n", "a: of b"),
        ("The map is that of a word.", "those of"),
        ("Save a picture.", "picture"),
        ("Some text. Of these, two.", "Of"),
        ("A value that cannot be, in a call.", "cannot be"),
        ("Refuse an option that is none.", "is none"),
        ("Keep models of one's own.", "one's own"),
        ("Hand in what they pay to the text.", "pay to"),
        ("Write all words but one without.", "all but one"),
        ("Return the map that is wanted.", "name"),
    ],
)
def test_each_pattern_is_seen(text, name, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(f'"""{text}"""\n')
    assert +counted([path]) == {name: 1}


def test_docstrings_are_at_most_17_percent_of_the_lines():
    lines = docs = 0
    for path in (ROOT / "sdattn").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        lines += len(source.splitlines())
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
                docs += node.body[0].end_lineno - node.body[0].lineno + 1
    assert docs / lines <= 0.17, f"{docs} of {lines}"
