"""`capture()`, which watches a model, and `MapStore`, which holds the maps and makes heatmaps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import InvalidValueError, known_options
from ..follow.pass_options import Guidance
from ..follow.passes import CaptureError
from ..keep.keep import Heads, Keep, Selection, Steps
from ..keep.map_store import CapturedMaps
from ..keep.watching import watch_model
from ..look.output_space import Space
from ..models.layers import LayerSelection
from ..unknown.told import Grid
from ..unknown.watching import watch_unknown
from .captured import read_passes, self_maps, spot_maps, text_maps
from .from_stores import heatmaps
from .heatmap import Heatmap
from .heatmaps import Heatmaps
from .layermaps import LayerMap, LayerMaps, Source, layer_maps
from .presets import Preset


class MapStore(CapturedMaps):
    """The maps that :func:`sdattn.capture` collects.

    Attributes:
        layers: the watched attention layers; once the block has ended, without their modules.
        sums: what is held for each layer, by name.
        passes: one :class:`Pass` for each model call for these images, in order, kept or not.
        stopped: where the run was stopped (``pipe._interrupt = True``), or None.
        has_no_guidance: guidance was on but acted in no step of the run (Z-Image's truncation), so
            the negative prompt has no images.
        checks_itself: whether the capture, not its caller, checks the run at its end.
        keep: the steps, heads and columns that are kept; ``steps``, ``heads``, ``frames`` as asked.
        skipped: calls of the model that are not captured: the other branch's, in pipelines that run
            the two in turn, and skip-layer guidance's.
        kernels: kernels that made attention in the place of torch's own, by name, once the run is
            over; each with the largest absolute difference of any head's output from torch's own
            in float32. A kernel that differs by more than rounding explains (2 % of a head's
            largest value in half types and under autocast, 0.1 % in float32) is refused. Maps are
            the softmax of the query and key that the kernel got.
        tokens: key columns kept, or None for all.
        drawn: the prompts of the run; None if unknown (a bare model, text states) or before it
            runs.
        expected_nbytes: upper limit of the bytes held at the end of the run; for a bare model,
            whose number of calls is unknown, after one call. None before the run.
        maps: a mapping, layer name to ``[images, (steps,) (heads,) (frames,) rows, cols, tokens]``,
            without layers that have not run yet. Video models have a frames axis; ``steps="all"``
            or a list gives a steps axis, and heads likewise. Values are probabilities in [0, 1]. In
            float32 (the default) and with all tokens kept, cross- and self-attention sum to 1 over
            the last axis (the text and each image prompt separately), joint attention to less: the
            rest goes to the image.
    """

    def heatmaps(self, tokenizer: Any = None, prompt: Any = None, **options: Any) -> list[Heatmaps]:
        """Return the heatmaps of each image.

            with sdattn.capture(pipe) as store:
                pipe("a cat left of a pizza")
            store.heatmaps()[0]["cat"]

        Arguments are as for :func:`sdattn.heatmaps`.
        """
        return heatmaps(self, tokenizer, prompt, **options)

    def spots(self) -> list[list[Heatmap]]:
        """Return where each chosen cell looked, for each image, in the order of ``queries``.

            with sdattn.capture(pipe, queries=[(12, 20)]) as store:
                pipe("a cat left of a pizza")
            store.spots()[0][0].overlay(image)

        Values are the mean over heads, steps and the captured layers of the share of the cell's
        attention that goes to each cell, on the finest of their grids: a layer on a coarser grid
        has its shares divided among the finer cells. They sum to about 1, in joint attention to
        less, since the text gets the rest.

        Raises:
            ValueError: the store was captured without cells.
            CaptureError: no layer has run.
        """
        cells = self.keep.queries.cells
        if cells is None:
            text = "This store has no cells of its own. Capture with queries=[(row, col), ...]."
            raise InvalidValueError(text)
        each = []
        for image in spot_maps(self):
            found = []
            for i, (cell, values) in enumerate(zip(cells, image, strict=True)):
                found.append(Heatmap(str(cell), values, (i,), frames=self.frames))
            each.append(found)
        return each

    def layer_maps(
        self, preset: str | Preset = "default", self_attention: Source | None = None
    ) -> LayerMaps:
        """Return :func:`sdattn.maps.layermaps.layer_maps` of this store."""
        return layer_maps(self, preset, self_attention)

    @property
    def is_refined(self) -> bool:
        """True if the maps were spread while the model ran."""
        return self.keep.refine is not None

    def text_maps(self, preset: Preset) -> tuple[dict[str, LayerMap], int]:
        """Return :func:`sdattn.maps.captured.text_maps` of this store."""
        return text_maps(self, preset)

    def self_maps(self, preset: Preset) -> list[Tensor]:
        """Return :func:`sdattn.maps.captured.self_maps` of this store."""
        return self_maps(self, preset)

    def read_passes(self, preset: Preset) -> list[int]:
        """Return the passes of the run, counted from 0, that the preset reads."""
        return read_passes(self, preset)


@known_options()
def capture(
    target: Any,
    *,
    layers: LayerSelection = None,
    kinds: Sequence[str] | None = None,
    branch: str = "conditional",
    guidance: Guidance | None = "auto",
    steps: Selection | Steps = "mean",
    heads: Selection | Heads = "mean",
    tokens: Sequence[int] | None = None,
    among: Sequence[Sequence[int]] | None = None,
    text_states: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
    latent_size: tuple[int, int] | None = None,
    refine: Literal["self"] | None = None,
    space: Space = "attention",
    frames: Sequence[int] | None = None,
    depth: tuple[float, float] | None = None,
    queries: Literal["image", "text"] | Sequence[tuple[float, ...]] = "image",
    keys: Literal["image", "text"] | None = None,
    step_call: int | None = None,
    max_bytes: int | None = None,
    text: slice | torch.Tensor | str | None = None,
    grid: Grid | None = None,
    image: slice | None = None,
) -> AbstractContextManager[MapStore]:
    """Watch the attention of a model while it runs; its output stays the same, bit for bit.

        with sdattn.capture(pipe) as store:
            image = pipe("a cat left of a pizza").images[0]
        store.maps["mid_block.attentions.0.transformer_blocks.0.attn2"]  # [1, rows, cols, tokens]

    Each layer's own processor computes the output, and gets its place back on exit, also after an
    error. One ``with`` holds one run; captures may be nested. A compiled UNet stays compiled if
    means over heads are kept; otherwise it runs eagerly, with a warning.

    Args:
        target: a pipeline, or its UNet or transformer, also wrapped (``DistributedDataParallel``,
            ``PeftModel``); also any model of yours whose attention is all
            :class:`sdattn.attention.MultiHeadAttention`. A bare model has no known guidance, so
            every batch row counts as an image. Calls of a pipeline's model that are not passes of
            its run (a callback's, a reference pass's, another pipeline's) run untouched, are not
            counted, and are named in a warning.
        layers: names, places, resolutions or a predicate, see
            :func:`sdattn.models.layers.select_layers`.
        kinds: any of ``"cross"``, ``"joint"`` and ``"self"`` (default: those that ``queries`` have,
            usually the two that see the text).
            Joint attention (SD3, FLUX, Qwen-Image) keeps the text's columns, which sum to less than
            1: the rest goes to the image. Self-attention keeps a column for every cell.
        branch: ``"conditional"`` (the prompt), ``"unconditional"`` (the negative prompt), or
            ``"both"``: first the unconditional images, then the conditional ones. Pipelines that
            run the two in turn (FLUX, Qwen-Image) show one of them to one capture; nest two.
        guidance: where the unconditional rows of a batch are. ``"auto"`` asks the pipeline, inside
            its own call. Around a loop of your own, pass ``"batch"`` (the first half of the rows),
            ``"passes"`` (the first of two calls) or None (nowhere).
        steps: ``"mean"`` over the calls of the model (a second-order scheduler calls twice per
            step); the mean over a part of the schedule, ``(0.5, 1.0)`` for its second half;
            ``"last"``, only the last call; ``"all"``, or a list of the calls to keep one by one.
        heads: ``"mean"``, ``"all"``, or the indices of the heads to keep one by one.
        tokens: key columns to keep, None for all. The softmax is over all keys either way.
        among: key columns that the softmax is taken over instead of all, for each image or once for
            all. Not for self-attention.
        text_states: ``[1 or images, T, width]``, states of another text (or of the prompt): the
            maps show what the image would attend to in it. For UNets' cross-attention, and the
            joint attention of SD3 and FLUX, where each block runs twice; see
            :mod:`sdattn.look.other_text`.
        device: where to hold the maps (default: where they are computed).
        dtype: dtype of the maps; running sums are float32 at least.
        grad: keep the graph, so that a loss on the maps reaches the latents; not with gradient
            checkpointing.
        latent_size: (rows, cols) of the queries of a model of yours; without it they are a single
            row. Models of diffusers know it, except those on torch's meta device whose grid is in
            the values of ids (FLUX).
        refine: ``"self"``, for joint attention: spread maps twice along the image's own
            self-attention while the model runs, see :mod:`sdattn.look.refined`. A UNet's maps are
            spread afterwards: capture ``kinds=("cross", "self")``.
        space: for joint attention. ``"output"``: instead of attention, the similarity of the
            outputs of a cell and a token, as the product of their outputs before the output
            projection, averaged over features, of any sign, see :mod:`sdattn.look.output_space`.
        frames: frames of a video's latent to keep, counted from 0; None for all. A latent frame
            may stand for several video frames, see :meth:`sdattn.Heatmap.of_frames`.
        depth: with ``refine="self"``, the part of the depth whose blocks spread maps and have one,
            ``(0.5, 1.0)`` for the second half of the blocks, at least one block; the others
            only contribute their attention to the text. None for all.
        queries: who attends. ``"image"``: the image, to the text. ``"text"``, in joint attention:
            the text, to the image, so that a word's map shows where the word looked; a column of a
            layer's maps sums to less than 1 over the cells. A list of cells of the latent, ``[(row,
            col)]`` (``(frame, row, col)`` for a video), to the image: ``maps`` have a column for
            each cell, which sums to 1 over the cells in self-attention, and
            :meth:`MapStore.spots` gives heatmaps. A pixel's cell is its row and column divided by
            the side of a cell: 8 pixels in UNets, mostly 16 in transformers, whose cells are
            patches; ``store.latent_size`` has their number. Floats below 1 are fractions of the
            image's height and width. No ``[N, N]`` matrix is made. Self-attention to another
            image's keys (MasaCtrl) is refused on leaving.
        keys: what they attend to; ``"text"`` with ``queries="text"`` keeps the text's attention to
            itself, ``[images, (steps,) (heads,) T, T]``, a row for each query.
        step_call: number of the call that counts, from 0, for a pipeline that calls its model
            several times in a step for the same branch: 1 after a reference pass. By default maps
            of such a run are refused when they are read.
        max_bytes: bytes that the maps may take at most. A run whose maps would take more is refused
            at its first call of the model, before that runs. Default: no limit, and a warning is
            logged above 1 GB.
        text: for a model of no known family: where the text stands among the keys of its attention.
            A slice, ``slice(0, 77)`` or ``slice(-77, None)``; or, if a layer's keys are the text
            alone, the tensor of its states or the name of the argument with them. See
            :func:`sdattn.inspect_attention`, which proposes it, and ``grid``.
        grid: for such a model: the grid of the image's cells, ``(rows, cols)`` or ``(frames, rows,
            cols)``, in the order of its queries, row by row; a layer may have half of it, and so
            on. Or a function of the call's arguments, ``{name: value}``.
        image: for such a model: where the image stands among the queries of a layer with others
            too (a time token, registers), ``slice(8, None)``. Default: the only place beside the
            text where it has room; if there are several, a ``ValueError`` asks for it.

    Returns:
        A context manager that gives a :class:`MapStore`. By default it does not grow with the
        steps.

    Raises:
        TypeError: sdattn does not know the model.
        ValueError: an option does not fit; the message lists the choices.
        ValueError: while the first call of the model begins, ``max_bytes`` is too little.
        CaptureError: on leaving, nothing was captured; while running, the batch or the size
            changed, or a second run began; on entering it a second time.
        RuntimeError: a layer's attention cannot be seen, or did not produce its output.
    """
    keep = Keep.of(
        layers=layers,
        kinds=kinds,
        branch=branch,
        guidance=guidance,
        steps=steps,
        heads=heads,
        tokens=tokens,
        among=among,
        text_states=text_states,
        device=device,
        dtype=dtype,
        grad=grad,
        latent_size=latent_size,
        refine=refine,
        space=space,
        frames=frames,
        depth=depth,
        queries=queries,
        keys=keys,
        step_call=step_call,
        max_bytes=max_bytes,
        text=text,
        grid=grid,
        image=image,
    )
    return capture_kept(target, keep)


def capture_kept(target: Any, keep: Keep) -> AbstractContextManager[MapStore]:
    """Return :func:`capture` for options that were read."""
    is_told = any(one is not None for one in (keep.text, keep.grid, keep.image))
    watching = watch_unknown if is_told else watch_model
    return _EnteredOnce(watching(target, MapStore, keep))


class _EnteredOnce(AbstractContextManager[MapStore]):
    """A context manager that refuses a second entry by name."""

    def __init__(self, watching: AbstractContextManager[MapStore]):
        self._watching = watching
        self._was_entered = False

    def __enter__(self) -> MapStore:
        if self._was_entered:
            raise CaptureError(
                "This capture() was entered before, and one holds one run. Call capture() again "
                "for each `with`, also for nested ones."
            )
        self._was_entered = True
        return self._watching.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._watching.__exit__(*error)
