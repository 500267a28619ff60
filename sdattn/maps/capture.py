"""`capture()`, which watches a model, and the `MapStore` that it gives, with heatmaps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch

from ..hooks.capture import watch_model
from ..hooks.keep import Heads, Keep, Selection, Space, Steps
from ..hooks.map_store import CapturedMaps
from ..hooks.pass_options import Guidance
from ..models.layers import TEXT_KINDS, LayerSelection
from .from_stores import heatmaps
from .heatmaps import Heatmaps
from .layermaps import LayerMaps, layer_maps, read_passes
from .presets import Preset, preset_of


class MapStore(CapturedMaps):
    """The maps that :func:`sdattn.capture` collects.

    Attributes:
        layers: the attention layers that are watched.
        sums: what is held of each, by its name.
        passes: one :class:`Pass` for each call of the model for these images, in order, whether its
            maps are kept or not.
        texts: which text each pass was drawn from.
        stopped: where the run was stopped, ``pipe._interrupt = True``; None if it was not.
        has_no_guidance: guidance was on and acted in no step of the run (Z-Image's truncation), so
            the negative prompt has no images, which a warning says.
        checks_itself: the capture checks it at its end and warns of a stop; else its caller does.
        keep: what is kept of steps, heads and columns.
        steps, heads, frames: the same of these, as they were asked for.
        skipped: calls of the model that are not: those of the other branch, where a pipeline runs
            the two in turn, and those of skip-layer guidance.
        tokens: the key columns that are kept, or None for all.
        crop: the part of the image that the run draws (``padding_mask_crop``), which the maps are
            of; None for all of it.
        drawn: the prompts of the run; None where they are not known: of a bare model, of text
            states passed in their place, before the model runs.
        expected_nbytes: bytes that will be held at the end of the run, at most; None before it. Of
            a model without its pipeline, whose number of calls is not known, after one call.
        maps: a mapping, layer name to ``[images, (steps,) (heads,) (frames,) rows, cols, tokens]``.
            The frames axis is there with models of videos. The steps axis is there with
            ``steps="all"`` or a list, the heads axis likewise. Values are probabilities
            in [0, 1]; in the default dtype float32 and with all tokens kept those of cross- and
            self-attention sum to 1 over the last axis (text columns and those of each image prompt
            by themselves), those of joint attention to less: the rest goes to the image. A layer
            that has not run yet is not in it.
    """

    def heatmaps(self, tokenizer: Any = None, prompt: Any = None, **options: Any) -> list[Heatmaps]:
        """Return the heatmaps of each image, by :func:`sdattn.heatmaps` of this store.

            with sdattn.capture(pipe) as store:
                pipe("a red circle left of a blue square")
            store.heatmaps()[0]["circle"]

        Arguments are those of that function.
        """
        return heatmaps(self, tokenizer, prompt, **options)

    def layer_maps(
        self, preset: str | Preset = "default", self_attention: CapturedMaps | None = None
    ) -> LayerMaps:
        """Return the map of each layer that sees the text, as a preset reads them, see
        :func:`sdattn.maps.layermaps.layer_maps`."""
        return layer_maps(self, preset_of(preset), self_attention)

    def read_passes(self, preset: Preset) -> list[int]:
        """Return the passes of the run, counted from 0, that the preset's maps are of."""
        return read_passes(self, preset)


def capture(
    target: Any,
    *,
    layers: LayerSelection = None,
    kinds: Sequence[str] = TEXT_KINDS,
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
) -> AbstractContextManager[MapStore]:
    """Watch the attention of a model while it runs; its output stays what it was, bit for bit.

        with sdattn.capture(pipe) as store:
            image = pipe("a red circle left of a blue square").images[0]
        store.maps["mid_block.attentions.0.transformer_blocks.0.attn2"]  # [1, rows, cols, tokens]

    Each layer's own processor goes on making the output. On leaving, by any way, every layer holds
    the very processor it held before. One ``with`` holds one run; captures may be nested. A UNet
    that is compiled stays so where means over heads are kept; else it runs eagerly inside, with a
    warning.

    Args:
        target: a pipeline, or its UNet or transformer. On a bare model no guidance is known, so
            every batch row counts as an image of its own. Also any model of yours whose attention
            is all :class:`sdattn.attention.MultiHeadAttention`. Calls of a pipeline's model that
            are no passes of its run (a callback's, a reference pass's, another pipeline's) run
            untouched, are not counted, and are named in a warning.
        layers: names, places, resolutions or a predicate, see
            :func:`sdattn.models.layers.select_layers`.
        kinds: of ``"cross"``, ``"joint"`` and ``"self"``; by default those that see the text. Of
            joint attention (SD3, FLUX, Qwen-Image) the text's columns are kept, which sum to less
            than 1: the rest goes to the image. Self-attention keeps a column for every cell.
        branch: ``"conditional"`` (the prompt), ``"unconditional"`` (the negative prompt), or
            ``"both"``: first the unconditional images, then the conditional ones. Pipelines that
            run the two in turn (FLUX, Qwen-Image) show one of them to one capture; nest two.
        guidance: where the unconditional rows of a batch are. ``"auto"``: the pipeline says it,
            inside its own call; around a loop of your own say it yourself: ``"batch"``, in the
            first half; ``"passes"``, in the first of two calls; None, nowhere.
        steps: ``"mean"`` over the calls of the model (a second-order scheduler calls twice a step);
            the mean over a part of the schedule, ``(0.5, 1.0)`` for its second half; ``"last"``,
            the last call alone; ``"all"``, or a list of the calls to keep one by one.
        heads: ``"mean"``, ``"all"``, or the indices of the heads to keep one by one.
        tokens: key columns to keep, None for all. The softmax is over all keys either way.
        among: for each image (or once for all) the key columns that the softmax, or the z-score of
            ``space``, is taken over, in place of all of them. Not of self-attention.
        text_states: ``[1 or images, T, width]``, of another text than the prompt (or the same): the
            maps show what the image would attend to in it. Of UNets' cross-attention, see
            :class:`sdattn.hooks.other_text.OtherTextLook`, and of the joint attention of SD3 and
            FLUX, each of whose blocks then runs twice, see :mod:`sdattn.hooks.other_text`.
        device: where the maps are held, by default where they are computed.
        dtype: of the maps; running sums are float32 at least.
        grad: keep the graph, so that a loss on the maps reaches the latents.
        latent_size: of a model of yours, the (rows, cols) of its queries; without it they are a
            sequence, a single row. Models of diffusers know it, but for those on torch's meta
            device whose grid is in the values of ids (FLUX).
        refine: of joint attention, ``"self"``: maps are spread twice along the image's own
            self-attention while the model runs, see :mod:`sdattn.hooks.refined`. A UNet's maps are
            spread afterwards: capture ``kinds=("cross", "self")``.
        space: of joint attention, ``"output"``: not what a cell pays to a token but how alike what
            they both get is, the product of their outputs before the output projection, a feature's
            mean, of any sign, see :mod:`sdattn.hooks.output_space`. ``"gramcol"``: how like a cell
            is to the cell of its frame that a token is looked for by, as z-scores over the columns
            of ``among``, of any sign; ``"imap"``: the same of the five heads of each layer that
            tell a video's frames apart best, see :mod:`sdattn.hooks.output_space`.
        frames: of a video, those of its latent to keep, counted from 0; None for all. A latent
            frame may stand for several of the video, see :meth:`sdattn.Heatmap.of_frames`.

    Returns:
        A context manager that gives a :class:`MapStore`, see there for ``maps``; with the defaults
        its size does not grow with the steps.

    Raises:
        TypeError: ``target`` is no model that sdattn knows.
        ValueError: an option that fits nothing; the message lists what there is.
        CaptureError: on leaving, nothing was captured; while running, the batch or the size
            changed, or a second run began.
        RuntimeError: what a layer attends to cannot be seen, or is not what made its output.
    """
    return watch_model(
        target,
        MapStore,
        Keep.of(steps, heads, tokens, among, device, dtype, grad, refine, space, frames),
        layers=layers,
        kinds=kinds,
        branch=branch,
        guidance=guidance,
        text_states=text_states,
        latent_size=latent_size,
    )
