"""`AttentionLayer`: one layer of a denoiser, its place and what it attends to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..attention import level_grids
from .denoiser_call import Size

Place = Literal["down", "mid", "up", "double", "single", "block"]
Kind = Literal[
    "cross", "joint", "self", "text", "temporal", "linear", "audio", "grounded", "control"
]
PLACES: tuple[Place, ...] = ("down", "mid", "up")  # of a UNet
KINDS: tuple[Kind, ...] = ("cross", "joint", "self")  # kinds that can be captured
TEXT_KINDS: tuple[Kind, ...] = ("cross", "joint")  # kinds with a column per text token
# Places of the layers in FLUX and its descendants: two-stream blocks, then one-stream ones.
DOUBLE_THEN_SINGLE: Mapping[str, tuple[Place, Kind]] = {
    "transformer_blocks.*.attn": ("double", "joint"),
    "single_transformer_blocks.*.attn": ("single", "joint"),
}
# Blocks in which the image attends to itself, then to the text
SELF_THEN_CROSS: Mapping[str, tuple[Place, Kind]] = {
    "transformer_blocks.*.attn1": ("block", "self"),
    "transformer_blocks.*.attn2": ("block", "cross"),
}


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a denoiser.

    Attributes:
        name: module path, ``down_blocks.0.attentions.0.transformer_blocks.0.attn2``.
        place: ``"down"``, ``"mid"`` or ``"up"`` in a UNet; ``"double"`` or ``"single"`` stream in a
            transformer with joint attention, ``"block"`` in any other.
        kind: ``"cross"`` (keys from the text), ``"joint"`` (keys from text and image) or ``"self"``
            (keys from the image). Listed, but never captured: ``"text"`` (text only),
            ``"temporal"`` (across the frames of a video), ``"linear"`` (no softmax), ``"audio"``
            (to or from a video's sound), ``"grounded"`` (image and objects of GLIGEN's boxes
            together) and ``"control"`` (a control network inside the model, or reference images
            alone).
        level: 0 at the full latent resolution, 1 at half of it, and so on.
        heads: number of attention heads.
        module: diffusers' attention module; it holds the processor.
    """

    name: str
    place: Place
    kind: Kind
    level: int
    heads: int
    module: Any

    def grid(self, latent_size: Size) -> Size:
        """Return (rows, cols) of this layer's queries for a latent of (rows, cols) cells. A leading
        number of frames stays as it is."""
        return level_grids(latent_size, self.level + 1)[-1]
