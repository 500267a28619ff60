import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

from ..errors import is_bug, reworded
from ..maps.notebook import framed
from ..maps.presets import PRESETS
from ..models.call_options import call_options
from ..models.demos import demo_of, demo_settings
from ..models.layers import find_denoiser
from ..models.pipeline_call import turn
from ..models.sizes import default_size, size_unit
from ..models.videos import default_frames, makes_videos
from ..runs.generation import generate
from ..runs.option_names import PIPELINE
from ..runs.run import Run
from .recent_runs import RecentRuns, own_folder
from .server import import_gradio, launch_settings

gradio: Any = import_gradio()

_STOPPED = "Stopped. No image is being drawn for this page."
_MOST_RUNS = 10  # offered to a browser
_EXAMPLES = {
    "demo": ["a cat left of a pizza", "a red umbrella above a dog on grass"],
    "demo-mmdit": [
        "a red circle left of a blue square",
        "on the left a green star, on the right a ring",
    ],
    "demo-video": ["a cat above a pizza", "a red car above a tree"],
}
_ANY_EXAMPLES = ["a cat on a sofa", "an astronaut riding a horse on the moon"]
_LABELS = {**PIPELINE, "seed": "seed"}
_BUG = (
    "This is a bug in sdattn or in a library that it uses. Please report it, with the output of "
    "the server."
)


def serve(
    pipe: Any, host: str = "127.0.0.1", port: int | None = None, *, browser: bool = False
) -> None:
    """Serve :func:`build_app`, by default to this machine only, until it is interrupted, then
    delete its runs; raise OSError if the port is taken (default: the first free one from 7860)."""
    with own_folder() as folder:
        served = folder / "served"
        os.environ["GRADIO_TEMP_DIR"] = str(served)  # gradio serves the files in it
        app = build_app(pipe, RecentRuns(served / "runs"))
        settings = launch_settings(host, port)
        app.launch(**settings, inbrowser=browser, quiet=True, prevent_thread_lock=True)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl+C, which cleans up
        print(f"Open {app.local_url}, and stop with Ctrl+C.", flush=True)
        app.block_thread()


def build_app(pipe: Any, kept: RecentRuns) -> Any:
    """Return a gradio app that draws with a loaded pipeline, one image at a time."""
    with gradio.Blocks(title="sdattn", analytics_enabled=False, fill_width=True) as app:
        live = _Live(pipe, kept, app)
        gradio.Markdown("# sdattn: where each word went")
        with gradio.Row(equal_height=True):
            prompt = gradio.Textbox(
                label="Prompt", lines=1, max_lines=4, scale=6, min_width=300, autofocus=True
            )
            button = gradio.Button("Draw", variant="primary", min_width=100)
            stop = gradio.Button("Stop", min_width=100)
        demo = demo_of(pipe)
        examples = gradio.Examples(_EXAMPLES[demo.name] if demo else _ANY_EXAMPLES, prompt)
        settings = _settings(pipe)
        seen = gradio.BrowserState([], storage_key="sdattn-runs")  # keys of kept runs
        drawn = gradio.State()  # a run, until it is kept
        *view, gallery = _view()
        drawing = {
            "fn": live.draw,
            "inputs": [prompt, *settings],
            "outputs": [drawn],
            "show_progress_on": view[0],
            "concurrency_limit": 1,  # the pipeline draws one image at a time
            "concurrency_id": "pipe",
        }
        # To draw and to keep are two jobs: the next image is drawn while files are written.
        typed = gradio.on([button.click, prompt.submit], **drawing)
        example = examples.load_input_event.then(**drawing, api_visibility="private")
        keeping = {
            "fn": live.keep,
            "inputs": [drawn, seen],
            "outputs": [drawn, *view, seen, gallery],
            "show_progress_on": view[0],
        }
        kept_runs = [typed.success(**keeping), example.success(**keeping, api_visibility="private")]
        private = {"api_visibility": "private", "show_progress": "hidden"}
        jobs = [typed, example, *kept_runs]
        stop.click(lambda: _STOPPED, None, view[0], cancels=jobs, queue=False, **private)
        gallery.select(live.show, seen, view, **private)
        app.load(live.recall, seen, [seen, gallery], **private)
    app.queue(api_open=False)  # every request goes through the queue
    return app


def _view() -> list[Any]:
    """Return the components: the line above a run's page, the page, and the last runs."""
    status = gradio.HTML("The image and its heatmaps appear here.", min_height=80)
    gallery = gradio.Gallery(
        label="Last runs",
        height=150,
        allow_preview=False,
        buttons=[],
        elem_id="last-runs",  # see server.py
        visible=False,
    )
    with gradio.Row():
        page = gradio.DownloadButton("Save the page", size="sm", interactive=False)
        archive = gradio.DownloadButton("Save the run (zip)", size="sm", interactive=False)
    return [status, page, archive, gradio.HTML(), gallery]


def _settings(pipe: Any) -> list[Any]:
    """Return the components below the prompt, in the order of ``draw``'s arguments. Settings that
    the pipeline lacks are left empty; the pipeline validates ranges itself."""
    defaults, (height, width), unit = _defaults(pipe), default_size(pipe), size_unit(pipe)
    guidance, is_sized = defaults.get("guidance_scale"), {"width", "height"} <= {*defaults}
    guided = isinstance(guidance, (int, float))
    # FLUX and Qwen-Image use it only with a further option
    has_negative = "negative_prompt" in defaults and "true_cfg_scale" not in defaults
    steps, size = defaults.get("num_inference_steps") or 30, {"step": unit, "visible": is_sized}
    frames = default_frames(pipe) if makes_videos(pipe) else None

    def number(label: str, value: float | None, **options: Any) -> Any:
        return gradio.Number(value, label=label, min_width=100, **options)

    with gradio.Accordion("Settings", open=False):
        negative = gradio.Textbox(label="Negative prompt", visible=has_negative)
        with gradio.Row():
            numbers = [
                number("Seed", 0, precision=0),
                number("Steps", steps, precision=0),
                number("Guidance", guidance if guided else None, step=0.5, visible=guided),
                number("Width", width if is_sized else None, precision=0, **size),
                number("Height", height if is_sized else None, precision=0, **size),
                number("Frames", frames, precision=0, visible=frames is not None),
            ]
        with gradio.Row():
            preset = gradio.Dropdown(list(PRESETS), value="default", label="Preset")
            each_step = gradio.Checkbox(False, label="Keep every step")
    return [negative, *numbers, preset, each_step]


def _defaults(pipe: Any) -> dict[str, Any]:
    return {**call_options(pipe), **demo_settings(pipe)}


@dataclass(frozen=True)
class _Live:
    """Actions of the page, from and to values of its components: the line above the page, the
    page's file, the run's, the page, the keys of the last runs, their images."""

    pipe: Any
    kept: RecentRuns
    app: Any

    def draw(
        self,
        prompt: str,
        negative: str | None,
        seed: int | None,
        steps: int | None,
        guidance: float | None,
        width: int | None,
        height: int | None,
        frames: int | None,
        preset: str,
        each_step: bool,
        progress: Any = gradio.Progress(),  # noqa: B008  gradio looks for it here
    ) -> Run:
        if seed is None:
            raise _refusal("The seed is empty. Enter a whole number, for example 0.")
        # A size that is the model's own is not passed: run.json records what was asked.
        own_size = (height, width) == default_size(self.pipe)
        size = {} if own_size else {"width": width, "height": height}
        given: dict[str, Any] = {
            "num_inference_steps": steps,
            "guidance_scale": guidance,
            "negative_prompt": (negative or "").strip() or None,
            "num_frames": frames,
            **size,
        }
        options = {name: value for name, value in given.items() if value is not None}
        watch = {"steps": "all"} if each_step else {}
        with _refused(), turn(self.pipe), _progress_of(self.pipe, progress, self.app):
            return generate(
                self.pipe, prompt, seed=seed, preset=preset, capture_options=watch, **options
            )

    def keep(self, run: Run | None, seen: list[str]) -> list[Any]:
        """Keep a drawn run as files and show it, so that the page need not hold it any longer."""
        if run is None:
            raise _refusal("Nothing was drawn.")
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
        except (ValueError, FileNotFoundError) as error:
            raise _refusal("That run was removed: newer ones took its place.") from error
        files = [
            gradio.DownloadButton(value=str(path), interactive=True)
            for path in (kept.page, kept.archive)
        ]
        return [escape(kept.title), *files, framed(page)]


def _refusal(message: str) -> Exception:
    return gradio.Error(escape(message), print_exception=False)


@contextmanager
def _refused() -> Iterator[None]:
    """Show errors on the page in its own words; the server prints the traceback of a bug."""
    try:
        yield
    except gradio.Error:
        raise
    except Exception as error:
        if is_bug(error):
            raise gradio.Error(_BUG, print_exception=True) from error
        raise _refusal(reworded(str(error), _labelled)) from error


def _labelled(name: str, *value: Any) -> str | None:
    return " ".join([_LABELS[name], *map(str, value)]) if name in _LABELS else None


@contextmanager
def _progress_of(pipe: Any, progress: Any, app: Any) -> Iterator[None]:
    """Move ``progress``'s bar at each call of the model; stop a run that nobody waits for any
    more."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        _check_awaited(app)
        calls += 1
        number = len(pipe.scheduler.timesteps)
        progress(min(calls / number, 1.0), desc=f"step {min(calls, number)} of {number}")

    hook = find_denoiser(pipe).model.register_forward_pre_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _check_awaited(app: Any) -> None:
    """Raise if this thread's job was stopped or its page closed, so that the queue dropped it."""
    from gradio.context import LocalContext

    event = LocalContext.event_id.get(None)
    jobs = [job for group in app._queue.active_jobs for job in group or ()]
    if event is not None and not any(job._id == event and job.alive for job in jobs):
        raise _refusal("The page that asked for this image was closed, or its Stop was pressed.")
