"""Values of the wrong kind for an argument, by what the argument takes."""

import math

import torch


class Odd:
    """An object that nothing takes."""

    def __repr__(self) -> str:
        return "Odd()"


# Any of these may come for an argument; what it takes, FITTING leaves out.
VALUES = {
    "None": None,
    "True": True,
    "-1": -1,
    "7": 7,
    "1.5": 1.5,
    "nan": math.nan,
    "inf": math.inf,
    "'16'": "16",
    "b'cat'": b"cat",
    "[]": [],
    "[None]": [None],
    "[['cat']]": [["cat"]],
    "{}": {},
    "{'cat': None}": {"cat": None},
    "{'cat': '2'}": {"cat": "2"},
    "{3: 1.0}": {3: 1.0},
    "{1.5}": {1.5},
    "tensor": torch.ones(2, 3),
    "object": Odd(),
}
FITTING = {
    "nothing": [],
    "optional": ["None"],
    "text": ["'16'"],
    "map": ["tensor"],
    "seed": ["None", "7"],
    "count": ["7"],
    "index": ["-1"],
    "one": ["None", "'16'", "[None]", "[['cat']]"],
    "optional count": ["None", "7"],
    "number": ["None", "-1", "7", "1.5"],
    "positive": ["7", "1.5"],
    "parts by word": ["None", "{}"],
    "weights": ["None", "{}"],
    "words": ["[]"],
    "truth": ["True"],
    "optional truth": ["None", "True"],
}


def wrong(kind: str) -> dict[str, object]:
    """The values that an argument of a kind does not take, by how they are written."""
    return {name: value for name, value in VALUES.items() if name not in FITTING[kind]}
