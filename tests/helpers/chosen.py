"""The slow tests that every change must pass: tests/chosen_slow.txt, the one list of them."""

import re
from pathlib import Path

LIST = Path(__file__).parents[1] / "chosen_slow.txt"


def chosen_tests() -> dict[str, str]:
    """Return why each test was chosen, by its id.

    An id without brackets stands for every case of a test, a ``*`` for any text without commas.
    """
    chosen = {}
    for line in LIST.read_text("utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, why = line.partition("  # ")
        if not why or name.strip() in chosen:
            raise ValueError(f"{LIST.name}: {line!r} is there twice or lacks '  # why'.")
        chosen[name.strip()] = why
    return chosen


def chosen_pattern() -> re.Pattern[str]:
    """Return what matches the ids of chosen tests."""
    names = (re.escape(name).replace(r"\*", "[^,]*") for name in chosen_tests())
    return re.compile("|".join(rf"{name}(\[.*\])?" for name in names))
