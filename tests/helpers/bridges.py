"""The code of docs/editing.md, "Your code, our store", and what its maps are compared by."""

import re
from pathlib import Path

import torch

import sdattn
from sdattn.edit import register_attention_control

PAGE = Path(__file__).parents[2] / "docs" / "editing.md"
SECTION = PAGE.read_text(encoding="utf-8").split("## Your code, our store")[1]
SETUP = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)[0]
BRIDGES = dict(  # by the first word of the bold title before each
    re.findall(r"^\*\*([\w+-]+).*?```python\n(.*?)```", SECTION, re.DOTALL | re.MULTILINE)
)
WORDS = ["a cat"]


def bridge(title, pipe, **others):
    """Run the code under a title of the page, and return its names."""
    names = {"pipe": pipe, "torch": torch, "sdattn": sdattn, **others}
    names["register_attention_control"] = register_attention_control
    for block in (SETUP, BRIDGES[title]):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def same(ours, theirs, exact=True):
    """The maps are equal; to rounding where they are of runs of their own."""
    assert {key for key, maps in ours.items() if maps} == {k for k, maps in theirs.items() if maps}
    for key, maps in theirs.items():
        assert len(ours[key]) == len(maps)
        for one, other in zip(ours[key], maps, strict=True):
            assert one.shape == other.shape
            atol = 0 if exact else 1e-4
            torch.testing.assert_close(one, other, atol=atol, rtol=0)


def close(latents, expected):
    torch.testing.assert_close(latents, expected, atol=1e-4, rtol=0)


def cross(maps):
    return {key: kept for key, kept in maps.items() if key.endswith("cross") and kept}
