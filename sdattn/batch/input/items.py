"""Items of a batch, from lines of JSON, tables or text, and the lines that cannot be read.

Every line is checked by itself: a bad one is reported by its number and never stops a good one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import InvalidValueError, did_you_mean
from ...files.terminal import shorter, shown
from ...models.pipeline import Options
from ...models.values import LARGEST_SEED, checked_seeds
from ...prompts.words import split_phrase, split_words
from .columns import ALL, EDITS, NUMBERS, OWN, Columns, renamed
from .lines import open_lines
from .photos import Photo, photo_in
from .values import ID, number

_TAKEN = ("prompt_embeds", "generator", "output_type", "return_dict")
REFUSED, LEFT_OUT, KEPT = "refused", "left out", "kept"
_NO_OPTIONS: Options = {}  # one for all items that have none
Find = Callable[[str], Photo]
_HERE: Find = partial(photo_in, Path())


@dataclass(frozen=True, slots=True)
class Item:
    """One image, or video, to draw, or an image to explain.

    Attributes:
        id: name of its folder, unique even if letter case is ignored.
        prompt: at least one word.
        seed: 0 to 2**63 - 1.
        words: words and phrases to keep, from the prompt or, for an edit, from ``edit_to``; None
            for all.
        edit_to: the prompt of the image, which is then an edit of :attr:`prompt`'s.
        image: the image to explain, with the prompt as its caption; None: it is drawn.
        columns: further columns of the list, name to text, for the item's row.
        foreign: treatment of options that the pipeline does not have: :data:`REFUSED`,
            :data:`LEFT_OUT`, or :data:`KEPT` as columns, which hold all of them until then.
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
    foreign: str = REFUSED
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


def read_items(
    data: bytes, kind: str, find: Find = _HERE, *, seed: int = 0, columns: Columns | None = None
) -> tuple[list[Item], list[BadLine]]:
    r"""Return the items and the bad lines of a batch, each in the order of the input.

    An item without a seed has ``seed + line - 1``, one without an id its line's number as six
    digits. A line with the id of an earlier one is bad. ``find`` returns the image of a name in the
    list (default: from the current folder). Raise ValueError for a missing column to keep.

    >>> items, bad = read_items(b'{"prompt": "a cat", "width": 512}\n{"prompt": 5}', "jsonl")
    >>> items[0].id, items[0].seed, items[0].options
    ('000001', 0, {'width': 512})
    >>> bad[0].line, bad[0].reason
    (2, 'prompt=5: write a text with at least one word in it.')
    """
    checked_seeds(seed)
    columns = columns or Columns()
    lines, fields_of = open_lines(data, kind, columns)
    seen, taken = dict[str, None](), dict[str, int]()
    items, bad = list[Item](), list[BadLine]()
    for line, raw in lines:
        try:
            if (fields := fields_of(raw)) is None:
                continue
            seen |= dict.fromkeys(fields)
            found, kept = columns.read(fields)
            foreign = KEPT if columns.keep == ALL else LEFT_OUT if fields.of_table else REFUSED
            own = {"id": f"{line:06d}", "seed": seed + line - 1}
            item = item_of(own, found, line, find, columns=kept, foreign=foreign)
            if (first := taken.setdefault(item.id.lower(), line)) != line:
                raise InvalidValueError(
                    f"id={item.id!r} is already in line {first}. Write another; case is ignored."
                )
            items.append(item)
        except ValueError as error:
            text = raw[:800].decode(errors="backslashreplace")  # at most four bytes per character
            text = printable(text.rstrip("\r\n")[:200])[:200]
            bad.append(BadLine(line, printable(str(error)), text))
    columns.check_seen(seen)
    return (_with_same_columns(items) if columns.keep == ALL else items), bad


def _with_same_columns(items: Sequence[Item]) -> list[Item]:
    names = dict.fromkeys(name for item in items for name in item.columns)
    columns = [{name: item.columns.get(name, "") for name in names} for item in items]
    return [replace(item, columns=own) for item, own in zip(items, columns, strict=True)]


def item_of(
    defaults: Options,
    fields: Options,
    line: int,
    find: Find = _HERE,
    *,
    columns: Mapping[str, str] = _NO_OPTIONS,
    foreign: str = REFUSED,
) -> Item:
    """Return the item for a line's fields, ignoring None; raise ValueError for an invalid field."""
    found = {name: value for name, value in fields.items() if value is not None}
    if "prompt" not in found:
        raise InvalidValueError(f"the prompt is missing; found {shown([*found])}. Write one.")
    if "image" in found:
        _check_field("image", found["image"])
    image = find(found["image"]) if "image" in found else None
    given = {**defaults, **found}
    for name, value in given.items():
        if name in NUMBERS:
            given[name] = number(value, whole=name != "guidance_scale")
        _check_field(name, given[name])
        if foreign == REFUSED and not name.isidentifier():
            raise InvalidValueError(
                f"{shown(name)} is not an option. Write one of the pipeline, for example width."
            )
    _check_together(given)
    of_edit = {name: given[name] for name in EDITS if name in given}
    words = given.get("words")
    return Item(
        id=str(given["id"]),
        line=line,
        prompt=given["prompt"],
        seed=given["seed"],
        negative_prompt=given.get("negative_prompt"),
        words=None if words is None else tuple(words),
        options={name: value for name, value in given.items() if name not in OWN} or _NO_OPTIONS,
        edit_to=given.get("edit_to"),
        edit=of_edit or _NO_OPTIONS,
        columns=columns or _NO_OPTIONS,
        foreign=foreign,
        image=image,
    )


def _check_field(name: str, value: object) -> None:
    if name in _TAKEN:
        raise InvalidValueError(f"{name} cannot be chosen in a batch. Leave it out.")
    if advice := renamed(name):
        raise InvalidValueError(
            f"{shown(name)} is not an option: {advice}. To keep the column use keep_columns."
        )
    holds, wanted = _RULES.get(name, (None, ""))
    if holds and not holds(value):
        raise InvalidValueError(f"{name}={shown(value)}: {wanted}.")


def _check_together(given: Options) -> None:
    of_edit = [name for name in EDITS if name in given]
    if of_edit and "edit_to" not in given:
        raise InvalidValueError(
            f"{', '.join(of_edit)} is for an edit, and edit_to is missing. Write the edited prompt "
            "there, or leave it out."
        )
    if "image" in given and "edit_to" in given:
        raise InvalidValueError(
            "image is for an image to explain, edit_to for one to draw. Leave one of them out."
        )
    if "{prompt}" in given["prompt"]:
        raise InvalidValueError(
            f"{shown(given['prompt'])} is a style: {{prompt}} stands for another text. Write that."
        )
    if "words" in given:
        _check_words(given["words"], given.get("edit_to", given["prompt"]))


def _between(low: int, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high  # True is no number here


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_words(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_text, value))


_ONE = (_between(1, 1), "an item is one image or video. Write a line for each")
_SIDE = (_between(1, 16384), "write a whole number of pixels from 1 to 16384")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "id": (
        lambda value: type(value) in (int, str) and bool(ID.fullmatch(str(value))),
        "it names a folder. Write up to 100 letters a-z, digits and . _ -, beginning with a letter "
        "or digit, without a dot at the end or two in a row",
    ),
    "prompt": (_is_text, "write a text with at least one word in it"),
    "image": (_is_text, "write the path of an image file, or leave it out to draw the prompt"),
    "edit_to": (_is_text, "write the edited prompt, with at least one word in it"),
    "negative_prompt": (lambda value: isinstance(value, str), "write a text, or leave it out"),
    "seed": (
        _between(0, LARGEST_SEED),
        "write a whole number from 0 to 2**63 - 1 (-1 does not mean random here), or leave seed "
        "out: each line has its own",
    ),
    "words": (_is_words, "write a list of words and phrases of the prompt, or leave it out"),
    "blend": (
        lambda value: _is_text(value) or _is_words(value),
        "write a word, or a list of words, where the image may change",
    ),
    "weights": (
        lambda value: type(value) is dict and {*map(type, value.values())} <= {int, float},
        'write an object of words and their factors, as {"cat": 2}',
    ),
    "width": _SIDE,
    "height": _SIDE,
    "num_inference_steps": (_between(1, math.inf), "write a whole number from 1"),
    "guidance_scale": (lambda value: type(value) in (int, float), "write a finite number"),
    "num_images_per_prompt": _ONE,
    "num_videos_per_prompt": _ONE,
    "num_frames": (_between(1, math.inf), "write a whole number from 1"),
}


def _check_words(words: Sequence[str], prompt: str) -> None:
    """Refuse words that are not in the prompt; only the tokenizer knows ``<eos>`` and the like."""
    parts = split_phrase(prompt)
    for phrase in words:
        wanted = split_phrase(phrase)
        starts = range(len(parts) - len(wanted) + 1)
        special = phrase.startswith("<") and phrase.endswith(">")
        if not special and not any(parts[i : i + len(wanted)] == wanted for i in starts):
            found = ", ".join(dict.fromkeys(word for word, _, _ in split_words(prompt)))
            raise InvalidValueError(
                f"{shown(phrase)} is not in the prompt. Its words are: {shorter(found, 300)}."
                f"{did_you_mean(phrase, found.split(', '))}"
            )


def printable(text: str) -> str:
    if text.isprintable():
        return text
    signs = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(signs)
