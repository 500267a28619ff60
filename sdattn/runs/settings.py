"""How a run, an edit or an explained image was made, as the records that ``run.json`` holds. For
the contents of its files see :mod:`sdattn.runs.info`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..files.records import Record
from ..follow.capture_warnings import Stopped
from ..follow.run_part import Span
from ..keep.keep import Heads, Selection, Steps
from ..loading.options import LoadingOptions

EDIT_FORMAT = "sdattn-edit-1"


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
        command: the command that was typed, for a shell; None for a run that Python made.
        prompt: the text.
        seed: seed of the noise, or None if the noise is an image's own.
        model, pipeline, scheduler: ``"demo"``, a folder or a name; names of classes.
        loading: how the model was loaded, or None for the defaults.
        options: the pipeline's options that JSON can hold.
        options_left_out: names of the others, and ``losses`` of a guided run.
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
    command: str | None = None
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
