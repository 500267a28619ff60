"""Which cases of a test run when."""

from collections.abc import Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], quick: int = 1, daily: int = 2) -> list[Any]:
    """Return cases as parameters of a test: the first ``quick`` run in scripts/test, the first
    ``daily`` with --all, and the others with --weekly. A tuple has a value for each name."""
    marks = [[]] * quick + [[pytest.mark.slow]] * (daily - quick)
    parameters = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        found = marks[number] if number < daily else [pytest.mark.weekly]
        parameters.append(pytest.param(*values, marks=found))
    return parameters
