"""The captures of a run: of the prompt, of further texts, and of what refines the maps. Runs that
may be stopped before the steps that their preset reads keep the earlier steps too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import CaptureError, SdattnWarning, warn
from ..follow.capture_warnings import Stopped
from ..keep.budget import Budget, Expected
from ..keep.keep import Keep, Steps
from ..look.other_text import encode_text
from ..maps.aggregation import PLACE, refining
from ..maps.capture import MapStore
from ..maps.layermaps import read_steps
from ..maps.presets import Preset
from ..maps.requirements import columns_around
from ..models.facts import PipelineFacts, images_a_prompt, latent_size
from ..models.layers import TEXT_KINDS, select_layers
from ..models.pipeline import Options
from ..models.pipeline_call import one_each
from ..models.reading import read_prompts
from ..prompts.tokens import Prompt
from ..prompts.words import split_words

SPOTS = 16  # along the longer side
_CALLBACKS = ("callback_on_step_end", "callback")  # by which a run is stopped
_EARLY = "early "


@dataclass(frozen=True)
class Order:
    """A run to make, see :func:`sdattn.runs.sampling.sample`."""

    facts: PipelineFacts
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    options: Options
    preset: Preset
    asked: Asked | None
    spots: bool = False
    python: Sequence[str] = ()  # options that only Python has


def watch(order: Order, settings: Options) -> dict[str, dict[str, Any]]:
    """Return the options of each capture, each with a store of its own.

    Keys: ``"prompt"``, and if asked for ``"self"`` (the self-attention that refines),
    ``"negative"``, ``"asked"`` and ``"spots"`` (where spots of the image look). All are known
    before anything runs.
    """
    settings = dict(settings)
    preset = order.preset
    kept = ("steps", "dtype", "device")
    alike: dict[str, Any] = {name: settings[name] for name in kept if name in settings}
    both = settings.pop("branch", "conditional") == "both"
    found = {"prompt": settings}
    # The columns of self-attention are the image's own cells: a word's do not apply.
    if preset.refine and "refine" not in settings:
        found["self"] = {**alike, "kinds": ("self",), "layers": refining(order.facts.denoiser)}
    if both:  # a capture of its own, since some pipelines run the two in turn
        own: dict[str, object] = {"branch": "unconditional", "tokens": None, "among": None}
        if preset.among_words:
            read = read_negative(order.facts, order.options, len(order.prompts))
            images = images_a_prompt(order.facts, order.options)
            own["among"] = [columns_around(one) for one in read for _ in range(images)]
        found["negative"] = {**settings, **own}
    if order.asked is not None:
        found["asked"] = {**settings, **order.asked.settings}
    if order.spots:
        found["spots"] = {**alike, **_spots(order)}
    return found


def _spots(order: Order) -> dict[str, object]:
    """Return what to capture of an even grid of spots: of a UNet its way up."""
    rows, cols = spots_grid(order)
    layers = order.facts.denoiser.layers
    kinds = ("self", "joint")
    has_up = any(layer.place == PLACE for layer in layers if layer.kind in kinds)
    cells = [((r + 0.5) / rows, (c + 0.5) / cols) for r in range(rows) for c in range(cols)]
    return {"queries": cells, "layers": PLACE if has_up else None, "kinds": kinds}


def spots_grid(order: Order) -> tuple[int, int]:
    """Return the rows and columns of the spots, at most one for each of the finest cells."""
    size = latent_size(order.facts, order.options)
    part = min(1.0, SPOTS / max(size))
    return max(1, round(size[0] * part)), max(1, round(size[1] * part))


class Asked:
    """A text that is asked about: as the model reads it, and how its maps are captured."""

    def __init__(self, facts: PipelineFacts, text: str, preset: Preset, options: Options):
        text = " ".join(text.replace(",", " ").split())  # a comma would take part in the softmax
        [self.prompt] = read_prompts(facts.pipe, text, **options)
        columns = columns_around(self.prompt)
        self.settings: dict[str, object] = {
            "text_states": encode_text(facts.pipe, text, options),
            "tokens": None if preset.needs_all_columns else columns,
        }
        # in joint attention the image's own columns compete with the words already
        if not facts.is_joint:
            self.settings["among"] = [columns]


def warn_of_unlearnt(
    facts: PipelineFacts, prompts: Sequence[Prompt], ask: str | None = None
) -> None:
    """Warn of words of the prompts, or of the text that is asked about, that a demo model never
    learnt."""
    texts = [word.text for prompt in prompts for word in prompt.words]
    texts += [word for word, _, _ in split_words(ask or "")]
    demo = facts.demo
    if demo and (warning := demo.unlearnt(texts)):
        warn(warning, SdattnWarning)


def read_negative(
    facts: PipelineFacts, options: Options, prompts: int, columns: int | None = None
) -> list[Prompt]:
    """Return the negative prompts of a run as the model reads them, one per prompt."""
    texts = one_each(options["negative_prompt"], prompts)
    return read_prompts(facts.pipe, texts, columns, negative=True, **options)


def check_images(budget: Budget, order: Order, settings: Options, passes: int) -> None:
    """Refuse a run of an image model that would hold too much, before anything else runs."""
    size = latent_size(order.facts, order.options)
    every = order.facts.denoiser.layers
    names = {field.name for field in fields(Keep)}
    expected = []
    for kept in watch(order, settings).values():
        keep = Keep.of(**{name: value for name, value in kept.items() if name in names})
        layers = select_layers(every, kept.get("layers"), kept.get("kinds", TEXT_KINDS), size)
        store = Expected(
            keep=keep,
            layers=layers,
            latent_size=size,
            columns=len(order.prompts[0].tokens),
            rows=len(order.prompts),
            passes=passes,
        )
        expected.append(store)
    budget.check(expected)


class StoppedError(CaptureError):
    """A run was stopped before the steps that its preset reads, so it has no maps.

    Attributes:
        images: what was drawn, PIL; lists of frames for videos.
    """

    def __init__(self, message: str, images: Sequence[object] = ()):
        super().__init__(message)
        self.images = list(images)


def has_callback(options: Options) -> bool:
    """Check whether a run with these options of the pipeline may be stopped by a callback."""
    return any(options.get(name) for name in _CALLBACKS)


def with_early(watched: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what to capture of a run that may be stopped: also the steps before the part to keep,
    in stores of their own."""
    found = dict(watched)
    for name, kept in watched.items():
        part = Steps.of(kept.get("steps", "mean")).part
        if part is not None and part.first > 0:
            found[_EARLY + name] = {**kept, "steps": (0.0, part.first)}
    return found


def settled(stores: Mapping[str, MapStore], images: Sequence[object]) -> dict[str, MapStore]:
    """Return the stores to read after a run, checked; raise StoppedError if it was stopped too
    early for any of them."""
    own = {name: store for name, store in stores.items() if not name.startswith(_EARLY)}
    stopped = own["prompt"].stopped
    if stopped is not None and not own["prompt"].maps:
        own = {name: stores.get(_EARLY + name, store) for name, store in own.items()}
        if not own["prompt"].maps:
            said = (
                f"The run was stopped after {stopped.after} of {stopped.steps} steps, before those "
                "that its preset reads, so there are no maps. What was drawn is in `images` of "
                "this error. To have maps of a run that may be stopped, keep each step: "
                "`capture_options={'steps': 'all'}`."
            )
            raise StoppedError(said, images)
    for store in own.values():
        store.check()
    return own


def stop_of(store: MapStore, preset: Preset) -> Stopped | None:
    """Return where the run was stopped, with the steps that a preset's maps are of."""
    if store.stopped is None:
        return None
    kept = [number for number in range(len(store.passes)) if store.keeps(number)]
    return replace(store.stopped, kept=tuple(kept[place] for place in read_steps(store, preset)))
