"""Nodes for ComfyUI: where each word of a prompt went. docs/comfyui.md says how to install them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import sdattn
from sdattn.comfy import MapRecorder

TOKEN_PIXELS = 16  # side of an image token in FLUX
OVERRIDE = "optimized_attention_override"
_TEXT = ("STRING", {"multiline": True, "tooltip": "The prompt, as in CLIP Text Encode."})
_READ = {"attention": ("ATTENTION",), "clip": ("CLIP",), "prompt": _TEXT, "image": ("IMAGE",)}


class WatchAttention:
    """Records the attention of one sampler: put it between the model and that sampler."""

    CATEGORY, FUNCTION = "sdattn", "watch"
    RETURN_TYPES = ("MODEL", "ATTENTION")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        told = {"tooltip": "The image's size in pixels, for FLUX; 0 for UNets."}
        size = ("INT", {"default": 0, "min": 0, "max": 16384, **told})
        return {"required": {"model": ("MODEL",), "width": size, "height": size}}

    def watch(self, model: Any, width: int, height: int) -> tuple[Any, MapRecorder]:
        patched = model.clone()
        options = patched.model_options.get("transformer_options", {})
        grid = (-(-height // TOKEN_PIXELS), -(-width // TOKEN_PIXELS)) if height and width else None
        recorder = MapRecorder(options.get(OVERRIDE), grid=grid)
        patched.model_options["transformer_options"] = {**options, OVERRIDE: recorder}
        return patched, recorder


class WordHeatmaps:
    """Draws the heatmaps of words over the images, word by word."""

    CATEGORY, FUNCTION = "sdattn", "draw"
    RETURN_TYPES = ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        told = {"tooltip": "Words or phrases, commas between. Empty: every word."}
        return {"required": {**_READ, "words": ("STRING", {"default": "", **told})}}

    def draw(
        self, attention: MapRecorder, clip: Any, prompt: str, image: Tensor, words: str
    ) -> tuple[Tensor]:
        drawn = []
        for maps, pixels in _maps(attention, clip, prompt, image):
            picked = [word.strip() for word in words.split(",") if word.strip()]
            for heatmap in [maps[word] for word in picked] or maps.values():
                shown = Image.fromarray((pixels * 255).round().byte().cpu().numpy())
                drawn.append(np.asarray(heatmap.overlay(shown).convert("RGB")))
        return (torch.from_numpy(np.stack(drawn)).float() / 255,)  # [images*words, H, W, 3]


class WordMask:
    """Makes a mask of the place where a word's map is high."""

    CATEGORY, FUNCTION = "sdattn", "mask"
    RETURN_TYPES = ("MASK",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        told = {"tooltip": "Share of the range between the map's lowest and highest value."}
        threshold = ("FLOAT", {"default": 0.5, "min": 0.0, "max": 1.0, "step": 0.05, **told})
        return {"required": {**_READ, "word": ("STRING", {}), "threshold": threshold}}

    def mask(
        self,
        attention: MapRecorder,
        clip: Any,
        prompt: str,
        image: Tensor,
        word: str,
        threshold: float,
    ) -> tuple[Tensor]:
        size = image.shape[1], image.shape[2]
        found = _maps(attention, clip, prompt, image)
        return (torch.stack([maps[word].mask(size, threshold).float() for maps, _ in found]),)


def _maps(
    recorder: MapRecorder, clip: Any, prompt: str, image: Tensor
) -> Iterator[tuple[sdattn.Heatmaps, Tensor]]:
    """Yield the heatmaps of each image, and its pixels ``[H, W, 3]``."""
    columns = recorder.store().n_text
    found = _pieces(clip, prompt)
    exact = [pieces for pieces in found if len(pieces) == columns]
    heatmaps = recorder.heatmaps((exact or found)[0])
    if len(heatmaps) != len(image):
        raise sdattn.errors.InvalidValueError(
            f"The sampler drew {len(heatmaps)} image(s), and {len(image)} were passed. Pass the "
            "decoded images of the sampler whose model has the node Watch attention."
        )
    return zip(heatmaps, image, strict=True)


def _pieces(clip: Any, prompt: str) -> list[list[str]]:
    """Return the pieces of the prompt by each tokenizer of a CLIP; a word's pieces are joined."""
    found = []
    for name, chunks in clip.tokenize(prompt, return_word_ids=True).items():
        part = getattr(clip.tokenizer, f"clip_{name}", None) or getattr(clip.tokenizer, name)
        tokens = [token for chunk in chunks for token in chunk]  # (id or embedding, weight, word)
        pieces = [
            part.untokenize([token])[0][1] if isinstance(token[0], int) else "embedding</w>"
            for token in tokens
        ]
        words = [*(token[2] for token in tokens[1:]), 0]
        for i, (token, following) in enumerate(zip(tokens, words, strict=True)):
            if token[2] and token[2] == following:
                pieces[i] = pieces[i].removesuffix("</w>")
        found.append(pieces)
    return found


NODE_CLASS_MAPPINGS = {
    "SdattnWatchAttention": WatchAttention,
    "SdattnWordHeatmaps": WordHeatmaps,
    "SdattnWordMask": WordMask,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SdattnWatchAttention": "Watch attention",
    "SdattnWordHeatmaps": "Word heatmaps",
    "SdattnWordMask": "Word mask",
}
