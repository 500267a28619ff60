"""`PipelineFacts`: what is known of a pipeline before it runs, asked once and handed down."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from .call_options import call_options, is_modular
from .demos import Demo, demo_of
from .layers import Denoiser, find_denoiser
from .pipeline import Options, Pipeline


class PipelineFacts:
    """Facts of a pipeline, each read when it is first needed and then kept.

        facts = PipelineFacts.of(pipe)  # facts stay as they are

    Make them at the start of a run: another run may find other parts in the pipeline.

    Attributes:
        pipe: the pipeline.
    """

    def __init__(self, pipe: Pipeline):
        self.pipe = pipe

    @classmethod
    def of(cls, pipe: Pipeline | PipelineFacts) -> PipelineFacts:
        return pipe if isinstance(pipe, cls) else cls(pipe)

    @property
    def name(self) -> str:
        """Name of the pipeline's class."""
        return type(self.pipe).__name__

    @cached_property
    def denoiser(self) -> Denoiser:
        """Model that is called once a step, with its family and its layers; raise TypeError for one
        of no known family."""
        return find_denoiser(self.pipe)

    @property
    def makes_videos(self) -> bool:
        return self.denoiser.family.video

    @cached_property
    def is_joint(self) -> bool:
        """True if some layers attend to text and image together."""
        return any(layer.kind == "joint" for layer in self.denoiser.layers)

    @cached_property
    def demo(self) -> Demo | None:
        """Demo model that the pipeline was loaded from, or None."""
        return demo_of(self.pipe)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options that the pipeline's call knows, name to default."""
        return call_options(self.pipe)

    def option(self, options: Options, name: str) -> Any:
        """Return an option's value, or the pipeline's default if it was not given. An option that
        is no input of a modular pipeline's blocks is None."""
        if name in options:
            return options[name]
        return self.options.get(name) if is_modular(self.pipe) else self.options[name]
