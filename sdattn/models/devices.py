"""The devices of this machine: which to take, and which there are."""

import torch

from ..errors import OptionError


def best_device() -> str:
    """``"cuda"``, ``"mps"`` or ``"cpu"``, the first that this machine has."""
    return next((kind for kind, number in _gpus().items() if number), "cpu")


def checked_device(device: str | torch.device | None) -> torch.device:
    """The device that is asked for, the best one for None.

    Raises:
        ValueError: this machine's torch cannot use it, or knows none of that name.
    """
    try:
        found = torch.device(device or best_device())
    except RuntimeError:
        raise _refusal(device, "torch knows no device of that name") from None
    number = _gpus().get(found.type)
    if number is not None and number <= (found.index or 0):
        raise _refusal(device, _why_not(found.type, number))
    return found


def _gpus() -> dict[str, int]:
    """How many there are of each kind that is looked for."""
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"cuda": cuda, "mps": int(torch.backends.mps.is_available())}


def _why_not(kind: str, number: int) -> str:
    built = {
        "cuda": torch.version.cuda is not None or torch.version.hip is not None,
        "mps": torch.backends.mps.is_built(),
    }
    if not built[kind]:
        return f"this torch ({torch.__version__}) is built without {kind.upper()}"
    return "there is none of that number" if number else "torch finds no such GPU and its driver"


def _refusal(device: object, reason: str) -> OptionError:
    gpus = [f"{kind}:{i}" for kind, number in _gpus().items() for i in range(number)]
    here = ", ".join([*gpus, "cpu"])
    advice = "{0}. This machine has: {1}. Pass one of these, or leave it out for the best."
    return OptionError("device", str(device), advice, reason, here)
