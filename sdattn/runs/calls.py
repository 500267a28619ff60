"""Checks of a call, before its model is loaded if it has a name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..keep.budget import Budget
from ..loading.facts import check_names
from ..loading.pipelines import facts_of
from ..maps.presets import Preset, preset_of
from ..models.facts import PipelineFacts
from ..models.pipeline import Options
from ..models.values import check_text, check_values, checked_prompts, checked_seeds, whole
from ..prompts.words import empty_prompt


def checked_facts(
    pipe: object, prompts: object, options: Options, *, image: object = None, **checked: Any
) -> PipelineFacts:
    """Return the facts of a pipeline, which is loaded, after :func:`check_call`, if it is a name;
    see :func:`sdattn.loading.pipelines.facts_of`. ``checked`` are further arguments of the
    check."""
    texts = prompts if isinstance(prompts, list) else [prompts]
    return facts_of(
        pipe, image, *texts, before=lambda model: check_call(model, texts, options, **checked)
    )


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
        several = whole(seed) is None and isinstance(seed, (list, tuple))
        for one in seed if several else [seed]:  # type: ignore[union-attr]
            checked_seeds(one)
    preset_of(preset, refine)
    Budget.of(max_bytes)
    check_values(options)
    check_names(str(model), options, own)
