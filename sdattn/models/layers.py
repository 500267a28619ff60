"""Find and name a model's attention layers. The only file that knows module paths.

    find_denoiser(target)                    pipeline or model -> Denoiser
    find_layers(model)                       every attention layer, in execution order
    select_layers(found, layers, kinds)      those that were asked for

A UNet has self-attention ``attn1`` and cross-attention ``attn2`` in its down, mid and up blocks: SD
1.x has 16 places (2 in each of 3 down blocks, 1 mid, 3 in each of 3 up blocks), so 32 layers. A
transformer has blocks of one resolution, whose attention is either of these two kinds or joint: one
softmax over the tokens of text and picture together (Esser et al. 2024, section 4).
"""

import fnmatch
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

from torch import nn

from ..attention import MultiHeadAttention, level_grids

Place = Literal["down", "mid", "up", "double", "single", "block"]
Kind = Literal["cross", "joint", "self", "temporal", "linear"]
PLACES: tuple[Place, ...] = ("down", "mid", "up")  # of a UNet
KINDS: tuple[Kind, ...] = ("cross", "joint", "self")  # those that can be captured
TEXT_KINDS: tuple[Kind, ...] = ("cross", "joint")  # those with a column for each token of the text


@dataclass(frozen=True)
class Transformer:
    """What is known of a family of transformers.

    Attributes:
        layers: where its attention layers are, and of what place and kind.
        joined: in which order its joint attention joins text and picture (reference pictures follow
            the one that is made); None where none is joint. No family has an order by default.
    """

    layers: dict[str, tuple[Place, Kind]]
    joined: Literal["text first", "picture first"] | None


TRANSFORMERS: dict[str, Transformer] = {
    "SD3Transformer2DModel": Transformer(
        {
            "transformer_blocks.*.attn": ("double", "joint"),
            "transformer_blocks.*.attn2": ("double", "self"),
        },
        joined="picture first",
    ),
    "FluxTransformer2DModel": Transformer(
        {
            "transformer_blocks.*.attn": ("double", "joint"),
            "single_transformer_blocks.*.attn": ("single", "joint"),
        },
        joined="text first",
    ),
    "Flux2Transformer2DModel": Transformer(
        {
            "transformer_blocks.*.attn": ("double", "joint"),
            "single_transformer_blocks.*.attn": ("single", "joint"),
        },
        joined="text first",
    ),
    "QwenImageTransformer2DModel": Transformer(
        {"transformer_blocks.*.attn": ("double", "joint")}, joined="text first"
    ),
    "PixArtTransformer2DModel": Transformer(
        {
            "transformer_blocks.*.attn1": ("block", "self"),
            "transformer_blocks.*.attn2": ("block", "cross"),
        },
        joined=None,
    ),
    "SanaTransformer2DModel": Transformer(
        {
            "transformer_blocks.*.attn1": ("block", "linear"),
            "transformer_blocks.*.attn2": ("block", "cross"),
        },
        joined=None,
    ),
}
SUPPORTED = (
    "UNets with self- and cross-attention in down, mid and up blocks (SD 1.x, 2.x, SDXL, "
    "AnimateDiff), " + ", ".join(TRANSFORMERS) + ", and models of one's own whose attention is all "
    "sdattn.attention.MultiHeadAttention"
)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a denoiser.

    Attributes:
        name: the module's path, ``down_blocks.0.attentions.0.transformer_blocks.0.attn2``.
        place: ``"down"``, ``"mid"`` or ``"up"`` in a UNet; ``"double"`` or ``"single"`` stream in a
            transformer with joint attention, ``"block"`` in any other.
        kind: ``"cross"`` (keys from the text), ``"joint"`` (keys from text and picture), ``"self"``
            (keys from the picture); ``"temporal"`` (over the frames of a video) and ``"linear"``
            (no softmax) are listed but cannot be captured.
        level: 0 at the full latent resolution, 1 at half of it, and so on.
        heads: number of attention heads.
        module: the attention module of diffusers; it holds the processor.
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
LayerPredicate = (
    Callable[[AttentionLayer], bool] | Callable[[AttentionLayer, tuple[int, int] | None], bool]
)
LayerSelection = LayerChoice | Sequence[LayerChoice] | LayerPredicate | None


@dataclass(frozen=True)
class Denoiser:
    """The model that is called once a step, and the pipeline around it (None for a bare model)."""

    model: Any
    pipeline: Any

    @property
    def levels(self) -> int:
        """Number of resolutions: those of a UNet, 1 for a transformer."""
        return len(self.model.config.block_out_channels) if is_unet(self.model) else 1


def is_unet(model: Any) -> bool:
    """Whether a denoiser is a UNet, with resolutions and down, mid and up blocks."""
    return hasattr(model, "down_blocks") and _lists_processors(model)


def _lists_processors(model: Any) -> bool:
    # asked of the class, since the property walks through the whole model
    return hasattr(type(unwrapped(model)), "attn_processors")


def is_own(model: Any) -> bool:
    """Whether a model is somebody's own, its attention all of :class:`MultiHeadAttention`."""
    if not isinstance(model, nn.Module) or _lists_processors(model):
        return False
    attention = [one for one in model.modules() if hasattr(one, "to_q")]
    return bool(attention) and all(isinstance(one, MultiHeadAttention) for one in attention)


def family(model: Any) -> str:
    """The class name of a known transformer, found among the model's classes; ``""`` if none."""
    names = [cls.__name__ for cls in type(unwrapped(model)).__mro__]
    return next((name for name in names if name in TRANSFORMERS), "")


def joint_spans(model: Any, cells: int, n_text: int) -> tuple[slice, slice]:
    """In the joint attention of a transformer, where the picture's ``cells`` and the text's
    ``n_text`` tokens are.

    Raises:
        TypeError: that is not known of this model: another class that only bears the name of a
            known one, or a subclass with a ``forward`` of its own.
    """
    kind: Any = type(unwrapped(model))
    known = family(model)
    joined = TRANSFORMERS[known].joined if known else None
    base = next((cls for cls in kind.__mro__ if cls.__name__ == known), kind)
    same = base.__module__.startswith("diffusers.") and kind.forward is base.forward
    if joined is None or not same:
        raise TypeError(
            f"A {kind.__name__} ({kind.__module__}) has a forward that is not diffusers' own, so "
            "whether its joint attention has the text or the picture first is not known. Supported "
            "are these classes of diffusers, and subclasses that leave forward to them: "
            + ", ".join(name for name, one in TRANSFORMERS.items() if one.joined)
            + "."
        )
    if joined == "text first":
        return slice(n_text, n_text + cells), slice(0, n_text)
    return slice(0, cells), slice(cells, cells + n_text)


def unwrapped(model: Any) -> Any:
    """The module behind ``torch.compile(model)``, or the model itself."""
    return getattr(model, "_orig_mod", model)


def find_denoiser(target: Any) -> Denoiser:
    """The UNet or transformer of a pipeline, or that model itself.

    Raises:
        TypeError: ``target`` holds no model that is known.
    """
    if is_own(unwrapped(target)):
        return Denoiser(target, None)
    held = [getattr(target, name, None) for name in ("unet", "transformer")]
    model = next((one for one in held if one is not None), None)
    pipeline = target
    if model is None:
        model, pipeline = target, None
    if not hasattr(model, "attn_processors") or not (is_unet(model) or family(model)):
        found = "no denoiser" if pipeline is None else f"a {type(model).__name__}"
        raise TypeError(
            f"Asked to capture a {type(target).__name__}, which holds {found}. Supported: "
            f"pipelines with one of these models, or the model itself: {SUPPORTED}."
        )
    return Denoiser(model, pipeline)


def find_layers(model: Any) -> list[AttentionLayer]:
    """Every attention layer in the order in which they run: in a UNet down, mid, up, and ``attn1``
    before ``attn2`` in a block; in a transformer the double-stream blocks before the single ones;
    of a model of one's own in the order in which it was put together.

    Raises:
        TypeError: a layer of a kind that is not known, by name.
    """
    if is_own(unwrapped(model)):
        return _own_layers(unwrapped(model))
    describe = _describe_unet if is_unet(model) else _describe_transformer
    names = [name.removesuffix(".processor") for name in unwrapped(model).attn_processors]
    found = [describe(model, name) for name in names]
    if is_unet(model):
        found.sort(key=lambda layer: PLACES.index(layer.place))
    return found


def _own_layers(model: nn.Module) -> list[AttentionLayer]:
    found = [pair for pair in model.named_modules() if isinstance(pair[1], MultiHeadAttention)]
    kinds: list[Kind] = ["cross" if one.is_cross_attention else "self" for _, one in found]
    return [
        AttentionLayer(name, "block", kind, 0, module.heads, module)
        for kind, (name, module) in zip(kinds, found, strict=True)
    ]


def _describe_unet(model: Any, name: str) -> AttentionLayer:
    module: Any = unwrapped(model).get_submodule(name)
    place = next((place for place in PLACES if name.startswith(place)), None)
    added_keys = getattr(module, "add_k_proj", None) is not None
    if place is None or not hasattr(module, "to_q") or added_keys:
        raise TypeError(_unknown(name, module))
    deepest = len(model.config.block_out_channels) - 1
    block = int(name.split(".")[1]) if place != "mid" else 0
    level = {"down": block, "mid": deepest, "up": deepest - block}[place]
    kind: Kind = "cross" if module.is_cross_attention else "self"
    if ".motion_modules." in f".{name}.":
        kind = "temporal"
    return AttentionLayer(name, place, kind, level, module.heads, module)


def _describe_transformer(model: Any, name: str) -> AttentionLayer:
    module: Any = unwrapped(model).get_submodule(name)
    for pattern, (place, kind) in TRANSFORMERS[family(model)].layers.items():
        if fnmatch.fnmatchcase(name, pattern):
            return AttentionLayer(name, place, kind, 0, module.heads, module)
    raise TypeError(_unknown(name, module))


def _unknown(name: str, module: Any) -> str:
    return (
        f"{name} is a {type(module).__name__} of a kind that sdattn does not know. Supported: "
        f"{SUPPORTED}."
    )


def select_layers(
    found: Sequence[AttentionLayer],
    layers: LayerSelection = None,
    kinds: Sequence[str] = TEXT_KINDS,
    latent_size: tuple[int, int] | None = None,
) -> list[AttentionLayer]:
    """Those of ``found`` that are of one of ``kinds`` and fit one of ``layers``.

    Args:
        found: what :func:`find_layers` gave.
        layers: None for all; a predicate ``AttentionLayer -> bool``, or of the layer and
            ``latent_size``; or one or more of: a layer's name, a part of it that starts and ends
            at a dot (``"down_blocks.0"``), a place (``"down"``), a resolution: ``(rows, cols)``, or
            an integer for the grid whose shorter side it is.
        kinds: of ``"cross"``, ``"joint"``, ``"self"``; by default both kinds that see the text.
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
        chosen = [layer for layer in candidates if _holds(layers, layer, latent_size)]
        if not chosen:
            raise ValueError(_nothing_fits("the predicate", candidates, latent_size))
        return chosen
    choices = _as_choices(layers)
    if layers is None:
        chosen = candidates
    elif not choices:
        raise ValueError(f"layers={layers!r} names no layer. Pass None for all of them.")
    for choice in choices:
        if not any(_fits(layer, choice, latent_size) for layer in candidates):
            raise ValueError(_nothing_fits(repr(choice), candidates, latent_size))
    if choices:
        chosen = [la for la in candidates if any(_fits(la, c, latent_size) for c in choices)]
    if not chosen:
        raise ValueError(_nothing_fits(f"kinds={tuple(kinds)}", found, latent_size))
    return chosen


def _holds(predicate: Any, layer: AttentionLayer, latent_size: tuple[int, int] | None) -> bool:
    given = inspect.signature(predicate).parameters.values()
    needed = [one for one in given if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    return bool(predicate(layer, latent_size) if len(needed) > 1 else predicate(layer))


def _as_choices(layers: Any) -> list[LayerChoice]:
    if layers is None:
        return []
    is_grid = (
        isinstance(layers, tuple)
        and len(layers) == 2
        and all(isinstance(side, Integral) for side in layers)
    )
    if isinstance(layers, (str, Integral)) or is_grid:
        return [layers]
    return list(layers)


def _fits(layer: AttentionLayer, choice: LayerChoice, latent_size: tuple[int, int] | None) -> bool:
    if isinstance(choice, str):
        return choice == layer.place or f".{choice}." in f".{layer.name}."
    if latent_size is None:
        return True
    grid = layer.grid(latent_size)
    return min(grid) == choice if isinstance(choice, (int, Integral)) else grid == tuple(choice)


def _nothing_fits(
    asked: str, found: Sequence[AttentionLayer], latent_size: tuple[int, int] | None
) -> str:
    lines = []
    for layer in found:
        grid = "" if latent_size is None else " {}x{}".format(*layer.grid(latent_size))
        lines.append(f"  {layer.name} ({layer.place}, {layer.kind}{grid})")
    return f"No attention layer fits {asked}. The model has:\n" + "\n".join(lines or ["  none"])
