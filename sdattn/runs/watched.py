"""The captures of a run: of the prompt, of further texts, and of what refines the maps. Runs that
may be stopped before the steps that their preset reads keep the earlier steps too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import CaptureError, SdattnWarning, warn
from ..follow.capture_warnings import Stopped
from ..keep.budget import Expected
from ..keep.keep import Keep, Steps
from ..look.other_text import encode_text
from ..look.queries import Queries
from ..maps.aggregation import PLACE, refining
from ..maps.capture import MapStore
from ..maps.presets import Preset
from ..maps.requirements import columns_around
from ..models.facts import PipelineFacts, images_a_prompt, latent_size
from ..models.layers import select_layers
from ..models.pipeline import Options
from ..models.pipeline_call import one_each
from ..models.reading import read_prompts
from ..prompts.tokens import Prompt
from ..prompts.words import split_words

SPOTS = 16  # along the longer side
CALLBACKS = ("callback_on_step_end", "callback")  # options by which a run may be stopped


@dataclass(frozen=True)
class Order:
    """A run to make, see :func:`sdattn.runs.sampling.sample`."""

    facts: PipelineFacts
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    options: Options
    preset: Preset
    ask: str | None = None
    spots: bool = False
    python: Sequence[str] = ()  # options that only Python has

    @cached_property
    def asked(self) -> Prompt | None:
        """The text that is asked about, as the model reads it."""
        if self.ask is None:
            return None
        text = " ".join(self.ask.replace(",", " ").split())  # a comma would join the softmax
        [prompt] = read_prompts(self.facts.pipe, text, **self.options)
        return prompt


def watch(order: Order, keep: Keep) -> dict[str, Keep]:
    """Return what each capture of a run keeps, each in a store of its own.

    Keys: ``"prompt"``, and if asked for ``"self"`` (the self-attention that refines),
    ``"negative"``, ``"asked"`` and ``"spots"`` (where spots of the image look). All are known
    before anything runs.
    """
    has_negative = keep.branch == "both"
    keep = replace(keep, branch="conditional")
    # The columns of self-attention are the image's own cells: a word's do not apply.
    image = Keep(steps=keep.steps, dtype=keep.dtype, device=keep.device, max_bytes=keep.max_bytes)
    watched = {"prompt": keep}
    if order.preset.refine and not keep.refine:
        layers = refining(order.facts.denoiser)
        watched["self"] = replace(image, kinds=("self",), layers=layers)
    if has_negative:  # a capture of its own, since some pipelines run the two in turn
        watched["negative"] = _negative(order, keep)
    if order.asked is not None:
        watched["asked"] = _asked(order, keep, order.asked)
    if order.spots:
        watched["spots"] = _spots(order, image)
    return watched


def _negative(order: Order, keep: Keep) -> Keep:
    """Return what to capture of negative prompts."""
    among = None
    if order.preset.among_words:
        read = read_negative(order.facts, order.options, len(order.prompts))
        images = images_a_prompt(order.facts, order.options)
        among = []
        for prompt in read:
            among += [columns_around(prompt)] * images
    return replace(keep, branch="unconditional", tokens=None, among=among)


def _asked(order: Order, keep: Keep, prompt: Prompt) -> Keep:
    """Return what to capture of the text that is asked about."""
    columns = columns_around(prompt)
    states = encode_text(order.facts.pipe, prompt.text, order.options)
    tokens = None if order.preset.needs_all_columns else tuple(columns)
    keep = replace(keep, text_states=states, tokens=tokens)
    # in joint attention the image's own columns compete with the words already
    return keep if order.facts.is_joint else replace(keep, among=[columns])


def _spots(order: Order, keep: Keep) -> Keep:
    """Return what to capture of an even grid of spots: of a UNet its way up."""
    rows, cols = spots_grid(order)
    kinds = ("self", "joint")
    layers = order.facts.denoiser.layers
    has_up = any(layer.place == PLACE for layer in layers if layer.kind in kinds)
    cells = [((r + 0.5) / rows, (c + 0.5) / cols) for r in range(rows) for c in range(cols)]
    queries = Queries.of(cells, None)
    return replace(keep, queries=queries, layers=PLACE if has_up else None, kinds=kinds)


def spots_grid(order: Order) -> tuple[int, int]:
    """Return the rows and columns of the spots, at most one for each of the finest cells."""
    rows, cols = latent_size(order.facts, order.options)
    share = min(1.0, SPOTS / max(rows, cols))
    return max(1, round(rows * share)), max(1, round(cols * share))


def warn_of_unlearnt(
    facts: PipelineFacts, prompts: Sequence[Prompt], ask: str | None = None
) -> None:
    """Warn of words of the prompts, or of the text that is asked about, that a demo model never
    learnt."""
    texts = []
    for prompt in prompts:
        texts += [word.text for word in prompt.words]
    texts += [word for word, _, _ in split_words(ask or "")]
    warning = facts.demo.unlearnt(texts) if facts.demo else ""
    if warning:
        warn(warning, SdattnWarning)


def read_negative(
    facts: PipelineFacts, options: Options, prompts: int, columns: int | None = None
) -> list[Prompt]:
    """Return the negative prompts of a run as the model reads them, one per prompt."""
    texts = one_each(options["negative_prompt"], prompts)
    return read_prompts(facts.pipe, texts, columns, negative=True, **options)


def check_images(order: Order, keep: Keep, passes: int) -> None:
    """Refuse a run of an image model that would hold too much, before anything else runs."""
    size = latent_size(order.facts, order.options)
    every = order.facts.denoiser.layers
    for kept in watch(order, keep).values():
        expected = Expected(
            keep=kept,
            layers=select_layers(every, kept.layers, kept.kinds, size),
            latent_size=size,
            columns=len(order.prompts[0].tokens),
            rows=len(order.prompts),
            passes=passes,
        )
        expected.check()


class StoppedError(CaptureError):
    """A run was stopped before the steps that its preset reads, so it has no maps.

    Attributes:
        images: what was drawn, PIL; lists of frames for videos.
    """

    def __init__(self, message: str, images: Sequence[object] = ()):
        super().__init__(message)
        self.images = list(images)


def early_steps(watched: Mapping[str, Keep]) -> dict[str, Keep]:
    """Return what to capture, of a run that may be stopped, of the steps before those to keep."""
    early = {}
    for name, keep in watched.items():
        part = keep.steps.part
        if part is not None and part.first > 0:
            early[name] = replace(keep, steps=Steps.of((0.0, part.first)))
    return early


def settled(
    stores: Mapping[str, MapStore], early: Mapping[str, MapStore], images: Sequence[object]
) -> Mapping[str, MapStore]:
    """Return the stores to read after a run, checked: the ``early`` ones, by the same names, if it
    was stopped before the others' steps. Raise StoppedError if these are empty too."""
    stopped = stores["prompt"].stopped
    if stopped is not None and not stores["prompt"].maps:
        stores = {**stores, **early}
        if not stores["prompt"].maps:
            text = (
                f"The run was stopped after {stopped.after} of {stopped.steps} steps, before those "
                "that its preset reads, so there are no maps. What was drawn is in `images` of "
                "this error. To have maps of a run that may be stopped, keep each step: "
                "`capture_options={'steps': 'all'}`."
            )
            raise StoppedError(text, images)
    for store in stores.values():
        store.check()
    return stores


def stop_of(store: MapStore, preset: Preset) -> Stopped | None:
    """Return where the run was stopped, with the steps that a preset's maps are of."""
    if store.stopped is None:
        return None
    return replace(store.stopped, kept=tuple(store.read_passes(preset)))
