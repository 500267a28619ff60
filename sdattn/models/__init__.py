"""Facts about diffusers' models.

A `Family` (`family`, all are in `families`) describes a kind of denoiser: where its attention
is, how a call is read, how its pipelines read prompts and run guidance. `denoiser` finds a
pipeline's denoiser, `layers` chooses among its attention layers, `reading` reads its prompts'
columns, `guidance` the rows of each branch.

`facts` answers questions about a pipeline once a run, `pipeline_call` calls it with checked
options, `values` checks those that need no pipeline, and `demos` knows the demo models inside this
package. :func:`register` adds a family.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .families import register as register
    from .families import unregister as unregister
    from .family import Family as Family
    from .parts import Edits as Edits
    from .parts import ImageLatents as ImageLatents
    from .parts import Names as Names

# Module of each public name, loaded on first use: `demos` and `values` need no torch
_PUBLIC = {
    "Edits": "parts",
    "Family": "family",
    "ImageLatents": "parts",
    "Names": "parts",
    "register": "families",
    "unregister": "families",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Load a public name on first use."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sdattn.models' has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    return found
