"""A pass in which a controller is called: its rows, its grid, where its text is."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from ..attention.joining import TEXT, check_layer, unknown_layer
from ..attention.joint_processor import Spans
from ..errors import InvalidTypeError, InvalidValueError
from ..models.denoiser_call import DenoiserCall, Size
from ..models.guidance import GuidanceWatch, Order, branch_rows
from ..models.layers import (
    AttentionLayer,
    Denoiser,
    find_denoiser,
    is_unet,
    joint_order,
    ordered_spans,
)
from .installer import Installation
from .latent_sizes import LatentSizes
from .run_watch import RunWatch


@dataclass(frozen=True)
class ControlledPass:
    """One pass of a model.

    Attributes:
        batch: its rows.
        size: (rows, cols) of the latent's queries.
        spans: where the picture's tokens and the text's are in joint attention; None where none is
            joint.
        order: the branches of its batch; None where no pipeline knows them.
        begins_run: whether it is the first of a run.
        skips_layers: whether it is the extra pass of skip-layer guidance.
    """

    batch: int
    size: Size
    spans: Spans | None
    order: Order | None
    begins_run: bool
    skips_layers: bool

    @property
    def of_no_prompt(self) -> bool:
        """Whether it is of the negative prompt alone, or of neither branch."""
        return self.skips_layers or (self.order is not None and "conditional" not in self.order)

    @property
    def prompts(self) -> slice | None:
        """The rows that are the prompts'; None where no pipeline knows them."""
        return None if self.order is None else branch_rows(self.order, self.batch)["conditional"]


class ControlledPasses:
    """The passes of one model, each read once, where its first layer calls or before.

    Args:
        denoiser: its pipeline is held weakly, and the model is not.

    Raises:
        ValueError: how the pipeline lays out guidance is not known.
    """

    def __init__(self, denoiser: Denoiser):
        pipeline = denoiser.pipeline
        self.guidance = None if pipeline is None else GuidanceWatch(pipeline)
        self.runs = RunWatch()
        self._pipeline: Any = (lambda: None) if pipeline is None else weakref.ref(pipeline)
        self._sizes = LatentSizes()
        is_joint = any(layer.kind == "joint" for layer in denoiser.layers)
        self._joined = joint_order(denoiser) if is_joint else None

    def read(self, call: DenoiserCall) -> ControlledPass:
        """The pass that begins now."""
        begins = self.runs.begins(self._pipeline())
        in_run = self.runs.schedule is not None and not begins
        size, spans = cast(Size, self._sizes.of(call, in_run)), None
        if self._joined is not None:
            spans = ordered_spans(self._joined, math.prod(size), call.n_text)
        return ControlledPass(call.batch, size, spans, self._order(), begins, call.skips_layers)

    def listen(self, installed: Installation) -> None:
        """Listen to what the pipeline says of its calls, for as long as the installation."""
        if self.guidance is not None:
            installed.undo(self.guidance.close)
            self.guidance.listen()

    def check_guidance(self, controller: Any) -> None:
        """Refuse a controller that was told of another layout than the pipeline has.

        Raises:
            ValueError: it was.
        """
        in_turn = self.guidance is not None and self.guidance.in_turn
        if in_turn and getattr(controller, "guidance", None) == "passes":
            raise InvalidValueError(
                "guidance='passes' is of models that run for the negative prompt first, and a "
                f"{type(self._pipeline()).__name__} runs for the prompt first, if in two passes at "
                "all. Leave guidance= out: the pipeline says which pass is which."
            )

    def _order(self) -> Order | None:
        if self.guidance is None or self.guidance.pipeline is None:
            return None
        try:
            return self.guidance.order()
        except AttributeError:  # it has not run yet: the model is called by hand
            return None


def controlled_layers(target: Any) -> tuple[Denoiser, list[AttentionLayer]]:
    """Return a model whose layers can call a controller, and its layers in execution order: a UNet
    of self- and cross-attention, or a transformer of joint attention.

    Raises:
        TypeError: ``target`` is no such model.
    """
    denoiser = find_denoiser(target)
    layers = denoiser.layers
    kinds = {layer.kind for layer in layers}
    if "joint" in kinds and kinds <= {"joint", "self"}:
        check_joint(denoiser, layers)
    elif not kinds <= {"cross", "self"} or not is_unet(denoiser.model):
        strange = sorted(kinds - {"cross", "self"})
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} is no UNet of Stable Diffusion and has no joint "
            f"attention alone, but {' and '.join(strange) or 'other'} attention in other places, "
            "which the controllers of prompt-to-prompt do not know. Pass a pipeline of SD 1.x, "
            "2.x, SDXL, Stable Diffusion 3, FLUX or Qwen-Image, or its UNet or transformer."
        )
    return denoiser, layers


def check_joint(denoiser: Denoiser, layers: Sequence[AttentionLayer]) -> None:
    """Refuse joint attention that :class:`sdattn.TorchJointProcessor` does not compute, before
    anything is put into the model.

    Raises:
        TypeError: an order, a layer or a place of the text that it does not know.
    """
    joint_order(denoiser)
    if denoiser.family.film:
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} makes films, and controllers and knockouts are of "
            "pictures. capture() can watch it."
        )
    if denoiser.family.spans is not None:
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} has its text elsewhere in each row of a batch, "
            "or with more beside it, which controllers and knockouts do not know. capture() can "
            "watch it."
        )
    for layer in layers:
        check_layer(layer.module)
        two = layer.kind == "joint" and layer.place == "double"
        if two and not any(getattr(layer.module, name, None) is not None for name in TEXT):
            raise unknown_layer(layer.module, "has two streams and no projections for the text")
