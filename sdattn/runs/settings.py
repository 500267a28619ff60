"""How a run, an edit or an explained image was made, as the records that ``run.json`` holds, and
the command that makes it again from these. For the contents of its files see
:mod:`sdattn.runs.info`."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import InvalidValueError
from ..files.records import Record
from ..follow.capture_warnings import Stopped
from ..follow.run_part import Span
from ..keep.keep import Heads, Selection, Steps
from ..loading.options import LoadingOptions
from ..maps.presets import PRESETS, Preset

EDIT_FORMAT = "sdattn-edit-1"
OPTIONS_OF_EDITS = (  # options of the pipeline that the command for edits has
    *("num_inference_steps", "guidance_scale", "negative_prompt", "width", "height"),
    "num_images_per_prompt",  # 1
)


@dataclass(frozen=True, kw_only=True)
class Captured(Record):
    """The steps and heads that a run kept, as passed to :func:`sdattn.capture`, and whether it kept
    where spots looked. Raise ValueError for an invalid choice of steps or heads."""

    steps: list[int] | Selection
    heads: list[int] | Selection
    spots: bool | None = None

    def __post_init__(self) -> None:
        Steps.of(self.steps)
        Heads.of(self.heads)


@dataclass(frozen=True, kw_only=True)
class Explained(Record):
    """How an existing image was explained, see :func:`sdattn.explain`; ``file`` is its file's name,
    if it had one."""

    way: str
    timesteps: list[int]
    reconstruction_psnr: float | None = None
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class Edited(Record):
    """The edit that an image belongs to, see :func:`sdattn.edit.edit` for its arguments."""

    prompt: str
    targets: list[str]
    mode: str
    cross_replace_steps: Span | dict[str, Span]
    self_replace_steps: Span
    blend: list[list[str]] | None
    weights: dict[str, float]
    reconstruction_psnr: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunSettings(Record):
    """How one image's run was made.

    Attributes:
        id, line, fingerprint: identity of an item of a batch run.
        list_columns: further columns of the item's list, as text, or None.
        prompt: the text.
        seed: seed of the noise, or None if the noise is an image's own.
        model, pipeline, scheduler: ``"demo"``, a folder or a name; names of classes.
        loading: how the model was loaded, or None for the defaults.
        options: the pipeline's options that JSON can hold.
        options_left_out: names of the others, and of options of ours that only Python has.
        device, dtype: for example ``"cpu"``, ``"float32"``.
        timesteps: timesteps that the model was called with, in order.
        captured: steps and heads that were kept.
        stopped: where the run was stopped, if it was, and the steps of its maps.
        versions: versions of the packages.
        size: width and height in pixels.
        frames, frame_rate: a video's number of frames, and frames per second; None for an image.
        blanked: the pipeline's safety checker blanked the image.
        asked: the other text that was asked about.
        explained, edited: set if the image existed before, or belongs to an edit.
    """

    id: str | None = None
    line: int | None = None
    fingerprint: str | None = None
    list_columns: dict[str, str] | None = None
    prompt: str
    seed: int | None
    model: str | None = None
    pipeline: str | None = None
    scheduler: str | None = None
    loading: LoadingOptions | None = None
    options: dict[str, Any] | None = None
    options_left_out: list[str] | None = None
    device: str | None = None
    dtype: str | None = None
    timesteps: list[float] | None = None
    captured: Captured | None = None
    stopped: Stopped | None = None
    versions: dict[str, str] | None = None
    size: tuple[int, int] | None = None
    frames: int | None = None
    frame_rate: float | None = None
    blanked: bool | None = None
    asked: str | None = None
    explained: Explained | None = None
    edited: Edited | None = None

    def alone(self) -> RunSettings:
        """Return the settings without a document's entries for its files."""
        return RunSettings(**{f.name: getattr(self, f.name) for f in fields(RunSettings)})


@dataclass(frozen=True, kw_only=True)
class EditInfo(Edited, RunSettings):
    """``run.json`` of an edit: the settings of its source's run, and the edit.

    Attributes:
        runs: folders of the images' runs, next to the file.
    """

    runs: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"format": EDIT_FORMAT, **super().to_json()}

    @property
    def of_images(self) -> RunSettings:
        """Return the settings as each image has them."""
        edited = Edited(**{f.name: getattr(self, f.name) for f in fields(Edited)})
        return replace(self.alone(), edited=edited)


def command_for(settings: RunSettings, preset: Preset) -> str:
    """Return the command whose ``--config run.json`` makes a run again: generate, explain or edit.

    Raises:
        ValueError: the run needs something that only Python can give; says what.
    """
    edited = settings.edited
    if not settings.model:
        raise InvalidValueError("The pipeline was built in Python, so no name of a model is known.")
    if settings.stopped:
        raise InvalidValueError("It was stopped before its end.")
    if edited and edited.reconstruction_psnr is not None:
        raise InvalidValueError("The image was edited from one that the run does not hold.")
    python = _of_python(settings)
    if python:
        text = f"Options were given that only Python can: {', '.join(sorted(python))}."
        raise InvalidValueError(text)
    known = PRESETS.get(preset.name)
    if known and settings.explained:  # it reads the chosen timesteps
        known = replace(known, steps=preset.steps)
    if known is None or replace(known, refine=None) != replace(preset, refine=None):
        raise InvalidValueError(f"The preset {preset.name!r} was made in Python.")
    if edited:
        return "edit"
    return "explain" if settings.explained else "generate"


def _of_python(settings: RunSettings) -> set[str]:
    """Return the options that the run's command does not have."""
    python = set(settings.options_left_out or ())
    if settings.explained:
        return python - {"latents"}  # the image's
    if settings.edited:
        python -= {"callback_on_step_end"}  # the edit's own
        python |= set(settings.options or {}) - {*OPTIONS_OF_EDITS}
        for name in ("cross_replace_steps", "self_replace_steps"):
            if not isinstance(getattr(settings.edited, name), (int, float)):
                python.add(name)
    return python
