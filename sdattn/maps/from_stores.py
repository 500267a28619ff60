from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from ..errors import InvalidTypeError, InvalidValueError
from ..follow.drawn import DrawnPrompts
from ..keep.map_store import CapturedMaps
from ..models.guidance import Branch
from ..models.reading import read_prompts
from ..models.values import EACH
from ..prompts.chunks import read_long_prompt
from ..prompts.tokenizing import Token
from ..prompts.tokens import Prompt, read_prompt
from ..prompts.weights import refuse_weights
from .aggregation import aggregate, finish
from .folded import Folded, FoldedMaps, StepChoice, folded_maps
from .heatmaps import Heatmaps
from .layermaps import LayerMaps, Source, layer_maps
from .presets import Preset, preset_of


def heatmaps(
    store: Source | Folded,
    tokenizer: Any = None,
    prompt: str | Mapping[str, Sequence[int]] | Prompt | Sequence[Any] | None = None,
    *,
    preset: str | Preset = "default",
    refine: Literal["self"] | None = None,
    latent_size: tuple[int, int] | None = None,
    steps: StepChoice | None = None,
    **options: Any,
) -> list[Heatmaps]:
    """Return the heatmaps of each image of a run, from maps that were captured or stored.

        sdattn.heatmaps(store)                # of the prompt that was drawn
        sdattn.heatmaps(store, pipe, prompt)  # if that is not known

    The first form works if a pipeline ran on a text; a prompt that is passed is compared with what
    the text encoders got.

    The layers that the preset reads are averaged over steps and heads, resized to their finest grid
    (bilinear) and averaged. The default preset reads the up blocks of a UNet, on grids of 16 cells
    and more, and all layers of a transformer, over the steps that the store kept. It works best
    over ``capture(steps=(0.5, 1.0))``, as :func:`sdattn.generate` keeps them.
    For joint attention that is ``capture(steps=(0.75, 1.0), refine="self", depth=(0.5, 1.0))``.

    Args:
        store: the result of ``capture()``; or an :class:`sdattn.AttentionStore`, one of its
            dictionaries, a list of maps or one map, ``[images*heads, queries, tokens]``:
            probabilities of the prompts' rows, with as many images as prompts.
        tokenizer: the pipeline, or its tokenizer if no other reads the text (Stable Diffusion 1, 2
            and XL). Default: the pipeline that ran, while it lives.
        prompt: the prompt, or one per prompt of the run, in order. Several images per prompt follow
            each other, as pipelines put them; with ``branch="both"`` the negative prompts come
            first. Default: the prompts that were drawn. If text states were passed to the pipeline
            instead of a prompt: labels, ``{"cat": [2], "red dog": [4, 5]}``.
        preset: a name in :data:`sdattn.maps.presets.PRESETS`, or a preset of your own.
        refine: ``"self"`` spreads each map along the image's self-attention, which the store must
            hold. Joint attention is refined while it is captured, see :func:`sdattn.capture`.
        latent_size: (rows, cols) of the latent, for maps that do not know it: the image's height
            and width divided by the VAE's scale factor. An attached store knows.
        steps: for an ``AttentionStore``: ``"mean"`` over its steps; ``"last"``, the default for
            presets that read only the last; or, with ``keep_steps=True``, a number or a part of the
            run. ``capture()`` chose its own.
        options: options of the pipeline's call that change what the text encoder reads (default:
            the run's).

    Returns:
        One :class:`Heatmaps` per image; none for the negative prompt of guidance that never acted.

    Raises:
        CaptureError: the store holds no layer that sees the text, or not what the preset reads.
        RuntimeError: no step of the store has finished.
        TypeError: the store is none of these.
        ValueError: an unknown preset, an unknown latent size, a wrong number of prompts or token
            columns, another prompt than was drawn, or none where it is not known.
    """
    # What was refined while the model ran stays so.
    if isinstance(store, CapturedMaps) and store.keep.refine:
        chosen = preset_of(preset, "self", default="joint")
    else:
        chosen = preset_of(preset, refine)
    source: Source
    if isinstance(store, CapturedMaps):
        if store.has_no_guidance and not store.passes:
            return []
        chosen_there = {"latent_size": latent_size, "steps": steps}
        if given := [name for name, value in chosen_there.items() if value is not None]:
            raise InvalidValueError(
                f"{' and '.join(given)}: maps from capture() have their own size and steps. Choose "
                "them there, capture(steps=...), and leave them out here."
            )
        source = store
    else:  # heads are folded into the rows
        source = folded_maps(cast(Folded, store), chosen, latent_size, steps)
    drawn = drawn_in(source, source.read_passes(chosen), prompt)
    reading = _Reading.of(drawn, source.branches, tokenizer, prompt, options)
    if isinstance(source, FoldedMaps):
        source = source.of_images(len(reading.given))
    return heatmaps_of(source, layer_maps(source, chosen), chosen, reading.prompts(source))


def drawn_in(store: Source, passes: Sequence[int], prompt: Any) -> DrawnPrompts | None:
    """Return what some passes of a run were drawn from, as far as known; raise ValueError for
    several texts, whose columns are other words."""
    numbers = store.texts.of(passes)
    drawn = store.drawn
    given = [prompt] if isinstance(prompt, (str, Mapping, Prompt)) else list(prompt or [None])
    if not all(isinstance(one, Mapping) for one in given):
        _refuse_texts(store, passes, len(numbers) > 1)
    if drawn is None or numbers in ([], [0]):
        return drawn
    if prompt is None:
        raise InvalidValueError(
            f"The prompt of these maps was swapped inside the run, {_when(store)}, and which text "
            "took its place is not known. Pass that prompt, sdattn.heatmaps(store, pipe, prompt), "
            "or labels, {'cat': [2]}."
        )
    # What the text encoders got first says nothing of a later text.
    return replace(drawn, texts={}, ids={})


def check_texts(store: Source, preset: Preset) -> None:
    """Raise ValueError if a callback, or whatever else, set other text states inside the run."""
    passes = store.read_passes(preset)
    _refuse_texts(store, passes, store.texts.of(passes) not in ([], [0]))


def _refuse_texts(store: Source, passes: Sequence[int], changed: bool) -> None:
    """Raise ValueError if a text ``changed`` in passes, or if their frames have their own."""
    why = f"The text states changed inside the run, {_when(store)}"
    if by_frame := store.texts.by_frame(passes):
        why = "The frames of this video were drawn from texts of their own"
    if changed or by_frame:
        raise InvalidValueError(
            f"{why}, so these maps do not belong to one prompt. Run the pipeline inside "
            "`capture()` for a part that was drawn from one text, steps=(0.5, 1.0) or "
            "frames=range(8), and pass its prompt, heatmaps(store, pipe, prompt), or labels, "
            "{'cat': [2]}."
        )


def _when(store: Source) -> str:
    """Say when other text states came, as passes count in captures and stores."""
    steps = store.texts.changes()
    numbers = ", ".join(map(str, steps[:5])) + ", …" * (len(steps) > 5)
    several = "s" * (len(steps) > 1)
    return f"before step{several} {numbers}, counted from 0 (a callback set others?)"


@dataclass
class _Reading:
    """The prompts of a store's images, given or drawn, one for each group of consecutive images."""

    given: list[Any]
    tokenizer: Any
    options: Mapping[str, Any]
    drawn: DrawnPrompts | None

    @classmethod
    def of(
        cls,
        drawn: DrawnPrompts | None,
        branches: Sequence[Branch],
        tokenizer: Any,
        prompt: Any,
        options: Mapping[str, Any],
    ) -> "_Reading":
        """With what was left out filled in."""
        if prompt is None and isinstance(tokenizer, (str, Mapping, Prompt, Sequence)):
            raise InvalidTypeError(
                f"heatmaps(store, {tokenizer!r}): the second argument is the pipeline or its "
                "tokenizer. Pass prompt=..., or leave out the prompt that was drawn."
            )
        if prompt is None:
            texts = {} if drawn is None else drawn.texts
            if drawn is None or not branches or not set(branches) <= set(texts):
                raise InvalidValueError(
                    "The prompt of these maps is not known: sdattn knows it only if a pipeline ran "
                    "on a text, inside capture(pipe) or with an AttentionStore attached. Pass it, "
                    "sdattn.heatmaps(store, pipe, prompt), or labels for text states of your own."
                )
            prompt = []
            for branch in dict.fromkeys(branches):
                prompt.extend(texts[branch])
        given = [prompt] if isinstance(prompt, (str, Mapping, Prompt)) else list(prompt)
        if tokenizer is None and any(isinstance(one, str) for one in given):
            tokenizer = None if drawn is None else drawn.pipeline
            if tokenizer is None:
                raise InvalidValueError(
                    f"The pipeline that read {given[0]!r} is not known, or is gone: a store does "
                    "not keep it alive. Pass the pipeline that ran, sdattn.heatmaps(store, pipe), "
                    "or for a model without one a tokenizer, store.heatmaps(tokenizer, prompt), "
                    "or columns by name, prompt={'cat': [2]}."
                )
        return cls(given, tokenizer, options, drawn)

    def prompts(self, store: Source) -> list[Prompt]:
        """Read each for the branch of its images; raise ValueError for another prompt than was
        drawn."""
        each = _images_each(store, len(self.given))
        branches = store.branches[::each]
        read: list[Prompt | None] = [None] * len(self.given)
        for branch in dict.fromkeys(branches):  # all of a batch at once: it may share its length
            positions = [i for i, side in enumerate(branches) if side == branch]
            if self.drawn is None or branch not in self.drawn.texts:  # no encoder was watched
                for one in (self.given[i] for i in positions):
                    if isinstance(one, str):
                        refuse_weights(one)
            try:
                found = self._read(store, [self.given[i] for i in positions], branch, each)
            # If another prompt was drawn, that is the more helpful error.
            except InvalidValueError:
                if self.drawn is not None:
                    self.drawn.check_texts(store.branches, self.given)
                raise
            for i, prompt in zip(positions, found, strict=True):
                read[i] = prompt
        prompts = [prompt for prompt in read if prompt is not None]
        if self.drawn is not None:
            self.drawn.check(store.branches, prompts)
        return prompts

    def _read(self, store: Source, texts: list[Any], branch: Branch, each: int) -> list[Prompt]:
        columns = store.n_text or 0
        tokenizer = self.tokenizer
        options = self.options
        is_tokenizer = hasattr(tokenizer, "convert_ids_to_tokens")
        # By the pipeline: as its family reads, with the options of the run. By a bare tokenizer:
        # CLIP's way, or what fills the columns.
        if not is_tokenizer or not all(isinstance(text, str) for text in texts):
            if self.drawn is not None:
                options = {**self.drawn.options, **options}
            options = {**dict.fromkeys(EACH, each), **options}
            negative = branch == "unconditional"
            return read_prompts(tokenizer, texts, columns, negative=negative, **options)
        most = tokenizer.model_max_length
        if columns > most:
            return [read_long_prompt(tokenizer, text, columns, **options) for text in texts]
        # CLIP is filled up whatever the prompt, others to a length that the pipeline chooses
        length = most if "CLIP" in type(tokenizer).__name__ else columns
        return [read_prompt(tokenizer, text, max_length=length) for text in texts]


def _images_each(store: Source, prompts: int) -> int:
    each, rest = divmod(store.images or 0, max(prompts, 1))
    if rest or not each or not prompts:
        raise InvalidValueError(
            f"{prompts} prompt(s) do not fit {store.images} image(s). Pass one prompt for all "
            "images, or one for each prompt of the run, in order."
        )
    return each


def heatmaps_of(
    store: Source, layers: LayerMaps, preset: Preset, prompts: Sequence[Prompt]
) -> list[Heatmaps]:
    """Return :func:`heatmaps` of a store's averaged layers and of prompts that have been read."""
    each = _images_each(store, len(prompts))
    for prompt in prompts:
        if len(prompt.tokens) != store.n_text:
            raise InvalidValueError(
                f"The attention has {store.n_text} token columns of text, and the tokenizer made "
                f"{len(prompt.tokens)} of the prompt {prompt.text!r}. Pass the pipeline that ran, "
                "or its own tokenizer."
            )
    found = []
    for i, maps in enumerate(aggregate(layers, preset)):
        prompt = prompts[i // each]
        tokens = [*prompt.tokens]
        for number in range(1, (store.n_keys or 0) - len(prompt.tokens) + 1):
            name = f"<image {number}>"  # columns of image prompts follow the text's
            tokens.append(Token(-1, name, start=0, end=0, special=name))
        shown = replace(prompt, tokens=tuple(tokens))
        found.append(
            finish(maps.detach(), shown, preset, columns=store.tokens, frames=store.frames)
        )
    return found
