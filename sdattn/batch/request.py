from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

from ..errors import InvalidValueError, MissingPackageError, OptionError, refuse
from ..loading.options import LoadingOptions
from ..maps.masks import MaskSettings
from ..maps.presets import PRESETS, Preset
from ..models.pipeline import Options
from ..runs.parts import PARTS, USUAL, USUAL_OF_IMAGES
from .formats import FORMATS
from .tables import KINDS

STOPS = {"SIGINT": 130, "SIGTERM": 143}  # and the exit code of each
_BATCH = 8
_BATCH_OF_VIDEOS = 1


@dataclass(frozen=True)
class Request:
    """Options of a batch run.

    Attributes:
        source: a list of prompts to draw, see :func:`sdattn.batch.tables.list_rows`.
        photos: in its place, photos with captions to explain, none of which is ever drawn, see
            :func:`sdattn.batch.photos.photo_rows`.
        out: the run's folder, or its address in a storage, ``s3://bucket/run``.
        model, device, dtype, loading: as for :func:`sdattn.load_pipeline`.
        options: arguments of the pipeline's call, for items that do not have them; also
            ``candidates`` and ``decide_at`` of :func:`sdattn.generate`.
        seed: seed of the first line; an item without a seed has ``seed + line - 1``.
        batch_size: items drawn together (default: 8 images, or 1 video).
        shard_items: items in a shard, the unit of work (default: a minute or two of work, see
            :func:`sdattn.batch.plan.default_shard_items`).
        limit: draw only the shards that hold the first items of the list; the same request without
            it, or with another, goes on.
        format: one of :data:`sdattn.batch.formats.FORMATS`: ``"folder"``, one folder per item, or
            ``"webdataset"``, tar files of many.
        preset: preset of the heatmaps.
        save: some of :data:`sdattn.runs.parts.PARTS` (default: the usual ones, see
            :meth:`parts`).
        mask_words: words to make masks of (default: all).
        mask_threshold: share of a map's range above which its mask is white, or ``"otsu"``
            (default: 0.5).
        part: (number, count), to divide the shards between machines (default: what SLURM or
            torchrun set, see :func:`part_of_environment`).
        strict: stop if a line cannot be read.
        force: go on in a folder that another input, model or setting made, and draw again the
            shards that differ.
        retry_failed: draw again the items that failed.
        prompt_column: the list's column that holds the prompt or caption (default: by its name).
        keep_columns: further columns to keep in the items' rows, or ``"all"``.
        input_format: one of :data:`sdattn.batch.tables.KINDS` (default: by the source's name).
        max_errors: number of failed items at which to stop.
        engine: ``"local"``, this machine, or ``"ray"``, a cluster, which needs ray.
        workers: processes at work (default: one per GPU; without a GPU one).
    """

    source: str | Path | None = None
    out: str | Path = ""
    model: str = "demo"
    photos: str | Path | None = None
    options: Options = field(default_factory=dict)
    seed: int = 0
    batch_size: int | None = None
    shard_items: int | None = None
    limit: int | None = None
    format: str = "folder"
    preset: Preset = PRESETS["default"]
    save: Sequence[str] | None = None
    mask_words: Sequence[str] | None = None
    mask_threshold: float | str | None = None
    part: tuple[int, int] | None = None
    strict: bool = False
    force: bool = False
    retry_failed: bool = False
    prompt_column: str | None = None
    keep_columns: Sequence[str] = ()
    input_format: str | None = None
    max_errors: int | None = None
    device: str | None = None
    dtype: torch.dtype | str | None = None
    progress: bool = True
    engine: str = "local"
    workers: int | None = None
    loading: LoadingOptions = field(default_factory=LoadingOptions)

    def check(self) -> None:
        """Raise ValueError for an invalid option, ImportError for a missing library."""
        if (self.source is None) == (self.photos is None):
            raise InvalidValueError(
                "Pass either `source`, prompts to draw, or `photos` to explain."
            )
        if not str(self.out):
            raise InvalidValueError("`out` is missing. Pass the run's folder.")
        for name in ("batch_size", "shard_items", "limit", "max_errors", "workers"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 1):
                raise refuse(name, number, "a whole number from 1")
        if self.format not in FORMATS:
            raise refuse("format", self.format, FORMATS)
        if self.input_format not in (None, *KINDS):
            raise refuse("input_format", self.input_format, KINDS)
        self._check_save()
        self._check_workers()

    def _check_workers(self) -> None:
        which, of = self.part or (1, 1)
        if not 1 <= which <= of:
            raise refuse("part", self.part, f"{(1, of)} to {(of, of)}")
        if self.part is None:
            part_of_environment()  # or refuse, before anything is loaded
        if self.engine not in ("local", "ray"):
            raise refuse("engine", self.engine, ("local", "ray"))
        if self.engine == "ray" and find_spec("ray") is None:
            raise MissingPackageError("`engine='ray'` needs Ray: pip install 'sdattn[ray]'")
        if self.device is not None and ":" in self.device and (self.workers or 1) > 1:
            raise OptionError("device", self.device, "it is one device. Leave its number out.")

    def _check_save(self) -> None:
        if isinstance(self.save, str):
            raise refuse("save", self.save, f"a tuple of names, some of {', '.join(PARTS)}")
        unknown = [name for name in self.save or () if name not in PARTS]
        if unknown or (self.save is not None and not self.save):
            raise refuse("save", unknown[0] if unknown else self.save, PARTS)
        if "masks" not in (self.save or ()):
            for name in ("mask_words", "mask_threshold"):
                if getattr(self, name) is not None:
                    raise OptionError(name, getattr(self, name), "add masks to `save`.")
        self.masks  # noqa: B018

    @property
    def masks(self) -> MaskSettings:
        """Return the masks to save; raise ValueError for an invalid word or share."""
        words = None if self.mask_words is None else tuple(self.mask_words)
        return MaskSettings(words, self.mask_threshold)  # type: ignore[arg-type]

    def batch_of(self, *, videos: bool) -> int:
        """Return the number of items that are drawn together."""
        return self.batch_size or (_BATCH_OF_VIDEOS if videos else _BATCH)

    def parts(self, *, videos: bool) -> Sequence[str]:
        """Return the parts to save of each item; raise ValueError for videos of images."""
        if self.save is None:
            return USUAL if videos else USUAL_OF_IMAGES
        if "video" in self.save and not videos:
            raise InvalidValueError(
                f"`model={str(self.model)!r}` makes images. Leave video out of "
                f"`save={','.join(self.save)!r}`, or choose a model that makes videos."
            )
        return self.save


def part_of_environment(variables: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return the (number, count) that a SLURM array and a launcher gave this process, or None.

    If each job of an array starts several ranks, every rank of every job is a part.

    Raises:
        ValueError: variables that tell no part, as in an array with gaps.

    >>> array = {"ID": "2", "COUNT": "4", "MIN": "0", "MAX": "3", "STEP": "1"}
    >>> part_of_environment({f"SLURM_ARRAY_TASK_{name}": text for name, text in array.items()})
    (3, 4)
    >>> part_of_environment({"RANK": "1", "WORLD_SIZE": "8"})
    (2, 8)
    """
    number = 0
    count = 1
    if f"{_ARRAY}ID" in variables:
        job, count, first, last, step = numbers_of(variables, _ARRAY, "ID COUNT MIN MAX STEP")
        number, between = divmod(job - first, max(step, 1))
        # SLURM does not tell a job's position in a list with gaps.
        if between or not 0 <= number < count or first + (count - 1) * step != last:
            raise InvalidValueError(
                f"SLURM's array has {count} jobs with numbers from {first} to {last} in steps of "
                f"{step}, so job {job} cannot know which part is its own. Write "
                f"--array=1-{count}: each job draws its share of what is missing. Or pass `part`."
            )
    if "RANK" in variables and "WORLD_SIZE" in variables:
        rank, size = numbers_of(variables, "", "RANK WORLD_SIZE")
        if not 0 <= rank < size:
            raise InvalidValueError(
                f"RANK={rank} is none of WORLD_SIZE={size} ranks, which are numbered from 0. "
                "Correct the variables, or pass `part`."
            )
        number = number * size + rank
        count *= size
    return None if count == 1 else (number + 1, count)


_ARRAY = "SLURM_ARRAY_TASK_"


def numbers_of(variables: Mapping[str, str], begins: str, names: str) -> list[int]:
    """Return the numbers of a launcher's variables, whose names begin alike; raise ValueError for
    one that is no number."""
    found = []
    for name in names.split():
        text = variables.get(f"{begins}{name}", "")
        if not text.strip().isdecimal():
            raise InvalidValueError(
                f"{begins}{name}={text!r} is not a number, so it does not tell which part of the "
                "run this process draws. Correct it, or pass `part` and `device`."
            )
        found.append(int(text))
    return found


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run, or of its part.

    Attributes:
        items: items that can be drawn.
        before: items that were whole before the run began.
        whole: items that are whole now.
        failed: items that could not be drawn.
        bad_lines: lines that could not be read.
        stopped: why the run ended early, if it did: ``"SIGINT"``, ``"SIGTERM"`` or a sentence.
        seconds: drawing time, from the loaded model to the last item on the disk.
    """

    items: int
    before: int
    whole: int
    failed: int
    bad_lines: int
    stopped: str | None
    seconds: float

    @property
    def exit_code(self) -> int:
        if self.stopped in STOPS:
            return STOPS[self.stopped]
        return int(bool(self.stopped or self.failed or self.bad_lines or self.whole < self.items))
