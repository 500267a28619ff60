from typing import Any

from ..errors import OptionError, did_you_mean

_FLOW = "FlowMatch"  # prefix of all flow-matching schedulers


def fitting_scheduler(name: str, own: str) -> Any:
    """Return the class of that name; raise ValueError if it cannot replace ``own``."""
    import diffusers

    kinds = _diffusion(), tuple(each for each in dir(diffusers) if each.startswith(_FLOW))
    fitting = next((kind for kind in kinds if own in kind), (own,))
    if name not in fitting:
        known = name.endswith("Scheduler") and hasattr(diffusers, name)
        why = f"does not go with this model, whose own is {own}" if known else "is unknown"
        near = did_you_mean(name, fitting)
        text = f"it {why}. Pass one of {', '.join(sorted(fitting))}.{near}"
        raise OptionError("scheduler", name, text)
    return getattr(diffusers, name)


def _diffusion() -> tuple[str, ...]:
    """Return diffusers' exchangeable schedulers, and two for distilled models."""
    from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers

    return (*(each.name for each in KarrasDiffusionSchedulers), "LCMScheduler", "TCDScheduler")
