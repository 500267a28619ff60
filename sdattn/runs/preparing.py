"""`prepare()`: all that `generate()`, `explain()`, edits and batches ask of a pipeline, and refuse,
before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from pathlib import Path
from typing import Any

from ..errors import InvalidTypeError, InvalidValueError, OptionError, SdattnWarning, refuse, warn
from ..keep.budget import Expected
from ..keep.keep import Keep, Steps, checked_bytes
from ..loading.facts import check_names
from ..loading.pipelines import load_pipeline
from ..look.other_text import encode_text
from ..look.queries import Queries
from ..maps.aggregation import PLACE, refining
from ..maps.presets import Preset, preset_for, preset_of
from ..maps.requirements import capture_settings, checked_capture, columns_around, known_steps
from ..models.caches import is_cached
from ..models.denoiser import held_model
from ..models.facts import PipelineFacts, images_a_prompt, latent_size, size_doubt
from ..models.layers import select_layers
from ..models.pipeline import Options, Pipeline
from ..models.pipeline_call import checked_options, one_each
from ..models.reading import read_prompts
from ..models.threads import few_threads
from ..models.values import check_text, check_values, checked_prompts, checked_seeds, seeds_of
from ..prompts.tokens import Prompt
from ..prompts.words import empty_prompt, split_words

SPOTS = 16  # along the longer side
SMALL = 16_000_000  # bytes: a run whose maps of each step take no more keeps them
CALLBACKS = ("callback_on_step_end", "callback")  # options by which a run may be stopped


@dataclass(frozen=True)
class Order:
    """A run that was checked and can be made, see :func:`sdattn.runs.sampling.sample`.

    Attributes:
        facts: facts of the pipeline.
        prompts: the prompts as the model reads them.
        seeds: one per image, in the pipeline's order.
        options: options of the pipeline's call.
        preset: preset of the heatmaps.
        keep: what the prompt's capture keeps.
        ask: another text that is asked about.
        spots: True keeps where spots of the image look.
        may_stop: True keeps the steps before those that the preset reads too, for a run that its
            caller may stop.
        python: options that only Python has, for the run's record.
    """

    facts: PipelineFacts
    prompts: list[Prompt]
    seeds: list[int]
    options: Options
    preset: Preset
    keep: Keep
    ask: str | None = None
    spots: bool = False
    may_stop: bool = False
    python: Sequence[str] = ()

    @cached_property
    def asked(self) -> Prompt | None:
        """The text that is asked about, as the model reads it."""
        if self.ask is None:
            return None
        text = " ".join(self.ask.replace(",", " ").split())  # a comma would join the softmax
        [prompt] = read_prompts(self.facts.pipe, text, **self.options)
        return prompt

    def negative(self, columns: int | None = None) -> list[Prompt]:
        """Return the negative prompts as the model reads them, one per prompt; ``columns`` as for
        :func:`sdattn.read_prompts`."""
        texts = one_each(self.options["negative_prompt"], len(self.prompts))
        return read_prompts(self.facts.pipe, texts, columns, negative=True, **self.options)


def prepare(
    pipe: Pipeline | PipelineFacts | str | Path,
    prompt: object,
    options: Options,
    *,
    seed: int | Sequence[int] | None = 0,
    words: Sequence[str] | None = None,
    preset: str | Preset = "default",
    refine: str | None = None,
    ask: str | None = None,
    spots: bool = False,
    capture_options: Options | None = None,
    max_bytes: int | None = None,
    branches: Sequence[str] = ("conditional", "both"),
    videos: bool = False,
    own: Sequence[str] = (),
) -> Order:
    """Check a run and read what it needs, so that nothing is refused after its first step.

    Args:
        pipe: a pipeline, its facts, or a model to load, see :func:`loaded_facts`.
        branches: branches that ``capture_options`` may name.
        videos: True if the caller can use videos.
        own: the caller's own options, which a misspelt name may mean (default: generate()'s).

    The others are :func:`sdattn.generate`'s, and so is what is raised.
    """
    if isinstance(pipe, PipelineFacts):
        facts = pipe
    else:
        of_call: dict[str, Any] = {"seed": seed, "preset": preset, "refine": refine}
        facts = loaded_facts(pipe, prompt, options, max_bytes=max_bytes, own=own, **of_call)
    if spots and facts.makes_videos:
        text = "a video's are not kept. Leave it out, or capture some cells by `queries`."
        raise OptionError("spots", spots, text)
    if ask is not None and not isinstance(ask, str):
        raise refuse("ask", ask, "a text that is asked about")
    texts = checked_prompts(prompt)
    options = checked_options(facts, options, prompts=len(texts), videos=videos, own=own)
    read = read_prompts(facts.pipe, texts, **options)
    if not read:
        raise OptionError("prompt", prompt, "there is none. Pass a text, or a list of some.")
    seeds = seeds_of(seed, len(read) * images_a_prompt(facts, options))
    chosen = preset_for(facts.denoiser, preset, refine)
    watch = checked_capture(capture_options or {}, words, read, branches)
    if watch.get("frames") is not None:
        text = "A run keeps all frames of a video. Choose `frames` with `capture()`."
        raise InvalidValueError(text)
    with_negative = watch.get("branch") == "both"
    if with_negative and not options.get("negative_prompt"):
        text = "`branch='both'` shows the words of a negative prompt. Pass one."
        raise InvalidValueError(text)
    order = Order(
        facts=facts,
        prompts=read,
        seeds=seeds,
        options=options,
        preset=chosen,
        keep=capture_settings(facts, chosen, read, options, {"max_bytes": max_bytes, **watch}),
        ask=ask,
        spots=spots,
        may_stop=any(options.get(name) for name in CALLBACKS),
    )
    if with_negative:
        order.negative()  # or refuse
    for doubt in (size_doubt(facts, options), _unlearnt(order)):
        if doubt:
            warn(doubt, SdattnWarning)
    return order


def _unlearnt(order: Order) -> str:
    """Return a demo's warning of words that it never learnt; "" for any other model."""
    if order.facts.demo is None:
        return ""
    said = list[str]()
    for one in order.prompts:
        said += [word.text for word in one.words]
    said += [word for word, _, _ in split_words(order.ask or "")]
    doubt = order.facts.demo.unlearnt(said)
    return doubt and f"{doubt} The page of the run lists all that it knows."


def loaded_facts(
    pipe: Any,
    prompts: object,
    options: Options,
    *,
    image: object = None,
    seed: int | Sequence[int] | None = 0,
    preset: str | Preset = "default",
    refine: str | None = None,
    max_bytes: int | None = None,
    own: Sequence[str] = (),
) -> PipelineFacts:
    """Return the facts of a pipeline. A name that :func:`sdattn.load_pipeline` takes is loaded,
    after what no model could take was refused; the arguments are as for :func:`prepare`, where each
    of ``prompts`` may be several.

    Raises:
        TypeError: anything else, also where a prompt or the image is the pipeline.
    """
    several = prompts if isinstance(prompts, list) else [prompts]
    is_swapped = any(held_model(other) is not None for other in (image, *several))
    if isinstance(pipe, (str, Path)) and not is_swapped:
        for text in chain.from_iterable(map(checked_prompts, several)):
            if isinstance(text, str):
                check_text(text, "prompt")
                if not text.strip():
                    raise empty_prompt(text)
        for image_seed in seed if isinstance(seed, (list, tuple)) else [seed]:
            if image_seed is not None:
                checked_seeds(image_seed)
        preset_of(preset, refine)
        checked_bytes(max_bytes)
        check_values(options)
        check_names(str(pipe), options, own)
        pipe = load_pipeline(pipe)
    facts = PipelineFacts.of(pipe)
    if facts.denoiser.pipeline is None:
        raise InvalidTypeError(
            f"A {type(pipe).__name__} is a pipeline's model alone, which draws nothing by itself. "
            "Pass the pipeline; `capture()` takes a model too."
        )
    return facts


# What is watched


def watch(order: Order) -> dict[str, Keep]:
    """Return what each capture of a run keeps, each in a store of its own.

    Keys: ``"prompt"``, and if asked for ``"self"`` (the self-attention that refines),
    ``"negative"``, ``"asked"`` and ``"spots"`` (where spots of the image look). All are known
    before anything runs.
    """
    has_negative = order.keep.branch == "both"
    keep = replace(order.keep, branch="conditional")
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
        images = images_a_prompt(order.facts, order.options)
        among = []
        for prompt in order.negative():
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
    cells = [((r + 0.5) / rows, (c + 0.5) / cols) for r, c in product(range(rows), range(cols))]
    queries = Queries.of(cells, None)
    return replace(keep, queries=queries, layers=PLACE if has_up else None, kinds=kinds)


def spots_grid(order: Order) -> tuple[int, int]:
    """Return the rows and columns of the spots, at most one for each of the finest cells."""
    rows, cols = latent_size(order.facts, order.options)
    share = min(1.0, SPOTS / max(rows, cols))
    return max(1, round(rows * share)), max(1, round(cols * share))


def check_images(order: Order, passes: int) -> None:
    """Refuse a run of an image model that would hold too much, before anything else runs."""
    for kept in watch(order).values():
        _expected(order, kept, passes).check()


def keep_small_steps(order: Order) -> Order:
    """Return the order of a run that keeps each step too, if all its maps then take at most
    ``SMALL`` bytes, else the order itself, also of a video, of maps that are refined in each step,
    or of a run whose steps may not be known before it ends."""
    steps = known_steps(order.facts, order.options)
    is_open = order.may_stop or is_cached(order.facts.denoiser)
    if not steps or is_open or order.facts.makes_videos or order.preset.refine:
        return order
    allowed = SMALL if order.keep.max_bytes is None else min(SMALL, order.keep.max_bytes)
    each = replace(order, keep=replace(order.keep, steps=Steps.of("all")))
    if _expected(each, each.keep, steps).nbytes > allowed:
        return order  # without asking what else is watched, which may encode a text
    with few_threads(order.facts.pipe):
        held = [_expected(each, kept, steps).nbytes for kept in watch(each).values()]
    return each if sum(held) <= allowed else order


def _expected(order: Order, kept: Keep, passes: int) -> Expected:
    """Return what a capture of an image model will hold."""
    size = latent_size(order.facts, order.options)
    return Expected(
        keep=kept,
        layers=select_layers(order.facts.denoiser.layers, kept.layers, kept.kinds, size),
        latent_size=size,
        columns=len(order.prompts[0].tokens),
        rows=max(len(order.prompts), len(order.seeds)),
        passes=passes,
    )
