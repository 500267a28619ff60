"""Classes that the oldest admitted diffusers lacks. Helpers and tests ask for them where they are
used and import none at the top of a module, so that scripts/test-oldest collects."""

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import pytest


def newer(name: str) -> Any:
    """Return a class of diffusers; skip the test that asks for it where there is none."""
    if not hasattr(diffusers, name):
        pytest.skip(f"diffusers {diffusers.__version__} has no {name}")
    return getattr(diffusers, name)


def needs_argument(function: Callable[..., Any], name: str) -> None:
    """Skip the test that asks if a function of diffusers does not take this argument yet."""
    if name not in inspect.signature(function).parameters:
        called = function.__qualname__
        pytest.skip(f"diffusers {diffusers.__version__}: {called} takes no {name}")
