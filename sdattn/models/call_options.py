"""Options of a pipeline's call: arguments of a classic pipeline, inputs of a modular one.

A modular pipeline (diffusers' ``ModularPipeline``) is a sequence of blocks, and its call takes
``**kwargs``: its options are the inputs of its blocks.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from ..errors import InvalidTypeError
from .pipeline import Options, Pipeline


def is_modular(pipe: Pipeline) -> bool:
    """Check whether a pipeline is made of blocks, without importing diffusers."""
    return any(cls.__name__ == "ModularPipeline" for cls in type(pipe).__mro__)


def call_options(pipe: Pipeline) -> dict[str, Any]:
    """Return the options that a pipeline's call knows, name to default.

    Required ones have ``inspect.Parameter.empty`` or None.
    """
    if is_modular(pipe):
        found = pipe.default_call_parameters
        return {name: default for name, default in found.items() if name is not None}
    parameters = inspect.signature(pipe.__call__).parameters.values()
    return {one.name: one.default for one in parameters if one.kind is not one.VAR_KEYWORD}


def option_of(pipe: Pipeline, options: Options, name: str, known: Options | None = None) -> Any:
    """Return an option's value, or the pipeline's own default if it was not given; ``known`` are
    its :func:`call_options`.

    An option that is no input of a modular pipeline's blocks is None.
    """
    if name in options:
        return options[name]
    if known is None:
        known = call_options(pipe)
    return known.get(name) if is_modular(pipe) else known[name]


def setting_of(pipe: Pipeline, name: str) -> Any:
    """Return a setting that decides how a pipeline reads prompts, such as a template. In a modular
    pipeline the block that reads the prompt may hold it; raise TypeError if nobody has it, or
    blocks differ."""
    if hasattr(pipe, name):
        return getattr(pipe, name)
    blocks = _blocks(pipe.blocks) if is_modular(pipe) else ()
    found = [getattr(one, name) for one in blocks if hasattr(one, name)]
    if not found or any(value != found[0] for value in found):
        raise InvalidTypeError(
            f"sdattn does not know how this {type(pipe).__name__} reads prompts: {len(found)} of "
            f"its blocks have a {name}. Pass labels, {{'cat': [2]}} for example, and columns=."
        )
    return found[0]


def _blocks(block: Any) -> Iterator[Any]:
    yield block
    for inner in getattr(block, "sub_blocks", {}).values():
        yield from _blocks(inner)
