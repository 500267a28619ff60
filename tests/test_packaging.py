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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OF_CONTRIBUTORS = {"test", "browser", "evaluation", "check", "docs"}
EXTRAS = PROJECT["optional-dependencies"]


def names(requirements):
    """Of distributions, as pip compares them."""
    return {re.sub(r"[-_.]+", "-", Requirement(one).name).lower() for one in requirements}


NEEDED = names(PROJECT["dependencies"])
OPTIONAL = names(one for name in EXTRAS.keys() - OF_CONTRIBUTORS for one in EXTRAS[name])


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
IMPORTED = distributions(set().union(*map(imported, FILES)))


@pytest.mark.parametrize("package", sorted(IMPORTED))
def test_what_is_imported_is_declared(package):
    assert IMPORTED[package] & (NEEDED | OPTIONAL), f"{package} is in no list of pyproject.toml"


def test_what_is_declared_is_imported():
    used = set().union(*IMPORTED.values())
    assert NEEDED - used == set()
    # which fsspec and diffusers import, or sdattn.errors.optional()
    assert OPTIONAL - used == {"s3fs", "bitsandbytes", "datasets", "gguf", "ftfy"}


def test_what_is_only_an_extra_is_imported_where_it_is_used():
    early = {(one, path.name) for path in FILES for one in imported(path, anywhere=False)}
    assert {(one, file) for one, file in early if not IMPORTED[one] & NEEDED} == set()


PAGES = [*FILES, ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]


def test_extras_that_messages_and_pages_name_are_there():
    told = set()
    for path in PAGES:
        for asked in re.findall(r"sdattn\[([\w,]+)\]", path.read_text(encoding="utf-8")):
            told |= set(asked.split(","))
    assert told - EXTRAS.keys() == set()
    assert EXTRAS.keys() - OF_CONTRIBUTORS <= told


def test_an_extra_of_ours_names_extras_that_are_there():
    inner = [Requirement(one) for extra in EXTRAS.values() for one in extra]
    asked = set().union(*(one.extras for one in inner if one.name == "sdattn"))
    assert asked <= EXTRAS.keys()
