"""How the tests run. What they share is in helpers/fixtures.py."""

import gc

import pytest
from _pytest.doctest import DoctestModule
from helpers.chosen import chosen_pattern

# What the libraries are made of is no garbage; to look for some in it is a fifth of a collection.
gc.disable()
CHOSEN = pytest.StashKey()


def pytest_configure(config):
    """To import what tests need takes seconds, in vain where they only are handed out (-n 2)."""
    config.stash[CHOSEN] = chosen_pattern()
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


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    from helpers import fewer_collections  # noqa: F401


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        help="where the tests run that need a GPU; 'cpu' tries those that can do without",
    )
