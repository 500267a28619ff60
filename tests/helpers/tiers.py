"""Which cases of a test run when."""

from collections.abc import Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], quick: int = 1, daily: int = 2) -> list[Any]:
    """Return cases as parameters of a test: the first ``quick`` run in scripts/test, the first
    ``daily`` with --all, and the others with --weekly.

    A tuple has a value for each of the parameter's names.
    """
    parameters = []
    for number, case in enumerate(cases):
        later = pytest.mark.slow if number < daily else pytest.mark.weekly
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(pytest.param(*values, marks=[] if number < quick else later))
    return parameters
