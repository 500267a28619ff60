"""Names in docs/contributing, held against the code: modules, files, classes, flags and values."""

import ast
import builtins
import keyword
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sdattn"
PAGES = sorted((ROOT / "docs" / "contributing").glob("*.md"))
CODE = ("sdattn", "scripts", "demos", "integrations", "tests/helpers")
ROOMS = {path.name for path in PACKAGE.iterdir() if list(path.glob("*.py"))}

SPAN = re.compile(r"`([^`\n]+)`")
CLASS = re.compile(r"\*\*([A-Z]\w+)\*\*")  # a term of the glossary that is a class
ROOM = re.compile(r"\| `(\w+)` \|")  # begins a row about a room
MODULE = re.compile(
    rf"(?<![\w/])(?:{'|'.join(ROOMS)})\.(?!py\b)\w+(?:\.\w+)?"
)  # from the package's root
ENVIRONMENT = re.compile(r"\.venv[\w/-]*")
FLAG = re.compile(r"(?<!\S)--[a-z][a-z-]+")
FILE = re.compile(r"(?<![\w/-])[\w.-]+/[\w./*-]*|(?<![\w/-])[\w-]+\.(?:py|md|json|txt)\b")
WORD = re.compile(r"[A-Za-z_]\w*")
VALUE = re.compile(r"\A(?:--)?\w[\w-]*\Z")  # a text of the code that is a flag or a name
FENCE = re.compile(r"^ *```(\w*)")

STORE = ast.Store()
NAMED = {  # nodes that give a name, and their field with it
    ast.ClassDef: "name",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.arg: "arg",
    ast.Name: "id",
    ast.Attribute: "attr",
}
OTHERS = {  # that are no names of our code
    "ROOM": "stands for a room, in a command",
    "NAME": "stands for a module, in a command",
    "PYTHON": "a variable of the environment, which shell scripts read",
    "My": "begins the name of the example's family",
    "MyPipeline": "stands for a pipeline, in an example",
    "python3": "the program",
    "apt": "the system's package manager",
}


@cache
def names(folders=CODE):
    """Return what the code in these folders defines, takes as an argument or has as a value."""
    found = {*dir(builtins), *keyword.kwlist}
    found |= {*re.findall(r"^(\w+) = ", (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)}
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            found |= {*path.relative_to(ROOT).with_suffix("").parts}
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if type(node) in NAMED and isinstance(getattr(node, "ctx", STORE), ast.Store):
                    found.add(getattr(node, NAMED[type(node)]))
                elif isinstance(node, ast.alias):
                    found |= {*node.name.split(".")}
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= {*VALUE.findall(node.value)}
    return found


@cache
def flags():
    """Return the options of the commands and scripts."""
    found = {name for name in names() if name.startswith("--")}
    for path in (ROOT / "scripts").iterdir():
        if path.is_file():
            found |= {*FLAG.findall(path.read_text(encoding="utf-8"))}
    return found


@cache
def file_names():
    return {path.name for folder in (*CODE, "tests") for path in (ROOT / folder).rglob("*")}


def has_file(name):
    """Check for a file or folder, from the repository's or the package's root, or by its name."""
    if "/" not in name:
        return name in file_names() or (ROOT / name).exists()
    return any(list(root.glob(name.strip("/"))) for root in (ROOT, PACKAGE))


def has_module(name):
    """Check for a module of a room, or a name that the room's files define."""
    room, *rest = name.split(".")
    return (PACKAGE / room / rest[0]).with_suffix(".py").exists() or rest[0] in names(
        (f"sdattn/{room}",)
    )


def unknown(text, folders=CODE):
    """Yield the names in a piece of code that the code does not have."""
    text = ENVIRONMENT.sub(" ", text)
    for pattern, is_known in (
        (MODULE, has_module),
        (FLAG, lambda flag: flag in flags()),
        (FILE, has_file),
    ):
        yield from (name for name in pattern.findall(text) if not is_known(name))
        text = pattern.sub(" ", text)
    known = names(folders)
    yield from (name for name in WORD.findall(text) if name not in known and name not in OTHERS)


def wrong_names(page):
    """Yield (line, name) for each name of a page that the code does not have."""
    fence = None
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if found := FENCE.match(line):
            fence = found[1] if fence is None else None
        elif fence == "text":
            yield from ((number, name) for name in MODULE.findall(line) if not has_module(name))
        elif fence == "sh":
            yield from ((number, name) for name in unknown(line.partition("#")[0], CODE))
        elif fence is None:
            room = ROOM.match(line)
            is_of_room = room is not None and room[1] in ROOMS
            folders = (f"sdattn/{room[1]}",) if is_of_room else CODE
            for code in SPAN.findall(line):
                yield from ((number, name) for name in unknown(code, folders))
            if page.stem == "glossary":
                terms = CLASS.findall(line)
                yield from ((number, name) for name in terms if name not in names())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_name_in_code_font_is_in_the_code(page):
    wrong = [
        f"docs/contributing/{page.name}:{number}: {name}" for number, name in wrong_names(page)
    ]
    assert not wrong, "The code has no such names:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("| `batch` | `plan`, and `storage` |", "storage"),
        ("| `loading` | `loading/no_such.py` |", "loading/no_such.py"),
        ("see `loading/pipelines.py` and `no_such.py`", "no_such.py"),
        ("`scripts/test --monthly`", "--monthly"),
        ("the class **NoSuchClass**", "NoSuchClass"),
        ("`NoSuchClass`", "NoSuchClass"),
        ("`loading.no_such_module`", "loading.no_such_module"),
        ("```text\nprompt ── loading.no_such_module\n```", "loading.no_such_module"),
    ],
)
def test_a_name_that_is_nowhere_is_found(line, name, tmp_path):
    (tmp_path / "glossary.md").write_text(f"`capture()`\n{line}\n")
    assert [found for _, found in wrong_names(tmp_path / "glossary.md")] == [name]


def test_exceptions_are_still_needed():
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in OTHERS if name in names() or name not in text] == []
