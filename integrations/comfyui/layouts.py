"""Where text and image stand in each attention call of ComfyUI's models, as read in their source.

A model is known by its class. The grid comes from the latent that the sampler passes in, so nobody
is asked for pixels:

    UNet               cross-attention: the keys are the text; the grid is named by the block
    FLUX, Chroma, Qwen-Image, SD3, FLUX.2    one sequence: [text | image | reference images]
    Lumina 2, Z-Image  [text, padded | image, padded], after layers that see one of them alone;
                       reference images stand before the image, their captions before the text
    HiDream            [image | text], the text of two encoders
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Options = Mapping[str, Any]  # ComfyUI's transformer_options
Grid = tuple[int, int]  # rows, cols
ALL = slice(None)
UNET_PLACES = {"input": "down", "middle": "mid", "output": "up"}


class UnknownModelError(Exception):
    """The places of text and image in a model's attention are not known."""


@dataclass(frozen=True)
class ModelCall:
    """One call of a model, as the sampler makes it.

    Attributes:
        model: ComfyUI's diffusion model.
        family: name of the class that holds it, ``"SDXL"``.
        latent: ``[B, C, (1,) rows, cols]``.
        text: text states ``[B, T, width]``.
        given: the model's further arguments.
    """

    model: Any
    family: str
    latent: Tensor
    text: Tensor
    given: Mapping[str, Any]

    def grid(self, latent: Tensor | None = None) -> Grid:
        """Return the grid of patches of a latent (default: the image's), padded to whole ones."""
        rows, cols = (self.latent if latent is None else latent).shape[-2:]
        patch = getattr(self.model, "patch_size", 2)
        patch = patch if isinstance(patch, int) else patch[-1]
        return -(-rows // patch), -(-cols // patch)

    def cells(self, latent: Tensor | None = None) -> int:
        rows, cols = self.grid(latent)
        return rows * cols

    @property
    def references(self) -> Sequence[Tensor]:
        return self.given.get("ref_latents") or ()


@dataclass(frozen=True)
class Look:
    """What one attention call shows of one text.

    Attributes:
        place: ``"down"``, ``"mid"``, ``"up"`` (UNet), ``"double"``, ``"single"`` or ``"block"``.
        grid: (rows, cols) of the image's queries.
        queries: the image's queries.
        texts: keys of the text, part after part.
        image: keys of the image, for layers that have them; else None.
    """

    place: str
    grid: Grid
    queries: slice
    texts: tuple[slice, ...]
    image: slice | None = None


@dataclass(frozen=True)
class TextFacts:
    """What is known of the columns of a model's text, but for their tokens.

    Attributes:
        columns: their number.
        skips: names of tokenizers whose tokens the model does not attend to.
        filled_to: columns that shorter texts are filled up to on their left; 0 if they are not.
        has_images: there are reference images, which the text may name.
        has_captions: the reference images have texts of their own, so that the template is theirs.
    """

    columns: int
    skips: tuple[str, ...] = ()
    filled_to: int = 0
    has_images: bool = False
    has_captions: bool = False


class Layout:
    """Where text and image stand in one call of a model."""

    skips: tuple[str, ...] = ()
    filled_to = 0
    blocks: tuple[str, ...] = ()  # lists of the model's blocks, each of which attends to the text

    def __init__(self, call: ModelCall):
        self.call = call
        self.n_text = call.text.shape[1]

    def layers(self) -> int:
        """Return how many layers of the model attend to the text; 0 if that is not known."""
        return sum(len(getattr(self.call.model, name, ())) for name in self.blocks)

    def facts(self, repeats: int) -> TextFacts:
        """Return what is known of the text's columns, which are repeated so often."""
        return TextFacts(
            columns=self.n_text // repeats,
            skips=self.skips,
            filled_to=self.filled_to,
            has_images=bool(self.call.references),
            has_captions=bool(self.call.given.get("ref_contexts")),
        )

    def look(self, queries: int, keys: int, options: Options) -> Look | None:
        """Return what an attention call of so many queries and keys shows; None for nothing."""
        raise NotImplementedError

    def of_row(self, look: Look, row: int) -> Look:
        """Return the same for one row of the batch, if rows differ."""
        return look


class UNetLayout(Layout):
    """A UNet: layer by layer, self-attention and then cross-attention."""

    def __init__(self, call: ModelCall):
        super().__init__(call)
        self._blocks: set[object] = set()

    def layers(self) -> int:
        return sum(name.endswith("attn2") for name, _ in self.call.model.named_modules())

    def look(self, queries: int, keys: int, options: Options) -> Look | None:
        block = options.get("block"), options.get("block_index")
        is_second = block in self._blocks
        self._blocks.add(block)
        grid = tuple(options["activations_shape"][-2:])
        place = UNET_PLACES[options["block"][0]]
        if keys == queries and not (keys == self.n_text and is_second):
            whole = queries == grid[0] * grid[1]
            return Look(place, grid, ALL, (), ALL) if whole else None
        return Look(place, grid, ALL, (slice(0, self.n_text),)) if keys == self.n_text else None


class TextFirst(Layout):
    """One sequence: text, image, reference images."""

    blocks: tuple[str, ...] = ("transformer_blocks",)

    def look(self, queries: int, keys: int, options: Options) -> Look | None:
        call = self.call
        references = sum(call.cells(latent) for latent in call.references)
        if not queries == keys == self.n_text + call.cells() + references:
            return None
        image = slice(self.n_text, self.n_text + call.cells())
        place = options.get("block_type", "block")
        return Look(place, call.grid(), image, (slice(0, self.n_text),), image)


class FluxLayout(TextFirst):
    """FLUX attends to T5's tokens; CLIP's are pooled to one vector."""

    skips = ("l", "g")
    blocks = ("double_blocks", "single_blocks")

    def __init__(self, call: ModelCall):
        super().__init__(call)
        self.filled_to = 512 if call.family == "Flux2" else 0


class SD3Layout(TextFirst):
    """SD 3; a further layer of some blocks sees the image alone."""

    blocks = ("joint_blocks",)

    def look(self, queries: int, keys: int, options: Options) -> Look | None:
        return super().look(queries, keys, {"block_type": "double"})


class HiDreamLayout(Layout):
    """Image, T5's tokens, and Llama's twice: of two of its layers."""

    skips = ("l", "g")
    blocks = ("double_stream_blocks", "single_stream_blocks")

    def __init__(self, call: ModelCall):
        super().__init__(call)
        self.n_llama = call.given["encoder_hidden_states_llama3"].shape[-2]
        self.n_t5 = self.n_text
        self.n_text += self.n_llama

    def look(self, queries: int, keys: int, options: Options) -> Look | None:
        cells = self.call.cells()
        t5 = self.n_t5
        llama = self.n_llama
        if not queries == keys == cells + t5 + 2 * llama:
            return None
        middle = cells + t5 + llama
        texts = slice(cells, middle), slice(middle, middle + llama)
        image = slice(0, cells)
        return Look("block", self.call.grid(), image, texts, image)


class NextDiTLayout(Layout):
    """Lumina 2 and Z-Image."""

    blocks = ("layers",)

    def __init__(self, call: ModelCall):
        super().__init__(call)
        self.multiple = getattr(call.model, "pad_tokens_multiple", None) or 1
        self.is_first_version = not hasattr(call.model, "pad_tokens_multiple")
        self.lengths = self._lengths() if self.is_first_version else []

    def _lengths(self) -> list[int]:
        # This version cuts each row's text at its mask, which it reads back from the device too.
        mask = self.call.given.get("attention_mask")
        if mask is None:
            return [int(self.call.given["num_tokens"])] * len(self.call.latent)
        return [int(length) for length in mask.sum(1).tolist()]

    def _padded(self, tokens: int) -> int:
        return tokens + -tokens % self.multiple

    def look(self, queries: int, keys: int, options: Options) -> Look | None:
        call = self.call
        if self.is_first_version:
            if not queries == keys == max(self.lengths) + call.cells():
                return None
            return self._look(0, slice(0, self.lengths[0]))
        first, after = self._captions()
        images = [self._padded(call.cells(latent)) for latent in (*call.references, call.latent)]
        text = first + self._padded(self.n_text) + after
        if not queries == keys == text + self._features() + sum(images):
            return None
        return self._look(keys - images[-1], slice(first, first + self.n_text))

    def _captions(self) -> tuple[int, int]:
        """Return the columns of the reference images' captions before the text and after it."""
        captions = [part.shape[1] for part in self.call.given.get("ref_contexts") or ()]
        n_images = len(self.call.references)
        captions += [0] * (n_images - len(captions))
        # a reference image without a caption has one of padding
        before = [self._padded(length) or self.multiple for length in captions[:n_images]]
        return sum(before), sum(map(self._padded, captions[n_images:]))

    def _features(self) -> int:
        """Return the columns that hold the reference images' features by a vision encoder."""
        call = self.call
        if not call.references or getattr(call.model, "siglip_embedder", None) is None:
            return 0
        features = [math.prod(part.shape[1:3]) for part in call.given.get("siglip_feats") or ()]
        features = features[: len(call.references)]
        missing = len(call.references) + 1 - len(features)  # the image itself has none
        return sum(map(self._padded, features)) + missing * self.multiple

    def of_row(self, look: Look, row: int) -> Look:
        if not self.is_first_version:
            return look
        return self._look(self.lengths[row], slice(0, self.lengths[row]))

    def _look(self, start: int, text: slice) -> Look:
        image = slice(start, start + self.call.cells())
        return Look("block", self.call.grid(), image, (text,), image)


LAYOUTS: dict[str, type[Layout]] = {
    "UNetModel": UNetLayout,
    "Flux": FluxLayout,
    "Chroma": FluxLayout,
    "OpenAISignatureMMDITWrapper": SD3Layout,
    "QwenImageTransformer2DModel": TextFirst,
    "NextDiT": NextDiTLayout,
    "HiDreamImageTransformer2DModel": HiDreamLayout,
}


def read_layout(call: ModelCall) -> Layout:
    """Return where text and image stand in a call; raise UnknownModelError if that is unknown."""
    name = type(call.model).__name__
    if name not in LAYOUTS:
        raise UnknownModelError(
            f"{name} is a model whose order of text and image sdattn does not know. It knows: "
            f"{', '.join(LAYOUTS)}."
        )
    if call.latent.ndim == 5 and call.latent.shape[2] > 1:
        raise UnknownModelError(
            f"{name} draws a video of {call.latent.shape[2]} latent frames; these nodes show "
            "single images."
        )
    return LAYOUTS[name](call)
