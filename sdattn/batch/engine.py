"""`run_batch()`: read the input, share it out, draw what is missing, write it, report."""

import errno
import itertools
import sys
import time
from collections.abc import Container, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from ..files.terminal import visible
from ..maps.requirements import capture_settings
from ..models.loading import load_pipeline
from ..models.outline import outline
from .claims import Claim, describe_input, settings_of
from .drawing import Drawer, writer_for
from .folder import BatchFolder
from .gallery import write_gallery
from .items import BadLine, Item, read_items
from .plan import Job, check_items, digest_model, fingerprint, plan_batches
from .progress import Progress
from .request import Outcome, Request
from .sizing import find_batch_size
from .sources import read_source
from .team import Team, heard
from .whole import settle

_LOOKS = 8  # for the lock of another machine, before the disk counts as one of its own


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
        self.here = set(range(team.size))  # the processes that have not ended
        self.disks = 1  # that hold a folder of this run
        self.keeper = team.first  # of the folder: the first process, and of each disk of its own
        self.fingerprints: dict[str, str] = {}  # of each item of the run, by id

    def go(self) -> Outcome:
        items, jobs, bad = self.team.share(self._read)
        try:
            self._open()
            pipe = self.team.together(self._load)
            if jobs is None:  # a model that has no outline
                jobs, more = self.team.share(lambda: self._check(pipe, items, []))
                bad = bad + more
            return self._draw_missing(pipe, jobs, bad)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # before the first picture, too
                raise _with_advice(error, self.folder) from error
            raise
        finally:
            self.folder.close()

    # Before the first picture

    def _read(self) -> tuple[list[Item], list[Job] | None, list[BadLine]]:
        data, kind = read_source(str(self.request.source), self.request.input_format)
        items, bad = read_items(data, kind, seed=self.request.seed)
        pipe = outline(self.request.model)
        if pipe is None:
            self._report(items, bad)
            return items, None, bad
        return [], *self._check(pipe, items, bad)

    def _check(
        self, pipe: Any, items: list[Item], bad: list[BadLine]
    ) -> tuple[list[Job], list[BadLine]]:
        """The jobs, and the lines that are bad with those that were before."""
        capture_settings(pipe, self.request.preset, (), self.request.options)  # refuses, early
        jobs, more = check_items(pipe, items, self.request.options)
        bad = sorted([*bad, *more], key=lambda line: line.line)
        self._report(jobs, bad)
        return jobs, bad

    def _report(self, good: Sequence[Any], bad: list[BadLine]) -> None:
        """Print bad lines. They end the run if there are no others, or with ``strict``."""
        reasons = {line.reason for line in bad}
        if len(bad) > 1 and not good and len(reasons) == 1:  # an option for all of them, mostly
            raise ValueError(f"None of {len(bad)} lines can be drawn: {reasons.pop()}")
        for line in bad:
            print(f"sdattn: line {line.line}: {visible(line.reason)}", file=sys.stderr)
        if not good:
            raise ValueError(f"{self.request.source} has no line that can be drawn.")
        if bad and self.request.strict:
            raise ValueError(
                f"{len(bad)} line(s) of {self.request.source} cannot be drawn, the first is line "
                f"{bad[0].line}. Nothing was drawn, as --strict asks."
            )

    def _open(self) -> None:
        """Lock the folder: the first process for all that see its disk."""
        team, folder, name = self.team, self.folder, self.job_name
        team.share(lambda: folder.open(name, adopt=self.request.adopt))
        team.together(self._join_from_another_machine)
        if not (team.first or team.first_here):
            folder.lock.join(name)

    def _join_from_another_machine(self) -> None:
        if self.team.first or not self.team.first_here:
            return
        for _ in range(_LOOKS):
            if self.folder.lock.join(self.job_name):
                return
            time.sleep(0.5)  # a shared disk can show late what another machine has written
        self.keeper = True
        self.folder.open(self.job_name, adopt=self.request.adopt)

    def _load(self) -> Any:
        pipe = load_pipeline(self.request.model, device=self.team.device, dtype=self.request.dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    # Drawing

    def _draw_missing(self, pipe: Any, jobs: list[Job], bad: list[BadLine]) -> Outcome:
        batches, missing = self._claim(pipe, jobs, bad)
        start, total = time.monotonic(), len(self.fingerprints)
        before = total - len(missing)
        with heard(self._stop):
            for again in itertools.count():
                error = self._work(pipe, batches, missing, f"{self.job_name}/{again}")
                missing = self._undone(error)
                if not missing:
                    break
                batches = _touching(batches, missing)
            seconds = time.monotonic() - start
            whole, failed = self._end(bad, error)
        return Outcome(total, before, whole, failed, len(bad), self.folder.stopped, seconds)

    def _claim(
        self, pipe: Any, jobs: list[Job], bad: list[BadLine]
    ) -> tuple[list[list[Job]], set[str]]:
        """Take the folder for this run; returns the batches that are not whole, for all processes,
        and the ids of the items that are missing."""
        request, team = self.request, self.team
        digests = team.gather(team.together(lambda: digest_model(pipe)))
        settings = settings_of(request, pipe, team.share(lambda: _same(digests)))
        size = team.share(lambda: self._batch_size(pipe, jobs))
        which, of = request.part
        batches = plan_batches(jobs[which - 1 :: of], size)  # of the items, whatever the size
        self.fingerprints = {
            job.item.id: fingerprint(job, settings["fingerprint"])
            for batch in batches
            for job in batch
        }
        made_of = describe_input(request, jobs, len(self.fingerprints), len(bad))
        claim = Claim(self.folder, request, settings, made_of, size, self.fingerprints)

        def make() -> set[str] | None:
            if not self.keeper:
                return None
            whole = claim.make(job.item.id for job in jobs)
            # what failed in a run that crashed is not counted for this one
            self.folder.journals.gather_errors(map(asdict, bad), whole, self.fingerprints)
            return whole

        kept = [whole for whole in team.gather(team.together(make)) if whole is not None]
        self.disks = len(kept)
        missing = set(self.fingerprints).difference(*kept)
        return _touching(batches, missing), missing

    def _batch_size(self, pipe: Any, jobs: Sequence[Job]) -> int:
        asked = self.request.batch_size
        if isinstance(asked, int):
            return asked
        before = None if self.folder.is_new else self.folder.manifest["batch_size"]
        return before or find_batch_size(pipe, jobs, self.request.preset, self.team.size)

    def _work(
        self, pipe: Any, batches: list[list[Job]], missing: set[str], deal: str
    ) -> Exception | None:
        """Draw batches until all are dealt or the run is to stop; returns what ended it."""
        request, folder, total = self.request, self.folder, len(self.fingerprints)
        name = f"{self.job_name}-{self.team.rank}"
        try:
            with ExitStack() as stack:
                if self.team.first and request.progress:
                    progress = Progress(folder.hidden, total, total - len(missing))
                    stack.enter_context(progress)
                writer = stack.enter_context(writer_for(max(map(len, batches), default=1)))
                drawer = Drawer(pipe, folder, writer, name, self.fingerprints, request)
                for batch in self.team.deal(batches, deal):
                    if folder.stopped:
                        break
                    drawer.draw(batch, missing)
            folder.layout.flush()  # what is held back
        except Exception as error:
            self._stop(f"a process ended with: {error}")
            return error
        finally:
            folder.journals.close()  # whoever gathers them removes them
        return None

    def _undone(self, error: Exception | None) -> set[str]:
        """Wait for the others; returns the items that those left undone that have ended since."""
        team, here = self.team, self.team.meet(error is None)
        lost, self.here = self.here - here.keys(), set(here)
        if not lost:
            return set()
        ending = not all(here.values()) or self.folder.stopped or self.disks > 1
        undone = team.meet(set() if ending or not team.first else self._find_undone())[0]
        if team.first:
            who = f"process {', '.join(map(str, sorted(lost)))} of {team.size} has ended too soon"
            then = "the others draw" if undone else "the same command draws"
            print(f"sdattn: {who}; {then} what is missing", file=sys.stderr, flush=True)
        return undone

    def _find_undone(self) -> set[str]:
        """The items that are neither whole nor have failed, while no process draws."""
        self.folder.tidy()
        found = settle(self.folder, self.fingerprints).keys()
        return self.fingerprints.keys() - found - self.folder.journals.failures(new=True).keys()

    def _stop(self, reason: str) -> None:
        with suppress(OSError):  # a full disk: the others will notice too, and the error is raised
            self.folder.stop(reason)

    # After the last picture

    def _end(self, bad: list[BadLine], error: Exception | None) -> tuple[int, int]:
        """Gather what the processes have noted; returns how many items are whole and failed."""
        whole, failed = set[str](), 0
        try:
            if self.keeper:
                journals = self.folder.journals
                number = journals.gather()
                whole = journals.rows().keys() & self.fingerprints.keys()
                failed = journals.gather_errors(map(asdict, bad), whole, self.fingerprints)
                write_gallery(self.folder)
                self.folder.seal(number)
        except OSError as another:
            error = error or another
        found = self.team.meet((whole, failed)).values()
        if error is not None:
            raise _with_advice(error, self.folder) from error
        return len(whole.union(*(ids for ids, _ in found))), sum(count for _, count in found)


def _touching(batches: list[list[Job]], items: Container[str]) -> list[list[Job]]:
    """The batches that hold some of the items."""
    return [batch for batch in batches if any(job.item.id in items for job in batch)]


def _same(digests: list[str]) -> str:
    if len(set(digests)) > 1:
        raise ValueError(
            f"The processes have loaded different models (checksums {', '.join(digests)}). Give "
            "every machine the same files."
        )
    return digests[0]


def _with_advice(error: Exception, folder: BatchFolder) -> Exception:
    if not isinstance(error, OSError):
        return error
    return OSError(
        f"{error}. What was finished stays in {folder.root}; when this is mended, the same command "
        "does the rest."
    )
