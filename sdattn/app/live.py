"""Actions of the live page: draw in a thread of its own, keep the run, show it again."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from html import escape
from queue import SimpleQueue
from typing import Any

from PIL import Image

from ..errors import OptionError, RunError, is_bug
from ..maps.notebook import framed
from ..models.facts import default_size
from ..models.layers import find_denoiser
from ..models.pipeline_call import turn
from ..runs.generation import generate
from ..runs.report.images import as_uri
from ..runs.run import Run
from .preview import preview_hook
from .recent_runs import RecentRuns
from .server import import_gradio

gradio: Any = import_gradio()

_MOST_RUNS = 10  # offered to a browser
_NEEDED = {"prompt": "Write a sentence.", "seed": "Enter a whole number, for example 0."}
_BUG = (
    "This is a bug in sdattn or in a library that it uses. Please report it, with the output of "
    "the server."
)


@dataclass(frozen=True)
class Live:
    """Actions of the page, from and to values of its components; ``fields`` has the form's by
    name."""

    pipe: Any
    kept: RecentRuns
    app: Any
    fields: Mapping[str, Any]

    def draw(
        self,
        given: Mapping[Any, Any],
        progress: Any = gradio.Progress(),  # noqa: B008  gradio looks for it here
    ) -> Iterator[list[Any]]:
        """Yield a drawn run or None, the result to show, and an error: its field and its text."""
        asked = {name: given[field] for name, field in self.fields.items()}
        previews: SimpleQueue[Image.Image | None] = SimpleQueue()
        with_progress = _progress_of(self.pipe, progress, self.app, previews.put)
        pool = ThreadPoolExecutor(1)
        job = pool.submit(copy_context().run, self._drawn, asked, with_progress)
        job.add_done_callback(lambda _: previews.put(None))
        pool.shutdown(wait=False)  # a run that nobody waits for ends at its next step
        while image := previews.get():
            shown = f'<img class="preview" alt="Preview" src="{as_uri(image)}">'
            yield [None, shown, None]
        run, error = job.result()
        yield [run, gradio.skip(), error]

    def _drawn(
        self, asked: dict[str, Any], watched: Any
    ) -> tuple[Run | None, dict[str, str] | None]:
        for name, advice in _NEEDED.items():
            if asked[name] is None or not str(asked[name]).strip():
                return None, {"field": name, "text": f"The {name} is empty. {advice}"}
        try:
            with turn(self.pipe), watched:
                return self._generate(asked), None
        except Exception as error:
            return None, self._told(error)

    def _generate(self, asked: dict[str, Any]) -> Run:
        watch = {"steps": "all"} if asked.pop("each_step") else {}
        watch |= {"branch": "both"} if asked.pop("negative_maps") else {}
        asked |= {name: (asked[name] or "").strip() or None for name in ("negative_prompt", "ask")}
        asked["refine"] = "self" if asked["refine"] else None
        if (asked["height"], asked["width"]) == default_size(self.pipe):
            # A size that is the model's own is not passed: run.json records what was asked.
            asked |= {"height": None, "width": None}
        given = {name: value for name, value in asked.items() if value is not None}
        return generate(self.pipe, capture_options=watch, **given)

    def _told(self, error: Exception) -> dict[str, str]:
        """Return the field that an error is about, or "", and what the page says; the server prints
        the traceback of a bug."""
        if is_bug(error):
            traceback.print_exception(error)
            return {"field": "", "text": _BUG}
        if isinstance(error, OptionError) and error.option in self.fields:
            text = f"{self.fields[error.option].label} {error.value}: {error.advice}"
            return {"field": error.option, "text": text}
        return {"field": "", "text": str(error)}

    def keep(self, run: Run | None, seen: list[str]) -> Any:
        """Keep a drawn run as files and show it, so that the page need not hold it any longer."""
        if run is None:
            return gradio.skip()
        key = self.kept.keep(run)
        return [None, *self._viewed(key), *self.recall([key, *seen])]

    def show(self, seen: list[str], event: gradio.SelectData) -> list[Any]:
        return self._viewed(seen[event.index])

    def recall(self, seen: list[str]) -> list[Any]:
        known = list(self.kept.known(seen))[:_MOST_RUNS]
        images = [(kept.small, kept.title) for _, kept in known]
        return [[key for key, _ in known], gradio.Gallery(images, visible=bool(known))]

    def _viewed(self, key: str) -> list[Any]:
        try:
            [(_, kept)] = self.kept.known([key])
            page = kept.page.read_bytes()
        except (ValueError, FileNotFoundError):
            return ["That run was removed: newer ones took its place.", *[gradio.skip()] * 3]
        files = [
            gradio.DownloadButton(value=str(path), interactive=True)
            for path in (kept.page, kept.archive)
        ]
        return [escape(kept.title), *files, framed(page)]


@contextmanager
def _progress_of(
    pipe: Any, progress: Any, app: Any, show: Callable[[Image.Image], None]
) -> Iterator[None]:
    """Move ``progress``'s bar at each call of the model and show previews; stop a run that nobody
    waits for any more."""
    from gradio.context import LocalContext

    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        # Gone if this thread's job was stopped or its page closed, so that the queue dropped it.
        event = LocalContext.event_id.get(None)
        jobs = [job for group in app._queue.active_jobs for job in group or ()]
        if event is not None and not any(job._id == event and job.alive for job in jobs):
            raise RunError("The page that asked for this image was closed, or Stop was pressed.")
        calls += 1
        number = len(pipe.scheduler.timesteps)
        progress(min(calls / number, 1.0), desc=f"step {min(calls, number)} of {number}")

    model = find_denoiser(pipe).model
    hooks = [
        model.register_forward_pre_hook(count),
        model.register_forward_hook(preview_hook(pipe, show), with_kwargs=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
