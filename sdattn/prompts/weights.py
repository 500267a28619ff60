"""Weights that are typed into a prompt, of other encoders than diffusers' own."""

import re

from ..errors import InvalidValueError

# "circle++" and "(blue square)1.4" are of compel; "(circle:1.3)", "[cat:dog:0.5]", "((circle))" of
# AUTOMATIC1111's web UI and those that follow it (lpw, A1111 prompts in ComfyUI).
_TYPED = re.compile(
    r"[\w)\"']\++(?=[\s,.;)]|$)|[\w)\"']-{2,}(?=[\s,.;)]|$)|\)\s?\d*\.?\d+|\([^()]*:\s*\d*\.?\d+\s*\)"
    r"|\[[^\[\]]*:[^\[\]]*\]|\(\(|\[\[|\)\.(?:blend|and|swap)\("
)


def refuse_weights(text: str) -> None:
    """Refuse a text that was given for text states, and that has weights in it: their signs are no
    tokens, so each word would get the column of another.

    Raises:
        ValueError: it has.
    """
    found = _TYPED.search(text)
    if found is not None:
        around = text[max(found.start() - 12, 0) : found.end()]
        raise InvalidValueError(
            f"{text!r} has what looks like a weight (at {around!r}), which the encoder that made "
            "the text states (compel, say) took out before it made tokens, so the columns of the "
            "words are not known. Pass the prompt without weights, or labels, {'cat': [2]}."
        )
