"""Another scheduler than the one that a pipeline was saved with."""

from typing import Any

from ..errors import OptionError

_FLOW = "FlowMatch"  # how the names of all that are of flow matching begin


def fitting_scheduler(name: str, own: str) -> Any:
    """The class of that name, which can take the place of a scheduler of the class ``own``.

    Raises:
        ValueError: diffusers has none of that name, or it does not go with the model; the message
            lists those that do.
    """
    import diffusers

    kinds = _diffusion(), tuple(each for each in dir(diffusers) if each.startswith(_FLOW))
    fitting = next((kind for kind in kinds if own in kind), (own,))
    if name not in fitting:
        known = name.endswith("Scheduler") and hasattr(diffusers, name)
        why = f"does not go with this model, whose own is {own}" if known else "is unknown"
        raise OptionError("scheduler", name, f"it {why}. Pass one of {', '.join(sorted(fitting))}.")
    return getattr(diffusers, name)


def _diffusion() -> tuple[str, ...]:
    """Those that diffusers lists as exchangeable, and two for distilled models, which take
    the same settings."""
    from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers

    return (*(each.name for each in KarrasDiffusionSchedulers), "LCMScheduler", "TCDScheduler")
