"""`run_batch()`: read the input, share it out, draw what is missing, write it, tell how it went."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from ..heatmaps import Heatmaps, cross_maps
from ..outlines import outline
from ..packing import PARTS, USUAL, pack_run
from ..pipelines import load_pipeline
from ..prompts import read_prompts
from ..runs import Run, sample
from .claims import Claim, describe_input, settings_of
from .folder import BatchFolder
from .items import BadLine, Item, kind_of, read_items
from .plan import (
    Job,
    check_items,
    digest_model,
    fingerprint,
    plan_batches,
    restricted,
)
from .progress import Progress, Tally
from .sizing import find_batch_size, is_out_of_memory, release_memory
from .team import Team
from .writing import Writer

STOPS = {"SIGINT": 130, "SIGTERM": 143}  # and the exit code of each


@dataclass(frozen=True)
class Request:
    """What is asked of a batch run.

    Attributes:
        source: a ``.jsonl``, ``.csv`` or ``.txt`` file, or ``"-"`` for standard input; see
            :func:`sdattn.batch.items.read_items`.
        out: the run's folder.
        model, device, dtype: as :func:`sdattn.load_pipeline` takes them; under ``accelerate
            launch`` each process has a device of its own.
        options: of the pipeline's call, for items that do not have them.
        seed: of the first line; an item without a seed of its own has ``seed + line - 1``.
        batch_size: items that run together, or ``"auto"``.
        format: ``"folder"``, a folder an item, or ``"shard"``.
        shard_bytes: a shard is written once it holds so much.
        save: of :data:`sdattn.packing.PARTS`.
        part: (which, of how many), to share an input between runs that know nothing of each other.
        strict: stop if a line cannot be read.
        force: go on in a folder that another input, model or setting made, making anew what
            differs.
        max_errors: stop once so many items have failed.
    """

    source: str | Path
    out: str | Path
    model: str = "demo"
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    batch_size: int | str = "auto"
    format: str = "folder"
    shard_bytes: int = 256_000_000
    save: Sequence[str] = USUAL
    part: tuple[int, int] = (1, 1)
    strict: bool = False
    force: bool = False
    max_errors: int | None = None
    device: str | None = None
    dtype: torch.dtype | None = None

    def check(self) -> None:
        """Raise ValueError for what cannot be asked."""
        size = self.batch_size
        if size != "auto" and (type(size) is not int or size < 1):
            raise ValueError(f"batch_size={size!r}: pass a whole number from 1, or 'auto'.")
        if self.format not in ("folder", "shard"):
            raise ValueError(f"format={self.format!r}: pass 'folder' or 'shard'.")
        if unknown := sorted(set(self.save) - set(PARTS)) or not self.save:
            raise ValueError(f"save={unknown or []}: choose of {', '.join(PARTS)}.")
        which, of = self.part
        if not 1 <= which <= of:
            raise ValueError(f"part={which}/{of}: pass 1/{of} to {of}/{of}.")


@dataclass(frozen=True)
class Outcome:
    """How a run went.

    Attributes:
        items: of the input (of its part) that can be drawn.
        before: of those, whole before the run began.
        whole: of those, whole now.
        failed: items that could not be drawn.
        bad_lines: lines that could not be read.
        stopped: why the run ended early, if it did: ``"SIGINT"``, ``"SIGTERM"`` or a sentence.
    """

    items: int
    before: int
    whole: int
    failed: int
    bad_lines: int
    stopped: str | None

    @property
    def exit_code(self) -> int:
        if self.stopped in STOPS:
            return STOPS[self.stopped]
        return int(bool(self.stopped or self.failed or self.bad_lines or self.whole < self.items))


def run_batch(request: Request) -> Outcome | None:
    """Draw every item of an input that the folder does not hold yet.

    Run it in one process, or in each of many that ``accelerate launch`` starts. An item's files
    are written whole or not at all; the same call again does only what is missing.

    Returns:
        How it went; None in all processes but the first.

    Raises:
        ValueError: a request that cannot be, an input without an item or (``strict``) with bad
            lines, or a folder that another input, model or setting made.
        OSError: the folder is in use or cannot be written; what was finished stays.
    """
    request.check()
    team = Team(request.device)
    try:
        outcome = _BatchRun(request, team).go()
        return outcome if team.first else None
    finally:
        team.close()


class _BatchRun:
    """One process's side of a run."""

    def __init__(self, request: Request, team: Team):
        self.request, self.team = request, team
        self.folder = BatchFolder(request.out)
        self.job_name = team.share(lambda: uuid4().hex[:12])
        self.writer_name = f"{self.job_name}-{team.rank}"
        self.tally = Tally(self.folder.hidden)
        self.keeper = team.first  # of the folder: the first process, and of each disk of its own
        self.limits: dict[int, int] = {}  # largest batch of a shape that has run

    def go(self) -> Outcome:
        items, jobs, bad = self.team.share(self._read)
        self._open()
        try:
            pipe = self.team.together(self._load)
            if jobs is None:  # a model that has no outline
                jobs, more = self.team.share(lambda: check_items(pipe, items, self.request.options))
                bad = self._tell(bad, more)
            if not jobs:
                raise ValueError(f"{self.request.source} has no line that can be drawn.")
            return self._draw_missing(pipe, jobs, bad)
        finally:
            self.folder.lock.release()

    # Before the first picture

    def _read(self) -> tuple[list[Item], list[Job] | None, list[BadLine]]:
        source = str(self.request.source)
        kind = kind_of(source)
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        items, bad = read_items(data, kind, seed=self.request.seed)
        pipe = outline(self.request.model)
        if pipe is None:
            return items, None, self._tell([], bad)
        jobs, more = check_items(pipe, items, self.request.options)
        return [], jobs, self._tell([], sorted([*bad, *more], key=lambda one: one.line))

    def _tell(self, told: list[BadLine], new: list[BadLine]) -> list[BadLine]:
        """Print bad lines; with ``strict`` they end the run."""
        if self.team.first:
            for one in new:
                print(f"sdattn: line {one.line}: {one.reason}", file=sys.stderr)
        if new and self.request.strict:
            raise ValueError(
                f"{len(new)} line(s) of {self.request.source} cannot be drawn, the first is line "
                f"{new[0].line}. Nothing was written, as --strict asks."
            )
        return told + new

    def _open(self) -> None:
        """Lock the folder: the first process for all that see its disk."""
        team, folder, name = self.team, self.folder, self.job_name
        team.share(lambda: folder.open(name))
        team.together(self._join_from_another_machine)
        if not (team.first or team.first_here):
            folder.lock.join(name)

    def _join_from_another_machine(self) -> None:
        if (
            self.team.first_here
            and not self.team.first
            and not self.folder.lock.join(self.job_name)
        ):
            self.keeper = True
            self.folder.open(self.job_name)

    def _load(self) -> Any:
        pipe = load_pipeline(self.request.model, device=self.team.device, dtype=self.request.dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    # Drawing

    def _draw_missing(self, pipe: Any, jobs: list[Job], bad: list[BadLine]) -> Outcome:
        request, team = self.request, self.team
        settings = settings_of(request, pipe, _same(team.gather(digest_model(pipe))))
        size = team.share(lambda: self._batch_size(pipe, jobs))
        which, of = request.part
        batches = plan_batches(jobs, size)[which - 1 :: of]
        self.fingerprints = {
            job.item.id: fingerprint(job, settings["fingerprint"]) for one in batches for job in one
        }
        made_of = describe_input(request, jobs, len(self.fingerprints), len(bad))
        claim = Claim(settings, made_of, size)
        there = team.together(
            lambda: (
                claim.make(self.folder, self.fingerprints, request.force) if self.keeper else set()
            )
        )
        missing = set(self.fingerprints).difference(*team.gather(there))
        todo = [one for one in batches if any(job.item.id in missing for job in one)]
        error = self._work(pipe, todo[team.rank :: team.size], missing)
        team.wait()
        return self._end(bad, len(self.fingerprints) - len(missing), error)

    def _batch_size(self, pipe: Any, jobs: Sequence[Job]) -> int:
        asked = self.request.batch_size
        if isinstance(asked, int):
            return asked
        before = None if self.folder.is_new else self.folder.manifest["batch_size"]
        return before or find_batch_size(pipe, jobs, self.team.size)

    def _work(self, pipe: Any, batches: list[list[Job]], missing: set[str]) -> Exception | None:
        """Draw batches until all are done or the run is to stop; returns what ended it."""
        self.pipe, self.layout = pipe, self.folder.layout
        total = len(self.fingerprints)
        try:
            with ExitStack() as stack:
                stack.enter_context(_signals(self.folder))
                if self.team.first:
                    progress = Progress(self.folder.hidden, total, total - len(missing))
                    stack.enter_context(progress)
                self.writer = stack.enter_context(_writer(max(map(len, batches), default=1)))
                for batch in batches:
                    if self.folder.stopped:
                        break
                    self._draw_batch(batch, missing)
            self.layout.flush()
        except Exception as error:
            _try(self.folder.stop, f"a process ended with: {error}")
            return error
        return None

    def _draw_batch(self, batch: list[Job], missing: set[str]) -> None:
        """Draw a batch whole, also where some of it is there: the rest is then bit for bit what it
        would have been."""
        size = self.limits.get(batch[0].shape, len(batch))
        for start in range(0, len(batch), size):
            part = batch[start : start + size]
            wanted = {job.item.id for job in part} & missing
            if wanted:
                self._attempt(part, wanted)

    def _attempt(self, part: list[Job], wanted: set[str]) -> None:
        try:
            run = self._sample(part)
        except Exception as error:
            # Text only: the traceback itself would keep what fills the memory.
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            text, too_large = traceback.format_exc(), is_out_of_memory(error)
        else:
            self._store(part, wanted, run)
            return
        if too_large:
            release_memory()
        if len(part) == 1:
            self._fail(part[0].item, reason, text)
            return
        size = 1
        if too_large:
            size = self.limits[part[0].shape] = (len(part) + 1) // 2
            print(
                f"sdattn: out of memory with {len(part)} items of {part[0].options}; from here on "
                f"such items run {size} together",
                file=sys.stderr,
            )
        for start in range(0, len(part), size):
            fewer = part[start : start + size]
            if still := {job.item.id for job in fewer} & wanted:
                self._attempt(fewer, still)

    def _sample(self, part: list[Job]) -> Run:
        options = dict(part[0].options)
        if part[0].item.negative_prompt is not None:
            options["negative_prompt"] = [job.item.negative_prompt for job in part]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one item each; its row tells what was cut off
            prompts = read_prompts(self.pipe, [job.item.prompt for job in part], **options)
            return sample(self.pipe, prompts, [job.item.seed for job in part], options)

    def _store(self, part: list[Job], wanted: set[str], run: Run) -> None:
        maps = cross_maps(run.store)
        for i, job in enumerate(part):
            if job.item.id in wanted:
                layers = {name: one[i] for name, one in maps.items()}
                arguments = run.images[i], run.heatmaps[i], layers, run.info[i]
                self.writer.submit(self._write, job.item, *arguments)

    def _write(self, item: Item, image: Any, heatmaps: Heatmaps, layers: Any, info: Any) -> None:
        """On a thread of the writer."""
        try:
            if item.words is not None:
                columns = restricted(heatmaps.prompt, item.words)
                heatmaps = Heatmaps(heatmaps.prompt, heatmaps.maps[..., columns], columns)
                layers = {name: one[..., columns] for name, one in layers.items()}
            own = {"id": item.id, "line": item.line, "fingerprint": self.fingerprints[item.id]}
            files = pack_run(image, heatmaps, layers, {**own, **info}, parts=self.request.save)
        except Exception as error:
            self._fail(item, f"{type(error).__name__}: {error}", traceback.format_exc())
            return
        self.layout.add(item.id, item.line, files, self._whole)

    def _whole(self, item: str, place: str, files: Any) -> None:
        self.folder.note_whole(self.writer_name, item, place, files)

    def _fail(self, item: Item, reason: str, text: str) -> None:
        row = {**asdict(item), "reason": reason, "traceback": text}
        self.folder.note("failed", self.writer_name, row)
        most = self.request.max_errors
        if most is not None and self.tally.count("failed") >= most:
            self.folder.stop(f"{most} item(s) have failed, which is --max-errors")

    # After the last picture

    def _end(self, bad: list[BadLine], before: int, error: Exception | None) -> Outcome:
        stopped, whole, failed = self.folder.stopped, set[str](), 0
        try:
            if self.keeper:
                self.folder.gather()
                whole = set(self.folder.rows()) & set(self.fingerprints)
                failed = self.folder.gather_errors(map(asdict, bad), whole)
        except OSError as another:
            error = error or another
        found = self.team.gather((whole, failed))
        if error is not None:
            raise _with_advice(error, self.folder) from error
        whole = whole.union(*(one for one, _ in found))
        failed = sum(one for _, one in found)
        return Outcome(len(self.fingerprints), before, len(whole), failed, len(bad), stopped)


def _same(digests: list[str]) -> str:
    if len(set(digests)) > 1:
        raise ValueError(
            f"The processes have loaded different models (checksums {', '.join(digests)}). Give "
            "every machine the same files."
        )
    return digests[0]


def _writer(batch: int) -> Writer:
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, min(8, (os.cpu_count() or 1) // here - 1))
    return Writer(threads, ahead=2 * batch + threads)


@contextmanager
def _signals(folder: BatchFolder) -> Iterator[None]:
    """Within the block the first SIGINT or SIGTERM has the run stop after the batch in hand; the
    next does what it always does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {name: signal.getsignal(getattr(signal, name)) for name in STOPS}

    def stop(number: int, _: Any) -> None:
        name = signal.Signals(number).name
        signal.signal(number, before[name])
        print(f"sdattn: {name}: finishing the items in hand", file=sys.stderr, flush=True)
        _try(folder.stop, name)

    for name in STOPS:
        signal.signal(getattr(signal, name), stop)
    try:
        yield
    finally:
        for name, one in before.items():
            signal.signal(getattr(signal, name), one)


def _try(call: Any, *arguments: Any) -> None:
    """Where the disk may be full already."""
    try:
        call(*arguments)
    except OSError as error:
        print(f"sdattn: {error}", file=sys.stderr)


def _with_advice(error: Exception, folder: BatchFolder) -> Exception:
    if not isinstance(error, OSError):
        return error
    return OSError(
        f"{error}. What was finished stays in {folder.root}; when this is mended, the same command "
        "does the rest."
    )
