"""The ways to say a scene of sprites.

Every form of words takes the objects' phrases ("a blue car") and, where it names one, the ground's
("at the beach"). The same wording of other objects or another ground has as many words.
"""

from __future__ import annotations

import re

from .grounds import DEFAULT, PLACES

PLAIN = {
    "left of": ("{a} left of {b}", "{a} to the left of {b}"),
    "right of": ("{a} right of {b}", "{a} to the right of {b}"),
    "above": ("{a} above {b}", "{a} over {b}"),
    "below": ("{a} below {b}", "{a} under {b}"),
    "and": ("{a} and {b}", "{a} with {b}", "{a} next to {b}"),
}
PLACE_FIRST = {
    "left of": ("on the left {a}, on the right {b}",),
    "right of": ("on the right {a}, on the left {b}",),
    "above": ("at the top {a}, at the bottom {b}",),
    "below": ("at the bottom {a}, at the top {b}",),
    "and": (),
}
PICTURES = ("a picture of", "a photo of", "an image of", "a drawing of")
ALONE = ("{a}", *(f"{one} {{a}}" for one in PICTURES))
THREE = ("{a}, {b} and {c}", "{a} and {b} and {c}")
GROUND_LAST, GROUND_FIRST = "{scene} {ground}", "{ground} {scene}"
ON = {"grass": "on grass", "beach": "at the beach", "night": "at night", "snow": "in the snow"}


def article(word: str) -> str:
    """Return the article that a word takes."""
    return "an" if word[0] in "aeiou" else "a"


def ground_phrase(ground: str) -> str:
    """Return a background's phrase: "at the beach", "on a blue background"."""
    return ON[ground] if ground in PLACES else f"on {article(ground)} {ground} background"


def forms(n_objects: int, relation: str | None) -> tuple[str, ...]:
    """Return all wordings of so many objects in a relation, without their ground."""
    if n_objects == 1:
        return ALONE
    if n_objects == 3:
        return THREE
    return (*PLAIN[relation or "and"], *PLACE_FIRST[relation or "and"])


def say(phrases: list[str], relation: str | None, ground: str) -> tuple[str, ...]:
    """Return all ways to say a scene; a default ground may be left unsaid.

    Grounds come last, or first for a form that does not begin with a place itself.
    """
    said = [
        form.format(**dict(zip("abc", phrases, strict=False)))
        for form in forms(len(phrases), relation)
    ]
    where = ground_phrase(ground)
    full = [GROUND_LAST.format(scene=text, ground=where) for text in said]
    first = [
        GROUND_FIRST.format(scene=text, ground=where)
        for text in said
        if not text.startswith(("on ", "at ", *PICTURES))
    ]
    return (*said, *full) if ground == DEFAULT else (*full, *first)


def further_words() -> tuple[str, ...]:
    """Return the words of all forms, without those of objects and colours."""
    places = [ON[name] for name in ON]
    ground = "on a background"
    every = (
        *ALONE,
        *THREE,
        *(one for form in (PLAIN, PLACE_FIRST) for some in form.values() for one in some),
    )
    filled = " ".join([*every, *places, ground]).format(a="a", b="an", c="a")
    return tuple(sorted(set(re.findall("[a-z]+", filled)) - set(ON)))
