"""List diffusers' pipelines that run a denoiser that sdattn knows, and what is known of each.

    python -m scripts.list_pipelines            every pipeline
    python -m scripts.list_pipelines refused    those whose layout of guidance is not written down

One line each: the class, its denoiser, and how its batch says which rows are the prompt's, or
"refused". Modular pipelines with a guider need no layout.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import diffusers

from sdattn.models.families import UNMAPPED, registered

LAYOUTS = ("refused", "known", "guider")


class Found(NamedTuple):
    """A pipeline of diffusers.

    Attributes:
        name: of its class.
        denoiser: class of the model that is called once a step.
        layout: "known" with the way it is known, "guider" of a modular one, or "refused", with the
            reason if its loop has been read.
    """

    name: str
    denoiser: str
    layout: str


def known_denoisers() -> set[str]:
    """Return the classes of denoisers that a family lists, by name."""
    return {name for family in registered() for name in family.denoiser_names}


def denoisers_of(kind: type) -> list[str]:
    """Return the classes that a pipeline's denoiser may have, as its constructor names them."""
    if issubclass(kind, diffusers.ModularPipeline):
        parts = {spec.name: str(spec.type_hint) for spec in components_of(kind)}
    else:
        parameters = inspect.signature(kind).parameters.values()
        parts = {parameter.name: str(parameter.annotation) for parameter in parameters}
    hints = (parts[name] for name in ("unet", "transformer") if name in parts)
    return [name for hint in hints for name in re.findall(r"\w+", hint)]


def components_of(kind: Any) -> list[Any]:
    """Return what a modular pipeline's blocks need; nothing of one without blocks of its own."""
    blocks: Any = getattr(diffusers, str(kind.default_blocks_name), None)
    return list(blocks().expected_components) if blocks else []


def layout_of(kind: type) -> str:
    """Return how the layout of a class's guidance is known, "refused" where it is not."""
    modular = issubclass(kind, diffusers.ModularPipeline)
    if modular and any(spec.name == "guider" for spec in components_of(kind)):
        return "guider"
    layouts = {name: held for family in registered() for name, held in family.guidance.items()}
    for base in kind.__mro__:
        if base.__name__ in UNMAPPED:
            return f"refused: {UNMAPPED[base.__name__]}"
        held = layouts.get(base.__name__)
        has_property = hasattr(kind, "do_classifier_free_guidance")
        if held and (held.known_by != "property" or has_property):
            return f"known ({held.known_by})"
    return "refused"


def found() -> Iterator[Found]:
    """Yield the pipelines with a denoiser that is known, by name."""
    known = known_denoisers()
    for name in sorted(dir(diffusers)):
        kind = getattr(diffusers, name) if "Pipeline" in name else None
        bases = diffusers.DiffusionPipeline, diffusers.ModularPipeline
        if not inspect.isclass(kind) or not issubclass(kind, bases) or kind in bases:
            continue
        own = [one for one in denoisers_of(kind) if one in known]
        if own:
            yield Found(name, own[0], layout_of(kind))


def main(arguments: list[str] | None = None) -> None:
    """Print the list and how many of it are refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("layout", nargs="?", choices=LAYOUTS, help="only pipelines of this layout")
    asked = parser.parse_args(arguments).layout or ""
    rows = [row for row in found() if row.layout.startswith(asked)]
    for row in rows:
        print(f"{row.name:52} {row.denoiser:38} {row.layout}")
    refused = sum(row.layout.startswith("refused") for row in rows)
    print(
        f"{len(rows)} pipelines, {refused} refused; diffusers {diffusers.__version__}",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
