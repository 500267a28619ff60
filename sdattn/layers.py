"""Find and name a model's attention layers. The only file that knows module paths.

    find_denoiser(target)                    pipeline or model -> Denoiser
    find_layers(model)                       every attention layer, in execution order
    select_layers(found, layers, kinds)      those that were asked for

SD 1.x has 16 places (2 in each of 3 down blocks, 1 mid, 3 in each of 3 up blocks), each with a
self-attention ``attn1`` and a cross-attention ``attn2``: 32 layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .attention import level_grids

Place = Literal["down", "mid", "up"]
Kind = Literal["cross", "self"]
PLACES: tuple[Place, ...] = ("down", "mid", "up")
KINDS: tuple[Kind, ...] = ("cross", "self")


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a denoiser.

    Attributes:
        name: the module's path, ``down_blocks.0.attentions.0.transformer_blocks.0.attn2``.
        place: ``"down"``, ``"mid"`` or ``"up"``.
        kind: ``"cross"`` (keys from the text) or ``"self"`` (keys from the picture).
        level: 0 at the full latent resolution, 1 at half of it, and so on.
        heads: number of attention heads.
        module: the diffusers ``Attention``; it holds the processor.
    """

    name: str
    place: Place
    kind: Kind
    level: int
    heads: int
    module: Any

    def grid(self, latent_size: tuple[int, int]) -> tuple[int, int]:
        """(rows, cols) of this layer's queries for a latent of (rows, cols) cells."""
        return level_grids(latent_size, self.level + 1)[-1]


LayerChoice = str | int | tuple[int, int]
LayerSelection = LayerChoice | Sequence[LayerChoice] | Callable[[AttentionLayer], bool] | None


@dataclass(frozen=True)
class Denoiser:
    """The model that is called once a step, and the pipeline around it (None for a bare model)."""

    model: Any
    pipeline: Any

    @property
    def levels(self) -> int:
        """Number of resolutions in the UNet."""
        return len(self.model.config.block_out_channels)


def find_denoiser(target: Any) -> Denoiser:
    """The UNet of a pipeline, or the UNet itself.

    Raises:
        TypeError: ``target`` holds no UNet whose attention processors can be set.
    """
    model = getattr(target, "unet", None)
    pipeline = target
    if model is None:
        model, pipeline = target, None
    if not hasattr(model, "attn_processors") or not hasattr(model, "down_blocks"):
        inner = getattr(target, "transformer", None)
        held = f"a {type(inner).__name__}" if inner is not None else "no UNet"
        raise TypeError(
            f"Asked to capture a {type(target).__name__}, which holds {held}. Supported: Stable "
            "Diffusion pipelines built on a UNet (SD 1.x, 2.x, SDXL), or such a UNet itself."
        )
    return Denoiser(model, pipeline)


def find_layers(model: Any) -> list[AttentionLayer]:
    """Every attention layer of a UNet: down, mid, up, ``attn1`` before ``attn2`` in a block."""
    names = [name.removesuffix(".processor") for name in model.attn_processors]
    found = [_describe(model, name) for name in names]
    return sorted(found, key=lambda layer: PLACES.index(layer.place))


def _describe(model: Any, name: str) -> AttentionLayer:
    module: Any = model.get_submodule(name)
    place = next((place for place in PLACES if name.startswith(place)), None)
    if (
        place is None
        or not hasattr(module, "to_q")
        or (hasattr(module, "add_k_proj") and (module.add_k_proj is not None))
    ):
        raise TypeError(
            f"{name} is a {type(module).__name__} of a kind that sdattn does not know. Supported: "
            "self- and cross-attention with to_q, to_k, to_v in the down, mid and up blocks of a "
            "UNet."
        )
    deepest = len(model.config.block_out_channels) - 1
    block = int(name.split(".")[1]) if place != "mid" else 0
    level = {"down": block, "mid": deepest, "up": deepest - block}[place]
    kind: Kind = "cross" if module.is_cross_attention else "self"
    return AttentionLayer(name, place, kind, level, module.heads, module)


def select_layers(
    found: Sequence[AttentionLayer],
    layers: LayerSelection = None,
    kinds: Sequence[str] = ("cross",),
    latent_size: tuple[int, int] | None = None,
) -> list[AttentionLayer]:
    """Those of ``found`` that are of one of ``kinds`` and fit one of ``layers``.

    Args:
        found: what :func:`find_layers` gave.
        layers: None for all; a predicate ``AttentionLayer -> bool``; or one or more of: a layer's
            name, a part of it that starts and ends at a dot (``"down_blocks.0"``), a place
            (``"down"``), a resolution: ``(rows, cols)``, or an integer for the grid whose shorter
            side it is.
        kinds: ``"cross"``, ``"self"``.
        latent_size: (rows, cols) of the latent. While it is None, resolutions are not known yet
            and fit every layer.

    Raises:
        ValueError: a kind or a choice that fits no layer; the message lists what there is.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds or isinstance(kinds, str):
        raise ValueError(f"kinds={kinds!r}: pass a tuple of {' and/or '.join(map(repr, KINDS))}.")
    candidates = [layer for layer in found if layer.kind in kinds]
    if callable(layers):
        chosen = [layer for layer in candidates if layers(layer)]
        if not chosen:
            raise ValueError(_nothing_fits("the predicate", candidates, latent_size))
        return chosen
    choices = _as_choices(layers)
    if not choices:
        chosen = candidates
    for choice in choices:
        if not any(_fits(layer, choice, latent_size) for layer in candidates):
            raise ValueError(_nothing_fits(repr(choice), candidates, latent_size))
    if choices:
        chosen = [la for la in candidates if any(_fits(la, c, latent_size) for c in choices)]
    if not chosen:
        raise ValueError(_nothing_fits(f"kinds={tuple(kinds)}", found, latent_size))
    return chosen


def _as_choices(layers: Any) -> list[LayerChoice]:
    if layers is None:
        return []
    is_grid = (
        isinstance(layers, tuple)
        and len(layers) == 2
        and all(isinstance(side, int) for side in layers)
    )
    if isinstance(layers, (str, int)) or is_grid:
        return [layers]
    return list(layers)


def _fits(layer: AttentionLayer, choice: LayerChoice, latent_size: tuple[int, int] | None) -> bool:
    if isinstance(choice, str):
        return choice == layer.place or f".{choice}." in f".{layer.name}."
    if latent_size is None:
        return True
    grid = layer.grid(latent_size)
    return min(grid) == choice if isinstance(choice, int) else grid == tuple(choice)


def _nothing_fits(
    asked: str, found: Sequence[AttentionLayer], latent_size: tuple[int, int] | None
) -> str:
    lines = []
    for layer in found:
        grid = "" if latent_size is None else " {}x{}".format(*layer.grid(latent_size))
        lines.append(f"  {layer.name} ({layer.place}, {layer.kind}{grid})")
    return f"No attention layer fits {asked}. The model has:\n" + "\n".join(lines or ["  none"])
