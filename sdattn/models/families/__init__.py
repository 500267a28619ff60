"""The families of models, and the registry that the rest of the package asks.

Each module of this folder has a table, ``FAMILIES``, with a row for each family of its
architecture, and before it the functions of those that facts alone do not describe. It is found by
itself.
"""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import chain
from pkgutil import iter_modules
from typing import TypeVar

from ...errors import InvalidTypeError, InvalidValueError
from ..call_options import is_modular
from ..denoiser_call import unwrapped
from ..encode_prompt import read_encoded
from ..encoders import Reader, refuse_unknown
from ..family import Family
from ..parts import Edits, ImageLatents
from ..pipeline import Options, Pipeline

Fact = TypeVar("Fact")
PAGE = "docs/contributing/family.md"
TWO_FACTS = """\
is watched in Python by two facts, which a dry run proposes:
    print(sdattn.inspect_attention(model, *its_arguments))
    with sdattn.capture(model, text=..., grid=...) as store: ...
"""
# Models of diffusers that only the two facts can watch, by class, and why.
RESISTING: Mapping[str, str] = {
    "PRXTransformer2DModel": "in each layer the image attends to the text and to itself and the "
    "text to nothing",
}
# Pipelines of diffusers whose calls of the model have been read and make no map of one image.
UNMAPPED: Mapping[str, str] = {
    "StableDiffusionPanoramaPipeline": "it runs the model on windows of the image, several a step, "
    "so no call is of the whole image",
    "StableDiffusionGLIGENTextImagePipeline": "it runs the model twice a step on both prompts, "
    "with boxes and without, and takes one prompt from either",
}


_tables = [import_module(f".{module.name}", __name__) for module in iter_modules(__path__)]
_registered: tuple[Family, ...] = tuple(chain.from_iterable(table.FAMILIES for table in _tables))


def registered() -> tuple[Family, ...]:
    """Return all known families."""
    return _registered


def register(family: Family) -> None:
    """Make a family of models known everywhere in sdattn, until :func:`unregister`.

    Raises:
        ValueError: another family has one of its names.
    """
    global _registered
    names = _names(family)
    for other in _registered:
        if common := names & _names(other):
            raise InvalidValueError(
                f"The family {family.name!r} names {common.pop()}, which the family "
                f"{other.name!r} has. unregister() that one first."
            )
    _registered = (*_registered, family)


def unregister(family: Family) -> None:
    """Undo :func:`register`.

    Raises:
        ValueError: the family is not registered.
    """
    global _registered
    if family not in _registered:
        raise InvalidValueError(f"The family {family.name!r} is not registered.")
    _registered = tuple(other for other in _registered if other is not family)


def _names(family: Family) -> set[str]:
    return {repr(family.name), *family.denoiser_names, *family.readers, *family.guidance}


def listed(kind: type) -> Family | None:
    """Return the family that lists a class or its nearest base among its denoisers."""
    for base in kind.__mro__:
        for family in _registered:
            if family.lists(base):
                return family
    return None


def claimed(model: object) -> Family | None:
    """Return the family that lists a model's class, else the one that recognises the model."""
    inner = unwrapped(model)
    recognising = (family for family in _registered if family.recognises(inner))
    return listed(type(inner)) or next(recognising, None)


def family_of(model: object, asked: str = "") -> Family:
    """Return the family of a model; raise TypeError, naming it or what was ``asked``, if it has
    none."""
    found = claimed(model)
    if found is None:
        what = asked or f"A {type(unwrapped(model)).__name__} is of no known family"
        for cls in type(unwrapped(model)).__mro__:
            if cls.__name__ in RESISTING:
                why = RESISTING[cls.__name__]
                raise InvalidTypeError(
                    f"{what}: {why}, fewer queries than keys. Its pipelines are not read; the "
                    f"model itself {TWO_FACTS}"
                )
        alike = closest(type(unwrapped(model)))
        raise InvalidTypeError(
            f"{what}. The model itself {TWO_FACTS}"
            f"Written down they are a family, see {PAGE}; `python -m scripts.new_family MODEL`, in "
            "a checkout of sdattn, drafts it. "
            f"{f'The closest family by name is {alike.title}. ' if alike else ''}"
            "A name in parentheses stands for classes of diffusers, and subclasses of them. "
            f"Known are: {'; '.join(family.title for family in _registered)}."
        )
    return found


def closest(kind: type) -> Family | None:
    """Return the family whose denoiser has the most similar class name, or None."""
    named: dict[Sequence[str], Family] = {}
    for family in _registered:
        named |= dict.fromkeys(map(_words, family.denoiser_names), family)
    found = get_close_matches(_words(kind.__name__), list(named), n=1)
    return named[found[0]] if found else None


def _words(name: str) -> tuple[str, ...]:
    rest = re.sub(r"Transformer|Condition|Model|\dD", "", name)
    return tuple(re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]*|\d+", rest))


def reader_of(pipe: Pipeline) -> Reader:
    """Return the reader for a pipeline's class or its nearest base; the longest matching name wins,
    and the pipeline's own ``encode_prompt`` if none does.

    Mixins are passed over: Kolors has Stable Diffusion's, Chroma has Flux's.
    """
    readers: dict[str, Reader] = {}
    for family in _registered:
        readers.update(family.readers)
    for cls in type(pipe).__mro__:
        if "Pipeline" in cls.__name__:
            fitting = [name for name in readers if cls.__name__.startswith(name)]
            if fitting:
                return readers[max(fitting, key=len)]
    if is_modular(pipe) or hasattr(pipe, "encode_prompt"):
        return read_encoded
    return refuse_unknown


def image_latents_of(pipe: Pipeline, *, invertible: bool = False) -> ImageLatents:
    """Return how a text-to-image pipeline takes an image, by its class or nearest base (else
    TypeError). With ``invertible``, only pipelines whose way back to the noise is known."""
    known: dict[str, ImageLatents] = {}
    for family in _registered:
        found = family.image_latents
        if found and (found.invertible or not invertible):
            known.update(dict.fromkeys(found.pipelines, found))
    return _known_of(pipe, known)


def edits_of(pipe: Pipeline) -> Edits:
    """Return how prompt-to-prompt edits a pipeline's images, by its class or nearest base (else
    TypeError)."""
    known: dict[str, Edits] = {}
    for family in _registered:
        if family.edits:
            known.update(dict.fromkeys(family.edits.pipelines, family.edits))
    return _known_of(pipe, known)


def _known_of(pipe: Pipeline, known: Mapping[str, Fact]) -> Fact:
    for cls in type(pipe).__mro__:
        if cls.__name__ in known:
            return known[cls.__name__]
    raise InvalidTypeError(f"This needs a {' or '.join(known)}; found a {type(pipe).__name__}.")


def unguided_options(pipe: Pipeline) -> Options:
    """Return the options that run a text-to-image pipeline without guidance."""
    return _known_of(pipe, image_latents_of(pipe).pipelines)
