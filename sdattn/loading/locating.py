"""Locating a model: a demo, a local folder or file, or a name of the hub."""

from pathlib import Path

from ..errors import InvalidValueError, MissingFileError, MissingPackageError, did_you_mean
from ..models.demos import DEMOS
from .repository import HubName


def find_model(model: str | Path) -> Path | None:
    """Return the folder or file of a model, None for a name of the hub; raise FileNotFoundError if
    it is neither, ValueError if a folder holds no pipeline or an address is not the hub's,
    ImportError for a demo that is not installed."""
    path = DEMOS.get(str(model)) or Path(model).expanduser()
    if path.is_dir() and not (path / "model_index.json").is_file():
        if path in DEMOS.values():
            raise MissingPackageError(
                f"The model {model} is in a package of its own, sdattn-demos: in a clone of "
                "sdattn, pip install ./demos"
            )
        raise InvalidValueError(
            f"{path} is a folder without model_index.json, so it holds no pipeline. Pass a "
            "folder made by save_pretrained."
        )
    if path.is_file() or path.is_dir():
        return path
    if HubName.read(str(model)) is not None:
        return None
    raise MissingFileError(
        f"There is no model at {model}. Pass {' or '.join(map(repr, DEMOS))}, a diffusers folder, "
        f"a .safetensors file, or a hub id such as owner/name.{did_you_mean(model, DEMOS)}"
    )
