"""Tabs of the live page, a form each: draw an image, explain a photo, edit an image."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import InvalidTypeError
from ..maps.presets import PRESETS
from ..models.call_options import call_options
from ..models.demos import demo_named, demo_of, demo_settings
from ..models.facts import default_frames, default_size, makes_videos, size_unit
from ..models.families import edits_of, image_latents_of
from ..runs.info import RunSettings
from ..runs.run import Run
from . import tasks
from .example_prompts import examples_of
from .recent_runs import RecentRun
from .server import import_gradio

gradio: Any = import_gradio()

PRIVATE = {"api_visibility": "private", "show_progress": "hidden", "queue": False}


EXAMPLES = Path(__file__).parent / "examples"  # images of the demo's prompts, in their order


@dataclass(frozen=True)
class Form:
    """A tab of the page.

    Attributes:
        name: "draw", "explain" or "edit".
        make: makes a run of a pipeline and the values of the fields.
        fields: components by the option that each sets.
        starts: the events that start it; each registers a handler.
    """

    name: str
    make: Callable[[Any, dict[str, Any]], Run]
    fields: Mapping[str, Any]
    starts: list[Any]

    def __post_init__(self) -> None:
        for name, field in self.fields.items():
            field.elem_id = f"{self.name}-{name}"  # where page.js says an error


def forms_of(pipe: Any, example: RecentRun) -> Iterator[Form]:
    """Yield the form of each tab that the pipeline can serve, and show it; first the drawing's."""
    with gradio.Tab("Draw"):
        yield _drawing(pipe)
    if _is_known(image_latents_of, pipe):
        with gradio.Tab("Photo"):
            yield _explaining(pipe, example)
    if _is_known(edits_of, pipe):
        with gradio.Tab("Edit"):
            yield _editing(pipe)


def _is_known(facts: Callable[[Any], object], pipe: Any) -> bool:
    try:
        facts(pipe)
    except InvalidTypeError:
        return False
    return True


def _drawing(pipe: Any) -> Form:
    (first, seed), *_ = examples_of(pipe).prompts
    prompt = gradio.Textbox(first, label="Prompt", lines=1, max_lines=4, autofocus=True)
    with _button_row("draw"):
        button = gradio.Button("Draw", variant="primary", min_width=100)
        shuffle = gradio.Button("Random seed", min_width=100)
    with _folded("draw"):
        fields = {"prompt": prompt, "seed": _seed(shuffle, seed), **_settings(pipe)}
    return Form("draw", tasks.draw, fields, [button.click, prompt.submit])


def show_examples(pipe: Any, drawing: Form) -> None:
    """Show the examples' prompts, for a demo as images; a click draws one."""
    prompts = examples_of(pipe).prompts
    fields = [drawing.fields["prompt"], drawing.fields["seed"]]
    images = sorted(EXAMPLES.glob("*.webp")) if demo_of(pipe) == demo_named("demo") else []
    if not images:
        examples = gradio.Examples([[*one] for one in prompts], fields)
        drawing.starts.append(examples.load_input_event.then)
        return
    shown = [(str(path), prompt) for path, (prompt, _) in zip(images, prompts, strict=True)]
    gallery = gradio.Gallery(
        shown, label="Examples", columns=2, allow_preview=False, buttons=[], elem_id="examples"
    )

    def pick(event: gradio.SelectData) -> list[Any]:
        return [*prompts[event.index]]

    drawing.starts.append(gallery.select(pick, None, fields, **PRIVATE).then)


def changes_of(pipe: Any, shown: Any, settings_of: Callable[[str], RunSettings]) -> Iterator[Form]:
    """Yield the forms of the bar that opens at a tap on a word of the result, see page.js: another
    word in its place, and a box for it. ``shown`` holds the key of the run that is shown."""
    if not _is_known(edits_of, pipe):
        return
    with gradio.Row(elem_id="change"):
        word = gradio.Textbox(label="Word", min_width=70, max_lines=1)
        other = gradio.Textbox(label="Other word", min_width=80, max_lines=1)
        swap = _button("swap", "Swap")
        gradio.HTML("or drag a box for it on the image", elem_id="or")
        box = gradio.Textbox(label="Box", placeholder="0 0 0.5 0.5", min_width=100, max_lines=1)
        place = _button("place", "Draw it there")
        gradio.Button("Close", min_width=60, elem_id="close")
    fields = {"run": shown, "word": word, "other": other}
    starts = [swap.click, other.submit]
    yield Form("swap", partial(tasks.swap, settings_of), fields, starts)
    fields = {"run": shown, "word": word, "box": box}
    starts = [place.click, box.submit]
    yield Form("place", partial(tasks.place, settings_of), fields, starts)


def remedies_of(row: Any, shown: Any, settings_of: Callable[[str], RunSettings]) -> Iterator[Form]:
    """Yield the forms in the row that opens when a word of the result is missing, see page.js: more
    seeds, and more attention to these words. ``shown`` is as for :func:`changes_of`."""
    texts = {"best": f"Best of {tasks.SEEDS} seeds", "excite": "More attention to what is missing"}
    for name, make in (("best", tasks.best_of), ("excite", tasks.excite)):
        with row, _button_row(name):
            button = gradio.Button(texts[name], size="sm", min_width=100)
        yield Form(name, partial(make, settings_of), {"run": shown}, [button.click])


def _explaining(pipe: Any, example: RecentRun) -> Form:
    photo = gradio.Image(label="Photo", sources=["upload", "clipboard"], buttons=[], height=220)
    caption = gradio.Textbox(label="Caption", info="What the photo shows.", lines=1, max_lines=4)
    button = _button("explain", "Explain")
    if demo := demo_of(pipe):
        with gradio.Accordion("Words that the demo knows", open=False):
            gradio.Markdown(demo.learnt())
    examples = gradio.Examples([[str(example.small), example.settings.prompt]], [photo, caption])
    with _folded("explain"):
        fields = {"image": photo, "prompt": caption, **_map_settings()}
    starts = [button.click, caption.submit, examples.load_input_event.then]
    return Form("explain", tasks.explain, fields, starts)


def _editing(pipe: Any) -> Form:
    ((start, seed), *_), swap = examples_of(pipe)
    source = gradio.Textbox(start, label="Source prompt", lines=1, max_lines=4)
    with gradio.Row():
        word = gradio.Textbox(swap[0], label="Swap the word", min_width=100)
        other = gradio.Textbox(swap[1], label="for", min_width=100)
    target = gradio.Textbox(
        tasks.swapped(start, *swap), label="Target prompt", lines=1, max_lines=4
    )
    for field in (source, word, other):
        field.change(_swapped, [source, word, other], target, **PRIVATE)  # input misses a paste
    with _button_row("edit"):
        button = gradio.Button("Edit", variant="primary", min_width=100)
        shuffle = gradio.Button("Random seed", min_width=100)
    fields = {"source": source, "target": target, "seed": _seed(shuffle, seed)}
    with _folded("edit"):
        fields["blend"] = gradio.Textbox(label="Change only where this word is")
        for name, kind in (("cross_replace_steps", "cross"), ("self_replace_steps", "self")):
            label = f"Part of the steps with the source's {kind}-attention, 0 to 1"
            fields[name] = gradio.Number(label=label, step=0.1)
    return Form("edit", tasks.edit, fields, [button.click, target.submit])


def _swapped(source: str, word: str, other: str) -> Any:
    """Return the source with another word in a word's place, or no change without both."""
    given = word.strip() and other.strip()
    return tasks.swapped(source, word, other) if given else gradio.skip()


def _button(name: str, text: str) -> Any:
    with _button_row(name):
        return gradio.Button(text, variant="primary", min_width=100)


def _button_row(name: str) -> Any:
    """Return the row of a form's button, where page.js says an error that is about no field."""
    return gradio.Row(elem_id=f"{name}-")


def _folded(name: str) -> Any:
    return gradio.Accordion("Settings", open=False, elem_id=f"{name}-settings")


def _seed(shuffle: Any, value: int) -> Any:
    """Return the field of a seed, which a button changes."""
    seed = gradio.Number(value, label="Seed", precision=0, min_width=100)
    shuffle.click(None, None, seed, js="() => Math.floor(Math.random() * 2 ** 31)", **PRIVATE)
    return seed


def _settings(pipe: Any) -> dict[str, Any]:
    """Return further fields of a drawing. Settings that the pipeline lacks are left empty; the
    pipeline validates ranges itself."""
    defaults = {**call_options(pipe), **demo_settings(pipe)}
    height, width = default_size(pipe)
    guidance = defaults.get("guidance_scale")
    is_sized = {"width", "height"} <= {*defaults}
    guided = isinstance(guidance, (int, float))
    # FLUX and Qwen-Image use it only with a further option
    has_negative = "negative_prompt" in defaults and "true_cfg_scale" not in defaults
    steps = defaults.get("num_inference_steps") or 30
    size = {"step": size_unit(pipe), "visible": is_sized}
    frames = default_frames(pipe) if makes_videos(pipe) else None

    def number(label: str, value: float | None, **options: Any) -> Any:
        return gradio.Number(value, label=label, min_width=100, **options)

    fields = {
        "negative_prompt": gradio.Textbox(label="Negative prompt", visible=has_negative),
        "negative_maps": gradio.Checkbox(label="Map the negative prompt", visible=has_negative),
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
    return {
        **fields,
        **_map_settings(),
        "causal": gradio.Checkbox(label="Causal: draw again without each word"),
        "each_step": gradio.Checkbox(label="Keep every step"),
    }


def _map_settings() -> dict[str, Any]:
    """Return the fields of :func:`generate` and :func:`explain` alike."""
    return {
        "ask": gradio.Textbox(label="Ask about another text", placeholder="wheel, hat"),
        "preset": gradio.Dropdown(list(PRESETS), value="default", label="Preset"),
        "refine": gradio.Checkbox(label="Refine: sharper maps"),
    }
