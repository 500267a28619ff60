"""Classes that the oldest admitted diffusers lacks. Helpers and tests ask for them where they are
used and import none at the top of a module, so that scripts/test-oldest collects."""

from typing import Any

import diffusers
import pytest


def newer(name: str) -> Any:
    """Return a class of diffusers; skip the test that asks for it where there is none."""
    if not hasattr(diffusers, name):
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    return getattr(diffusers, name)
