"""Columns of a list: which one holds the prompt, which are options, which are kept."""

import json
import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from ..errors import InvalidValueError, OptionError
from ..files.terminal import shown
from ..maps.statistics import NUMBERS as STATISTICS
from ..models.pipeline_call import MEANT
from ..models.values import EACH
from ..runs.explaining import is_decided
from .tables import CELLS, Row, parsed

ALL = "all"
PROMPTS = ("prompt", "Prompt", "Prompts", "caption", "text", "txt")
IMAGES = ("image", "file_name", "jpg", "jpeg", "png", "webp")
EDITS = ("mode", "blend", "weights", "cross_replace_steps", "self_replace_steps")
OWN = ("id", "prompt", "negative_prompt", "seed", "words", "image", "edit_to", *EDITS)
CHOICE = ("candidates", "decide_at")  # of the seed, see generate()
WHOLE = ("seed", "width", "height", "num_frames", "num_inference_steps", "candidates", *EACH)
NUMBERS = (*WHOLE, "guidance_scale", "decide_at")
# The columns before the numbers in a table of the words of all items
WORD_LABELS = ("id", "prompt", "seed", "word", "occurrence")
# Names that rows, the tables made of them and datasets' imagefolder use themselves
OWN_NAMES = frozenset(
    (
        *("id", "line", "prompt", "source_prompt", "source_file", "negative_prompt", "seed"),
        *("width", "height", "frames", "num_inference_steps", "guidance_scale", "words", "masks"),
        *("truncated", "statistics", "blanked", "fingerprint", "file_name", "place", "run_sha256"),
        *("thumb", "files", "failed", "traceback", "image", "score", "missing", "candidates"),
        *WORD_LABELS,
        *STATISTICS,
    )
)


def meant(name: str) -> str | None:
    """Return our name for what other programs, or tables, call otherwise.

    >>> meant("CFG scale"), meant("Category"), meant("seed")
    ('guidance_scale', None, None)
    """
    plain = re.sub(r"[\s-]+", "_", name.strip()).lower()
    return plain if plain != name and plain in (*OWN, *NUMBERS) else MEANT.get(plain)


class Columns:
    """How the columns of a list are read.

    Args:
        prompt: the column that holds the prompt; None: the only one of :data:`PROMPTS`.
        keep: columns to keep as text in the items' rows, never read as options: their names, or
            ``"all"`` that are neither ours nor an option of the pipeline.
        options: names of the pipeline's options.
        photos: the list has images to explain, which decide some options.
    """

    def __init__(
        self,
        prompt: str | None = None,
        keep: Sequence[str] = (),
        options: Collection[str] = (),
        *,
        photos: bool = False,
    ):
        if keep != ALL and (taken := sorted(OWN_NAMES.intersection(keep))):
            raise OptionError("keep_columns", taken, "rows have columns so called. Rename yours.")
        self.prompt = prompt
        self.keep = keep
        self.options = (*options, *OWN, *NUMBERS)
        self.photos = photos
        self.named = () if keep == ALL else tuple(keep)
        self.kept = dict.fromkeys(self.named)
        self.left_out: dict[str, None] = {}  # of tables, as they are no options
        self.image = IMAGES[0]  # the column of images
        self.seen: dict[str, None] = {}
        self.split = lru_cache(1000)(self._split)

    def choose(self, names: Sequence[str], images: Sequence[str]) -> list[str]:
        """Return the columns of a table to read; raise ValueError for what it lacks. ``images`` are
        columns of images."""
        pictures = [*(name for name in IMAGES if name in names), *images]
        if self.photos:
            self.image = self.image_in(pictures, *images)
        elif pictures and pictures != ["file_name"]:
            raise InvalidValueError(
                f"the list has a column {pictures[0]!r} of images. Pass it as `photos`."
            )
        others = tuple(name for name in names if name not in pictures)
        fields, kept = self.split(others, is_table=True)
        self.check_seen()
        image = [self.image] if self.photos else []
        return list(dict.fromkeys([*fields.values(), *kept, *image]))

    def read(self, row: Row) -> tuple[dict[str, Any], dict[str, str]]:
        """Return an item's fields, with the prompt under that name, and the columns to keep."""
        columns, kept = self.split(tuple(row.fields), is_table=row.kind not in ("jsonl", "txt"))
        fields = {name: row.fields[column] for name, column in columns.items()}
        if row.kind in CELLS:
            fields = {name: _value(name, cell) for name, cell in fields.items()}
        return fields, {name: _text(row.fields.get(name)) for name in kept}

    def image_in(self, names: Collection[str], *further: str) -> str:
        """Return the column that holds the image."""
        for name in (self.image, *IMAGES, *further):
            if name in names:
                return name
        raise InvalidValueError("there is no image. Write its path under image or file_name.")

    def check_seen(self) -> None:
        """Raise ValueError for columns to keep that no line has."""
        if self.seen and (lacking := [name for name in self.named if name not in self.seen]):
            text = f"the list has no such column. It has {shown([*self.seen], 300)}."
            raise OptionError("keep_columns", lacking, text)

    def _split(self, names: tuple[str, ...], *, is_table: bool) -> tuple[dict[str, str], list[str]]:
        """Return the columns of an item's fields, by our names, and those to keep."""
        self.seen |= dict.fromkeys(names)
        choice = [self.prompt] if self.prompt else [n for n in PROMPTS if n not in self.named]
        found = [name for name in choice if name in names]
        if len(found) != 1:
            what = f"{' and '.join(found)} may be" if found else "it lacks"
            raise InvalidValueError(
                f"{what} the prompt; found {shown([*names], 200)}. Write one, or pass "
                "`prompt_column`."
            )
        fields = {"prompt": found[0]}
        kept = list(self.named)
        for name in names:
            if name in (found[0], "prompt", *self.named):
                continue
            is_foreign = (is_table or self.keep == ALL) and self._is_foreign(name)
            if is_foreign and self.keep == ALL and name not in self.options:
                kept.append(name)
            elif is_foreign:
                self.left_out[name] = None
            else:
                fields[name] = name
        self.kept |= dict.fromkeys(kept)
        if taken := sorted(OWN_NAMES.intersection(kept)):
            raise InvalidValueError(
                f"rows have columns called {', '.join(taken)}. Rename yours, or name those to keep."
            )
        return fields, kept

    def _is_foreign(self, name: str) -> bool:
        """Check that no option has this name, or nearly this name, which may be a typo."""
        if self.photos:
            return name not in self.options or is_decided(name)
        if name in self.options or meant(name):
            return False
        return not get_close_matches(name.lower(), self.options, n=1, cutoff=0.85)


def _value(name: str, cell: str) -> object:
    """Return a cell's value: None, a list of words, JSON, or the text."""
    if not cell.strip() or name in ("prompt", "id", "negative_prompt", "edit_to"):
        return cell if cell.strip() else None
    if name == "words" and not cell.lstrip().startswith("["):
        return [phrase.strip() for phrase in cell.split(";") if phrase.strip()]
    try:
        return parsed(cell)
    except json.JSONDecodeError:
        return cell


def _text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)
