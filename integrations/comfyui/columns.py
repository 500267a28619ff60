"""A prompt's words and the columns of text that the model gets for them, by ComfyUI's tokenizers.

    read(clip, "a (cat:1.3) left of a pizza", columns=77).find("cat")   # [(2,)]

Columns are counted from what ``clip.tokenize`` gives the text encoder: paddings, the text of a
template and embeddings included. What cannot be told is refused, with the tokens listed.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sdattn import Prompt
from sdattn.errors import InvalidValueError
from sdattn.prompts.tokenizing import PAD, TEMPLATE, Token
from sdattn.prompts.tokens import join_prompts

from .layouts import TextFacts
from .pieces import IMAGE, Tokenize, read_prompts

CLIPS = ("l", "g", "h")  # tokenizers whose columns are one encoder's, or those of two at once
CONCATENATED = re.compile(r"\n\s*---+\s*\n")  # between the prompts of ConditioningConcat
TURN = ["<|im_start|>", "user", "\u010a"]  # where the user's text begins
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
OMNI = "<|vision_end|>{}<|im_end|>\n<|im_start|>assistant\n<|vision_start|>"


def read(clip: Any, prompt: str, facts: TextFacts, states: Tensor | None = None) -> Prompt:
    """Return the prompt with its words' columns; raise ValueError if its tokens do not fit.

    Args:
        clip: ComfyUI's CLIP.
        prompt: the text, as typed. Lines of ``---`` may be its own, or stand between the prompts of
            concatenated conditionings.
        facts: what the model got.
        states: text states as the sampler got them, ``[images, columns, width]``. They decide where
            a prompt fits both undivided and as concatenated ones; without them it is undivided.
    """
    parts = [part for part in CONCATENATED.split(prompt) if part.strip()]
    if not parts:
        raise InvalidValueError("The prompt is empty. Write the text that was encoded.")
    tried: list[Prompt] = []
    found: list[tuple[list[str], list[Prompt]]] = []
    for texts in [[prompt]] if parts == [prompt] else [[prompt], parts]:
        fitting = _fitting(clip, texts, facts, tried)
        found += [(texts, fitting)] if fitting else []
    if len(found) > 1 and states is not None:
        found.sort(key=lambda one: _distance(clip, one[0], states))
    if found and len(found[0][1]) == 1:
        return found[0][1][0]
    listed = "\n".join(_listed(reading) for reading in (found[0][1] if found else tried))
    raise InvalidValueError(
        f"The model got {facts.columns} columns of text; which of them belong to the words of "
        f"{prompt!r} cannot be told. Connect the CLIP and write the prompt that the sampler's "
        "conditioning was made from, with --- on a line of its own between the prompts of "
        f"concatenated conditionings. Tokens of this prompt, by encoder:\n{listed or 'none'}"
    )


def _fitting(
    clip: Any, texts: Sequence[str], facts: TextFacts, tried: list[Prompt]
) -> list[Prompt]:
    """Return texts that follow each other as one prompt, by each encoder whose columns fit; add the
    readings of the first text to those tried."""
    for tokenize in _ways(clip, facts):
        of_texts = [list(_readings(clip, tokenize, text, facts.skips)) for text in texts]
        tried += of_texts[0]
        fitting: dict[object, Prompt] = {}
        for readings in zip(*of_texts, strict=True):
            fitted = _fitted(readings, facts)
            if fitted is not None:
                fitting.setdefault(tuple(word.columns for word in fitted.words), fitted)
        if fitting:
            return list(fitting.values())
    return []


def _distance(clip: Any, texts: Sequence[str], states: Tensor) -> float:
    """Return how far text states are from the encoding of texts that follow each other, whose
    columns are the last ones; infinity if there are not so many."""
    encoded = [clip.encode_from_tokens(clip.tokenize(text)).float().cpu() for text in texts]
    joined = torch.cat(encoded, 1)
    last = states[:1, max(states.shape[1] - joined.shape[1], 0) :].float().cpu()
    return float((last - joined).abs().mean()) if last.shape == joined.shape else math.inf


def _ways(clip: Any, facts: TextFacts) -> Iterator[Tokenize]:
    """Yield how ComfyUI's nodes may have had a text tokenized, the usual way first."""

    def tokenize(text: str, before: str = "", **options: Any) -> dict[str, Any]:
        tokens: dict[str, Any] = clip.tokenize(before + text, return_word_ids=True, **options)
        return tokens

    if facts.has_captions:  # Text Encode Z-Image Omni
        yield lambda text: tokenize(text, llama_template=OMNI)
        return
    yield tokenize
    if hasattr(clip.tokenizer, "gemma2_2b"):  # CLIP Text Encode for Lumina2
        from comfy_extras.nodes_lumina2 import CLIPTextEncodeLumina2

        for system in CLIPTextEncodeLumina2.SYSTEM_PROMPT.values():
            before = f"{system} <Prompt Start> "
            yield lambda text, before=before: tokenize(text, before)
    images = getattr(clip.tokenizer, "llama_template_images", None)
    if facts.has_images and images is not None:  # Text Encode Qwen Image Edit, and Plus
        yield lambda text: tokenize(text, llama_template=images)
        plus = images.replace(VISION, "")
        yield lambda text: tokenize(text, f"Picture 1: {VISION}", llama_template=plus)


def _readings(clip: Any, tokenize: Tokenize, prompt: str, skips: Sequence[str]) -> Iterator[Prompt]:
    """Yield the prompt as each encoder of a CLIP reads it, and as those that follow each other
    do."""
    prompts = read_prompts(clip.tokenizer, tokenize, prompt)
    names = [name for name in prompts if name not in skips and _is_loaded(clip, name)]
    clips = [prompts[name] for name in names if name in CLIPS]
    others = [prompts[name] for name in names if name not in CLIPS]
    if len({tuple(word.columns for word in found.words) for found in clips}) == 1:
        clips = clips[:1]  # two encoders that read the same tokens side by side
    yield from clips
    yield from others
    if len(clips) <= 1 < len(clips + others):  # SD 3: CLIP's and T5's; HiDream: T5's and Llama's
        yield join_prompts([*clips, *others])


def _is_loaded(clip: Any, name: str) -> bool:
    model = getattr(clip, "cond_stage_model", None)
    return getattr(model, f"clip_{name}" if name in CLIPS else name, clip) is not None


def _fitted(parts: Sequence[Prompt], facts: TextFacts) -> Prompt | None:
    """Return prompts that follow each other, if they have so many columns: without their
    templates' starts if the encoder cuts these off, filled up on the left, or with images as large
    as they must be. None if they do not fit."""
    whole = _concatenated(parts)
    tokens = whole.tokens
    columns = facts.columns
    images = [i for i, token in enumerate(tokens) if token.special == IMAGE]
    if images:  # their columns are what the text behind them leaves
        tail = len(tokens) - images[-1] - 1
        filled = columns - tail
        is_single = len(parts) == 1 and filled > 0
        return _moved(whole, tail, (IMAGE,) * filled) if is_single else None
    if len(tokens) == columns:
        return whole
    if len(tokens) < columns == facts.filled_to:
        return _moved(whole, len(tokens), (PAD,) * (columns - len(tokens)))
    cut = _concatenated([_moved(part, _after_template(part), ()) for part in parts])
    return cut if len(cut.tokens) == columns else None


def _after_template(prompt: Prompt) -> int:
    """Return the number of columns after the template's start, as Qwen-Image's encoder cuts it."""
    specials = [token.special for token in prompt.tokens]
    start = next((i for i, kind in enumerate(specials) if kind != TEMPLATE), 0)
    texts = [token.text for token in prompt.tokens[:start]]
    if TURN[0] in texts:
        last = start - 1 - texts[::-1].index(TURN[0])
        if texts[last:] != TURN:  # some versions spell it otherwise before an embedding
            start = last
    return len(specials) - start


def _moved(prompt: Prompt, kept: int, before: Sequence[str]) -> Prompt:
    """Return a prompt with its last columns only, after others of these kinds."""
    tokens = prompt.tokens[len(prompt.tokens) - kept :]
    shift = len(before) + kept - len(prompt.tokens)
    words = []
    for word in prompt.words:
        columns = tuple(column + shift for column in word.columns if column + shift >= len(before))
        words.append(replace(word, columns=columns))
    first = tuple(Token(-1, special, 0, 0, special) for special in before)
    return replace(prompt, words=tuple(words), tokens=(*first, *tokens))


def _concatenated(prompts: Sequence[Prompt]) -> Prompt:
    """Return prompts whose columns follow each other, as one."""
    text = ""
    words = []
    tokens = []
    for prompt in prompts:
        start = len(text)
        first = len(tokens)
        for word in prompt.words:
            own = tuple(column + first for column in word.columns)
            words.append(replace(word, start=word.start + start, end=word.end + start, columns=own))
        for token in prompt.tokens:
            tokens.append(replace(token, start=token.start + start, end=token.end + start))
        text += prompt.text + "\n"
    return Prompt(text.removesuffix("\n"), tuple(words), tuple(tokens))


def _listed(prompt: Prompt) -> str:
    """Return a prompt's tokens with their columns, paddings and template told in short."""
    shown = [
        f"{column} {token.text or token.special}"
        for column, token in enumerate(prompt.tokens)
        if token.special not in (PAD, TEMPLATE)
    ]
    return f"{len(prompt.tokens)} columns: {', '.join(shown[:200])}"
