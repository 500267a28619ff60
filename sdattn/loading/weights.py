"""Which files of a folder, or of a repository on the hub, make a pipeline.

unet/config.json
unet/diffusion_pytorch_model.safetensors
unet/diffusion_pytorch_model.fp16.safetensors              of a variant
text_encoder_2/model.fp16-00001-of-00002.safetensors       a shard of one
text_encoder_2/model.safetensors.index.fp16.json           the list of its shards
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import InvalidValueError, OptionError

_WEIGHTS = re.compile(  # in old files the variant is behind the number of the shard
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.([\w-]+?))?"
    r"(?:-\d+-of-(\d+))?(?:\.([\w-]+))?\.safetensors"
)
_INDEX = re.compile(r"\w+\.safetensors(?:\.index\.([\w-]+)|\.([\w-]+)\.index|\.index)\.json")
_FORMATS = (".safetensors", ".onnx", ".pb", ".msgpack", ".h5", ".xml", ".gguf")  # of weights
_ANEW = "Get the folder again, or save it again with pipe.save_pretrained(folder)."
PICKLES = (".bin", ".ckpt", ".pt", ".pth", ".pkl", ".pickle")


Needs = Literal["weights", "settings", "all"]


@dataclass(frozen=True)
class PipelineFiles:
    """Files that make a pipeline, by their paths below its folder.

    Attributes:
        settings: all of its parts' files but the weights.
        weights: the weights, with the lists of their shards.
        variant: the variant to pass to ``from_pretrained``; None for plain files.
        chosen: True if the variant was not asked for, and is all that there is.
    """

    settings: list[str]
    weights: list[str]
    variant: str | None
    chosen: bool = False


class _Part:
    """The files of a part, by their kinds: the weights and the lists of their shards by variant,
    None for plain ones."""

    def __init__(self, path: str, names: Iterable[str], *, is_model: bool):
        self.path = path
        settings = (".json",) if is_model else ("",)
        self.weights: dict[str | None, list[str]] = {}
        self.lists: dict[str | None, list[str]] = {}
        self.settings: list[str] = []
        self.pickles: list[str] = []
        others = []  # a list of shards may name them as it likes
        for name in names:
            file = name.partition("/")[2]
            if found := _WEIGHTS.fullmatch(file):
                self.weights.setdefault(found[1] or found[3], []).append(name)
            elif found := _INDEX.fullmatch(file):
                self.lists.setdefault(found[1] or found[2], []).append(name)
            elif file.endswith(".safetensors"):
                others.append(name)
            elif file.endswith(PICKLES):
                self.pickles.append(file)
            elif file.endswith(settings) and not file.endswith((*_FORMATS, ".py", ".index.json")):
                self.settings.append(name)
        for one in self.lists.keys() - self.weights.keys() if others else ():
            self.weights[one] = others

    @property
    def variants(self) -> set[str]:
        return {name for name in self.weights if name is not None}

    def check(self) -> None:
        """Raise ValueError if there are no weights, or only pickles."""
        if self.weights:
            return
        if not self.pickles:
            raise InvalidValueError(
                f"{self.path} has no weights that diffusers reads, such as "
                f"diffusion_pytorch_model.safetensors. {_ANEW}"
            )
        raise InvalidValueError(
            f"{self.path} holds its weights as {self.pickles[0]} and not as .safetensors. Pickles "
            "are not read, since they can run code. Look for a `revision` or another model with "
            ".safetensors; or, if you trust their source, convert them: diffusers."
            "DiffusionPipeline.from_pretrained(FOLDER, use_safetensors=False)"
            ".save_pretrained(NEW_FOLDER)."
        )

    def of(self, variant: str | None) -> list[str]:
        """Return the weights of a variant, else the plain ones, with the lists of their shards:
        each whole set, if there are several, since diffusers and transformers do not prefer the
        same; raise ValueError if a shard of the only set is missing."""
        one = variant if variant in self.weights else None
        sets: dict[tuple[str | None, ...], list[str]] = {}
        for name in self.weights.get(one, []):
            found = _WEIGHTS.fullmatch(name.partition("/")[2])
            sets.setdefault(found.group(1, 2) if found else (None, None), []).append(name)
        whole = []
        for (_, number), files in sets.items():
            whole += files if number is None or int(number) == len(files) else []
        if sets and not whole:
            (_, number), files = next(iter(sets.items()))
            raise InvalidValueError(
                f"{self.path} has {len(files)} of the {int(number or 1)} files of its weights, "
                f"{files[0]} among them. {_ANEW}"
            )
        return whole + self.lists.get(one, [])


def choose_files(
    names: Iterable[str], parts: Mapping[str, Needs], variant: str | None, where: str
) -> PipelineFiles:
    """Choose the files that diffusers would read.

    Args:
        names: the files of the folder, as ``unet/config.json``.
        parts: the pipeline's parts, and what of each is read: ``"weights"`` and settings,
            ``"settings"`` alone of a model that is given, or ``"all"``, of a tokenizer for one.
        variant: the one to prefer, as ``"fp16"``; a part that lacks it has its plain files read.
        where: the folder or the repository, for messages.

    Raises:
        ValueError: a part's weights or some of their shards are missing, or there are only pickles;
            nothing has the variant, or several have variants alone that are not the same.
    """
    inside: dict[str, list[str]] = {part: [] for part in parts}
    for name in sorted(names):
        part, _, file = name.partition("/")
        if part in inside and "/" not in file:
            inside[part].append(name)
    held = {}
    for part, files in inside.items():
        held[part] = _Part(f"{where}/{part}", files, is_model=parts[part] != "all")
    needed = [held[part] for part, needs in parts.items() if needs == "weights"]
    for each in needed:
        each.check()
    asked = variant
    if asked is None:
        variant = _only_variant(needed, where)
    known = sorted(set[str]().union(*(part.variants for part in held.values())))
    if variant is not None and variant not in known:
        there = f"It has {', '.join(known)}." if known else "Leave it out."
        raise OptionError("variant", variant, f"no part of {where} has files of it. {there}")
    settings = ["model_index.json"]
    weights = []
    for each in held.values():
        settings += each.settings
    for each in needed:
        weights += each.of(variant)
        if not each.of(variant):
            has = ", ".join(sorted(each.variants))
            text = f"{each.path} has no files of it, and no plain ones. It has {has}."
            raise OptionError("variant", variant, text)
    return PipelineFiles(settings, weights, variant, chosen=variant != asked)


def _only_variant(parts: Iterable[_Part], where: str) -> str | None:
    """Return the variant of parts without plain files; None if all have some."""
    without = [part for part in parts if None not in part.weights]
    if not without:
        return None
    common = set.intersection(*(part.variants for part in without))
    if not common:
        told = [f"{part.path} only as {', '.join(sorted(part.variants))}" for part in without]
        raise InvalidValueError(
            f"{where} has no plain weights, and no variant of all: {'; '.join(told)}. Pass a "
            "folder with weights of one kind."
        )
    return "fp16" if "fp16" in common else min(common)
