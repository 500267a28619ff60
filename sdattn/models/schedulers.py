"""Another scheduler than the one that a pipeline was saved with."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .loading_options import LoadingOptions


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

    names = sorted(each for each in dir(diffusers) if each.endswith("Scheduler"))
    fitting = [each for each in names if _fits(each, own)]
    if name not in fitting:
        why = f"does not go with this model, whose own is {own}" if name in names else "is unknown"
        raise OptionError("scheduler", name, f"it {why}. Pass one of {{0}}.", ", ".join(fitting))
    return getattr(diffusers, name)


def _fits(name: str, own: str) -> bool:
    """Whether both are of diffusion, with a schedule of betas, or both of flow matching."""
    return _kind(name) == _kind(own) != "" or name == own


def _kind(name: str) -> str:
    import diffusers

    if name.startswith("FlowMatch"):
        return "flow"
    known = inspect.signature(getattr(diffusers, name).__init__).parameters
    return "diffusion" if "beta_schedule" in known else ""
