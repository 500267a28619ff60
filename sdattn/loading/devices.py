"""The devices of this machine, and which one to use."""

import torch

from ..errors import OptionError, refuse
from ..models.pipeline import Pipeline

# Dtypes that weights are loaded in, by their names and by short ones
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def best_device() -> str:
    return next((kind for kind, number in _gpus().items() if number), "cpu")


def checked_device(device: str | torch.device | None) -> torch.device:
    """Return the requested or the best device; raise ValueError if torch here cannot use it."""
    try:
        chosen = torch.device(device or best_device())
    except RuntimeError:
        raise _refusal(device, "torch knows no device of that name") from None
    number = _gpus().get(chosen.type)
    if number is not None and number <= (chosen.index or 0):
        raise _refusal(device, _why_not(chosen.type, number))
    return chosen


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return a dtype, also by its name; raise ValueError for any but :data:`DTYPES`."""
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in DTYPES:
        raise refuse("dtype", name, DTYPES)
    return None if dtype is None else DTYPES[name]


def place(pipe: Pipeline, device: torch.device, offload: str | None) -> Pipeline:
    """Move the pipeline to a device; with ``offload`` its weights stay on the CPU and move when
    needed: ``"model"`` one model at a time, ``"sequential"`` and ``"group"`` one layer."""
    if offload is None:
        return pipe.to(device)
    if offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        # Layers, since a VAE's blocks are not found; no streams, which predict the layers' order:
        # capture of another text runs some of them twice.
        pipe.enable_group_offload(device, offload_type="leaf_level")
    return pipe


def _gpus() -> dict[str, int]:
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
    here = []
    for kind, number in _gpus().items():
        here += [f"{kind}:{i}" for i in range(number)]
    found = ", ".join([*here, "cpu"])
    text = f"{reason}. This machine has: {found}. Pass one of these, or leave it out for the best."
    return OptionError("device", str(device), text)
