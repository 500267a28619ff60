"""The live page of ``sdattn app``: draw, explain or edit, and see where each word went. Needs
gradio."""

import os
import signal
from functools import partial
from html import escape
from typing import Any

from ..maps.notebook import framed
from .example_prompts import first_run
from .forms import PRIVATE, Form, changes_of, forms_of, remedies_of, show_examples
from .live import Live
from .recent_runs import RecentRun, RecentRuns, own_folder
from .server import check_address, import_gradio, launch_settings

gradio: Any = import_gradio()

_STORED = "sdattn-runs"  # a browser's keys of kept runs


def serve(
    pipe: Any, host: str = "127.0.0.1", port: int | None = None, *, browser: bool = False
) -> None:
    """Serve :func:`build_app`, by default to this machine only, until it is interrupted, then
    delete its runs; raise ValueError if the port is taken (default: the first free one from 7860)
    or the host is not this machine's."""
    check_address(host, port)
    with own_folder() as folder:
        served = folder / "served"
        os.environ["GRADIO_TEMP_DIR"] = str(served)  # gradio serves the files in it
        kept = RecentRuns(served / "runs")
        app = build_app(pipe, kept, first_run(pipe, kept))
        settings = launch_settings(host, port)
        try:
            app.launch(**settings, inbrowser=browser, quiet=True, prevent_thread_lock=True)
        except OSError:
            check_address(host, port)  # it may have been taken meanwhile
            raise
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C, which cleans up
        print(f"Open {app.local_url}, and stop with Ctrl+C.", flush=True)
        app.block_thread()


def build_app(pipe: Any, kept: RecentRuns, example: RecentRun) -> Any:
    """Return a gradio app that runs a loaded pipeline, one image at a time: the forms on the left,
    the result on the right, or below on a phone, first the example."""
    with gradio.Blocks(title="sdattn", analytics_enabled=False, fill_width=True) as app:
        gradio.Markdown("# sdattn: where each word went")
        with gradio.Row(elem_id="home"):  # see page.css
            with gradio.Column(elem_id="forms"), gradio.Tabs():
                forms = [*forms_of(pipe, example)]
            with gradio.Column(elem_id="shown"):
                view, stop, remedy = _view(example)
                of_shown = (
                    view[-1],
                    lambda key: kept.settings(key) if key else example.settings,
                )
                forms += [*remedies_of(remedy, *of_shown), *changes_of(pipe, *of_shown)]
            with gradio.Column(elem_id="more"):
                show_examples(pipe, forms[0])
                gallery = gradio.Gallery(
                    label="Last runs",
                    height=124,
                    allow_preview=False,
                    buttons=[],
                    elem_id="last-runs",
                    visible=False,
                )
        live = Live(pipe, kept, app)
        seen = gradio.BrowserState([], storage_key=_STORED)
        drawn = gradio.State()  # a run, until it is kept
        told = gradio.JSON(visible=False)  # an error with its field, or warnings, see page.js
        jobs = []
        for form in forms:
            for event in form.starts:  # first: a page runs them in order
                event(_turned_on, None, stop, js="() => begin()", **PRIVATE)
            jobs += _jobs(live, form, told, drawn, [*view, seen, gallery], stop)
        stop.click(_stopped, None, [view[0], stop], cancels=jobs, **PRIVATE)
        gallery.select(live.show, seen, view, **PRIVATE)
        view[1].input(live.choose, view[1], view, **PRIVATE)
        app.load(live.recall, seen, [seen, gallery], **PRIVATE)
    app.queue(api_open=False)  # every request goes through the queue
    return app


def _jobs(live: Live, form: Form, told: Any, drawn: Any, shown: list[Any], stop: Any) -> list[Any]:
    """Return the jobs that Stop ends: to draw and to keep are two, so that the next image is drawn
    while files are written. Stop is off when a drawing ends."""
    status, _, page, *_, seen, _ = shown
    making = {
        "fn": live.job(form),
        "inputs": {*form.fields.values()},
        "outputs": [drawn, page, told],
        "preprocess": False,  # the library checks values, and reads photos
        "show_progress_on": status,
        "concurrency_limit": 1,  # the pipeline draws one image at a time
        "concurrency_id": "pipe",
    }
    keeping = {"inputs": [drawn, seen], "outputs": [drawn, *shown], "show_progress_on": status}
    jobs = []
    for number, start in enumerate(form.starts):
        public = {"api_name": form.name} if number == 0 else {"api_visibility": "private"}
        made = start(**making, **public)
        jobs += [made, made.success(live.keep, **keeping, api_visibility="private")]
        made.then(lambda: gradio.Button(interactive=False), None, stop, **PRIVATE)
        made.then(None, told, None, js="(told) => tellError(told)", **PRIVATE)
    return jobs


def _turned_on() -> Any:
    return gradio.Button(interactive=True)


def _stopped() -> list[Any]:
    return ["Stopped. No image is being drawn for this page.", gradio.Button(interactive=False)]


def _view(example: RecentRun) -> tuple[list[Any], Any, Any]:
    """Return the components that :func:`sdattn.app.live.view_of` fills, with the example, Stop, and
    the row of :func:`remedies_of`."""
    with gradio.Row():
        status = gradio.HTML(escape(example.title), min_height=40, elem_id="status")
        stop = gradio.Button("Stop", size="sm", scale=0, min_width=80, interactive=False)
        save = partial(gradio.DownloadButton, size="sm", scale=0, min_width=130)
        html = save("Save the page", value=str(example.page))
        archive = save("Save the run (zip)", value=str(example.archive))
    remedy = gradio.Row(elem_id="remedy")
    choice = gradio.Radio([], show_label=False, container=False, visible=False)
    page = gradio.HTML(framed(example.page.read_bytes()), elem_id="result")
    return [status, choice, page, html, archive, gradio.State("")], stop, remedy
