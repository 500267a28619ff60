"""The live page of ``sdattn app``: type a prompt, see where its words went. Needs gradio."""

import os
import signal
from typing import Any

from ..maps.presets import PRESETS
from ..models.call_options import call_options
from ..models.demos import demo_of, demo_settings
from ..models.facts import default_frames, default_size, makes_videos, size_unit
from .live import Live
from .recent_runs import RecentRuns, own_folder
from .server import import_gradio, launch_settings

gradio: Any = import_gradio()

_EXAMPLES = {
    "demo": ["a cat left of a pizza", "a red umbrella above a dog on grass"],
    "demo-mmdit": [
        "a red circle left of a blue square",
        "on the left a green star, on the right a ring",
    ],
    "demo-video": ["a cat above a pizza", "a red car above a tree"],
}
_ANY_EXAMPLES = ["a cat on a sofa", "an astronaut riding a horse on the moon"]
_PRIVATE = {"api_visibility": "private", "show_progress": "hidden", "queue": False}
_UNTOLD = "() => tellError(null)"
_STORED = "sdattn-runs"  # a browser's keys of kept runs


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
    """Return a gradio app that draws with a loaded pipeline, one image at a time: the prompt on the
    left, the result on the right, or below on a phone."""
    with gradio.Blocks(title="sdattn", analytics_enabled=False, fill_width=True) as app:
        gradio.Markdown("# sdattn: where each word went")
        with gradio.Row():
            with gradio.Column(scale=1, min_width=300):
                fields, (draw, stop), examples = _form(pipe)
            with gradio.Column(scale=3, min_width=320):
                *view, gallery = _view()
        live, seen = Live(pipe, kept, app, fields), gradio.BrowserState([], storage_key=_STORED)
        starts = [draw.click, fields["prompt"].submit]
        for event in (*starts, examples.load_input_event.then):  # first: a page runs them in order
            event(lambda: gradio.Button(interactive=True), None, stop, js=_UNTOLD, **_PRIVATE)
        jobs = _jobs(live, starts, examples.load_input_event.then, stop, seen, view, gallery)
        stop.click(_stopped, None, [view[0], stop], cancels=jobs, **_PRIVATE)
        gallery.select(live.show, seen, view, **_PRIVATE)
        app.load(live.recall, seen, [seen, gallery], **_PRIVATE)
    app.queue(api_open=False)  # every request goes through the queue
    return app


def _jobs(
    live: Live, starts: list[Any], example: Any, stop: Any, seen: Any, view: list[Any], gallery: Any
) -> list[Any]:
    """Return the jobs that Stop ends: to draw and to keep are two, so that the next image is drawn
    while files are written. Stop is off when a drawing ends."""
    drawn = gradio.State()  # a run, until it is kept
    told = gradio.JSON(visible=False)  # an error and its field, see page.js
    drawing = {
        "fn": live.draw,
        "inputs": {*live.fields.values()},
        "outputs": [drawn, view[-1], told],
        "show_progress_on": view[0],
        "concurrency_limit": 1,  # the pipeline draws one image at a time
        "concurrency_id": "pipe",
    }
    keeping = {
        "fn": live.keep,
        "inputs": [drawn, seen],
        "outputs": [drawn, *view, seen, gallery],
        "show_progress_on": view[0],
    }
    typed, chosen = gradio.on(starts, **drawing), example(**drawing, api_visibility="private")
    kept = [typed.success(**keeping), chosen.success(**keeping, api_visibility="private")]
    for job in (typed, chosen):
        job.then(lambda: gradio.Button(interactive=False), None, stop, **_PRIVATE)
        job.then(None, told, None, js="(told) => tellError(told)", **_PRIVATE)
    return [typed, chosen, *kept]


def _stopped() -> list[Any]:
    return ["Stopped. No image is being drawn for this page.", gradio.Button(interactive=False)]


def _form(pipe: Any) -> tuple[dict[str, Any], tuple[Any, Any], Any]:
    """Return the fields by name, the buttons Draw and Stop, and the examples."""
    prompt = gradio.Textbox(label="Prompt", lines=1, max_lines=4, autofocus=True)
    with gradio.Row(elem_id="field-"):
        draw = gradio.Button("Draw", variant="primary", min_width=100)
        stop = gradio.Button("Stop", min_width=100, interactive=False)
    with gradio.Row():
        seed = gradio.Number(0, label="Seed", precision=0, min_width=100)
        shuffle = gradio.Button("Random seed", min_width=100, elem_id="shuffle")
    shuffle.click(None, None, seed, js="() => Math.floor(Math.random() * 2 ** 31)", **_PRIVATE)
    demo = demo_of(pipe)
    examples = gradio.Examples(_EXAMPLES[demo.name] if demo else _ANY_EXAMPLES, prompt)
    fields = {"prompt": prompt, "seed": seed, **_settings(pipe)}
    for name, field in fields.items():
        field.elem_id = f"field-{name}"  # where page.js says an error
    return fields, (draw, stop), examples


def _view() -> list[Any]:
    """Return the components: the line above the result, the downloads, the result, the last
    runs."""
    status = gradio.HTML("The image and its heatmaps appear here.", min_height=40)
    page = gradio.HTML(elem_id="result")
    with gradio.Row(elem_id="kept"):
        gallery = gradio.Gallery(
            label="Last runs",
            height=124,
            allow_preview=False,
            buttons=[],
            elem_id="last-runs",  # see page.css
            visible=False,
            scale=3,
        )
        with gradio.Column(scale=1, min_width=180):
            html = gradio.DownloadButton("Save the page", size="sm", interactive=False)
            archive = gradio.DownloadButton("Save the run (zip)", size="sm", interactive=False)
    return [status, html, archive, page, gallery]


def _settings(pipe: Any) -> dict[str, Any]:
    """Return the folded components by name, see :class:`Live`. Settings that the pipeline lacks
    are left empty; the pipeline validates ranges itself."""
    defaults = {**call_options(pipe), **demo_settings(pipe)}
    (height, width), unit = default_size(pipe), size_unit(pipe)
    guidance, is_sized = defaults.get("guidance_scale"), {"width", "height"} <= {*defaults}
    guided = isinstance(guidance, (int, float))
    # FLUX and Qwen-Image use it only with a further option
    has_negative = "negative_prompt" in defaults and "true_cfg_scale" not in defaults
    steps, size = defaults.get("num_inference_steps") or 30, {"step": unit, "visible": is_sized}
    frames = default_frames(pipe) if makes_videos(pipe) else None

    def number(label: str, value: float | None, **options: Any) -> Any:
        return gradio.Number(value, label=label, min_width=100, **options)

    with gradio.Accordion("Settings", open=False, elem_id="settings"):
        fields = {
            "negative_prompt": gradio.Textbox(label="Negative prompt", visible=has_negative),
            "negative_maps": gradio.Checkbox(label="Map the negative prompt", visible=has_negative),
            "ask": gradio.Textbox(label="Ask about another text", placeholder="wheel, hat"),
        }
        with gradio.Row():
            guide = {"step": 0.5, "visible": guided}
            fields |= {
                "num_inference_steps": number("Steps", steps, precision=0),
                "guidance_scale": number("Guidance", guidance if guided else None, **guide),
                "width": number("Width", width if is_sized else None, precision=0, **size),
                "height": number("Height", height if is_sized else None, precision=0, **size),
                "num_frames": number("Frames", frames, precision=0, visible=frames is not None),
            }
        return fields | {
            "preset": gradio.Dropdown(list(PRESETS), value="default", label="Preset"),
            "refine": gradio.Checkbox(label="Refine: sharper maps"),
            "causal": gradio.Checkbox(label="Causal: draw again without each word"),
            "each_step": gradio.Checkbox(label="Keep every step"),
        }
