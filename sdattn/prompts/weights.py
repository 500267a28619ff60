"""Weights typed into a prompt, for other encoders than diffusers' own."""

import re

from ..errors import InvalidValueError

# compel: "circle++", "(blue square)1.4"; AUTOMATIC1111's web UI and its followers (lpw, A1111
# prompts in ComfyUI): "(circle:1.3)", "[cat:dog:0.5]", "((circle))".
_TYPED = re.compile(
    r"[\w)\"']\++(?=[\s,.;)]|$)|[\w)\"']-{2,}(?=[\s,.;)]|$)|\)\s?\d*\.?\d+|\([^()]*:\s*\d*\.?\d+\s*\)"
    r"|\[[^\[\]]*:[^\[\]]*\]|\(\(|\[\[|\)\.(?:blend|and|swap)\("
)


def refuse_weights(text: str) -> None:
    """Raise ValueError if a text for text states contains weights: their signs are not tokens."""
    found = _TYPED.search(text)
    if found is not None:
        around = text[max(found.start() - 12, 0) : found.end()]
        raise InvalidValueError(
            f"{text!r} seems to contain a weight (at {around!r}). The encoder that made the text "
            "states (for example compel) removed it before making tokens, so the columns of the "
            "words are unknown. Pass the prompt without weights, or labels, {'cat': [2]}."
        )
