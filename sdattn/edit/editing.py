import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..attention import level_grids
from ..control.blend import LocalBlend
from ..control.controllers import (
    AttentionControlEdit,
    AttentionRefine,
    AttentionReplace,
    AttentionReweight,
    checked_weights,
    step_end,
)
from ..control.registration import register_attention_control
from ..errors import (
    InvalidValueError,
    OptionError,
    SdattnWarning,
    option_names,
    refuse,
    warn,
)
from ..files.records import plain
from ..follow.run_part import Span
from ..inversion.invert import Inversion, psnr
from ..maps.presets import Preset
from ..models.facts import PipelineFacts, is_guided, latent_size, model_passes
from ..models.families import edits_of
from ..models.pipeline import Options, Pipeline
from ..models.pipeline_call import one_at_a_time
from ..models.values import checked_prompts, seeds_of
from ..prompts.matching import blended_words, edited_words, is_swap
from ..prompts.tokens import Prompt
from ..runs.editrun import EditRun
from ..runs.info import Edited
from ..runs.preparing import Order, loaded_facts, prepare
from ..runs.sampling import sample
from .given_samples import OTHERS, asked_scheduler

Mode = Literal["auto", "replace", "refine", "reweight"]


@one_at_a_time
def edit(
    pipe: Pipeline | str | Path,
    source: str,
    target: str | Sequence[str],
    *,
    seed: int | Sequence[int] | None = 0,
    mode: Mode = "auto",
    cross_replace_steps: Span | Mapping[str, Span] | None = None,
    self_replace_steps: Span | None = None,
    blend: str | Sequence[str | Sequence[str]] = (),
    weights: Mapping[str, float] | None = None,
    max_self_queries: int | None = None,
    inversion: Inversion | None = None,
    preset: str | Preset = "default",
    refine: Literal["self"] | None = None,
    max_bytes: int | None = None,
    **options: Any,
) -> EditRun:
    """Draw a prompt and its edited versions from the same noise, and keep the layout.

    Args:
        pipe: a text-to-image pipeline of SD 1.x, 2.x, SDXL, Stable Diffusion 3 or FLUX.1; or a
            model to load, ``"demo"``.
        source: prompt whose image is kept.
        target: the edited prompt, or several, which run in one batch.
        seed: seed of the noise that all images share, None for a random one; drawn on the CPU.
        mode: ``"replace"`` swaps words one for one; ``"refine"`` adds or removes words;
            ``"reweight"`` keeps the words and changes their weights. ``"auto"`` takes reweight for
            the same text, replace if the words match best at the same places, else refine.
        cross_replace_steps: part of the run that uses the source's cross-attention (in joint
            attention, from image to text): 0.8, ``(0.2, 0.8)``, or by word ``{"default_": 0.8,
            "star": 0.4}``. Default: measured best for the family.
        self_replace_steps: the same for self-attention (in joint attention, from image to image).
        blend: a word or several; the image changes only where they are. Each prompt must have one
            of them, or a word in the place of one of them. Or the words of each prompt, source
            first, ``[["cat"], ["dog"]]``, as prompt-to-prompt and a run's record have them.
        weights: factor of words of the targets, in addition to any mode.
        max_self_queries: largest number of queries at which self-attention is edited; default, in a
            UNet: at a quarter of the latent's sides, 16x16 for 64x64.
        inversion: result of :func:`invert` for a real image and ``source``. The first image is then
            that image, reconstructed; steps, guidance and size are the inversion's.
        preset, refine, max_bytes, options: as for :func:`sdattn.generate`.

    Returns:
        EditRun: images, and heatmaps of the attention as it was used, edits included.

    Raises:
        TypeError: another kind of pipeline.
        ValueError: prompts that do not fit the mode, an impossible number, an option of another
            type, or maps beyond ``max_bytes``.
        KeyError: a word that is in none of the prompts. All are raised before the first step.
    """
    of_call: dict[str, Any] = {"preset": preset, "refine": refine, "max_bytes": max_bytes}
    facts = loaded_facts(pipe, [source, target], options, seed=seed, own=_OWN, **of_call)
    options = {**options, **_of_inversion(source, inversion, options)}
    asked = EditOptions(
        mode, cross_replace_steps, self_replace_steps, blend, weights, max_self_queries
    )
    # Inside the replay: the scheduler there decides how many passes the controller counts.
    with inversion.replay(facts.pipe) if inversion else nullcontext():
        plan = plan_edit(facts, source, target, asked, options, seed=seed, **of_call)
        order = plan.order
        read = order.prompts
        if inversion:
            latents = inversion.noise.repeat(len(read), 1, 1, 1)
            order = replace(order, options={**order.options, "latents": latents})
        with register_attention_control(facts.pipe, plan.control, layers=plan.layers):
            run = sample(order)
    edited = plan.edited
    if inversion:
        # How close the first image came to the user's says how far the edits can be trusted.
        near = min(psnr(inversion.image, run.images[0]), 99.0)
        edited = replace(edited, reconstruction_psnr=near)
    image_runs = []
    for image_run in run:
        # with an inversion the noise is the image's own
        seed = None if inversion else image_run.settings.seed
        settings = replace(image_run.settings, edited=edited, seed=seed)
        image_runs.append(replace(image_run, settings=settings))
    words = [edited_words(read, i, list(weights or ())) for i in range(len(read))]
    return EditRun(image_runs, run.store, run.layers, words, edited)


edit_image = edit
"""The name of :func:`edit` at the top of the package, where ``sdattn.edit`` is this room."""


@dataclass(frozen=True)
class EditOptions:
    mode: str = "auto"
    cross_replace_steps: Span | Mapping[str, Span] | None = None
    self_replace_steps: Span | None = None
    blend: Any = ()  # words; once checked, those of each prompt
    weights: Mapping[str, float] | None = None
    max_self_queries: int | None = None


_OWN = (
    *(field.name for field in fields(EditOptions)),
    *("seed", "inversion", "preset", "refine", "max_bytes"),
)


@dataclass(frozen=True)
class EditPlan:
    """Checked edit that has not run yet, made by :func:`plan_edit`."""

    order: Order
    control: AttentionControlEdit
    layers: list[str]  # that call it
    edited: Edited


def plan_edit(
    pipe: Pipeline | PipelineFacts,
    source: str,
    target: str | Sequence[str],
    asked: EditOptions,
    options: Options,
    *,
    seed: int | Sequence[int] | None = 0,
    **of_call: Any,
) -> EditPlan:
    """Check everything that :func:`edit` refuses, before anything runs; ``of_call`` are its other
    arguments that :func:`sdattn.generate` has too."""
    facts = PipelineFacts.of(pipe)
    known = edits_of(facts.pipe)
    weights = checked_weights(asked.weights)
    texts = [source, *checked_prompts(target)]
    _check_own(options)
    seeds = seeds_of(seed) * len(texts)
    order = prepare(facts, texts, options, seed=seeds, own=_OWN, **of_call)
    read = order.prompts
    cross = asked.cross_replace_steps
    self_ = asked.self_replace_steps
    asked = replace(
        asked,
        mode=_mode(read, asked.mode, weights),
        cross_replace_steps=known.cross if cross is None else cross,
        self_replace_steps=known.self_ if self_ is None else self_,
        blend=blended_words(read, asked.blend),
        weights=weights,
    )
    control = _controller(order, asked)
    if control.local_blend is not None:
        _tell_of_lost_blends(order, control.local_blend.start)
    order = replace(order, options={**order.options, "callback_on_step_end": step_end(control)})
    settings = {name: value for name, value in vars(asked).items() if name != "max_self_queries"}
    targets = [prompt.text for prompt in read[1:]]
    edited = Edited(prompt=source, targets=targets, **plain(settings))
    return EditPlan(order, control, known.layers(facts.denoiser.layers), edited)


def _tell_of_lost_blends(order: Order, start: int) -> None:
    """Warn if the scheduler does not go on from latents that are blended from pass ``start`` on."""
    passes, given = asked_scheduler(order.facts, order.options)
    blended = range(start + 1, passes)  # the passes that get them
    lost = len(set(blended) - given)
    if lost:
        warn(
            f"A {type(order.facts.pipe.scheduler).__name__} goes on from samples of its own in "
            f"{lost} of the {len(blended)} steps after a blend, so the blend of latents is lost "
            f"there, and the images may differ where `blend` keeps them alike. {OTHERS}",
            SdattnWarning,
        )


def _of_inversion(source: str, inversion: Inversion | None, options: Options) -> dict[str, object]:
    """Return the options that a real image's inversion fixes."""
    if inversion is None:
        return {}
    if not isinstance(inversion, Inversion):
        raise refuse("inversion", inversion, "what `invert()` returned")
    if source != inversion.prompt:
        raise InvalidValueError(
            f"The image was inverted with {inversion.prompt!r} and the source is {source!r}. "
            "Pass that prompt as the source, or invert again with this one."
        )
    fixed = inversion.options()
    refused = sorted({*fixed, "negative_prompt", "eta"} & set(options))
    if refused:
        raise InvalidValueError(
            f"The inversion sets {option_names(refused)}. Invert again with other settings."
        )
    del fixed["latents"]  # one of them for each prompt
    return fixed


def _check_own(options: Options) -> None:
    """Refuse options that the edit sets itself, and several images of a prompt."""
    if options.get("num_images_per_prompt", 1) != 1:
        text = "an edit makes one image of each prompt. Call `edit_image()` once for each seed."
        raise OptionError("num_images_per_prompt", options["num_images_per_prompt"], text)
    ours = {"callback_on_step_end", "callback_on_step_end_tensor_inputs", "latents"}
    schedule = {"timesteps", "sigmas", "denoising_end"}
    refused = sorted((ours | schedule) & set(options))
    if refused:
        raise InvalidValueError(
            f"`edit_image()` sets {option_names(refused)} itself. Use register_attention_control()."
        )


def _mode(prompts: Sequence[Prompt], mode: str, weights: Mapping[str, float]) -> str:
    modes = ("auto", "replace", "refine", "reweight")
    if mode not in modes:
        raise refuse("mode", mode, modes)
    if mode == "reweight" and not weights:
        text = "`mode='reweight'` needs a factor for a word, e.g. `weights={'cat': 2.0}`."
        raise InvalidValueError(text)
    source, *targets = prompts
    if mode != "auto" or not targets:  # without a target the controller says what is wrong
        return "replace" if mode == "auto" else mode
    if all(target.text == source.text for target in targets):
        if not weights:
            raise InvalidValueError(
                "The target is the source and no weights were given, so there is nothing to edit. "
                "Change a word, or pass `weights={'word': 2.0}`."
            )
        return "reweight"
    return "replace" if all(is_swap(source, target) for target in targets) else "refine"


def _controller(order: Order, asked: EditOptions) -> AttentionControlEdit:
    facts, prompts, options = order.facts, order.prompts, order.options
    passes = model_passes(facts, options)
    most = asked.max_self_queries
    if most is None:  # a transformer has one level
        levels = min(facts.denoiser.levels, 3)
        most = math.prod(level_grids(latent_size(facts, options), levels)[-1])
    common: dict[str, Any] = {
        "prompts": prompts,
        "num_steps": passes,
        "cross_replace_steps": asked.cross_replace_steps,
        "self_replace_steps": asked.self_replace_steps,
        "local_blend": LocalBlend(prompts, asked.blend, passes) if asked.blend else None,
        "max_self_queries": most,
        "guidance": "batch" if is_guided(facts, options) else None,
        "kinds": ("cross",) if asked.blend else None,
    }
    weights = asked.weights
    if asked.mode == "reweight":
        return AttentionReweight(weights=weights, **common)
    control = {"replace": AttentionReplace, "refine": AttentionRefine}[asked.mode](**common)
    return AttentionReweight(weights=weights, controller=control, **common) if weights else control
