"""Columns of a list: which one holds the prompt, which are options, which are kept; other programs'
names for ours."""

import json
import re
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from ..errors import InvalidValueError, OptionError
from ..files.terminal import shown
from ..maps.statistics import NUMBERS as _STATISTICS
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
# Column names that rows, their tables and files use themselves
OWN_NAMES = frozenset(
    {"id", "line", "prompt", "source_prompt", "source_file", "negative_prompt", "seed", "width"}
    | {"height", "frames", "num_inference_steps", "guidance_scale", "words", "statistics"}
    | {"masks", "truncated", "blanked", "place", "fingerprint", "run_sha256", "files", "thumb"}
    | {"file_name", "image", "video", "failed", "traceback", "maps", "run"}
    | {*WORD_LABELS, *_STATISTICS}
)
_CALLED = {  # names in other programs, such as AUTOMATIC1111 and ComfyUI
    "guidance_scale": "cfg cfg_scale cfgscale guidance",
    "num_inference_steps": "num_steps sampling_steps step steps",
    "negative_prompt": "neg neg_prompt negative negativeprompt negative_prompts",
    "prompt": "positive positive_prompt",
    "seed": "noise_seed",
    "num_frames": "n_frames",
    "width": "w",
    "height": "h",
}
_HINTS = {name: f"write {ours}" for ours, names in _CALLED.items() for name in names.split()}
_HINTS |= dict.fromkeys(
    ("sampler", "sampler_name", "sampler_index", "scheduler"),
    "choose a scheduler for the whole run, with the option scheduler",
)
_HINTS |= dict.fromkeys(
    ("batch_size", "n_iter", "n_samples", "num_images"),
    "write a line for each image; how many run together is the option batch_size",
)


def renamed(name: str) -> str | None:
    """Return advice for a name that other programs use for an option of ours.

    >>> renamed("CFG scale"), renamed("Category")
    ('write guidance_scale', None)
    """
    plain = re.sub(r"[\s-]+", "_", name.strip()).lower()
    is_ours = plain != name and plain in (*OWN, *NUMBERS)
    return f"write {plain}" if is_ours else _HINTS.get(plain)


class Split(NamedTuple):
    """Names in a row: of the prompt, of fields for an item, of columns to keep."""

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
        self.prompt, self.keep, self.options, self.photos = prompt, keep, options, photos
        self.named = () if keep == ALL else tuple(keep)
        self.kept = dict.fromkeys(self.named)
        self.left_out: dict[str, None] = {}  # of tables, as the pipeline has no such options
        self.decided: dict[str, None] = {}  # of tables, as an image decides them
        self._lacking: set[str] | None = None
        self._splits: dict[tuple[str, ...], Split] = {}

    def choose(self, names: Sequence[str], images: Sequence[str]) -> list[str]:
        """Return the columns of a table to read; raise ValueError for what it lacks. ``images`` are
        columns of images."""
        image = []
        if self.photos:
            image = [self.image_in(names, images)]
        elif found := [*images, *(name for name in IMAGES if name in names and name != IMAGES[1])]:
            raise InvalidValueError(
                f"the list has a column {shown(found[0])} of images. Pass it as `photos` to "
                "explain them."
            )
        split = self._split([name for name in names if name not in image], of_table=True)
        self._note(names)
        self.check_seen()
        return list(dict.fromkeys([split.prompt, *split.fields, *split.kept, *image]))

    def read(self, row: Row) -> tuple[dict[str, Any], dict[str, str]]:
        """Return an item's fields, with the prompt under that name, and the columns to keep."""
        names = tuple(row.fields)
        if names not in self._splits:
            if len(self._splits) > 1000:
                self._splits.clear()
            self._note(names)
            self._splits[names] = self._split(names, of_table=row.of_table)
        split = self._splits[names]
        fields = {"prompt": row.fields[split.prompt]}
        for name in split.fields:
            fields[name] = row.fields[name]
        return fields, {name: _text(row, name) for name in split.kept}

    def image_in(self, names: Sequence[str], images: Sequence[str] = ()) -> str:
        """Return the column that holds the image."""
        for name in (*IMAGES, *images):
            if name in names:
                return name
        raise InvalidValueError(
            f"there is no image; found {shown([*names], 200)}. Write its path under image or "
            "file_name."
        )

    def prompt_in(self, names: Sequence[str]) -> str:
        """Return the column that holds the prompt."""
        choice = [self.prompt] if self.prompt else [n for n in PROMPTS if n not in self.named]
        found = [name for name in choice if name in names]
        if len(found) == 1:
            return found[0]
        what = "the prompt is missing" if not found else f"{' and '.join(found)} may be the prompt"
        raise InvalidValueError(
            f"{what}; found {shown([*names], 200)}. Write one, or pass `prompt_column`."
        )

    def check_seen(self) -> None:
        """Raise ValueError for columns to keep that no line has."""
        if self._lacking:
            lacking = [name for name in self.named if name in self._lacking]
            raise OptionError("keep_columns", lacking, "the list has no such column.")

    def _note(self, names: Iterable[str]) -> None:
        lacking = set(self.named) if self._lacking is None else self._lacking
        self._lacking = lacking.difference(names)

    def _split(self, names: Sequence[str], *, of_table: bool) -> Split:
        prompt = self.prompt_in(names)
        rest = [name for name in names if name not in (prompt, "prompt", *self.named)]
        kept = list(self.named)
        if of_table or self.keep == ALL:
            foreign = [name for name in rest if self._is_foreign(name)]
            if self.keep == ALL:
                kept = foreign
                self.kept |= dict.fromkeys(foreign)
            else:
                self.left_out |= dict.fromkeys(foreign)
            decided = [name for name in rest if self.photos and is_decided(name)]
            self.decided |= dict.fromkeys(decided)
            rest = [name for name in rest if name not in (*foreign, *decided)]
        if taken := sorted(OWN_NAMES.intersection(kept)):
            raise InvalidValueError(
                f"rows have columns called {', '.join(taken)}. Rename yours, or name those to keep."
            )
        return Split(prompt, rest, kept)

    def _is_foreign(self, name: str) -> bool:
        """Check that no option has this name; raise ValueError for what may be one's."""
        if name in (*OWN, *NUMBERS) or name in self.options:
            return False
        near = get_close_matches(name.lower(), [*self.options, *OWN], n=1, cutoff=0.85)
        if self.photos or not (near or renamed(name)):
            return True
        advice = renamed(name) or f"did you mean {near[0]}?"
        raise InvalidValueError(
            f"{shown(name)} is not an option: {advice} To keep the column use `keep_columns`."
        )


def _text(row: Row, name: str) -> str:
    value = row.fields.get(name) if row.cells is None else row.cells.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)
