"""Which family a model that none claims is most like, and by what.

What few families have counts for more than what most have: ``img_ids`` among the arguments says
more than ``timestep``.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from .denoiser_call import holds_processor, innermost
from .family import Family

PAGE = "docs/contributing/family.md"
COMMON = 0.25  # an argument of that rarity: four families have it
_PLAIN_WORDS = {"Transformer", "Model", "D", "Di", "T"}  # of the names of classes: 2D, DiT


@dataclass(frozen=True)
class Traits:
    """What of a model can be compared without calling it.

    Attributes:
        paths: of its attention layers, with ``*`` for numbers.
        kinds: of these layers, as far as they are known.
        processors: the names of the classes of their processors.
        arguments: of ``forward``.
        words: of the name of its class.
    """

    paths: Set[str]
    kinds: Set[str]
    processors: Set[str]
    arguments: Set[str]
    words: Set[str]


_SAID = {  # how a message speaks of what two models share
    "paths": "attention at {}",
    "kinds": "{} attention",
    "processors": "the processor {}",
    "arguments": "forward({})",
    "words": "{} in its name",
}


def folded(name: str) -> str:
    """The path of a module as a pattern of :attr:`Family.layers`.

    >>> folded("transformer_blocks.12.attn1")
    'transformer_blocks.*.attn1'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def nearest(
    model: Any, families: Iterable[Family], kinds: Set[str] | None = None
) -> tuple[Family, str] | None:
    """The family that a model is most like, and what both have, for a message; None where it has
    nothing in common with any of them but what most models have.

    Args:
        model: a module, on any device; it is not called.
        families: to choose from; compared are their :attr:`Family.denoisers`.
        kinds: of the model's attention, where they are known; None for what its layers' parts tell.
    """
    if not isinstance(model, torch.nn.Module):
        return None
    known = [(family, found) for family in families for found in _of_family(family)]
    rarity = _rarity([found for _, found in known])
    own = _traits(model, kinds or _built_for(model))
    alike = [(_likeness(own, found, rarity), family, found) for family, found in known]
    if not alike:
        return None
    _, family, found = max(alike, key=lambda one: one[0])
    reason = _reason(own, found, rarity)
    return (family, reason) if reason else None


def _traits(model: Any, kinds: Set[str]) -> Traits:
    layers = [pair for pair in model.named_modules() if holds_processor(pair[1])]
    processors = [innermost(getattr(module, "processor", None)) for _, module in layers]
    return Traits(
        paths={folded(name) for name, _ in layers},
        kinds=kinds,
        processors={type(one).__name__ for one in processors if one is not None},
        arguments=_arguments(type(model)),
        words=_words(type(model)),
    )


def _of_family(family: Family) -> Iterator[Traits]:
    """The traits of each of a family's denoisers that can be had."""
    for denoiser in family.denoisers:
        cls: Any = denoiser
        if isinstance(denoiser, str):
            import diffusers

            cls = getattr(diffusers, denoiser, None)
        if (small := without_values(cls, {})) is not None:
            yield _traits(small, {layer.kind for layer in family.find_layers(small)})
        elif cls is not None:
            kinds = {kind for _, kind in family.layers.values()}
            yield Traits(set(family.layers), kinds, set(), _arguments(cls), _words(cls))


def _words(kind: type) -> set[str]:
    return set(re.findall("[A-Z][a-z]*", kind.__name__)) - _PLAIN_WORDS


def _arguments(kind: Any) -> set[str]:
    given = inspect.signature(kind.forward).parameters
    return {name for name in given if name not in ("self", "args", "kwargs", "input")}


def _built_for(model: Any) -> set[str]:
    """The kinds of attention that a model's layers have parts for. A layer without parts for the
    text is self-attention beside layers of cross-attention; in another model it may get text and
    picture joined."""
    layers = [one for one in model.modules() if holds_processor(one)]
    kinds = {"joint" for one in layers if getattr(one, "add_k_proj", None) is not None}
    cross = [one for one in layers if getattr(one, "is_cross_attention", False)]
    if cross:
        kinds |= {"cross"} if len(cross) == len(layers) else {"cross", "self"}
    return kinds


def without_values(cls: Any, config: Mapping[str, Any]) -> Any | None:
    """A model of diffusers on the meta device, with two of its blocks of each sort at the most;
    None where its class cannot be built so (another library's; an older diffusers')."""
    if not hasattr(cls, "from_config"):
        return None
    try:
        with torch.device("meta"):
            return cls.from_config({**config, **two_blocks(cls, config)})
    except (TypeError, ValueError, RuntimeError, NotImplementedError):
        return None  # its defaults are no model, or it computes with values while it is built


def two_blocks(cls: Any, config: Mapping[str, Any]) -> dict[str, int]:
    """The entries of a configuration that count blocks, two each at the most."""
    defaults = {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items()}
    counts = {name: config.get(name, default) for name, default in defaults.items()}
    return {
        name: min(count, 2)
        for name, count in counts.items()
        if re.fullmatch(r"(num|n)_(\w+_)?layers", name) and isinstance(count, int)
    }


def _rarity(known: Sequence[Traits]) -> dict[tuple[str, str], float]:
    """For each trait one by the number of models that have it."""
    counts: dict[tuple[str, str], int] = {}
    for traits in known:
        for sort, held in vars(traits).items():
            for one in held:
                counts[sort, one] = counts.get((sort, one), 0) + 1
    return {trait: 1 / count for trait, count in counts.items()}


def _likeness(own: Traits, other: Traits, rarity: Mapping[tuple[str, str], float]) -> float:
    """The sum over the sorts of traits of what both have by what either has, each in [0, 1]."""
    total = 0.0
    for sort in _SAID:
        one, two = getattr(own, sort), getattr(other, sort)
        weights = {trait: rarity.get((sort, trait), 1.0) for trait in one | two}
        if weights:
            total += sum(weights[trait] for trait in one & two) / sum(weights.values())
    return total


def _reason(own: Traits, other: Traits, rarity: Mapping[tuple[str, str], float]) -> str:
    """What both have, the rarest first; arguments that most models have say nothing."""
    parts = []
    for sort, text in _SAID.items():
        shared = sorted(getattr(own, sort) & getattr(other, sort))
        if sort == "arguments":
            shared = [one for one in shared if rarity[sort, one] > COMMON]
        if shared:
            shared.sort(key=lambda one: -rarity[sort, one])
            parts.append(text.format(", ".join(shared[:4])))
    return "; ".join(parts)
