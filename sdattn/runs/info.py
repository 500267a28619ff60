"""``run.json`` as one record: how an image's run, or an edit, was made, and what its files hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InvalidValueError, MissingFileError
from ..files.records import Record, read_document, read_sealed, shortened
from ..follow.capture_warnings import Stopped
from ..follow.run_part import Span
from ..keep.keep import Heads, Selection, Steps
from ..loading.options import LoadingOptions
from ..maps.arrival import Arrival
from ..maps.presets import Preset
from ..maps.statistics import WordStatistics
from ..prompts.tokenizing import Token
from ..prompts.tokens import Prompt, Word
from .parts import FURTHER, MAPS, SPOTS, STEPS

FORMAT = "sdattn-run-4"
EDIT_FORMAT = "sdattn-edit-1"

_DO = "Restore it or generate the run again."


# How a run was made


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


@dataclass(frozen=True)
class Candidate(Record):
    """A seed that was judged, see ``candidates`` of :func:`sdattn.generate`, and the
    :meth:`sdattn.Heatmaps.score` of its maps."""

    seed: int
    score: float


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
        candidates: seeds that the seed was chosen from, the best first.
        decide_at: share of the steps by which they were judged.
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
    candidates: tuple[Candidate, ...] | None = None
    decide_at: float | None = None
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


# What its files hold


@dataclass(frozen=True)
class LayerEntry(Record):
    """A layer's place, level and heads, and the (rows, cols) of its map, or (frames, rows, cols)
    for a video."""

    place: str
    level: int
    heads: int
    grid: tuple[int, ...]


@dataclass(frozen=True)
class DetailsEntry(Record):
    """The model calls and heads that were kept one by one, and their columns; (rows, cols) of the
    spots and of the map of each."""

    steps: tuple[int, ...] | None
    heads: str | tuple[int, ...] | None
    columns: tuple[int, ...]
    spots: tuple[int, ...] | None


@dataclass(frozen=True)
class FurtherEntry(Record):
    """A further text and, for each of its maps, (word, its columns)."""

    text: str
    maps: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class RunInfo(RunSettings):
    """``run.json``.

    Attributes:
        words, truncated, tokens: the prompt's words, the words that were cut off, its token
            columns.
        encoders: text encoders with columns of their own, if there are several.
        columns: columns of the maps.
        preset: preset that makes the heatmaps.
        statistics: statistics of each word's heatmap, in prompt order, made from the saved maps, to
            six significant digits.
        score: :meth:`sdattn.Heatmaps.score` of the heatmaps; None if no word names a thing.
        missing: words that probably did not arrive, see :meth:`sdattn.ImageRun.missing`.
        passes: number of model calls that the maps average.
        layers: layers in ``maps.safetensors``, by name.
        self_attention: (rows, cols) of the self-attention that refines the maps; (frames, rows,
            cols) for a video whose cells attend to all frames.
        details: contents of the files of single steps and heads.
        more: further maps, by their folder.
        files: SHA-256 of each file, by its path.
        checksum: checksum of the rest of the document, or None before it is sealed.
    """

    words: tuple[Word, ...]
    truncated: list[str] | None = None
    tokens: tuple[Token, ...]
    encoders: tuple[tuple[str, int], ...] | None = None
    columns: tuple[int, ...]
    preset: Preset
    statistics: tuple[WordStatistics, ...]
    score: float | None = None
    missing: tuple[Arrival, ...] = ()
    passes: int
    layers: dict[str, LayerEntry]
    self_attention: tuple[int, ...] | None
    details: DetailsEntry
    more: dict[str, FurtherEntry]
    files: dict[str, str]
    checksum: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **super().to_json()}

    @property
    def read_prompt(self) -> Prompt:
        """The prompt as the model read it."""
        return Prompt(self.prompt, self.words, self.tokens, encoders=self.encoders or ())


# Reading


def read_info(files: Mapping[str, bytes], where: str) -> RunInfo:
    """Read and check ``run.json`` among a run's files; raise FileNotFoundError if it is missing,
    ValueError if it is no run of this version, was changed or lacks an entry, which is named."""
    path = f"{where}/run.json"
    if "run.json" not in files:
        raise missing(where, "run.json")
    document = read_sealed(files["run.json"], path, FORMAT, _DO, "checksum")
    info: RunInfo = read_document(RunInfo, document, path, _DO)
    for problem in _problems(info):
        raise InvalidValueError(f"{path}: {problem}. {_DO}")
    return info


def missing(where: str, name: str) -> FileNotFoundError:
    text = f"{where} has no {name}, so it is no run's folder. Runs are made by `generate()`."
    return MissingFileError(text)


def _problems(info: RunInfo) -> Iterator[str]:
    """Yield what does not fit together in a document."""
    if info.passes < 1:
        yield f"'passes' is {info.passes}, where 1 or more is expected"
    yield from _misplaced(info)
    heads = info.details.heads
    if isinstance(heads, str) and heads != "all":
        yield f"'details.heads' is {shortened(heads)}, where 'all' or a list is expected"
    for folder in info.more.keys() - FURTHER.keys():
        yield f"'more' has {folder!r}, which no run of this version has"
    needed = [f"{name}/{MAPS}" for name in info.more]
    needed += [STEPS] if info.details.steps is not None else []
    needed += [SPOTS] if info.details.spots is not None else []
    if MAPS in info.files:  # else it was saved without maps
        yield from (f"'files' does not name {name}" for name in needed if name not in info.files)


def _misplaced(info: RunInfo) -> Iterator[str]:
    """Yield words and columns that are not in the prompt."""
    tokens = range(len(info.tokens))
    letters = len(info.prompt)
    for i, word in enumerate(info.words):
        if not 0 <= word.start <= word.end <= letters:
            where = f"{word.start} to {word.end}"
            yield f"'words[{i}]' is at {where}, and the prompt has {letters} letters"
        if not set(word.columns).issubset(tokens):
            yield f"'words[{i}].columns' are {shortened(word.columns)} of {len(tokens)} columns"
    of_encoders = sum(number for _, number in info.encoders or ())
    if info.encoders and of_encoders != len(tokens):
        yield f"'encoders' have {of_encoders} columns of {len(tokens)}"
    columns = info.columns
    if len(set(columns)) < len(columns) or not set(columns).issubset(tokens):
        yield f"'columns' are {shortened(columns)} of {len(tokens)}, where each is there once"
