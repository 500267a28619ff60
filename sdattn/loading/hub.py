"""Fetching a model from the hub, whatever its repository holds."""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..errors import InvalidValueError, SdattnError
from ..files.records import read_object
from .folder import PipelineFolder
from .options import LoadingOptions
from .repository import LORA, HubName, Repository, cache_of, some_of
from .single_files import Header
from .weights import PICKLES

_TRANSFORMERS = ("model.safetensors", "model.safetensors.index.json")


@contextmanager
def named_on_hub(name: HubName | None) -> Iterator[None]:
    """Name the files of a model of the hub in errors as they are named there, not by their places
    in the cache."""
    try:
        yield
    except SdattnError as error:
        if name is not None:
            place = re.escape(str(cache_of(name) / "snapshots")) + r"[/\\]\w+"
            error.args = (re.sub(place, name.repo, str(error)), *error.args[1:])
        raise


@dataclass(frozen=True)
class HubModel:
    """A model of the hub, whose settings are on this machine, and whose weights may not be.

    Attributes:
        folder: the folder of its settings, judged.
        names: the files that it is made of.
        is_file: True for a checkpoint, whose settings are another model's.
    """

    repository: Repository
    folder: PipelineFolder
    names: list[str]
    is_file: bool = False

    @classmethod
    def find(cls, name: HubName, options: LoadingOptions, *, settings: bool = False) -> "HubModel":
        """Find a model, and fetch its settings, which weigh little, so that nobody waits for the
        weights of a model that is refused. Pickles and code are never fetched.

        Args:
            settings: True for a model that is not going to be loaded; if the hub cannot be asked,
                its weights may be missing from the cache.

        Raises:
            ValueError: it holds no pipeline, asks for code of its own or has only pickles, or an
                option does not fit it.
            TypeError: the pipeline's denoiser is of no known family.
            OSError: it cannot be fetched; see :func:`asking_hub`.
        """
        repository = Repository.find(name)
        file = name.file or _only_checkpoint(repository)
        if file is not None:
            repository.check(file)
            options.check_fit(str(name), is_file=True)
            is_here = not repository.missing([file])
            header = (
                Header.of_file(repository.fetch([file]) / file)
                if is_here
                else Header.on_hub(repository, file)
            )
            there = header.settings_folder(options.config)
            folder = PipelineFolder.judged(there, options, settings=True)
            return cls(repository, folder, [file], is_file=True)
        options.check_fit(str(name), is_file=False)
        alone = settings and repository.refused is not None
        folder = settings_in(repository, options, settings=alone)
        folder.dtype(None, half=True)
        return cls(repository, folder, folder.files.settings + folder.files.weights)

    def fetch(self) -> Path:
        """Return the folder, or the checkpoint's file, with all that is missing."""
        there = self.repository.fetch(self.names)
        self.repository.warn_if_not_asked()
        return there / self.names[0] if self.is_file else there

    @property
    def missing(self) -> list[str]:
        """The files that are not on this machine."""
        return self.repository.missing(self.names)


def settings_in(
    repository: Repository, options: LoadingOptions, *, settings: bool = False
) -> PipelineFolder:
    """Return the folder of a repository's pipeline with its settings, which weigh little, and
    judge it by the names of all its files; with ``settings`` it may have no weights."""
    judge = functools.partial(
        PipelineFolder.judged, repository.folder, options, repository.files, settings=settings
    )
    try:
        repository.fetch(["model_index.json"])
        repository.fetch(judge().files.settings)
        return judge()  # a part's configuration may ask for code
    except InvalidValueError:
        if repository.refused is None:
            raise
        raise repository.only_a_part() from repository.refused


def _only_checkpoint(repository: Repository) -> str | None:
    """Return the one checkpoint of a repository that is not a pipeline's folder, None for such a
    folder; raise ValueError for any other content."""
    names = sorted(repository.files)
    if "model_index.json" in names:
        return None
    if LORA in names or "adapter_config.json" in names or "lora" in repository.card.get("tags", ()):
        _refuse_lora(repository)
    files = [name for name in names if "/" not in name and name.endswith(".safetensors")]
    if "config.json" in names:
        _refuse_a_part(repository)
    if len(files) == 1 and files[0] not in (*_TRANSFORMERS, "learned_embeds.safetensors"):
        return files[0]
    repo = repository.name.repo
    if len(files) > 1 and not {*_TRANSFORMERS} & {*names}:
        paths = some_of([f"{repo}/{name}" for name in files])
        text = f"has {len(files)} checkpoints. Pass one of them: {paths}"
    elif found := [name for name in names if name.startswith("learned_embeds")]:
        text = (
            "is a textual inversion, words for another model. Load that model in Python, call "
            f"pipe.load_textual_inversion({repo!r}), and pass it to sdattn's functions"
        )
    elif found := [name for name in names if name.endswith(PICKLES)]:
        text = (
            f"has its weights as {found[0]} and not as .safetensors. Pickles are not read, since "
            "they can run code. Look for a `revision` or another model with .safetensors, or "
            "convert the file yourself, if you trust its source, and pass the result"
        )
    elif found := [name for name in names if name.endswith(".gguf")]:
        text = (
            f"has GGUF files, {found[0]} for one, which are a denoiser alone. Download one, and "
            "pass `quantization='gguf:FILE'` with the model that it was made from"
        )
    elif "modular_model_index.json" in names:
        text = "is a modular pipeline. Load it yourself, and pass it to sdattn's functions"
    else:
        has = f"It has {some_of(names)}" if names else "It has no files"
        text = f"has no model_index.json and no .safetensors checkpoint. {has}"
    raise InvalidValueError(f"{repo} on the hub {text}.")


def _refuse_lora(repository: Repository) -> NoReturn:
    base = repository.card.get("base_model")
    base = base[0] if isinstance(base, list) and base else base
    repo = repository.name.repo
    if isinstance(base, str):
        text = f"is a LoRA for {base}. Pass `model={base!r}` and `lora={repo!r}`."
    else:
        text = f"is a LoRA, not a model. Pass its model, and `lora={repo!r}`."
    raise InvalidValueError(f"{repo} on the hub {text}")


def _refuse_a_part(repository: Repository) -> NoReturn:
    """Refuse a model of transformers, or one part of a pipeline, by the class of its config."""
    config = read_object(repository.fetch(["config.json"]) / "config.json")
    kinds = config.get("architectures")
    kind = config.get("_class_name") or (kinds[0] if isinstance(kinds, list) and kinds else None)
    raise InvalidValueError(
        f"{repository.name.repo} on the hub is one model{f', {kind}' if kind else ''}, not a "
        "text-to-image pipeline of diffusers, which has a model_index.json. Pass the pipeline "
        "that it belongs to."
    )
