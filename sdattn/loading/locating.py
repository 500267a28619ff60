"""Locating a model: a local folder or file, or the hub."""

import re
from pathlib import Path

from ..errors import InvalidValueError, MissingFileError, did_you_mean
from ..models.demos import DEMOS, LORAS
from .hub import needs_the_hub

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def find_model(model: str | Path) -> Path | None:
    """Return the folder or file of a model, None for a hub id; raise FileNotFoundError if it is
    neither, ValueError if a folder holds no pipeline."""
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
        f"a .safetensors file, or a hub id such as owner/name.{did_you_mean(model, DEMOS)}"
    )


def find_lora(name: str) -> Path:
    """Return a LoRA's path on this machine: the demo's by its name, others by their path."""
    return LORAS.get(name) or Path(name).expanduser()


def is_hub_id(name: str) -> bool:
    """Check whether a name can be one of the hub, ``"owner/name"``, and not a file's."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".safetensors")


def download(name: str, *, variant: str | None = None, revision: str | None = None) -> Path:
    """Return the folder of a hub model, fetched if necessary, without its pickles; raise OSError if
    it cannot be fetched, or has Python of its own to run."""
    from diffusers import DiffusionPipeline

    which = {"variant": variant, "revision": revision}
    with needs_the_hub(f"{name!r}, which is not a local folder,"):
        found = DiffusionPipeline.download(
            name, use_safetensors=True, trust_remote_code=False, **which
        )
    return Path(found)
