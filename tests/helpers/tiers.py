"""Which cases of a test run when."""

from collections.abc import Iterable
from typing import Any

import pytest


def tiered(cases: Iterable[Any], quick: int = 1) -> list[Any]:
    """Return cases as parameters of a test: all but the first ``quick`` are slow.

    A tuple has a value for each of the parameter's names.
    """
    parameters = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marks = [] if number < quick else [pytest.mark.slow]
        parameters.append(pytest.param(*values, marks=marks))
    return parameters
