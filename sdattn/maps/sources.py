"""`Source`: what heatmaps are made from."""

from collections.abc import Sequence
from typing import Protocol

from ..hooks.drawn import DrawnPrompts
from ..hooks.text_watch import TextsOfRun
from ..models.guidance import Branch
from .layermaps import LayerMaps
from .presets import Preset


class Source(Protocol):
    """Maps of a run and the texts of their columns: a :class:`sdattn.MapStore`, or an attached
    store's."""

    @property
    def drawn(self) -> DrawnPrompts | None: ...
    @property
    def texts(self) -> TextsOfRun: ...
    @property
    def images(self) -> int | None: ...
    @property
    def branches(self) -> tuple[Branch, ...]: ...
    @property
    def n_text(self) -> int | None: ...
    @property
    def n_keys(self) -> int | None: ...
    @property
    def tokens(self) -> tuple[int, ...] | None: ...
    @property
    def frames(self) -> tuple[int, ...] | None: ...
    def layer_maps(self, preset: Preset) -> LayerMaps: ...
    def read_passes(self, preset: Preset) -> Sequence[int]: ...
