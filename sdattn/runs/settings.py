"""How a run was made, as records: what ``run.json`` says of it, of a run, an edit or an image that
was looked at. What its files hold is in :mod:`sdattn.runs.info`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..files.records import Record
from ..hooks.capture_warnings import Stopped
from ..loading.options import LoadingOptions
from ..models.crops import Crop

EDIT_FORMAT = "sdattn-edit-1"
Kept = str | Sequence[int] | tuple[float, ...] | None
Span = float | list[float]


@dataclass(frozen=True, kw_only=True)
class Captured(Record):
    """Which steps and heads a run kept, as :func:`sdattn.capture` is asked for them."""

    steps: Kept
    heads: Kept


@dataclass(frozen=True, kw_only=True)
class Explained(Record):
    """How an image that was there already was looked at, see :func:`sdattn.explain`; ``file`` is
    the name that it had, where it had one."""

    way: str
    timesteps: list[int]
    reconstruction_psnr: float | None = None
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class Edited(Record):
    """The edit that an image is of, see :func:`sdattn.edit.edit` for its arguments."""

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
        id, line, fingerprint: of an item of a batch run.
        list_columns: further columns of the list that the item is from, as text; None: none kept.
        prompt: the text.
        seed: of the noise; None where that is an image's own.
        model, pipeline, scheduler: ``"demo"``, a folder or a name; names of classes.
        loading: how the model was loaded; None where nothing was asked for.
        options: the pipeline's that JSON can hold.
        options_left_out: names of the others.
        device, dtype: ``"cpu"``, ``"float32"``.
        timesteps: that the model was called with, in order.
        captured: which steps and heads were kept.
        stopped: where the run was stopped, if it was, and the steps that its maps are of.
        versions: of the packages.
        size: width and height in pixels.
        crop: the part of the image that was drawn, where that was not all of it.
        frames, frame_rate: of a video, how many and how many a second; None of an image.
        blanked: the pipeline's safety checker blanked the image.
        asked: the other text that was asked about.
        explained, edited: the image was there already, or is of an edit.
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
    crop: Crop | None = None
    frames: int | None = None
    frame_rate: float | None = None
    blanked: bool | None = None
    asked: str | None = None
    explained: Explained | None = None
    edited: Edited | None = None

    def alone(self) -> RunSettings:
        """Without what a whole document says of the files."""
        return RunSettings(**{f.name: getattr(self, f.name) for f in fields(RunSettings)})


@dataclass(frozen=True, kw_only=True)
class EditInfo(Edited, RunSettings):
    """``run.json`` of an edit: the settings of its source's run, and the edit.

    Attributes:
        runs: the folders of the images' runs beside it.
    """

    runs: list[str]

    def to_json(self) -> dict[str, Any]:
        return {"format": EDIT_FORMAT, **super().to_json()}

    @property
    def of_images(self) -> RunSettings:
        """As each of the images has them."""
        edited = Edited(**{f.name: getattr(self, f.name) for f in fields(Edited)})
        return replace(self.alone(), edited=edited)
