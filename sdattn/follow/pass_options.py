"""Options of a reader of passes: which rows to keep, and their place in the batch."""

from __future__ import annotations

from typing import Literal

from ..errors import InvalidValueError, OptionError, refuse
from ..models.denoiser import Denoiser
from ..models.denoiser_call import unwrapped
from ..models.families.own import is_own
from ..models.guidance import Branch, Order
from ..models.values import whole

BRANCHES: dict[str, tuple[Branch, ...]] = {
    "conditional": ("conditional",),
    "unconditional": ("unconditional",),
    "both": ("unconditional", "conditional"),
}
Guidance = Literal["auto", "batch", "passes"]  # where the unconditional rows are; None: nowhere
TOLD: dict[str | None, tuple[Order, ...]] = {
    "batch": (("unconditional", "conditional"),),
    "passes": (("unconditional",), ("conditional",)),
    None: (("conditional",),),
}


def check_options(
    denoiser: Denoiser,
    branch: str,
    guidance: str | None,
    latent_size: tuple[int, int] | None,
    step_call: int | None = None,
) -> None:
    """Raise ValueError for options of a capture that do not fit its model."""
    if step_call is not None and (whole(step_call) is None or step_call < 0):
        raise refuse("step_call", step_call, "the number of a call in its step, from 0, or None")
    if guidance not in ("auto", *TOLD):
        raise refuse("guidance", guidance, ("auto", *TOLD))
    if latent_size is not None and not _needs_size(denoiser):
        text = f"a {type(denoiser.model).__name__} knows its own. Leave it out."
        raise OptionError("latent_size", latent_size, text)
    knows = denoiser.pipeline is not None or guidance in ("batch", "passes")
    if branch not in BRANCHES or (branch != "conditional" and not knows):
        text = (
            f"pass one of {', '.join(BRANCHES)}; on a model without its pipeline only "
            "'conditional', which keeps every row, or say with guidance= where the unconditional "
            "rows are."
        )
        raise OptionError("branch", branch, text)
    _refuse_shards(denoiser.model)


def refuse_both_in_turn(denoiser: Denoiser) -> None:
    """Raise ValueError for both branches if each has its own passes."""
    kind = type(denoiser.pipeline or denoiser.model).__name__
    text = (
        f"a {kind} runs the prompt and the negative prompt in turn. Nest two captures, one with "
        "branch='unconditional'."
    )
    raise OptionError("branch", "both", text)


def _needs_size(denoiser: Denoiser) -> bool:
    model = unwrapped(denoiser.model)
    if denoiser.family.grid_argument is not None:  # in values, which the meta device has none of
        return any(part.is_meta for part in model.parameters())
    return is_own(model)


def _refuse_shards(model: object) -> None:
    """Refuse a model that sees only a part of the sequence, or of the heads."""
    config = getattr(unwrapped(model), "_parallel_config", None)
    for name in ("context", "tensor"):
        if getattr(config, f"{name}_parallel_config", None) is not None:
            raise InvalidValueError(
                f"The {type(unwrapped(model)).__name__} runs under {name} parallelism "
                "(enable_parallelism), where each process sees a part of the attention. Capture a "
                "model that is loaded without it."
            )
