"""The architecture, held to by a test: one list of rooms, each may use those below it."""

import ast
import inspect
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import sdattn

PACKAGE = Path(sdattn.__file__).parent
TESTS = Path(__file__).parent
ROOMS = (  # top to bottom; docs/contributing/index.md shows the same list
    "sdattn",  # the package root, which nothing below imports
    "cli",
    "app",
    "batch",
    "edit",
    "figures",
    "runs",
    "loading",
    "control",
    "maps",
    "inversion",
    "unknown",
    "keep",
    "look",
    "follow",
    "models",
    "prompts",
    "attention",
    "files",
    "errors",
)
MODULES = {  # "cli" is cli/__init__.py, "cli.show" is cli/show.py
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [*PACKAGE.glob("[!_]*.py"), *PACKAGE.glob("*/**/*.py")]
} | {"sdattn": PACKAGE / "__init__.py"}
HEAVY = {"diffusers", "transformers", "matplotlib", "accelerate"}


def room(module):
    return module.split(".")[0]


@cache
def import_statements(path, top_level_only):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else ast.walk(tree)
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


def imports(module, top_level_only=False):
    """What a module imports: modules of this package without "sdattn.", packages by their name."""
    path = MODULES[module]
    for node in import_statements(path, top_level_only):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = path.relative_to(PACKAGE).parts
            folders = parts[: len(parts) - node.level]
            base = ".".join([*folders, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            yield from (name if name in MODULES else base or "sdattn" for name in names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]
        else:
            yield from (alias.name.split(".")[0] for alias in node.names)


def test_every_room_is_on_the_list():
    assert {room(module) for module in MODULES} == set(ROOMS)


def test_contributors_are_shown_the_same_list():
    page = TESTS.parent / "docs" / "contributing" / "index.md"
    table = page.read_text(encoding="utf-8").partition("| room |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == ROOMS


def test_a_room_uses_only_the_rooms_below_it():
    used = {(module, name) for module in MODULES for name in imports(module) if name in MODULES}
    level = {module: ROOMS.index(room(module)) for module in MODULES}
    assert {(module, name) for module, name in used if level[name] < level[module]} == set()


def test_what_imports_the_package_root_is_seen(tmp_path, monkeypatch):
    for number, line in enumerate(
        (
            "import sdattn",
            "from sdattn import capture",
            "from .. import __version__",
            "import sdattn.x",
        )
    ):
        path = tmp_path / "keep" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def late():\n    {line}\n", encoding="utf-8")
        monkeypatch.setitem(MODULES, "keep.late", path)
        monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
        assert list(imports("keep.late")) == ["sdattn"]


def test_no_modules_import_each_other_in_a_circle():
    uses = {name: {one for one in imports(name) if one in MODULES} - {name} for name in MODULES}
    assert len(list(TopologicalSorter(uses).static_order())) == len(MODULES)


def test_the_top_of_the_package_is_small():
    entries = [one for one in PACKAGE.iterdir() if one.name != "__pycache__"]
    assert len(entries) <= 22


def test_heavy_packages_are_loaded_only_where_they_are_used():
    loaded = {module: HEAVY & set(imports(module, top_level_only=True)) for module in MODULES}
    assert {module: names for module, names in loaded.items() if names} == {}


@pytest.mark.parametrize(("alone", "allowed"), [("attention", {"torch"}), ("prompts", set())])
def test_rooms_that_stand_alone(alone, allowed):
    modules = [module for module in MODULES if room(module) == alone]
    foreign = {"torch", "numpy", "PIL"} | HEAVY
    used = {(module, name) for module in modules for name in imports(module) if name in foreign}
    assert {(module, name) for module, name in used if name not in allowed} == set()


PROGRAM = """
import sys

def loaded():
    heavy = "torch", "torch._dynamo", "sympy", "diffusers", "transformers", "matplotlib", "PIL"
    return {name for name in heavy if name in sys.modules}

import sdattn
assert not loaded()
assert dir(sdattn) == sorted(["__version__", *sdattn.__all__])
parts = {
    sdattn.figures.figure, sdattn.figures.save_figure, sdattn.models.Family,
    sdattn.batch.open_batch, sdattn.edit.edit, sdattn.attention.attention_probs,
}
assert {one.__module__.partition(".")[0] for one in parts} == {"sdattn"} and len(parts) == 6
assert "matplotlib" not in loaded()
for name in sdattn.__all__:
    getattr(sdattn, name)
assert "torch._dynamo" not in loaded()
"""


def test_the_import_is_light_and_names_load_what_they_need():
    """Not torch, which names wait for, nor do they load matplotlib or torch's compiler."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_in_the_table_and_in_what_type_checkers_read():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    said = [
        name.asname or name.name if isinstance(node, ast.ImportFrom) else name.id
        for node in block.body
        for name in (node.names if isinstance(node, ast.ImportFrom) else node.targets)
    ]
    assert sorted(name for name in said if name[0] != "_") == sorted(sdattn.__all__)
    assert all(getattr(sdattn, name) is not None for name in sdattn.__all__)


@pytest.mark.parametrize("module", ["", "attention", "batch", "edit", "figures", "models"])
def test_every_public_name_has_an_entry_in_the_api_pages(module):
    pages = (TESTS.parent / "docs" / "api").glob("*.md")
    entries = {
        entry
        for page in pages
        for entry in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    home = getattr(sdattn, module) if module else sdattn
    public = {name for name in home.__all__ if not inspect.ismodule(getattr(home, name))}
    at_the_top = {"TorchAttnProcessor", "TorchJointProcessor"}
    twice = at_the_top if module == "attention" else set()
    assert {f"{home.__name__}.{name}" for name in public - twice} <= entries


def test_what_users_hold_has_a_public_class():
    """By the names of its own classes a result can be annotated and caught."""
    held = ("ImageRun", "SavedRun", "Comparison", "Prompt", "Word", "NotFiniteError")
    assert {getattr(sdattn, name).__name__ for name in held} == set(held) <= set(sdattn.__all__)
    assert {"animate", "save_animation"} <= set(sdattn.figures.__all__)


def test_tests_lie_in_the_rooms_of_what_they_test():
    folders = {path.name for path in TESTS.iterdir() if list(path.glob("*.py"))}
    assert folders <= {*ROOMS, "helpers", "hub", "integrations", "scripts", "demos"}


def test_what_tests_share_lies_in_helpers():
    wrong = set()
    for path in TESTS.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        used = [
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        ]
        used += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        wrong |= {(path.name, name) for name in used if re.search(r"\b(test_\w+|conftest)$", name)}
    assert wrong == set()
