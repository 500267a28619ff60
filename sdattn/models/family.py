"""One record with the facts about a family of models, read by every room above.

    Family(
        name="FLUX.1",
        denoisers=("FluxTransformer2DModel",),
        layers={"transformer_blocks.*.attn": ("double", "joint")},
        joined="text first",
        grid=grid_of_ids,
    )

sdattn's own families are in :mod:`sdattn.models.families`;
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
from .denoiser_call import (
    DenoiserCall,
    Size,
    Timestep,
    arguments,
    grid_of_patches,
    head_count,
)
from .encoders import Reader
from .layers import AttentionLayer, Kind, Place
from .parts import Edits, Guidance, ImageLatents, Names
from .pipeline import Given, Model

Joined = Literal["text first", "image first"]
Half = Literal["float16", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Family of transformers; subclasses describe other models, see ``families/unet.py``.

    Attributes:
        name: name that its users know.
        grid: function from the model and its call's arguments by name to the grid of the image's
            queries, ``(rows, cols)`` or ``(frames, rows, cols)``. Default: the latent's patches.
        video: True if it makes videos: maps have an axis for frames, even if there is one frame. A
            video is one sequence, frame by frame, or its frames are consecutive rows of the batch,
            see :attr:`DenoiserCall.frame_rows`.
        fps: frames per second that the authors show videos at; a function of the model if its
            releases differ.
        default_frames: frames of a video if neither the pipeline nor the model says it.
        frame_unit: unit of latent frames: a video's latent has 1 plus a multiple of it.
        grid_argument: argument whose values, not shape, ``grid`` reads (a tensor of ids), or None.
            Values are read once per run, since reading waits for the device.
        denoisers: model classes, or names of diffusers' classes, which are then not imported.
            Subclasses belong to the family too.
        layers: patterns of attention modules' paths, with place and kind. The modules have
            ``heads`` (or ``num_heads``) and a ``processor``.
        joined: order in which joint attention joins text and image (reference images follow the
            generated one); None if no layer is joint. There is no default.
        spans: for joint attention in which image and text do not simply follow each other, or whose
            rows differ: function from the model, its call's arguments by name and the number of
            image cells to a pair of slices per row of the batch. Each row has its own text columns,
            padded to the longest text. None if :attr:`joined` is enough.
        spans_arguments: arguments whose values, not shapes, ``spans`` reads (masks). The same
            tensors are read once, since reading waits for the device.
        caches_text: True if the text attends by itself, and no more once its keys are cached.
        timestep_unit: factor from the model's timestep to the scheduler's.
        timestep_start: the scheduler's timestep at the model's 0; the unit is then negative.
        patch: latent cells per side of one query; None for ``config.patch_size``.
        size_unit: pixels that image sides must be a multiple of; cells may need more.
        default_size: pixels per side of an image if neither the pipeline nor the model has a
            ``sample_size``.
        readers: prefixes of pipeline class names, and how those pipelines read prompts, if their
            ``encode_prompt`` alone does not tell. The longest prefix that fits a class, or its
            nearest base that any fits, wins.
        guidance: names of pipeline classes, and how they and their subclasses run guidance.
        text_argument: argument of the pipeline's call with the text behind the columns;
            ``"prompt"`` if that is left out. A negative prompt's has ``negative_`` in front.
        text_options: further arguments that decide what the text encoders get, as readers ask for
            them.
        reads_ids: path, in a text encoder, of the module that its pipelines call with token ids; ""
            for the encoder itself.
        names: names of the inputs of the model's forward.
        text_stream: for joint attention, how text states as the model gets them enter the text's
            own stream; None if blocks have no such stream.
        preset: name of the preset in :data:`sdattn.maps.presets.PRESETS` that points best.
        half: half-precision dtype that its authors run it in.
        image_latents: how its text-to-image pipelines take a given image; None if unknown.
        edits: how prompt-to-prompt edits its images; None if unknown.

    Raises:
        ValueError: joint attention without ``joined``, or the reverse.
    """

    name: str
    grid: Callable[[Model, Given], tuple[int, ...]] = grid_of_patches
    denoisers: tuple[type | str, ...] = ()
    layers: Mapping[str, tuple[Place, Kind]] = field(default_factory=dict)
    video: bool = False
    fps: int | Callable[[Model], int] = 8
    default_frames: int = 16
    frame_unit: int = 1
    joined: Joined | None = None
    spans: Callable[[Model, Given, int], Sequence[Spans]] | None = None
    spans_arguments: tuple[str, ...] = ()
    caches_text: bool = False
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
    reads_ids: str = ""
    names: Names = field(default_factory=Names)
    text_stream: Callable[[Model, Tensor], Tensor] | None = None
    preset: str = "default"
    half: Half = "bfloat16"
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
        """Name and classes, for messages that list supported models."""
        names = ", ".join(self.denoiser_names)
        return f"{self.name} ({names})" if names else self.name

    @property
    def denoiser_names(self) -> list[str]:
        """Names of the classes in :attr:`denoisers`."""
        return [kind if isinstance(kind, str) else kind.__name__ for kind in self.denoisers]

    def lists(self, kind: type) -> bool:
        """Check whether a class is among the denoisers; a name stands for diffusers' own class."""
        is_diffusers = kind.__module__.partition(".")[0] == "diffusers"
        return kind in self.denoisers or (is_diffusers and kind.__name__ in self.denoisers)

    def within(self, _pipeline: Any) -> "Family":
        """Return the family as used in a pipeline: the same model may make images and videos."""
        return self

    def recognises(self, _model: Model) -> bool:
        """Check whether a model that no family lists belongs to this one by how it is built."""
        return False

    def order_of(self, model: Model) -> Joined | None:
        """Return :attr:`joined` if it is known for this very model: not for a subclass with its own
        ``forward``."""
        kind: Any = type(model)
        base = next((cls for cls in kind.__mro__ if self.lists(cls)), None)
        return self.joined if base is not None and kind.forward is base.forward else None

    def find_layers(self, model: Model, modules: Mapping[str, Module]) -> list[AttentionLayer]:
        """Return every attention layer of a model with these modules, in running order.

        Raises:
            TypeError: an unknown layer, by name.
        """
        # The processor does the work. Most have a set_processor too, Mochi's do not.
        held = [pair for pair in modules.items() if hasattr(pair[1], "processor")]
        # A processor may be a module that holds another one (StyleAligned), and is no layer.
        processors = set[Module]()
        for _, module in held:
            if isinstance(module.processor, Module):
                processors.update(module.processor.modules())
        return [self.describe(model, *pair) for pair in held if pair[1] not in processors]

    def describe(self, _model: Model, name: str, module: Module) -> AttentionLayer:
        """Return the attention layer for a module of a model."""
        for pattern, (place, kind) in self.layers.items():
            if fnmatch.fnmatchcase(name, pattern):
                return AttentionLayer(name, place, kind, 0, head_count(module), module)
        raise self.unknown_layer(name, module)

    def unknown_layer(self, name: str, module: Module, why: str = "") -> TypeError:
        """Return the error for attention in a place where the family has none."""
        return InvalidTypeError(
            f"{name} is a {type(module).__name__} of a kind that sdattn does not know in a model "
            f"of the family {self.title}{why and f': {why}'}."
        )

    def levels(self, _model: Model) -> int:
        """Return the number of resolutions."""
        return 1

    def cell(self, model: Model) -> int:
        """Return the latent cells per side of the finest query."""
        return self.patch or int(model.config.patch_size)

    def latents(self, model: Model, args: tuple[object, ...], kwargs: Given) -> Any:
        """Return the latents among a call's arguments, as the model gets them."""
        return arguments(model, args, kwargs)[self.names.latents]

    def with_latents(
        self, args: tuple[object, ...], kwargs: Given, latents: Tensor
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Return a call's arguments with other latents, by name or in first place."""
        if self.names.latents in kwargs:
            return args, {**kwargs, self.names.latents: latents}
        return (latents, *args[1:]), dict(kwargs)

    def read_call(self, model: Model, args: tuple[object, ...], kwargs: Given) -> DenoiserCall:
        """Read the arguments of ``model(*args, **kwargs)``."""
        given = arguments(model, args, kwargs)
        names = self.names
        latents = given[names.latents]
        frame_rows = self.frame_rows(given)
        batch = len(latents) * frame_rows
        text = given[names.text] if names.text else None
        if isinstance(text, tuple):  # a UNet's, before image prompts
            text = text[0]
        skips = [given.get(name) for name in names.skips]
        return DenoiserCall(
            timestep=self.timestep(model, given),
            size=partial(self.size, model, given),
            batch=batch,
            text=text,
            text_2=given.get(names.text_2),
            frame_rows=frame_rows,
            sample=latents if isinstance(latents, Tensor) else None,
            n_image=self.image_columns(model, given, batch),
            skips_layers=any(one is not None and one is not False for one in skips),
            grid_ids=given.get(self.grid_argument) if self.grid_argument else None,
            spans=partial(self.spans, model, given) if self.spans else None,
            spans_of=tuple(given[name] for name in self.spans_arguments if name in given),
        )

    def timestep(self, _model: Model, given: Given) -> Timestep:
        """Read the timestep from a call's arguments."""
        names = self.names.timestep
        name = next((name for name in names if given.get(name) is not None), names[-1])
        return Timestep(given[name], self.timestep_unit, self.timestep_start)

    def frame_rows(self, _given: Given) -> int:
        """Return the number of batch rows per video: its frames, if each is a row."""
        return 1

    def image_columns(self, _model: Model, _given: Given, _batch: int) -> int:
        """Return the number of columns of image prompts, which follow the text's."""
        return 0

    def size(self, model: Model, given: Given) -> Size:
        """Return :attr:`grid` as integers; (rows, cols) for an image.

        Raises:
            ValueError: several frames from a model that is not known to make videos.
        """
        *frames, rows, cols = map(int, self.grid(model, given))
        if self.video:
            return (*frames, rows, cols)
        if math.prod(frames) != 1:
            raise InvalidValueError(
                f"A {type(model).__name__} was called with a grid of {frames[0]} frames "
                f"of {rows}x{cols} cells in one sequence. Its maps are of single images: make "
                "one."
            )
        return rows, cols
