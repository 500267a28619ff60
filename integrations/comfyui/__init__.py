"""Nodes for ComfyUI: where each word of a prompt went. README.md says how to install them."""

from typing import Any

from .masks import MasksForRegions, WordMask
from .nodes import SelfAttentionOfSpot, WatchAttention, WordHeatmaps, WordsAtSpot
from .pieces import spelled

NODE_CLASS_MAPPINGS = {
    "SdattnWatchAttention": WatchAttention,
    "SdattnWordHeatmaps": WordHeatmaps,
    "SdattnWordMask": WordMask,
    "SdattnWordsAtSpot": WordsAtSpot,
    "SdattnMasksForRegions": MasksForRegions,
    "SdattnSelfAttentionOfSpot": SelfAttentionOfSpot,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SdattnWatchAttention": "Watch attention",
    "SdattnWordHeatmaps": "Word heatmaps",
    "SdattnWordMask": "Word mask",
    "SdattnWordsAtSpot": "Words at a spot",
    "SdattnMasksForRegions": "Masks for regions",
    "SdattnSelfAttentionOfSpot": "Self-attention of a spot",
}
WEB_DIRECTORY = "./web"  # what ComfyUI's page loads
__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]


def _pieces(clip: Any, prompt: str) -> list[list[str]]:
    """Return the spelling of a prompt's tokens, for each tokenizer of a CLIP."""
    found = []
    for name, chunks in clip.tokenize(prompt, return_word_ids=True).items():
        part = getattr(clip.tokenizer, f"clip_{name}", None) or getattr(clip.tokenizer, name)
        found.append([spelled(part, token) for chunk in chunks for token, _, _ in chunk])
    return found
