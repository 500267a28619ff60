"""Columns of a list: which one holds the prompt, which are options, which are kept."""

import json
import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from ..errors import InvalidValueError, OptionError
from ..files.terminal import shown
from ..maps.statistics import NUMBERS as STATISTICS
from ..models.pipeline_call import MEANT
from ..runs.explaining import is_decided
from .tables import Row

ALL = "all"
PROMPTS = ("prompt", "Prompt", "Prompts", "caption", "text", "txt")
IMAGES = ("image", "file_name", "jpg", "jpeg", "png", "webp")
EDITS = ("mode", "blend", "weights", "cross_replace_steps", "self_replace_steps")
OWN = ("id", "prompt", "negative_prompt", "seed", "words", "image", "edit_to", *EDITS)
WHOLE = ("seed", "width", "height", "num_frames", "num_inference_steps")
NUMBERS = (*WHOLE, "guidance_scale", "num_images_per_prompt", "num_videos_per_prompt")
# The columns before the numbers in a table of the words of all items
WORD_LABELS = ("id", "prompt", "seed", "word", "occurrence")
# Names that rows, the tables made of them and datasets' imagefolder use themselves
OWN_NAMES = frozenset(
    (
        *("id", "line", "prompt", "source_prompt", "source_file", "negative_prompt", "seed"),
        *("width", "height", "frames", "num_inference_steps", "guidance_scale", "words", "masks"),
        *("truncated", "statistics", "blanked", "fingerprint", "file_name", "place", "run_sha256"),
        *("thumb", "files", "failed", "traceback", "image"),
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


class Split(NamedTuple):
    """Names of a row's columns: the prompt, an item's fields, those to keep."""

    prompt: str
    fields: list[str]
    kept: list[str]


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
        self.options = options
        self.photos = photos
        self.named = () if keep == ALL else tuple(keep)
        self.kept = dict.fromkeys(self.named)
        self.left_out: dict[str, None] = {}  # of tables, as the pipeline has no such options
        self.decided: dict[str, None] = {}  # of tables, as an image decides them
        self.image = IMAGES[0]  # the column of images
        self.seen: dict[str, None] = {}
        self._splits: dict[tuple[str, ...], Split] = {}

    def choose(self, names: Sequence[str], images: Sequence[str]) -> list[str]:
        """Return the columns of a table to read; raise ValueError for what it lacks. ``images`` are
        columns of images."""
        pictures = [*(name for name in IMAGES if name in names), *images]
        if self.photos:
            pictures = [self.image_in(pictures, *pictures)]
            self.image = pictures[0]
        elif pictures and pictures != ["file_name"]:
            raise InvalidValueError(
                f"the list has a column {pictures[0]!r} of images. Pass it as `photos`."
            )
        split = self._split([name for name in names if name not in pictures], of_table=True)
        self.check_seen()
        image = pictures if self.photos else []
        return list(dict.fromkeys([split.prompt, *split.fields, *split.kept, *image]))

    def read(self, row: Row) -> tuple[dict[str, Any], dict[str, str]]:
        """Return an item's fields, with the prompt under that name, and the columns to keep."""
        names = tuple(row.fields)
        if names not in self._splits:
            if len(self._splits) > 1000:
                self._splits.clear()
            self._splits[names] = self._split(names, of_table=row.of_table)
        split = self._splits[names]
        fields = {"prompt": row.fields[split.prompt]}
        for name in split.fields:
            fields[name] = row.fields[name]
        return fields, {name: _text(row, name) for name in split.kept}

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

    def _split(self, names: Sequence[str], *, of_table: bool) -> Split:
        self.seen |= dict.fromkeys(names)
        choice = [self.prompt] if self.prompt else [n for n in PROMPTS if n not in self.named]
        found = [name for name in choice if name in names]
        if len(found) != 1:
            what = f"{' and '.join(found)} may be" if found else "it lacks"
            raise InvalidValueError(
                f"{what} the prompt; found {shown([*names], 200)}. Write one, or pass "
                "`prompt_column`."
            )
        rest = [name for name in names if name not in (found[0], "prompt", *self.named)]
        kept = list(self.named)
        if of_table or self.keep == ALL:
            foreign = [name for name in rest if self._is_foreign(name)]
            decided = [name for name in rest if self.photos and is_decided(name)]
            if self.keep == ALL:
                kept = foreign
                self.kept |= dict.fromkeys(kept)
            else:
                self.left_out |= dict.fromkeys(foreign)
            self.decided |= dict.fromkeys(decided)
            rest = [name for name in rest if name not in (*foreign, *decided)]
        if taken := sorted(OWN_NAMES.intersection(kept)):
            raise InvalidValueError(
                f"rows have columns called {', '.join(taken)}. Rename yours, or name those to keep."
            )
        return Split(found[0], rest, kept)

    def _is_foreign(self, name: str) -> bool:
        """Check that no option has this name, or nearly this name, which may be a typo."""
        known = (*self.options, *OWN, *NUMBERS)
        if name in known or (meant(name) and not self.photos):
            return False
        return self.photos or not get_close_matches(name.lower(), known, n=1, cutoff=0.85)


def _text(row: Row, name: str) -> str:
    value = row.fields.get(name) if row.cells is None else row.cells.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)
