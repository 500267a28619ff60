"""A row's fields as an item: an image or video to draw, or an image to explain."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidValueError
from ..files.terminal import shown
from ..models.pipeline import Options
from ..models.values import LARGEST_SEED
from .columns import EDITS, NUMBERS, OWN, WHOLE, meant
from .photos import Photo
from .tables import parsed

# Names of items, which name folders
ID = re.compile(r"(?!.*\.\.)[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?")
_NONE: Options = {}  # one for all items that have none
_NUMBER = re.compile(r"\s*(-?)\+?0*(?=[0-9])([0-9.eE+-]+)\s*")
_EXACT = 2**53  # a larger float may have been rounded


@dataclass(frozen=True, slots=True)
class Item:
    """One image, or video, to draw, or an image to explain.

    Attributes:
        id: name of its folder, unique even if letter case is ignored; "" until the plan names an
            image by its file.
        line: number in the list, from 1.
        words: words and phrases to keep of :attr:`text`; None for all.
        options: arguments of the call of the pipeline.
        edit_to: the prompt of the image, which is then an edit of :attr:`prompt`'s.
        columns: further columns of the list, name to text, for the item's row.
        image: the image to explain, with the prompt as its caption; None: it is drawn.
    """

    id: str
    line: int
    prompt: str
    seed: int
    negative_prompt: str | None
    words: tuple[str, ...] | None
    options: Options
    edit_to: str | None = None
    edit: Options = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    image: Photo | None = None

    @property
    def text(self) -> str:
        return self.edit_to or self.prompt


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is not an item: its number, from 1, the reason, and its start, made printable."""

    line: int
    reason: str
    text: str

    @classmethod
    def of(cls, line: int, error: object, text: str) -> "BadLine":
        return cls(line, printable(" ".join(str(error).split())), printable(text[:200])[:200])


def item_of(
    defaults: Options,
    fields: Options,
    line: int,
    *,
    image: Photo | None = None,
    columns: Mapping[str, str] = _NONE,
) -> Item:
    """Return the item for a line's fields, ignoring None; raise ValueError for an invalid field.

    >>> item_of({"id": "1", "seed": 0}, {"prompt": "a cat", "width": 512}, 1).options
    {'width': 512}
    """
    given = {**defaults, **{n: value for n, value in fields.items() if value is not None}}
    if "prompt" not in given:
        raise InvalidValueError(f"the prompt is missing; found {shown([*fields])}. Write one.")
    for name, value in given.items():
        if name in NUMBERS:
            given[name] = number(value, whole=name in WHOLE)
        _check_field(name, given[name])
    _check_together(given, image)
    words = given.get("words")
    return Item(
        id="" if image is not None and fields.get("id") is None else str(given["id"]),
        line=line,
        prompt=given["prompt"],
        seed=given["seed"],
        negative_prompt=given.get("negative_prompt"),
        words=None if words is None else tuple(words),
        options={name: value for name, value in given.items() if name not in OWN} or _NONE,
        edit_to=given.get("edit_to"),
        edit={name: given[name] for name in EDITS if name in given} or _NONE,
        columns=columns or _NONE,
        image=image,
    )


def number(value: Any, *, whole: bool) -> Any:
    """Return the number that a text or a float stands for, ``7`` for ``7.0`` and ``"7"`` if
    ``whole``; any other value as it is."""
    if isinstance(value, str) and (found := _NUMBER.fullmatch(value)):
        try:
            value = parsed(found[1] + found[2])
        except ValueError:
            return value
    is_exact = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return int(value) if whole and is_exact else value


def printable(text: str) -> str:
    """Return a text with its control characters, and halves of characters, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _check_field(name: str, value: object) -> None:
    holds, rule = _RULES.get(name, (None, ""))
    if holds:
        if not holds(value):
            raise InvalidValueError(f"{name}={shown(value)}: {rule}.")
    elif name == "image":
        raise InvalidValueError("image is for one to explain. Pass the list as `photos`.")
    elif (ours := meant(name)) or not name.isidentifier():
        raise InvalidValueError(
            f"{shown(name)} is not an option. Write {ours or 'one of the pipeline, as width'}; to "
            "keep the column use `keep_columns`."
        )


def _check_together(given: Options, image: Photo | None) -> None:
    of_edit = [name for name in EDITS if name in given]
    if of_edit and "edit_to" not in given:
        raise InvalidValueError(
            f"{', '.join(of_edit)} is for an edit, and edit_to is missing. Write the edited prompt "
            "there, or leave it out."
        )
    if image is not None and "edit_to" in given:
        raise InvalidValueError("edit_to is for an image to draw, not to explain. Leave it out.")
    if "{prompt}" in given["prompt"]:
        raise InvalidValueError(
            f"{shown(given['prompt'])} is a style: {{prompt}} stands for another text. Write that."
        )


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


def _is_words(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (
        lambda value: type(value) in (int, str) and bool(ID.fullmatch(str(value))),
        "it names a folder. Write up to 100 letters a-z, digits and . _ -, beginning with a letter "
        "or digit, without a dot at the end or two in a row",
    ),
    "prompt": (_is_text, "write a text with at least one word in it"),
    "edit_to": (_is_text, "write the edited prompt, with at least one word in it"),
    "negative_prompt": (lambda value: isinstance(value, str), "write a text, or leave it out"),
    "seed": (
        lambda value: type(value) is int and 0 <= value <= LARGEST_SEED,  # True is none
        "write a whole number from 0 to 2**63 - 1 (-1 does not mean random here), or leave seed "
        "out: each line has its own",
    ),
    "words": (_is_words, "write a list of words and phrases of the prompt, or leave it out"),
    "guidance_scale": (lambda value: type(value) in (int, float), "write a finite number"),
}
