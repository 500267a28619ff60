"""`Pipeline` and `Model`: what the rest of sdattn takes, whatever class of diffusers it is."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch

Options = Mapping[str, Any]  # arguments of a pipeline's call, by name
Given = Mapping[str, Any]  # arguments of a model's call, by name


class Model(Protocol):
    """A denoiser, as its family reads it: its config and parts differ from class to class."""

    def __getattr__(self, name: str, /) -> Any:
        """Return a part or a setting."""


class Pipeline(Protocol):
    """A pipeline of diffusers: its parts (``vae``, ``tokenizer_2``) and settings differ from class
    to class.

    ``__call__`` is left out, since diffusers' ``DiffusionPipeline`` itself has none.
    """

    @property
    def components(self) -> dict[str, Any]:
        """The parts, by name."""

    @property
    def device(self) -> torch.device:
        """Where it lies."""

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""

    def __getattr__(self, name: str, /) -> Any:
        """Return a part or a setting."""

    def __setattr__(self, name: str, value: Any, /) -> None:
        """Set a part or a setting."""
