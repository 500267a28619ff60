"""The architecture, held to by a test: one list of rooms, each may use those below it."""

import ast
import inspect
import re
import subprocess
import sys
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
    "comfy",
    "runs",
    "loading",
    "control",
    "maps",
    "inversion",
    "hooks",
    "models",
    "prompts",
    "attention",
    "files",
    "errors",
)
PARTS = {"batch": ("engines", "input", "storage")}  # of a room, in the same way
MODULES = {  # "cli" is cli/__init__.py, "cli.show" is cli/show.py
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in [*PACKAGE.glob("[!_]*.py"), *PACKAGE.glob("*/**/*.py")]
} | {"sdattn": PACKAGE / "__init__.py"}
HEAVY = {"diffusers", "transformers", "matplotlib", "accelerate"}


def room(module):
    return module.split(".")[0]


def imports(module, top_level_only=False):
    """What a module imports: modules of this package without "sdattn.", packages by their name."""
    path = MODULES[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = path.relative_to(PACKAGE).parts
            folders = parts[: len(parts) - node.level]
            base = ".".join([*folders, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            yield from (name if name in MODULES else base or "sdattn" for name in names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


def test_every_room_is_on_the_list():
    assert {room(module) for module in MODULES} == set(ROOMS)


def test_contributors_are_shown_the_same_list():
    page = TESTS.parent / "docs" / "contributing" / "index.md"
    table = page.read_text(encoding="utf-8").partition("| room |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == ROOMS


@pytest.mark.parametrize("module", MODULES)
def test_a_room_uses_only_the_rooms_below_it(module):
    used = {room(name) for name in imports(module) if name in MODULES}
    assert {name for name in used if ROOMS.index(name) < ROOMS.index(room(module))} == set()


def test_what_imports_the_package_root_is_seen(tmp_path, monkeypatch):
    for number, line in enumerate(
        (
            "import sdattn",
            "from sdattn import capture",
            "from .. import __version__",
            "import sdattn.x",
        )
    ):
        path = tmp_path / "hooks" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def late():\n    {line}\n", encoding="utf-8")
        monkeypatch.setitem(MODULES, "hooks.late", path)
        monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
        assert list(imports("hooks.late")) == ["sdattn"]


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) in PARTS])
def test_a_part_of_a_room_uses_only_the_parts_below_it(module):
    parts = PARTS[room(module)]

    def place(name):
        part = name.split(".")[1:2]
        return parts.index(*part) if part and part[0] in parts else -1

    used = {name for name in imports(module) if name in MODULES and room(name) == room(module)}
    assert {name for name in used if place(name) < place(module)} == set()


def test_no_modules_import_each_other_in_a_circle():
    uses = {name: {one for one in imports(name) if one in MODULES} - {name} for name in MODULES}
    assert len(list(TopologicalSorter(uses).static_order())) == len(MODULES)


def test_the_top_of_the_package_is_small():
    entries = [one for one in PACKAGE.iterdir() if one.name != "__pycache__"]
    assert len(entries) <= 20


@pytest.mark.parametrize("module", MODULES)
def test_heavy_packages_are_loaded_only_where_they_are_used(module):
    assert not HEAVY & set(imports(module, top_level_only=True))


@pytest.mark.parametrize("module", [m for m in MODULES if room(m) in ("attention", "prompts")])
def test_rooms_that_stand_alone(module):
    allowed = {"torch"} if room(module) == "attention" else set()
    foreign = set(imports(module)) & ({"torch", "numpy", "PIL"} | HEAVY)
    assert foreign <= allowed


def test_the_import_is_light():
    code = (
        "import sys, torch; before = set(sys.modules); import sdattn; "
        "heavy = 'diffusers', 'transformers', 'matplotlib', 'PIL', 'torch._dynamo', 'sympy'; "
        "print([m for m in heavy if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_import_waits_for_torch_until_it_is_used_and_completes_its_names():
    code = (
        "import sys, sdattn; print('torch' in sys.modules, set(sdattn.__all__) <= set(dir(sdattn)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_subpackages_are_there_after_the_import_without_matplotlib():
    code = (
        "import sys, sdattn; print(sdattn.figures.figure.__name__, sdattn.figures.save_figure."
        "__name__, sdattn.models.Family.__name__, sdattn.batch.open_batch.__name__, "
        "sdattn.edit.edit.__name__, sdattn.attention.attention_probs.__name__, "
        "'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["figure", "save_figure", "Family", "open_batch", "edit", "attention_probs"]
    assert done.stdout.split() == [*names, "False"]


def test_the_public_names_wait_for_torchs_compiler():
    code = (
        "import sys, sdattn; [getattr(sdattn, name) for name in sdattn.__all__]; "
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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


@pytest.mark.parametrize("module", ["", "attention", "batch", "edit", "figures"])
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
    assert folders <= {*ROOMS, "helpers", "scripts"}


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
