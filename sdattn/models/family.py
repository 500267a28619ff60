"""What is known of a family of models, in one record that every room above reads.

    Family(
        name="FLUX.1",
        denoisers=("FluxTransformer2DModel",),
        layers={"transformer_blocks.*.attn": ("double", "joint")},
        joined="text first",
        grid=grid_of_ids,
    )

Those that come with sdattn are in :mod:`sdattn.models.families`, a file each;
:func:`sdattn.models.register` adds another.
"""

import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor
from torch.nn import Module

from ..attention.joint_processor import Spans
from ..errors import InvalidTypeError, InvalidValueError
from .attention_layer import AttentionLayer, Kind, Place
from .denoiser_call import (
    DenoiserCall,
    Size,
    Timestep,
    arguments,
    head_count,
    holds_processor,
    unwrapped,
)
from .edits import Edits
from .encoders import Reader
from .image_latents import ImageLatents
from .names import Names
from .pipeline import Given, Model

Joined = Literal["text first", "image first"]
Half = Literal["float16", "bfloat16"]
Branch = Literal["conditional", "unconditional"]
Order = tuple[Branch | None, ...]


@dataclass(frozen=True)
class Guidance:
    """How a class of pipelines runs classifier-free guidance (Ho and Salimans 2022).

    Attributes:
        order: the branches of a guided batch, chunk by chunk; None is neither of them.
        known_by: what shows which branches a call of the model has, where the pipeline does not
            name it: ``do_classifier_free_guidance``, a ``"property"`` of the pipeline or a
            ``"variable"`` of its running call; the property and the ``"truncation"``, the part of
            the run after which guidance has ended; the count of ``"calls"`` in a step, the prompt's
            first, where they run in turn; or the ``"guider"`` of a modular pipeline, where they do
            too.
        further: the variable of the running call that counts further chunks of a guided batch, of
            neither branch; "" for none.
        once: whether only the first call of a step has these branches, and later ones have none.
    """

    order: Order
    known_by: Literal["property", "truncation", "variable", "calls", "guider"] = "property"
    further: str = ""
    once: bool = False


NEGATIVE_FIRST = Guidance(("unconditional", "conditional"))
# Pipelines that keep whether they are guided to their call
NEGATIVE_FIRST_IN_CALL = Guidance(("unconditional", "conditional"), known_by="variable")
IN_TURN = Guidance(("conditional",), known_by="calls")
GUIDED = Guidance(("conditional",), known_by="guider")


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of transformers; of other models a subclass, see ``families/unet.py``.

    Attributes:
        name: as its users call it.
        grid: the grid of the image's queries, ``(rows, cols)`` or ``(frames, rows, cols)``, from
            the model and the arguments of its call by name.
        video: whether its images are videos: their maps have an axis for the frames, also where
            there is one. Each is one sequence, frame by frame, or its frames are rows of the batch
            one after the other, :attr:`DenoiserCall.frame_rows`.
        fps: of videos, the frames a second that its authors show; of a model, where its releases
            differ.
        default_frames: of videos, how many frames they have by default, where neither the
            pipeline nor the model says it.
        frame_unit: of videos, their latents have one frame and a multiple of this number.
        grid_argument: the argument whose values, not its shape, ``grid`` reads (a tensor of ids):
            those of one run are read once, since the device waits for it. None where there is none.
        denoisers: its classes: the class itself, or the name of one of diffusers, which is then not
            imported. Their subclasses belong to the family too.
        layers: where the attention layers are, by patterns of module paths, and of what place and
            kind. They are modules with ``heads`` (or ``num_heads``) and a ``processor``.
        joined: in which order the joint attention joins text and image (reference images follow
            the one that is made); None where none is joint. There is no default.
        spans: of joint attention in which image and text do not simply follow each other, or are
            elsewhere in each row: where they are, a pair of slices for each row of the batch, from
            the model, the arguments of its call by name and the number of the image's cells. The
            columns of a row are those of its text, then nobody's up to the longest text. None
            where :attr:`joined` says it all.
        spans_arguments: those whose values, not their shapes, ``spans`` reads (masks): where they
            are the same tensors as before they are read once, since the device waits for them.
        timestep_unit: what the model's timestep is multiplied by to be the scheduler's.
        timestep_start: the scheduler's timestep where the model's is 0; its unit is then negative.
        patch: cells of the latent that one query has on a side; None for ``config.patch_size``.
        size_unit: images have sides of a multiple of this many pixels, at the least.
        default_size: pixels a side of its images by default, where neither the pipeline nor the
            model has a ``sample_size``.
        readers: the beginnings of names of pipeline classes, and how those read their prompts; the
            longest that fits a class, or the nearest base that any fits, is taken.
        guidance: the names of pipeline classes, and how those and their subclasses run guidance.
        text_argument: the argument of a pipeline's call whose text the columns are of; ``"prompt"``
            where that is left out. A negative prompt's has ``negative_`` before it.
        text_options: the arguments beside it that decide what the text encoders get, as readers
            ask for them.
        names: names that the model's forward has for its inputs.
        text_stream: of joint attention, how text states as the model gets them enter the stream
            beside the image; None where the blocks have no stream of their own for the text.
        preset: the name of that of :data:`sdattn.maps.presets.PRESETS` which points best.
        half: the half type that its authors run it in, of which torch has a dtype.
        image_latents: how its text-to-image pipelines take an image that is there already; None
            where that is not known.
        edits: how prompt-to-prompt edits its images; None where that is not known.

    Raises:
        ValueError: joint attention without ``joined``, or the reverse.
    """

    name: str
    grid: Callable[[Model, Given], tuple[int, ...]]
    denoisers: tuple[type | str, ...] = ()
    layers: Mapping[str, tuple[Place, Kind]] = field(default_factory=dict)
    video: bool = False
    fps: int | Callable[[Model], int] = 8
    default_frames: int = 16
    frame_unit: int = 1
    joined: Joined | None = None
    spans: Callable[[Model, Given, int], Sequence[Spans]] | None = None
    spans_arguments: tuple[str, ...] = ()
    timestep_unit: float = 1.0
    timestep_start: float = 0.0
    patch: int | None = None
    grid_argument: str | None = None
    size_unit: int = 8
    default_size: int = 1024
    readers: Mapping[str, Reader] = field(default_factory=dict)
    guidance: Mapping[str, Guidance] = field(default_factory=dict)
    text_argument: str = "prompt"
    text_options: tuple[str, ...] = ("max_sequence_length",)
    names: Names = field(default_factory=Names)
    text_stream: Callable[[Model, Tensor], Tensor] | None = None
    preset: str = "default"
    half: Half = "float16"
    image_latents: ImageLatents | None = None
    edits: Edits | None = None

    def __post_init__(self) -> None:
        joint = any(kind == "joint" for _, kind in self.layers.values())
        if self.joined not in (get_args(Joined) if joint else (None,)):
            known = " or ".join(map(repr, get_args(Joined))) if joint else "None"
            raise InvalidValueError(
                f"The family {self.name!r} has {'' if joint else 'no '}joint attention and "
                f"joined={self.joined!r}: pass {known}."
            )

    @property
    def title(self) -> str:
        """Its name and classes, for messages that list what is supported."""
        names = [kind if isinstance(kind, str) else kind.__name__ for kind in self.denoisers]
        return f"{self.name} ({', '.join(names)})" if names else self.name

    def lists(self, kind: type) -> bool:
        """Whether a class is named among the denoisers."""
        return kind in self.denoisers or kind.__name__ in self.denoisers

    def within(self, _pipeline: Any) -> "Family":
        """Return the family as it is in a pipeline: the same model may make images and videos."""
        return self

    def recognises(self, _model: Model) -> bool:
        """Whether a model that no family lists belongs to this one by how it is built."""
        return False

    def order_of(self, model: Model) -> Joined | None:
        """:attr:`joined`, where it is known of this very model: not of another class that only
        bears the name, nor of a subclass with a ``forward`` of its own."""
        kind: Any = type(model)
        base = next((cls for cls in kind.__mro__ if self.lists(cls)), kind)
        known = base in self.denoisers or base.__module__.startswith("diffusers.")
        return self.joined if known and kind.forward is base.forward else None

    def find_layers(self, model: Model) -> list[AttentionLayer]:
        """Every attention layer in the order in which they run.

        Raises:
            TypeError: one that is not known, by name.
        """
        held = model.named_modules()
        return [self.describe(model, *pair) for pair in held if holds_processor(pair[1])]

    def describe(self, _model: Model, name: str, module: Module) -> AttentionLayer:
        """The attention layer that is a module of a model."""
        for pattern, (place, kind) in self.layers.items():
            if fnmatch.fnmatchcase(name, pattern):
                return AttentionLayer(name, place, kind, 0, head_count(module), module)
        raise self.unknown_layer(name, module)

    def unknown_layer(self, name: str, module: Module, why: str = "") -> TypeError:
        """The error for attention in a place where the family is known to have none."""
        return InvalidTypeError(
            f"{name} is a {type(module).__name__} of a kind that sdattn does not know in a model "
            f"of the family {self.title}{why and f': {why}'}."
        )

    def levels(self, _model: Model) -> int:
        """Number of resolutions."""
        return 1

    def cell(self, model: Model) -> int:
        """Cells of the latent that the finest query has on a side."""
        return self.patch or int(model.config.patch_size)

    def latents(self, model: Model, args: tuple[object, ...], kwargs: Given) -> Any:
        """The latents in the arguments of a call, as the model gets them."""
        return arguments(model, args, kwargs)[self.names.latents]

    def with_latents(
        self, args: tuple[object, ...], kwargs: Given, latents: Tensor
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The arguments of a call with other latents, which are the first or have their name."""
        if self.names.latents in kwargs:
            return args, {**kwargs, self.names.latents: latents}
        return (latents, *args[1:]), dict(kwargs)

    def read_call(self, model: Model, args: tuple[object, ...], kwargs: Given) -> DenoiserCall:
        """Read the arguments of ``model(*args, **kwargs)``."""
        given, names = arguments(model, args, kwargs), self.names
        latents, rows = given[names.latents], self.frame_rows(given)
        text = given[names.text] if names.text else None
        text = text[0] if isinstance(text, tuple) else text  # a UNet's, before image prompts
        batch = len(latents) * rows
        return DenoiserCall(
            timestep=self.timestep(model, given),
            size=partial(self.size, model, given),
            batch=batch,
            text=text,
            text_2=given.get(names.text_2),
            frame_rows=rows,
            sample=latents if isinstance(latents, Tensor) else None,
            n_image=self.image_columns(model, given, batch),
            skips_layers=any(_is_set(given.get(name)) for name in names.skips),
            grid_ids=given.get(self.grid_argument) if self.grid_argument else None,
            spans=partial(self.spans, model, given) if self.spans else None,
            spans_of=tuple(given[name] for name in self.spans_arguments if name in given),
        )

    def timestep(self, _model: Model, given: Given) -> Timestep:
        """Read the timestep among the arguments of a call."""
        names = self.names.timestep
        name = next((name for name in names if given.get(name) is not None), names[-1])
        return Timestep(given[name], self.timestep_unit, self.timestep_start)

    def frame_rows(self, _given: Given) -> int:
        """Return the rows of the batch that one video has: its frames, if each is a row."""
        return 1

    def image_columns(self, _model: Model, _given: Given, _batch: int) -> int:
        """Return the columns of image prompts, which follow those of the text."""
        return 0

    def size(self, model: Model, given: Given) -> Size:
        """:attr:`grid` as whole numbers, of an image (rows, cols).

        Raises:
            ValueError: several frames of a model that is not known to make videos.
        """
        *frames, rows, cols = map(int, self.grid(model, given))
        if self.video:
            return (*frames, rows, cols)
        if math.prod(frames) != 1:
            raise InvalidValueError(
                f"A {type(unwrapped(model)).__name__} was called with a grid of {frames[0]} frames "
                f"of {rows}x{cols} cells in one sequence. Its maps are of single images: make "
                "one."
            )
        return rows, cols


def _is_set(value: object) -> bool:
    return value is not None and value is not False
