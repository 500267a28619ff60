import errno
import itertools
import time
from collections.abc import Container, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from uuid import uuid4

from ..errors import AccessError, InvalidValueError
from ..files.terminal import say
from ..loading.outline import outline
from .claims import claim, manifest_of
from .engines.local_engine import LocalEngine
from .engines.process_group import ProcessGroup, heard
from .engines.progress import Progress
from .engines.ray_engine import RayEngine
from .engines.worker import Loaded, check, join_lock
from .input.items import BadLine, Item, read_items
from .input.plan import Job, fingerprint, plan_batches
from .input.request import Outcome, Request
from .input.sources import read_source
from .storage.folder import BatchFolder
from .storage.whole import settle


def run_batch(request: Request) -> Outcome | None:
    """Draw every item of an input that the folder does not hold yet.

    Run it in one process, or in each of many that ``accelerate launch`` starts, or, for the engine
    ``"ray"``, in one that can reach Ray. The same call again does only what is missing. Only the
    first process gets the outcome, the others None.

    Raises:
        ValueError: an invalid request, an input without an item or (``strict``) with bad lines, or
            a folder that another input, model or setting made.
        OSError: the folder is in use or cannot be written; finished items stay.
    """
    request.check()
    on_ray = request.engine == "ray"  # its workers, not this process, have the devices
    team = ProcessGroup("cpu" if on_ray else request.device)
    try:
        if on_ray and team.size > 1:
            raise InvalidValueError(
                "`engine='ray'` starts the processes itself. Leave accelerate launch out."
            )
        outcome = _BatchRun(request, team).go()
        return outcome if team.first else None
    finally:
        team.close()


class _BatchRun:
    """One process's side of a run."""

    def __init__(self, request: Request, team: ProcessGroup):
        self.request, self.team = request, team
        self.folder = BatchFolder(request.out)
        self.job_name = team.broadcast(lambda: uuid4().hex[:12])
        self.here = set(range(team.size))  # living processes
        self.disks = 1  # number of disks with a folder of this run
        self.keeper = team.first  # keeps the folder: the first process, and one for each other disk
        self.fingerprints: dict[str, str] = {}  # of each item of the run, by id
        self.engine = (
            RayEngine(request, self.folder, self.job_name)
            if request.engine == "ray"
            else LocalEngine(request, team, self.folder, self.job_name)
        )

    def go(self) -> Outcome:
        items, jobs, bad = self.team.broadcast(self._read)
        try:
            self._open()
            loaded = self.engine.load()
            if jobs is None:  # a model without an outline
                jobs, more = self.engine.check(items)
                self.team.broadcast(lambda: self._report(jobs, more))
                bad = bad + more
            return self._draw_missing(loaded, jobs, bad)
        except OSError as error:
            if error.errno == errno.ENOSPC:  # before the first image, too
                raise _with_advice(error, self.folder) from error
            raise
        finally:
            self.engine.close()
            self.folder.close()

    # Before the first image

    def _read(self) -> tuple[list[Item], list[Job] | None, list[BadLine]]:
        asked = self.request
        found = read_source(str(asked.source), asked.input_format)
        items, bad = read_items(*found, seed=asked.seed, columns=asked.columns)
        model, loading = self.request.model, self.request.loading
        if self.request.engine == "local":  # Ray's workers have other devices and packages
            loading.check(model, self.team.device)
        pipe = outline(model, loading)
        if pipe is None:
            self._report(items, bad)
            return items, None, bad
        jobs, more = check(pipe, items, self.request)
        bad = sorted([*bad, *more], key=lambda line: line.line)
        self._report(jobs, bad)
        return [], jobs, bad

    def _report(self, good: Sequence[object], bad: list[BadLine]) -> None:
        reasons = {line.reason for line in bad}
        if len(bad) > 1 and not good and len(reasons) == 1:  # an option for all of them, mostly
            raise InvalidValueError(f"None of {len(bad)} lines can be drawn: {reasons.pop()}")
        for line in bad:
            say(f"line {line.line}: {line.reason}")
        if not good:
            raise InvalidValueError(f"{self.request.source} has no line that can be drawn.")
        if bad and self.request.strict:
            raise InvalidValueError(
                f"{len(bad)} line(s) of {self.request.source} cannot be drawn, the first is line "
                f"{bad[0].line}. Nothing was drawn, as `strict=True` asks."
            )

    def _open(self) -> None:
        """Lock the folder: the first process does it for all that see its disk."""
        team, folder, name = self.team, self.folder, self.job_name
        team.broadcast(lambda: folder.open(name))
        team.run_on_all(self._join_from_another_machine)
        if not (team.first or team.first_here):
            folder.lock.join(name)

    def _join_from_another_machine(self) -> None:
        if self.team.first or not self.team.first_here:
            return
        if not join_lock(self.folder.lock, self.job_name):
            self.keeper = True
            self.folder.open(self.job_name)

    # Drawing

    def _draw_missing(self, loaded: Loaded, jobs: list[Job], bad: list[BadLine]) -> Outcome:
        batches, missing = self._claim(loaded, jobs, bad)
        start, total = time.monotonic(), len(self.fingerprints)
        before = total - len(missing)
        with heard(self._stop):
            # If others end early, the remaining processes draw what these left undone.
            for again in itertools.count():
                error = self._work(batches, missing, f"{self.job_name}/{again}")
                missing = self._undone(error)
                if not missing:
                    break
                batches = _touching(batches, missing)
            seconds = time.monotonic() - start
            whole, failed = self._end(bad, error)
        return Outcome(total, before, whole, failed, len(bad), self.folder.stopped, seconds)

    def _claim(
        self, loaded: Loaded, jobs: list[Job], bad: list[BadLine]
    ) -> tuple[list[list[Job]], set[str]]:
        """Take the folder; return, for all processes, batches to draw and ids of missing items."""
        request, team = self.request, self.team
        # Batches depend on the input alone: the same run on other processes has the same batches,
        # and so the same bits.
        size = team.broadcast(self._known_size) or self.engine.batch_size(jobs)
        manifest = manifest_of(request, loaded, jobs, len(bad), size)
        own = manifest.input.share_of(jobs)  # for any size
        batches, settings = plan_batches(own, size), manifest.settings.fingerprint
        self.fingerprints = {job.item.id: fingerprint(job, settings) for job in own}

        # The folder becomes this run's, once on each disk. Every process learns which items are
        # whole on any of them.
        def make() -> set[str] | None:
            if not self.keeper:
                return None
            ids, own = (job.item.id for job in jobs), self.fingerprints
            whole = claim(self.folder, manifest, ids, own, force=request.force)
            # failures of a run that crashed are not counted for this one
            self.folder.journals.gather_errors(map(asdict, bad), whole, self.fingerprints)
            return whole

        kept = [whole for whole in team.all_gather(team.run_on_all(make)) if whole is not None]
        self.disks = len(kept)
        # Batches with anything missing are drawn; their other items run along, for the same bits.
        missing = set(self.fingerprints).difference(*kept)
        return _touching(batches, missing), missing

    def _known_size(self) -> int | None:
        asked = self.request.batch_size
        if isinstance(asked, int):
            return asked
        return None if self.folder.is_new else self.folder.manifest.batch_size

    def _work(self, batches: list[list[Job]], missing: set[str], deal: str) -> Exception | None:
        """Draw batches until all are dealt or the run is stopped; return the error, if any."""
        folder, total = self.folder, len(self.fingerprints)
        try:
            with ExitStack() as stack:
                if self.team.first and self.request.progress:
                    progress = Progress(folder.storage, total, total - len(missing))
                    stack.enter_context(progress)
                self.engine.draw(batches, {item: self.fingerprints[item] for item in missing}, deal)
        except Exception as error:
            self._stop(f"a process ended with: {error}")
            return error
        return None

    def _undone(self, error: Exception | None) -> set[str]:
        """Wait for the others; return the items left undone by processes that have ended."""
        team, here = self.team, self.team.gather_living(error is None)
        lost, self.here = self.here - here.keys(), set(here)
        if not lost and not self.engine.lost:
            return set()
        ending = not all(here.values()) or self.folder.stopped or self.disks > 1
        undone = team.gather_living(set() if ending or not team.first else self._find_undone())[0]
        if team.first and lost:
            who = f"process {', '.join(map(str, sorted(lost)))} of {team.size} has ended too soon"
            then = "the others draw" if undone else "the same command draws"
            say(f"{who}; {then} what is missing")
        return undone

    def _find_undone(self) -> set[str]:
        self.folder.storage.tidy()
        found = settle(self.folder, self.fingerprints).keys()
        return self.fingerprints.keys() - found - self.folder.journals.failures(new=True).keys()

    def _stop(self, reason: str) -> None:
        with suppress(OSError):  # a full disk: the others will notice too, and the error is raised
            self.folder.stop(reason)

    # After the last image

    def _end(self, bad: list[BadLine], error: Exception | None) -> tuple[int, int]:
        """Gather the processes' notes; return the numbers of whole and of failed items."""
        whole, failed = set[str](), 0
        try:
            if self.keeper:
                journals = self.folder.journals
                number = journals.gather()
                whole = journals.rows().keys() & self.fingerprints.keys()
                failed = journals.gather_errors(map(asdict, bad), whole, self.fingerprints)
                self.folder.seal(number)
        except OSError as another:
            error = error or another
        found = self.team.gather_living((whole, failed)).values()
        if error is not None:
            raise _with_advice(error, self.folder) from error
        return len(whole.union(*(ids for ids, _ in found))), sum(count for _, count in found)


def _touching(batches: list[list[Job]], items: Container[str]) -> list[list[Job]]:
    return [batch for batch in batches if any(job.item.id in items for job in batch)]


def _with_advice(error: Exception, folder: BatchFolder) -> Exception:
    if not isinstance(error, OSError):
        return error
    reason = str(error).rstrip(".")
    return AccessError(
        f"{reason}. Finished items stay in {folder.root}; once this is fixed, the same "
        "command does the rest."
    )
