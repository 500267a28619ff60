"""Where a model lies: a folder or a file of this machine, or the hub."""

import re
from pathlib import Path

from ..errors import InvalidValueError, MissingFileError
from ..models.demos import DEMOS, LORAS
from .hub import needs_the_hub

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def find_model(model: str | Path) -> Path | None:
    """The folder or file of what :func:`load_pipeline` takes; None for a hub id.

    Raises:
        FileNotFoundError: there is neither, and it is no hub id.
        ValueError: the folder holds no pipeline.
    """
    path = DEMOS.get(str(model)) or Path(model).expanduser()
    if path.is_dir() and not (path / "model_index.json").is_file():
        raise InvalidValueError(
            f"{path} is a folder without model_index.json, so it holds no pipeline. Pass a "
            "folder made by save_pretrained."
        )
    if path.is_file() or path.is_dir():
        return path
    if is_hub_id(str(model)):
        return None
    raise MissingFileError(
        f"There is no model at {model}. Pass {' or '.join(map(repr, DEMOS))}, a diffusers folder, "
        "a .safetensors file, or a hub id such as owner/name."
    )


def find_lora(name: str) -> Path:
    """Where a LoRA would be if it is on this machine: the demo model's by its name, others by their
    path."""
    return LORAS.get(name) or Path(name).expanduser()


def is_hub_id(name: str) -> bool:
    """Whether a name can be one of the hub, ``"owner/name"``, and is not that of a file."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".safetensors")


def download(name: str, *, variant: str | None = None, revision: str | None = None) -> Path:
    """The folder of a model of the hub, fetched where it is not there yet, without its pickles.

    Args:
        name: ``"owner/name"``.
        variant: of the files of weights.
        revision: a branch, a tag or a commit.

    Raises:
        OSError: it cannot be had, or has Python of its own to run.
    """
    from diffusers import DiffusionPipeline

    which = {"variant": variant, "revision": revision}
    with needs_the_hub(f"{name!r}, which is no folder here,"):
        found = DiffusionPipeline.download(
            name, use_safetensors=True, trust_remote_code=False, **which
        )
    return Path(found)
