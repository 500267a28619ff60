"""Columns of a list of prompts, and other programs' names for ours."""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from ...errors import InvalidValueError, OptionError
from ...files.terminal import shown
from ..storage.rows import OWN_NAMES
from .values import Fields

ALL = "all"
PROMPTS = ("prompt", "Prompt", "Prompts", "caption", "text")
EDITS = ("mode", "blend", "weights", "cross_replace_steps", "self_replace_steps")
OWN = ("id", "prompt", "negative_prompt", "seed", "words", "image", "edit_to", *EDITS)
_WHOLE = ("seed", "width", "height", "num_frames", "num_inference_steps")
NUMBERS = (*_WHOLE, "guidance_scale", "num_images_per_prompt", "num_videos_per_prompt")
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


@dataclass(frozen=True)
class Columns:
    """How the columns of a list are read.

    Attributes:
        prompt: the column that holds the prompt; None: the only one of :data:`PROMPTS`.
        keep: columns to keep as text in the items' rows, never read as options: their names, or
            ``"all"`` that are neither ours nor an option of the pipeline.
    """

    prompt: str | None = None
    keep: Sequence[str] = ()

    def check(self) -> None:
        """Raise InvalidValueError for a column that cannot be kept."""
        if self.keep != ALL and (taken := sorted(OWN_NAMES.intersection(self.keep))):
            raise OptionError("keep_columns", taken, "rows have columns so called. Rename yours.")

    def prompt_in(self, names: Collection[str]) -> str:
        """Return the column that holds the prompt; raise InvalidValueError for none or several."""
        choice = [name for name in PROMPTS if name not in self.named]
        found = [name for name in ([self.prompt] if self.prompt else choice) if name in names]
        if len(found) == 1:
            return found[0]
        what = "the prompt is missing" if not found else f"{' and '.join(found)} may be the prompt"
        raise InvalidValueError(
            f"{what}; found {shown([*names], 200)}. Write one, or pass `prompt_column`."
        )

    @property
    def named(self) -> Sequence[str]:
        return () if self.keep == ALL else self.keep

    def read(self, fields: Fields) -> tuple[dict[str, object], dict[str, str]]:
        """Return an item's fields, with the prompt under that name, and the columns to keep."""
        column = self.prompt_in(fields)
        rest = [name for name in fields if name not in ("prompt", column, *self.named)]
        found = {"prompt": fields[column], **{name: fields[name] for name in rest}}
        kept = [name for name in rest if name not in (*OWN, *NUMBERS)]
        kept = kept if self.keep == ALL else list(self.named)
        if taken := sorted(OWN_NAMES.intersection(kept)):
            raise InvalidValueError(
                f"rows have columns called {', '.join(taken)}. Rename yours, or name those to keep."
            )
        return found, {name: fields.text(name) for name in kept}

    def check_seen(self, names: Iterable[str]) -> None:
        """Raise InvalidValueError for columns to keep that no line has."""
        names = dict.fromkeys(names)
        if names and (lacking := [name for name in self.named if name not in names]):
            text = f"the list has no such column. It has {shown([*names], 300)}."
            raise OptionError("keep_columns", lacking, text)


def renamed(name: str) -> str | None:
    """Return advice for a name that other programs use for an option of ours.

    >>> renamed("CFG scale"), renamed("Category")
    ('write guidance_scale', None)
    """
    plain = re.sub(r"[\s-]+", "_", name.strip()).lower()
    is_ours = plain != name and plain in (*OWN, *NUMBERS)
    return f"write {plain}" if is_ours else _HINTS.get(plain)
