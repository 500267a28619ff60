"""Options of `capture()` for a run: the caller's, and what the preset needs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

from ..errors import InvalidTypeError, InvalidValueError, OptionError, did_you_mean, refuse
from ..follow.run_part import RunPart
from ..keep.keep import Heads, Keep, Steps
from ..models.facts import PipelineFacts, images_a_prompt
from ..models.layers import TEXT_KINDS, select_layers
from ..models.pipeline import Pipeline
from ..prompts.tokenizing import PAD
from ..prompts.tokens import Prompt
from .aggregation import refines_itself, refining
from .presets import Preset, nothing_read

# Options of capture() that a run does not have: its preset, `ask` and `spots` set them, and its
# record has steps and heads alone.
NOT_IN_RUNS = frozenset(
    {"text_states", "among", "refine", "depth", "space", "queries", "keys", "text", "grid"}
)


def checked_capture(
    settings: Mapping[str, Any],
    words: Sequence[str] | None,
    prompts: Sequence[Prompt],
    branches: Sequence[str] = ("conditional", "both"),
) -> dict[str, Any]:
    """Return checked options of :func:`sdattn.capture`, with the token columns of ``words``; raise
    ValueError if the prompt would get no heatmaps or ``words`` is not a list."""
    if not isinstance(settings, Mapping):
        raise refuse("capture_options", settings, "a dictionary of options for `capture()`")
    known = [field.name for field in fields(Keep)]
    for name in settings:
        if name not in known:
            text = f"`capture()` has no option {name!r}.{did_you_mean(name, known)}"
            raise OptionError("capture_options", dict(settings), text)
    branch = settings.get("branch", "conditional")
    kinds = settings.get("kinds", TEXT_KINDS)
    is_refused = not NOT_IN_RUNS.isdisjoint(settings)
    if branch not in branches or not set(kinds).intersection(TEXT_KINDS) or is_refused:
        text = (
            "this shows where the words of the prompt go. For anything else use `capture()` around "
            "the pipeline."
        )
        raise OptionError("capture_options", dict(settings), text)
    settings = dict(settings)
    if "steps" in settings:
        settings["steps"] = Steps.of(settings["steps"])
    if "heads" in settings:
        settings["heads"] = Heads.of(settings["heads"])
    if words is None:
        return settings
    is_list = isinstance(words, Collection) and not isinstance(words, (str, bytes, Mapping))
    if not is_list or not len(words):
        raise refuse("words", words, "a list of words and phrases, or None for all")
    return {**settings, "tokens": columns_of(words, prompts)}


def capture_settings(
    pipe: Pipeline | PipelineFacts,
    preset: Preset,
    prompts: Sequence[Prompt],
    options: Mapping[str, Any],
    chosen: Mapping[str, Any] | None = None,
) -> Keep:
    """Return what a capture must keep for a preset, with the ``chosen`` options; raise
    ValueError if they conflict, or the run lacks what the preset reads."""
    facts = PipelineFacts.of(pipe)
    needs: dict[str, Any] = _of_joint_attention(facts, preset)
    _check_layers(facts, preset, chosen or {})
    # What the preset reads must be kept; so is what the user chose, unless it rules that out.
    if preset.each_head:
        needs["heads"] = "all"
    if preset.steps == "last":
        needs["steps"] = "last"
    if preset.among_words and prompts:  # a batch's plan has none yet
        images = images_a_prompt(facts, options)
        needs["among"] = []
        for one in prompts:
            needs["among"] += [columns_around(one)] * images
    if preset.needs_all_columns:
        needs["tokens"] = None
    chosen = dict(chosen or {})
    # all steps or heads include what any preset reads
    has_all = {name for name in ("steps", "heads") if name in chosen and chosen[name].is_all}
    clash = sorted(needs.keys() & chosen.keys() - has_all)
    if clash:
        names = ", ".join("words (tokens)" if name == "tokens" else name for name in clash)
        raise InvalidValueError(
            f"The preset {preset.name!r} sets {names} of the capture itself. Leave that out, "
            "or choose another preset."
        )
    if preset.part is not None and options.get("denoising_end") is None:
        # a run that ends early may have no such part
        needs["steps"] = _steps_of_part(facts, preset, preset.part, options)
    columns = kept_columns(preset, prompts, "refine" in needs)
    if columns:
        needs["tokens"] = columns
    return Keep.of(**{**needs, **chosen})


def _steps_of_part(
    facts: PipelineFacts, preset: Preset, part: RunPart, options: Mapping[str, Any]
) -> tuple[float, float]:
    """Return the part of the run to keep: with the last step if a preset reads the end of the run,
    however short it is. Refuse any other part that has no step in it."""
    begin, end = astuple(part)
    steps = known_steps(facts, options)
    # a second-order scheduler calls the model twice per step, except the first or the last
    if steps and end == 1:
        return min(begin, max(0.0, (2 * steps - 2.5) / (2 * steps - 1))), 1.0
    if not steps or part.passes(steps) or part.passes(2 * steps - 1):
        return begin, end
    text = (
        f"the preset {preset.name!r} reads the part of the run from {begin:.3g} to {end:.3g}, "
        "in which none of so few steps has its middle. Take more, or another preset."
    )
    raise OptionError("num_inference_steps", steps, text)


def known_steps(facts: PipelineFacts, options: Mapping[str, Any]) -> int | None:
    """Return how many steps a run will have; None if its options do not say."""
    if "num_inference_steps" not in facts.options or options.get("strength"):
        return None
    for name in ("timesteps", "sigmas"):
        if options.get(name):
            return len(options[name])
    return facts.option(options, "num_inference_steps")


def _of_joint_attention(facts: PipelineFacts, preset: Preset) -> dict[str, Any]:
    needs: dict[str, Any] = {}
    is_joint = refines_itself(facts.denoiser)
    if preset.space != "attention":
        needs["space"] = preset.space
        if not is_joint:
            raise InvalidTypeError(
                f"The preset {preset.name!r} compares the outputs that joint attention makes of "
                f"text and image, and a {type(facts.denoiser.model).__name__} has none. "
                "Choose another preset."
            )
    if preset.refine and is_joint:
        needs["refine"] = "self"
        if isinstance(preset.depth, tuple):
            needs["depth"] = preset.depth
    elif preset.refine:
        refining(facts.denoiser)  # or refuse
    return needs


def _check_layers(facts: PipelineFacts, preset: Preset, chosen: Mapping[str, Any]) -> None:
    """Refuse, before the run, layers that would give no heatmaps."""
    kinds = [kind for kind in chosen.get("kinds", TEXT_KINDS) if kind in TEXT_KINDS]
    found = facts.denoiser.layers
    layers = [(la.place, la.level) for la in select_layers(found, chosen.get("layers"), kinds)]
    if not preset.or_all and not any(preset.reads(*layer) for layer in layers):
        raise InvalidValueError(nothing_read(preset, layers))


def columns_of(words: Sequence[str], prompts: Sequence[Prompt]) -> list[int]:
    """Return the token columns of words and phrases in any of the prompts; raise KeyError for a
    word that is in none."""
    columns: set[int] = set()
    for word in words:
        errors = []
        for prompt in prompts:
            try:
                columns.update(*prompt.find(word))
            except KeyError as error:
                errors.append(error)
        if len(errors) == len(prompts):
            raise errors[0]
    return sorted(columns)


def kept_columns(preset: Preset, prompts: Sequence[Prompt], refined: bool) -> list[int] | None:
    """Return the columns to keep for a preset, None for all; ``refined`` maps cost time per
    column."""
    if not prompts or preset.needs_all_columns or not refined:
        return None
    return columns_around(*prompts)


def columns_around(*prompts: Prompt) -> list[int]:
    """Return the columns of words and special tokens, without those that are padding in all
    prompts."""
    columns = set()
    for one in prompts:
        for column, token in enumerate(one.tokens):
            if token.special != PAD:
                columns.add(column)
    return sorted(columns)
