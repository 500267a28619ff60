"""Another scheduler than the one that a pipeline was saved with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .options import LoadingOptions

_FLOW = "FlowMatch"  # how the names of all that are of flow matching begin


def chosen_scheduler(
    options: LoadingOptions, folder: Path, index: Mapping[str, Any]
) -> dict[str, Any]:
    """The scheduler that is asked for, with the settings of the pipeline's own, as
    ``from_pretrained`` takes it; empty where none is asked for.

    Raises:
        ValueError: diffusers has none of that name, or it does not go with the model.
    """
    if options.scheduler is None:
        return {}
    kind = fitting_scheduler(options.scheduler, index["scheduler"][1])
    return {"scheduler": kind.from_pretrained(folder, subfolder="scheduler")}


def fitting_scheduler(name: str, own: str) -> Any:
    """The class of that name, which can take the place of a scheduler of the class ``own``.

    Raises:
        ValueError: as above; the message lists those that can.
    """
    import diffusers

    kinds = _diffusion(), tuple(each for each in dir(diffusers) if each.startswith(_FLOW))
    fitting = next((kind for kind in kinds if own in kind), (own,))
    if name not in fitting:
        known = name.endswith("Scheduler") and hasattr(diffusers, name)
        why = f"does not go with this model, whose own is {own}" if known else "is unknown"
        text = f"it {why}. Pass one of {{0}}."
        raise OptionError("scheduler", name, text, ", ".join(sorted(fitting)))
    return getattr(diffusers, name)


def _diffusion() -> tuple[str, ...]:
    """Those that diffusers lists as exchangeable, and two for distilled models, which take
    the same settings."""
    from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers

    return (*(each.name for each in KarrasDiffusionSchedulers), "LCMScheduler", "TCDScheduler")
