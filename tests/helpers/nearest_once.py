"""What the nearest family is found by is made once, not for each model that is asked about.

from helpers.nearest_once import traits_once  # noqa: F401  (a fixture of all tests in a module)
"""

import pytest

from sdattn.models import nearest

MADE = {}  # by id, beside the family, which so goes on having it
make = nearest._of_family


@pytest.fixture(name="traits_once", autouse=True)
def traits_once(monkeypatch):
    """The families' models are built on the meta device for the first test, and for no other."""
    monkeypatch.setattr(nearest, "_of_family", known)


def known(family):
    if id(family) not in MADE:
        MADE[id(family)] = family, [*make(family)]
    return MADE[id(family)][1]
