"""What a run should be told of when its maps are read: other nodes that attend in their own way."""

from collections.abc import Sequence
from typing import Any

DRAWN_AGAIN = "The {} text was drawn again within a step (perturbed guidance); the first counts."
ANOTHER_PATCH = "Another node changes the text between the layers (attn2_patch of {})."
ANOTHER_ATTENTION = (
    "Another node computes the attention to the text by itself and does not show it ({}). Maps are "
    "of the queries and keys that it was given."
)
ANOTHER_BLOCK = (
    "Another node computes whole blocks of the model by itself, and no attention to the text is "
    "seen in them ({}). The maps lack these blocks."
)
FEWER_LAYERS = (
    "At most {} of {} layers showed their attention to the text in a call of the model, and the "
    "maps are of these: another node computes or leaves out the others."
)
OTHER_TEXTS = "Another node attends to further texts or images in some layers; they are not shown."
UNKNOWN_TO_OTHERS = (
    "The module {} asked what overrides the attention, and for `{}`, which Watch attention lacks. "
    "If its node leaves out a kernel of its own for that, the image is another one than without "
    "Watch attention: draw it once without, to compare."
)


def names_of(patches: Sequence[Any]) -> str:
    """Return where functions or objects of other nodes come from."""
    kinds = [patch if hasattr(patch, "__qualname__") else type(patch) for patch in patches]
    return ", ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
