"""Actions of the live page: run a form in a thread of its own, keep the run, show it again."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from html import escape
from queue import SimpleQueue
from typing import Any

from PIL import Image

from ..errors import OptionError, RunError, SdattnWarning, is_bug
from ..maps.notebook import framed
from ..models.denoiser import find_denoiser
from ..models.pipeline_call import phase_of, turn
from ..runs.report.pages import as_uri
from ..runs.run import Run
from .forms import Form
from .preview import preview_hook
from .recent_runs import RecentRun, RecentRuns
from .server import import_gradio

gradio: Any = import_gradio()

_MOST_RUNS = 10  # offered to a browser
_NEEDED = {
    **dict.fromkeys(("prompt", "source", "target"), "Write a sentence."),
    "image": "Drop or choose a photo.",
    "seed": "Enter a whole number, for example 0.",
    "word": "Tap a word of the result.",
    "other": "Write what takes the place of the word.",
    "box": "Drag one on the image.",
}
_BUG = (
    "This is a bug in sdattn or in a library that it uses. Please report it, with the output of "
    "the server."
)


@dataclass(frozen=True)
class Live:
    """Actions of the page, from and to values of its components."""

    pipe: Any
    kept: RecentRuns
    app: Any

    def job(self, form: Form) -> Callable[..., Iterator[list[Any]]]:
        """Return the job of a form. It yields a run or None, the result to show, and an error or
        warnings as page.js says them."""

        def run(
            given: Mapping[Any, Any],
            progress: Any = gradio.Progress(),  # noqa: B008  gradio looks for it here
        ) -> Iterator[list[Any]]:
            asked = {name: given[field] for name, field in form.fields.items()}
            progress(0, desc="Starting")
            previews: SimpleQueue[Image.Image | None] = SimpleQueue()
            with_progress = _progress_of(self.pipe, progress, self.app, previews.put)
            pool = ThreadPoolExecutor(1)
            job = pool.submit(copy_context().run, self._made, form, asked, with_progress)
            job.add_done_callback(lambda _: previews.put(None))
            pool.shutdown(wait=False)  # a run that nobody waits for ends at its next step
            while image := previews.get():
                shown = f'<img class="preview" alt="Preview" src="{as_uri(image)}">'
                yield [None, shown, None]
            made, error = job.result()
            yield [made, gradio.skip(), error]

        return run

    def _made(
        self, form: Form, asked: dict[str, Any], watched: Any
    ) -> tuple[Run | None, dict[str, Any] | None]:
        for name, advice in _NEEDED.items():
            if name in asked and not str("" if asked[name] is None else asked[name]).strip():
                text = f"The {form.fields[name].label.lower()} is empty. {advice}"
                return None, {"form": form.name, "field": name, "text": text}
        try:
            with turn(self.pipe), watched, _warnings() as texts:
                run = form.make(self.pipe, asked)
        except Exception as error:
            return None, {"form": form.name, **_told(form, error)}
        if not texts:
            return run, None
        return run, {"form": form.name, "field": "", "text": " ".join(texts), "is_warning": True}

    def keep(
        self,
        run: Run | None,
        seen: list[str],
        progress: Any = gradio.Progress(),  # noqa: B008
    ) -> Any:
        """Keep a made run as files and show it, so that the page need not hold it any longer."""
        if run is None:
            return gradio.skip()
        progress(1.0, desc="Writing the page")
        key = self.kept.keep(run)
        return [None, *self._viewed(key), *self.recall([key, *seen])]

    def show(self, seen: list[str], event: gradio.SelectData) -> list[Any]:
        return self._viewed(seen[event.index])

    def choose(self, choice: str) -> list[Any]:
        """Show another page of a run; ``choice`` is its key and its number."""
        key, _, number = choice.partition("/")
        return self._viewed(key, int(number))

    def recall(self, seen: list[str]) -> list[Any]:
        known = list(self.kept.known(seen))[:_MOST_RUNS]
        images = [(kept.small, kept.title) for _, kept in known]
        return [[key for key, _ in known], gradio.Gallery(images, visible=bool(known))]

    def _viewed(self, key: str, number: int = 0) -> list[Any]:
        try:
            [(_, kept)] = self.kept.known([key])
            return view_of(key, kept, number)
        except (ValueError, IndexError, FileNotFoundError):
            return ["That run was removed: newer ones took its place.", *[gradio.skip()] * 5]


def view_of(key: str, run: RecentRun, number: int = 0) -> list[Any]:
    """Return what shows a kept run: its title, the choice of a page, that page, its downloads, and
    its key."""
    choices = [(label, f"{key}/{i}") for i, label in enumerate(run.pages)]
    page = list(run.pages.values())[number]
    return [
        escape(run.title),
        gradio.Radio(choices, value=choices[number][1], visible=len(choices) > 1),
        framed(page.read_bytes()),
        *(gradio.DownloadButton(value=str(path), interactive=True) for path in (page, run.archive)),
        key,
    ]


def _told(form: Form, error: Exception) -> dict[str, str]:
    """Return the field that an error is about, or "", and what the page says; the server prints
    the traceback of a bug."""
    if is_bug(error):
        traceback.print_exception(error)
        return {"field": "", "text": _BUG}
    if isinstance(error, OptionError) and error.option in form.fields:
        text = f"{form.fields[error.option].label} {error.value}: {error.advice}"
        return {"field": error.option, "text": text}
    return {"field": "", "text": str(error)}


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield the texts of sdattn's warnings, which are printed as well, also when they repeat. One
    run at a time: warnings are the process's."""
    texts: list[str] = []
    with warnings.catch_warnings():
        show = warnings.showwarning

        def note(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, SdattnWarning) and str(message) not in texts:
                texts.append(str(message))
            show(message, category, *place, **more)

        warnings.showwarning = note
        warnings.simplefilter("always", SdattnWarning)
        yield texts


@contextmanager
def _progress_of(
    pipe: Any, progress: Any, app: Any, show: Callable[[Image.Image], None]
) -> Iterator[None]:
    """Move ``progress``'s bar at each call of the model and show previews; stop a run that nobody
    waits for any more."""
    from gradio.context import LocalContext

    calls, begun = 0, None

    def count(*_: Any) -> None:
        nonlocal calls, begun
        # Gone if this thread's job was stopped or its page closed, so that the queue dropped it.
        event = LocalContext.event_id.get(None)
        jobs = list[Any]()
        for group in app._queue.active_jobs:
            jobs += group or ()
        if event is not None and not any(job._id == event and job.alive for job in jobs):
            raise RunError("The page that asked for this image was closed, or Stop was pressed.")
        number = len(pipe.scheduler.timesteps)
        phase = phase_of(pipe).capitalize()
        if begun is not pipe.scheduler.timesteps:  # also after one that ended early
            calls, begun = 0, pipe.scheduler.timesteps
        step = calls % number + 1
        calls += 1
        progress(step / number, desc=f"{phase}: step {step} of {number}")

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
