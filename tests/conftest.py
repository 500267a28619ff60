"""How the tests run. What they share is in helpers/fixtures.py."""

import gc
from collections import defaultdict
from pathlib import Path

import pytest
from _pytest.doctest import DoctestModule
from helpers.chosen import chosen_pattern

# What the libraries are made of is no garbage; to look for some in it is a fifth of a collection.
gc.disable()
CHOSEN = pytest.StashKey()
PACKAGE = Path(__file__).parents[1] / "sdattn"
MOST_PAIRS = 6


class Examples:
    """Modules without an example are not imported to look for some: the app's need seconds."""

    @staticmethod
    def pytest_ignore_collect(collection_path):
        is_module = collection_path.suffix == ".py" and PACKAGE in collection_path.parents
        return (is_module and ">>>" not in collection_path.read_text("utf-8")) or None


def pytest_configure(config):
    """To import what tests need takes seconds, in vain where they only are handed out (-n 2)."""
    config.stash[CHOSEN] = chosen_pattern()
    config.pluginmanager.register(Examples())
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("helpers.fixtures")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """No file of tests is read for doctests: one that cannot be imported would be skipped as such,
    where the tests in it are to fail."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


def pytest_itemcollected(item):
    """Mark the slow tests that run with --all: those in tests/chosen_slow.txt."""
    if item.config.stash[CHOSEN].fullmatch(item.nodeid):
        item.add_marker("chosen")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark cases of a test with several lists of parameters as slow whose values others have, if
    more than MOST_PAIRS are quick."""
    tests = defaultdict(list)
    for one in items:
        if hasattr(one, "callspec") and not any(map(one.get_closest_marker, ("slow", "pairs"))):
            tests[one.path, one.originalname].append((one, {*enumerate(one.callspec._idlist)}))
    for cases in tests.values():
        held, chosen = set(), set()
        for is_new in (set.isdisjoint, set.difference):  # in this order few hold all values
            for one, values in cases if len(cases) > MOST_PAIRS else ():
                if is_new(values, held):
                    held |= values
                    chosen.add(one)
        for one in {one for one, _ in cases} - chosen if held else ():
            one.add_marker("slow")


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    from helpers import fewer_collections  # noqa: F401


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        help="where the tests run that need a GPU; 'cpu' tries those that can do without",
    )
