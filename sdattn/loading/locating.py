"""Locating a model: a local folder or file, or the hub; why it could not be fetched from there."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import (
    AccessError,
    InvalidValueError,
    MissingFileError,
    MissingPackageError,
    did_you_mean,
)
from ..files.records import read_object
from ..models.demos import DEMOS

# The classes are huggingface_hub's and its HTTP library's, which differs between versions: by name.
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
_NOT_REACHED = (
    "the hub cannot be reached, and this machine's cache does not hold it. Check the connection, "
    "or pass a local folder."
)
_REASONS = {  # the first whose class is in the chain of causes counts
    "GatedRepoError": (
        f"access requires accepting its terms. Do so on its page there, and {_LOG_IN}."
    ),
    "RepositoryNotFoundError": (
        "there is nothing of that name, or it is private. Check the name; if it is private, "
        f"{_LOG_IN}."
    ),
    "OfflineModeIsEnabled": (
        "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, and this machine's cache does not hold it. "
        "Unset that, or pass a local folder."
    ),
    **dict.fromkeys(("TransportError", "ConnectionError", "Timeout"), _NOT_REACHED),
}


@contextmanager
def needs_the_hub(what: str) -> Iterator[None]:
    """Turn any error into an OSError that says why ``what`` cannot be fetched, and what to do."""
    try:
        yield
    except Exception as error:  # from httpx, the hub and the OS alike: it cannot be fetched
        raise AccessError(f"Could not load {what} from the hub: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    chain = list(_causes(error))
    names = set[str]()
    for cause in chain:
        names |= {kind.__name__ for kind in type(cause).__mro__}
    for name, text in _REASONS.items():
        if name in names:
            return text
    said = dict.fromkeys(" ".join(str(cause).split()) for cause in chain)
    return " Since: ".join(text for text in said if text)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and the errors that it was raised from or during, the last first."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def find_model(model: str | Path) -> Path | None:
    """Return the folder or file of a model, None for a hub id; raise FileNotFoundError if it is
    neither, ValueError if a folder holds no pipeline, ImportError for a demo that is not
    installed."""
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
    if is_hub_id(str(model)):
        return None
    raise MissingFileError(
        f"There is no model at {model}. Pass {' or '.join(map(repr, DEMOS))}, a diffusers folder, "
        f"a .safetensors file, or a hub id such as owner/name.{did_you_mean(model, DEMOS)}"
    )


def is_hub_id(name: str) -> bool:
    """Check whether a name can be one of the hub, ``"owner/name"``, and not a file's."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".safetensors")


def hub_index(name: str, revision: str | None = None) -> dict[str, Any]:
    """Return the ``model_index.json`` of a hub model, fetched if necessary; {} if it cannot be had,
    which loading the model then tells."""
    from huggingface_hub import hf_hub_download

    with suppress(Exception):  # any error
        return read_object(Path(hf_hub_download(name, "model_index.json", revision=revision)))
    return {}


def download(name: str, *, variant: str | None = None, revision: str | None = None) -> Path:
    """Return the folder of a hub model, fetched if necessary, without its pickles; raise OSError if
    it cannot be fetched, or has Python of its own to run."""
    from diffusers import DiffusionPipeline

    which = {"variant": variant, "revision": revision}
    with needs_the_hub(f"{name!r}, which is not a local folder,"):
        folder = DiffusionPipeline.download(
            name, use_safetensors=True, trust_remote_code=False, **which
        )
    return Path(folder)
