"""Options of a batch run, and its outcome."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..loading.options import LoadingOptions
from ..maps.presets import PRESETS, Preset
from ..models.pipeline import Options


@dataclass(frozen=True)
class Request:
    """Options of a batch run."""

    source: str | Path | None = None
    out: str | Path = ""
    photos: str | Path | None = None
    model: str = "demo"
    options: Options = field(default_factory=dict)
    seed: int = 0
    batch_size: int | None = None
    shard_items: int | None = None
    limit: int | None = None
    format: str = "folder"
    preset: Preset = PRESETS["default"]
    save: Sequence[str] | None = None
    strict: bool = False
    prompt_column: str | None = None
    keep_columns: Sequence[str] = ()
    input_format: str | None = None
    device: str | None = None
    dtype: torch.dtype | str | None = None
    progress: bool = True
    loading: LoadingOptions = field(default_factory=LoadingOptions)

    def batch_of(self, *, videos: bool) -> int:
        """Return the number of items that are drawn together."""
        return self.batch_size or (1 if videos else 8)
