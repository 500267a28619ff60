"""One call of a denoiser, and what families share in reading its arguments.

Every model has arguments of its own for the timestep, the grid of its picture and the text; its
:class:`sdattn.models.family.Family` reads them into a :class:`Call`, once a call.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .compiled import unwrapped


@dataclass(frozen=True)
class Call:
    """One call of a denoiser.

    Attributes:
        timestep: in the scheduler's unit (the batch's first, if rows differ).
        latent_size: (rows, cols) of the finest queries: the cells of a UNet's latent, the patches
            of a transformer's; None for a model of one's own, whose grid no argument names.
        batch: rows that the attention layers see; the frames of a video are rows.
        text: the text states, ``[B, T, width]``; None for a model of one's own.
        sample: the latents as the model gets them; None for a model of one's own.
        n_image: columns of image prompts (IP-Adapter), which follow those of the text.
        skips_layers: whether this is the extra pass of skip-layer guidance (SD 3.5), which is
            neither branch of the guidance.
    """

    timestep: float
    latent_size: tuple[int, int] | None
    batch: int
    text: Tensor | None
    sample: Tensor | None = None
    n_image: int = 0
    skips_layers: bool = False

    @property
    def n_text(self) -> int:
        """Columns of the text; 0 while they are not known."""
        return 0 if self.text is None else self.text.shape[1]


def arguments(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``model(*args, **kwargs)`` by their names."""
    forward = inspect.signature(unwrapped(model).forward)
    return forward.bind_partial(*args, **kwargs).arguments


def first_timestep(timestep: Any) -> float:
    """The batch's first, from a number or a tensor of any shape."""
    return float(torch.as_tensor(timestep).flatten()[0])


def grid_of_patches(model: Any, given: Mapping[str, Any]) -> tuple[int, ...]:
    """The grid of a latent ``[B, C, rows, cols]`` that the model cuts into patches itself."""
    rows, cols = given["hidden_states"].shape[-2:]
    return rows // model.config.patch_size, cols // model.config.patch_size


def grid_of_ids(_model: Any, given: Mapping[str, Any]) -> tuple[int, ...]:
    """The grid of packed patches ``[B, N, C]`` with ``img_ids`` ``[(B,) N, (picture, row, col)]``.

    The picture that is made is number 0 and comes first; reference pictures follow it.

    Raises:
        ValueError: its patches form no grid.
    """
    ids = given["img_ids"]
    ids = ids[0] if ids.ndim == 3 else ids
    made = ids[ids[:, 0] == 0][:, 1:3].float()
    rows, cols = made[:, 0].unique(), made[:, 1].unique()
    if not len(made) or not torch.equal(made, torch.cartesian_prod(rows, cols)):
        raise ValueError(
            f"img_ids name {len(made)} patches of the picture in {len(rows)} rows and {len(cols)} "
            "columns, which is no grid, row by row, so where a patch lies is not known."
        )
    return len(rows), len(cols)


def innermost(processor: Any) -> Any:
    """The processor behind those that only observe."""
    while getattr(processor, "is_observer", False):
        processor = processor.inner
    return processor


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a layer hands to its processor, behind itself."""
    names = "hidden_states", "encoder_hidden_states", "attention_mask"
    return {**dict(zip(names, args, strict=False)), **kwargs}
