"""ChatGLM's tokenizer, which Kolors has, and how it reads prompts."""

from typing import Any

from ..prompts.tokenizing import filled
from ..prompts.tokens import Prompt, read_source
from ..prompts.words import Source
from .encoders import TextCall

LENGTH = 256  # encode_prompt's own


def read_chatglm(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read prompts padded on the left, then two start tokens, then the text.

    Sources: pipeline_kolors.py, ``__call__``, whose ``max_sequence_length`` has no effect;
    kolors/tokenizer.py, ``ChatGLMTokenizer``.
    """
    if call.columns not in (None, LENGTH):
        raise call.unexplained(f"any max_sequence_length makes {LENGTH}")
    tokenizer, options = _Marked(call.pipe.tokenizer), filled(LENGTH)
    return [read_source(tokenizer, Source.of(text), **options) for text in texts]


class _Marked:
    """Tokenizer that marks special tokens: ChatGLM's own mask knows no padding and no start."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __call__(self, text: str, **options: object) -> dict[str, Any]:
        encoded = dict(self._tokenizer(text, **options))
        own = self._tokenizer.get_prefix_tokens()
        seen = encoded["attention_mask"]
        start = len(seen) - sum(seen)
        ids = encoded["input_ids"]
        ends = start + len(own) if ids[start : start + len(own)] == own else start
        encoded["special_tokens_mask"] = [int(i < ends) for i in range(len(ids))]
        return encoded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
