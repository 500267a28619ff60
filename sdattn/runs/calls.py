"""Facts of the pipeline that a run is called with, and checks of the call, before a model is loaded
if the pipeline is a name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InvalidTypeError
from ..keep.budget import Budget
from ..loading.facts import check_names
from ..loading.pipelines import load_pipeline
from ..maps.presets import Preset, preset_of
from ..models.denoiser import held_model
from ..models.facts import PipelineFacts
from ..models.pipeline import Options
from ..models.values import check_text, check_values, checked_prompts, checked_seeds
from ..prompts.words import empty_prompt


def checked_facts(
    pipe: Any, prompts: object, options: Options, *, image: object = None, **checked: Any
) -> PipelineFacts:
    """Return the facts of a pipeline, which is loaded, after :func:`check_call` with ``checked``
    as further arguments, if it is a name that :func:`sdattn.load_pipeline` takes; raise TypeError
    for anything else, also where a prompt or the image is the pipeline."""
    texts = prompts if isinstance(prompts, list) else [prompts]
    is_swapped = any(held_model(other) is not None for other in (image, *texts))
    if isinstance(pipe, (str, Path)) and not is_swapped:
        check_call(pipe, texts, options, **checked)
        pipe = load_pipeline(pipe)
    facts = PipelineFacts.of(pipe)
    if facts.denoiser.pipeline is None:
        raise InvalidTypeError(
            f"A {type(pipe).__name__} is a pipeline's model alone, which draws nothing by itself. "
            "Pass the pipeline; `capture()` takes a model too."
        )
    return facts


def check_call(
    model: str | Path,
    prompts: list[object],
    options: Options,
    *,
    seed: int | Sequence[int] | None = 0,
    preset: str | Preset = "default",
    refine: str | None = None,
    max_bytes: int | Budget | None = None,
    own: Sequence[str] = (),
) -> None:
    """Raise as the run would for what no model could take. Each of ``prompts`` is one or several;
    ``own`` are the caller's own options, which a misspelt name may mean."""
    texts = [text for several in prompts for text in checked_prompts(several)]
    for text in (text for text in texts if isinstance(text, str)):
        check_text(text, "prompt")
        if not text.strip():
            raise empty_prompt(text)
    if seed is not None:
        for image_seed in seed if isinstance(seed, (list, tuple)) else [seed]:
            checked_seeds(image_seed)
    preset_of(preset, refine)
    Budget.of(max_bytes)
    check_values(options)
    check_names(str(model), options, own)
