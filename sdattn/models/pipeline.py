"""`Pipeline` and `Model`: the types that the rest of sdattn takes, for any class of diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Options = Mapping[str, Any]  # arguments of a pipeline's call, by name
Given = Mapping[str, Any]  # arguments of a model's call, by name


class Model(Protocol):
    """Denoiser as its family reads it: config and parts differ from class to class."""

    def __getattr__(self, name: str, /) -> Any:
        """Return a part or a setting."""


class Pipeline(Protocol):
    """Pipeline of diffusers: parts (``vae``, ``tokenizer_2``) and settings differ from class to
    class.

    ``__call__`` is left out, since diffusers' ``DiffusionPipeline`` itself has none.
    """

    @property
    def components(self) -> dict[str, Any]:
        """Parts by name."""

    @property
    def device(self) -> torch.device:
        """Device of its parts."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its parts."""

    def __getattr__(self, name: str, /) -> Any:
        """Return a part or a setting."""

    def __setattr__(self, name: str, value: Any, /) -> None:
        """Set a part or a setting."""
