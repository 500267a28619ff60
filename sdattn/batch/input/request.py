from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

from ...errors import InvalidValueError, MissingPackageError, refuse
from ...loading.options import LoadingOptions
from ...maps.presets import PRESETS, Preset
from ...models.pipeline import Options
from ...runs.parts import PARTS, USUAL, USUAL_OF_IMAGES
from ..storage.formats import FORMATS
from ..storage.parquets import require_pyarrow
from .columns import Columns
from .lines import KINDS

STOPS = {"SIGINT": 130, "SIGTERM": 143}  # and the exit code of each


@dataclass(frozen=True)
class Request:
    """Options of a batch run.

    Attributes:
        source: see :func:`sdattn.batch.input.sources.read_source`.
        out: the run's folder.
        model, device, dtype: as for :func:`sdattn.load_pipeline`; under ``accelerate launch`` each
            process has a device of its own.
        options: arguments of the pipeline's call, for items that do not have them.
        seed: seed of the first line; an item without a seed has ``seed + line - 1``.
        batch_size: items that run together, or ``"auto"``.
        format: one of :data:`sdattn.batch.storage.formats.FORMATS`: ``"folder"``, one folder per
            item, or ``"webdataset"``, tar files of many, or ``"parquet"``, which needs pyarrow.
        shard_bytes: size at which a file of many items is written.
        preset: preset of the heatmaps.
        save: some of :data:`sdattn.runs.parts.PARTS` (default: the usual ones, see
            :meth:`parts`).
        part: (number, count), to divide an input between independent runs.
        strict: stop if a line cannot be read.
        force: go on in a folder that another input, model or setting made, and draw again the items
            that differ.
        prompt_column: the list's column that holds the prompt (default: found by its name).
        keep_columns: further columns to keep in the items' rows, or ``"all"``.
        input_format: one of :data:`sdattn.batch.input.lines.KINDS` (default: by the source's name).
        max_errors: number of failed items at which to stop.
        engine: ``"local"``, this process or ``accelerate launch``'s; or ``"ray"``, actors of Ray,
            which needs ray.
        workers: Ray workers (at least, at most): drawing begins with the minimum, and others join
            when Ray finds room. Default: one per GPU, and drawing begins with the first.
    """

    source: str | Path
    out: str | Path
    model: str = "demo"
    options: Options = field(default_factory=dict)
    seed: int = 0
    batch_size: int | str = "auto"
    format: str = "folder"
    shard_bytes: int = 256_000_000
    preset: Preset = PRESETS["default"]
    save: Sequence[str] | None = None
    part: tuple[int, int] = (1, 1)
    strict: bool = False
    force: bool = False
    prompt_column: str | None = None
    keep_columns: Sequence[str] = ()
    input_format: str | None = None
    max_errors: int | None = None
    device: str | None = None
    dtype: torch.dtype | str | None = None
    progress: bool = True
    engine: str = "local"
    workers: tuple[int, int] | None = None
    loading: LoadingOptions = field(default_factory=LoadingOptions)

    def check(self) -> None:
        """Raise ValueError for an invalid option, ImportError for a missing library."""
        size = self.batch_size
        if size != "auto" and (type(size) is not int or size < 1):
            raise refuse("batch_size", size, "a whole number from 1, or 'auto'")
        if self.format not in FORMATS:
            raise refuse("format", self.format, FORMATS)
        if self.format == "parquet":
            require_pyarrow()
        if self.input_format not in (None, *KINDS):
            raise refuse("input_format", self.input_format, KINDS)
        self.columns.check()
        if isinstance(self.save, str):
            raise refuse("save", self.save, f"a tuple of names, some of {', '.join(PARTS)}")
        unknown = [name for name in self.save or () if name not in PARTS]
        if unknown or (self.save is not None and not self.save):
            raise refuse("save", unknown[0] if unknown else self.save, PARTS)
        which, of = self.part
        if not 1 <= which <= of:
            raise refuse("part", self.part, f"{(1, of)} to {(of, of)}")
        self._check_engine()

    @property
    def columns(self) -> Columns:
        """How the columns of the list are read."""
        return Columns(self.prompt_column, self.keep_columns)

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

    def _check_engine(self) -> None:
        if self.engine not in ("local", "ray"):
            raise refuse("engine", self.engine, ("local", "ray"))
        if self.engine == "local":
            if self.workers is not None:
                raise InvalidValueError(
                    "workers are for `engine='ray'`; else use accelerate launch --num_processes."
                )
            return
        least, most = self.workers or (1, 1)
        if not 1 <= least <= most:
            raise refuse("workers", self.workers, "(at least, at most), from 1")
        if self.device is not None and ":" in self.device:
            raise InvalidValueError(
                f"`device={self.device!r}` names one device for all workers. Leave the number out."
            )
        if find_spec("ray") is None:
            raise MissingPackageError("`engine='ray'` needs Ray: pip install 'sdattn[ray]'")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        items: items of the input (of its part) that can be drawn.
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
