"""What pyproject.toml declares: whatever is imported, and the extras that users are told of."""

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import sdattn

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGE = Path(sdattn.__file__).parent
ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]
EXTRAS = PROJECT["optional-dependencies"]


def names(requirements):
    """Of distributions, as pip compares them."""
    return {re.sub(r"[-_.]+", "-", Requirement(one).name).lower() for one in requirements}


NEEDED = names(PROJECT["dependencies"])
OPTIONAL = names(one for extra in EXTRAS.values() for one in extra)


def imported(path, anywhere=True):
    """Packages, not Python's own nor sdattn, that a file imports anywhere, or when it is loaded."""
    tree, found = ast.parse(path.read_text(encoding="utf-8")), set()
    for node in ast.walk(tree) if anywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module.partition(".")[0])
    return found - {*sys.stdlib_module_names, "tomllib", "sdattn"}


def distributions(packages):
    """What is to be installed for packages; one that is not here is thought to be called so."""
    known = packages_distributions()
    return {one: names(known.get(one, [one])) for one in packages}


FILES = [*PACKAGE.rglob("*.py")]


@pytest.fixture(scope="module")
def needed_by():
    """The distributions that may bring each package that is imported."""
    return distributions(set().union(*map(imported, FILES)))


def test_what_is_imported_is_declared(needed_by):
    declared = NEEDED | OPTIONAL
    assert {package for package, names in needed_by.items() if not names & declared} == set()


def test_what_is_declared_is_imported(needed_by):
    used = set().union(*needed_by.values())
    assert NEEDED - used == set()
    # which fsspec and diffusers import, or sdattn.errors.optional()
    assert OPTIONAL - used == {
        "s3fs",
        "bitsandbytes",
        "datasets",
        "gguf",
        "ftfy",
        "peft",
        "pyarrow",
    }


def test_what_is_only_an_extra_is_imported_where_it_is_used(needed_by):
    early = {(one, path.name) for path in FILES for one in imported(path, anywhere=False)}
    assert {(one, file) for one, file in early if not needed_by[one] & NEEDED} == set()


PAGES = [*FILES, ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def test_extras_that_messages_and_pages_name_are_there():
    told = set()
    for path in PAGES:
        for asked in re.findall(r"sdattn\[([\w,]+)\]", path.read_text(encoding="utf-8")):
            told |= set(asked.split(","))
    assert told - EXTRAS.keys() == set()
    assert EXTRAS.keys() <= told


def test_groups_name_extras_and_groups_that_are_there():
    entries = [one for group in GROUPS.values() for one in group]
    included = {one["include-group"] for one in entries if isinstance(one, dict)}
    needed = [Requirement(one) for one in entries if isinstance(one, str)]
    asked = set().union(*(one.extras for one in needed if one.name == "sdattn"))
    assert included <= GROUPS.keys() and asked <= EXTRAS.keys()
    assert not GROUPS.keys() & EXTRAS.keys()


def test_scripts_install_groups_that_are_there():
    told = set()
    for path in [
        *(ROOT / "scripts").glob("*"),
        ROOT / ".ci" / "run",
        *(ROOT / "docs").rglob("*.md"),
    ]:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            told |= {*re.findall(r"--group (\w+)", text)}
            told |= {*",".join(re.findall(r"scripts/install ([a-z,]+)", text)).split(",")}
    assert {"test", "browser", "check", "docs", "evaluation"} <= told <= {*GROUPS, ""}


DEMOS = tomllib.loads((ROOT / "demos" / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_two_wheels_have_every_file_of_the_demos_once():
    wheel = DEMOS["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["bypass-selection"]  # the modules in demos/ stay out of it
    included = wheel["force-include"]
    assert all((ROOT / "demos" / path).resolve() == ROOT / to for path, to in included.items())
    left_out = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["exclude"]
    for demo in ("demo-mmdit", "demo-video"):
        folder = PACKAGE / "models" / demo
        assert {f"/sdattn/models/{demo}/*", f"!/sdattn/models/{demo}/demo.json"} <= {*left_out}
        ours = {f"sdattn/models/{demo}/{path.name}" for path in folder.iterdir()}
        assert ours - {*included.values()} == {f"sdattn/models/{demo}/demo.json"}
    assert len(left_out) == 4
