"""What one call of a denoiser says: its batch, its timestep, the grid of its picture, its text.

Every model has arguments of its own for these; here they are read, once a call.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .layers import family, is_own, is_unet, unwrapped


@dataclass(frozen=True)
class Call:
    """One call of a denoiser.

    Attributes:
        timestep: in the scheduler's unit (the batch's first, if rows differ).
        latent_size: (rows, cols) of the finest queries: the cells of a UNet's latent, the patches
            of a transformer's; None for a model of one's own, where nobody has said it.
        batch: rows that the attention layers see; the frames of a video are rows.
        text: the text states, ``[B, T, width]``; None for a model of one's own.
        n_image: columns of image prompts (IP-Adapter), which follow those of the text.
        skips_layers: whether this is the extra pass of skip-layer guidance (SD 3.5), which is
            neither branch of the guidance.
    """

    timestep: float
    latent_size: tuple[int, int] | None
    batch: int
    text: Tensor | None
    n_image: int = 0
    skips_layers: bool = False

    @property
    def n_text(self) -> int:
        """Columns of the text; 0 while they are not known."""
        return 0 if self.text is None else self.text.shape[1]


def read_call(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """Read the arguments of ``model(*args, **kwargs)`` for a model of a known class."""
    if is_own(unwrapped(model)):
        return _own(args, kwargs)
    forward = inspect.signature(unwrapped(model).forward)
    given = forward.bind_partial(*args, **kwargs).arguments
    if is_unet(model):
        return _unet(model, given)
    picture = given["hidden_states"]
    return Call(
        timestep=_first(given["timestep"]) * _unit(model),
        latent_size=_GRIDS[family(model)](model, given),
        batch=len(picture),
        text=given["encoder_hidden_states"],
        skips_layers=given.get("skip_layers") is not None,
    )


def _unet(model: Any, given: Mapping[str, Any]) -> Call:
    sample, text = given["sample"], given["encoder_hidden_states"]
    frames = sample.shape[2] if sample.ndim == 5 else 1  # [B, C, frames, rows, cols]
    text, *images = text if isinstance(text, tuple) else (text,)
    return Call(
        timestep=_first(given["timestep"]),
        latent_size=(sample.shape[-2], sample.shape[-1]),
        batch=len(sample) * frames,
        text=text,
        n_image=_image_columns(model, images, given.get("added_cond_kwargs") or {}),
    )


def _own(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    given = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.ndim)
    return Call(timestep=0.0, latent_size=None, batch=len(next(given, [0])), text=None)


def _image_columns(model: Any, images: list[Any], added: Mapping[str, Any]) -> int:
    """Columns of all image prompts: of each adapter its tokens an image, times its images."""
    if images:  # a bare UNet that was given them beside the text, [B, images, tokens, width] each
        return sum(one.shape[1] * one.shape[2] for one in images[0])
    embeds = added.get("image_embeds")  # [B, images, ...] of each adapter
    if embeds is None:
        return 0
    # of the first layer that has some, since a walk through the whole model at each call is slow
    inner = (innermost(getattr(one, "processor", None)) for one in unwrapped(model).modules())
    tokens = next((one.num_tokens for one in inner if hasattr(one, "num_tokens")), ())
    counts = [one.shape[1] for one in embeds] if isinstance(embeds, (list, tuple)) else [1]
    return sum(count * each for count, each in zip(counts, tokens, strict=False))


def innermost(processor: Any) -> Any:
    """The processor behind those that only observe."""
    while getattr(processor, "is_observer", False):
        processor = processor.inner
    return processor


def _first(timestep: Any) -> float:
    return float(torch.as_tensor(timestep).flatten()[0])


def _unit(model: Any) -> float:
    """What a transformer's timestep is to be multiplied by to be the scheduler's."""
    if family(model) in (
        "FluxTransformer2DModel",
        "Flux2Transformer2DModel",
        "QwenImageTransformer2DModel",
    ):
        return 1000.0
    return 1 / getattr(model.config, "timestep_scale", 1.0)  # Sana


def _patches(model: Any, given: Mapping[str, Any]) -> tuple[int, int]:
    """The grid of a latent ``[B, C, rows, cols]`` that the model cuts into patches itself."""
    rows, cols = given["hidden_states"].shape[-2:]
    return rows // model.config.patch_size, cols // model.config.patch_size


def _by_ids(_model: Any, given: Mapping[str, Any]) -> tuple[int, int]:
    """The grid of packed patches ``[B, N, C]`` with ``img_ids`` ``[(B,) N, (picture, row, col)]``.

    The picture that is made is number 0 and comes first; reference pictures follow it.
    """
    ids = given["img_ids"]
    ids = ids[0] if ids.ndim == 3 else ids
    made = ids[ids[:, 0] == 0][:, 1:3].float()
    rows, cols = made[:, 0].unique(), made[:, 1].unique()
    if not len(made) or not torch.equal(made, torch.cartesian_prod(rows, cols)):
        raise ValueError(
            f"img_ids name {len(made)} patches of the picture in {len(rows)} rows and {len(cols)} "
            "columns, which is no grid, row by row, so where a patch is cannot be told."
        )
    return len(rows), len(cols)


def _by_shapes(_model: Any, given: Mapping[str, Any]) -> tuple[int, int]:
    """The grid of packed patches with ``img_shapes``: for each row of the batch the shapes
    (frames, rows, cols) of its pictures, the one that is made first, or that one alone."""
    shape = given["img_shapes"][0]
    _, rows, cols = shape if isinstance(shape[0], int) else shape[0]
    return int(rows), int(cols)


_GRIDS: dict[str, Callable[[Any, Mapping[str, Any]], tuple[int, int]]] = {
    "SD3Transformer2DModel": _patches,
    "FluxTransformer2DModel": _by_ids,
    "Flux2Transformer2DModel": _by_ids,
    "QwenImageTransformer2DModel": _by_shapes,
    "PixArtTransformer2DModel": _patches,
    "SanaTransformer2DModel": _patches,
}
