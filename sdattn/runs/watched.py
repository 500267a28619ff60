"""The captures of a run: of the prompt, of further texts, and of what refines the maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import SdattnWarning, warn
from ..keep.budget import RUN, Budget
from ..keep.expected import Expected
from ..keep.keep import Keep
from ..look.other_text import encode_text
from ..maps.aggregation import PLACE, refining
from ..maps.presets import Preset
from ..maps.requirements import columns_among
from ..models.call_facts import images_a_prompt
from ..models.demos import demo_of
from ..models.layers import TEXT_KINDS, find_denoiser, select_layers
from ..models.pipeline import Options, Pipeline
from ..models.pipeline_call import one_each
from ..models.reading import read_prompts
from ..models.sizes import latent_size
from ..prompts.tokens import Prompt
from ..prompts.words import split_words

SPOTS = 16  # along the longer side


@dataclass(frozen=True)
class Order:
    """A run to make, see :func:`sdattn.runs.sampling.sample`."""

    pipe: Pipeline
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    options: Options
    preset: Preset
    asked: Asked | None
    spots: bool = False


def watch(order: Order, settings: Options) -> dict[str, dict[str, Any]]:
    """Return the options of each capture, each with a store of its own.

    Keys: ``"prompt"``, and if asked for ``"self"`` (the self-attention that refines),
    ``"negative"``, ``"asked"`` and ``"spots"`` (where spots of the image look). All are known
    before anything runs.
    """
    settings, preset = dict(settings), order.preset
    kept = ("steps", "dtype", "device")
    alike: dict[str, Any] = {name: settings[name] for name in kept if name in settings}
    both = settings.pop("branch", "conditional") == "both"
    found = {"prompt": settings}
    # The columns of self-attention are the image's own cells: a word's do not apply.
    if preset.refine and "refine" not in settings:
        found["self"] = {**alike, "kinds": ("self",), "layers": refining(order.pipe)}
    if both:  # a capture of its own, since some pipelines run the two in turn
        own: dict[str, object] = {"branch": "unconditional", "tokens": None, "among": None}
        if preset.among_words or preset.compares_words:
            read = read_negative(order.pipe, order.options, len(order.prompts))
            images = images_a_prompt(order.pipe, order.options)
            own["among"] = [columns_among(preset, one) for one in read for _ in range(images)]
        found["negative"] = {**settings, **own}
    if order.asked is not None:
        found["asked"] = {**settings, **order.asked.settings}
    if order.spots:
        found["spots"] = {**alike, **_spots(order)}
    return found


def _spots(order: Order) -> dict[str, object]:
    """Return what to capture of an even grid of spots: of a UNet its way up."""
    rows, cols = spots_grid(order)
    layers, kinds = find_denoiser(order.pipe).layers, ("self", "joint")
    has_up = any(layer.place == PLACE for layer in layers if layer.kind in kinds)
    cells = [((r + 0.5) / rows, (c + 0.5) / cols) for r in range(rows) for c in range(cols)]
    return {"queries": cells, "layers": PLACE if has_up else None, "kinds": kinds}


def spots_grid(order: Order) -> tuple[int, int]:
    """Return the rows and columns of the spots, at most one for each of the finest cells."""
    size = latent_size(order.pipe, order.options)
    part = min(1.0, SPOTS / max(size))
    return max(1, round(size[0] * part)), max(1, round(size[1] * part))


class Asked:
    """A text that is asked about: as the model reads it, and how its maps are captured."""

    def __init__(self, pipe: Pipeline, text: str, preset: Preset, options: Options):
        text = " ".join(text.replace(",", " ").split())  # a comma would take part in the softmax
        [self.prompt] = read_prompts(pipe, text, **options)
        columns = columns_among(preset, self.prompt)
        self.settings: dict[str, object] = {
            "text_states": encode_text(pipe, text, options),
            "tokens": None if preset.needs_all_columns else columns,
        }
        # in joint attention the image's own columns compete with the words already
        is_joint = any(layer.kind == "joint" for layer in find_denoiser(pipe).layers)
        if preset.compares_words or not is_joint:
            self.settings["among"] = [columns]


def warn_of_unlearnt(pipe: Pipeline, prompts: Sequence[Prompt], ask: str | None = None) -> None:
    """Warn of words of the prompts, or of the text that is asked about, that a demo model never
    learnt."""
    texts = [word.text for prompt in prompts for word in prompt.words]
    texts += [word for word, _, _ in split_words(ask or "")]
    demo = demo_of(pipe)
    if demo and (warning := demo.unlearnt(texts)):
        warn(warning, SdattnWarning)


def read_negative(
    pipe: Pipeline, options: Options, prompts: int, columns: int | None = None
) -> list[Prompt]:
    """Return the negative prompts of a run as the model reads them, one per prompt."""
    texts = one_each(options["negative_prompt"], prompts)
    return read_prompts(pipe, texts, columns, negative=True, **options)


def budget_of(
    max_bytes: int | Budget | None, preset: Preset, given: Options, *fixed: str
) -> Budget | None:
    """Read ``max_bytes`` for a run. It advises to leave out only options that are ``given``, and no
    change that is ``fixed``."""
    kept = {name for name in ("heads", "refine") if not given.get(name)}.union(fixed)
    if preset.needs_all_columns:
        kept.add("words")
    return Budget.of(max_bytes, [name for name in RUN if name not in kept])


def check_images(budget: Budget, order: Order, settings: Options, passes: int) -> None:
    """Refuse a run of an image model that would hold too much, before anything else runs."""
    size, every = latent_size(order.pipe, order.options), find_denoiser(order.pipe).layers
    names = {field.name for field in fields(Keep)}
    expected = []
    for part, kept in watch(order, settings).items():
        keep = Keep.of(**{name: value for name, value in kept.items() if name in names})
        layers = select_layers(every, kept.get("layers"), kept.get("kinds", TEXT_KINDS), size)
        columns, rows = len(order.prompts[0].tokens), len(order.prompts)
        expected.append(Expected(keep, layers, size, columns, rows, passes=passes, part=part))
    budget.check(expected)
