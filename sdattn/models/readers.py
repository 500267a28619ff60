"""How each family of pipelines reads its prompts: what is tokenized, and which columns are kept.

``FAMILIES``, at the end, is the table; a reader takes a call and texts, one prompt each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..prompts.chunks import read_chunks
from ..prompts.tokenizing import NO_LIMIT, PAD, Token, filled, with_vectors
from ..prompts.tokens import Prompt, join_prompts, read_source
from ..prompts.words import Source

_MARK = "\ue000"  # a private character, for the place of the prompt in a template


@dataclass(frozen=True)
class PipelineCall:
    """What is known of a pipeline's call, see :func:`sdattn.models.reading.read_prompts`."""

    pipe: Any
    columns: int | None
    options: Mapping[str, Any]
    negative: bool = False
    split: str | None = None

    def option(self, name: str) -> Any:
        """An option's value, the pipeline's own default where it was not given."""
        default = inspect.signature(self.pipe.__call__).parameters[name].default
        return self.options.get(name, default)

    def source(self, tokenizer: Any, text: str) -> Source:
        """The prompt with its textual inversions, where the pipeline knows of them."""
        knows = hasattr(self.pipe, "maybe_convert_prompt")
        return with_vectors(tokenizer, Source.of(text)) if knows else Source.of(text)

    def length(self, *, before: int = 0, most: int | None = None) -> int:
        """The length of the text states behind the first ``before`` columns.

        ``most`` is the largest that the pipeline takes.
        """
        if self.columns is None:
            return int(self.option("max_sequence_length"))
        length = self.columns - before
        asked = self.options.get("max_sequence_length")
        if length < 1 or asked not in (None, length) or (most is not None and length > most):
            raise self.unexplained(
                f"max_sequence_length={self.option('max_sequence_length')} makes "
                f"{before + self.option('max_sequence_length')}"
                + (f", and {before + most} is the most there can be" if most else "")
            )
        return length

    def unexplained(self, found: str) -> ValueError:
        """The error for columns that none of the pipeline's ways leads to."""
        return ValueError(
            f"The text states have {self.columns} token columns, and a {type(self.pipe).__name__} "
            f"with {found}. Pass the prompts and options of this very run, or labels."
        )


Reader = Callable[[PipelineCall, list[str]], list[Prompt]]


def tokenizers(pipe: Any) -> list[Any]:
    """The CLIP tokenizers of a pipeline, one or two; SDXL's refiner has the second only.

    Raises:
        TypeError: it has none.
    """
    found = [getattr(pipe, name, None) for name in ("tokenizer", "tokenizer_2")]
    found = [one for one in found if one is not None]
    if not found:
        raise TypeError(
            f"A {type(pipe).__name__} without a tokenizer: its words cannot be told. Pass labels, "
            '{"cat": [2]} say, and columns=.'
        )
    return found


def unknown(call: PipelineCall, texts: list[str]) -> list[Prompt]:
    """The reader of pipelines that are not in the table, or whose columns are not those of the
    family that their name begins with: it refuses."""
    raise TypeError(
        f"How a {type(call.pipe).__name__} reads its prompts is not known, so the columns of "
        f"{texts[0]!r} cannot be told. Pass labels, {{'cat': [2]}} say, and columns=; or, if it "
        "pads the bare prompt, what sdattn.read_prompt(tokenizer, prompt) gives."
    )


def _with_images(call: PipelineCall, texts: list[str]) -> list[Prompt]:
    raise TypeError(
        f"A {type(call.pipe).__name__} has its text encoder read images before the prompt, so the "
        f"columns of {texts[0]!r} depend on them. Pass labels, {{'cat': [2]}} say, and columns=."
    )


def _clip(call: PipelineCall, texts: list[str]) -> list[Prompt]:
    """CLIP, filled up to its 77 columns, or in chunks; SDXL's two encoders share the columns."""
    first, *others = tokenizers(call.pipe)
    read = [_clip_columns(call, first, text) for text in texts]
    for other in others:
        for one in read:
            _check_agreement(one, _clip_columns(call, other, one.text))
    return read


def _clip_columns(call: PipelineCall, tokenizer: Any, text: str) -> Prompt:
    source, most = call.source(tokenizer, text), tokenizer.model_max_length
    if most >= NO_LIMIT:
        raise ValueError(
            f"The {type(tokenizer).__name__} has no model_max_length, to which CLIP's prompts are "
            "filled up. Get the folder of the model's tokenizer again, tokenizer_config.json above "
            "all, or set tokenizer.model_max_length."
        )
    if call.columns is None or call.columns == most:
        return read_source(tokenizer, source, **filled(most))
    return read_chunks(tokenizer, source, call.columns, call.split)


def _check_agreement(prompt: Prompt, twin: Prompt) -> None:
    spans = [[(word.start, word.end) for word in one.words] for one in (prompt, twin)]
    if spans[0] != spans[1]:
        raise ValueError(
            f"The pipeline's tokenizers disagree on the words of {prompt.text!r}: "
            f"{[word.text for word in prompt.words]} and {[word.text for word in twin.words]}. "
            "Load a textual inversion into both."
        )
    for word, other in zip(prompt.words, twin.words, strict=True):
        if word.columns != other.columns:
            raise ValueError(
                f"The pipeline's tokenizers disagree on {prompt.text!r}: {word.text!r} is at "
                f"columns {word.columns} for one and {other.columns} for the other. Use "
                "tokenizers that split words alike."
            )


def _sd3(call: PipelineCall, texts: list[str]) -> list[Prompt]:
    """Two CLIPs on the first 77 columns, T5 on those behind them; T5 can be left out, then its
    columns are zeros. Source: pipeline_stable_diffusion_3.py, ``encode_prompt``."""
    pipe, before = call.pipe, call.pipe.tokenizer.model_max_length
    clip = _clip(PipelineCall(pipe, before, call.options), texts)
    length = call.length(before=before, most=512)
    if pipe.text_encoder_3 is None:
        t5 = [Prompt(text, (), _padding(length)) for text in texts]
    else:
        t5 = [read_source(pipe.tokenizer_3, Source.of(text), **filled(length)) for text in texts]
    return [join_prompts(parts) for parts in zip(clip, t5, strict=True)]


def _padding(length: int) -> tuple[Token, ...]:
    """Columns of zeros, which come from no token."""
    return (Token(-1, PAD, 0, 0, PAD),) * length


def _flux(call: PipelineCall, texts: list[str]) -> list[Prompt]:
    """T5; CLIP gives one pooled vector. Source: pipeline_flux.py, ``_get_t5_prompt_embeds``."""
    tokenizer, options = call.pipe.tokenizer_2, filled(call.length(most=512))
    return [read_source(tokenizer, call.source(tokenizer, text), **options) for text in texts]


def _pixart(call: PipelineCall, texts: list[str]) -> list[Prompt]:
    """T5, in lower case. Source: pipeline_pixart_alpha.py, ``encode_prompt``."""
    options = filled(call.length())
    return [read_source(call.pipe.tokenizer, _cleaned(call, text), **options) for text in texts]


def _sana(call: PipelineCall, texts: list[str]) -> list[Prompt]:
    """Gemma behind an instruction, of which the start and what the length leaves of its end are
    kept. Source: pipeline_sana.py, ``_get_gemma_prompt_embeds`` and ``encode_prompt``."""
    tokenizer, length = call.pipe.tokenizer, call.length()
    lines = None if call.negative else call.option("complex_human_instruction")
    if not lines:
        options = {**filled(length), "padding_side": "right"}
        return [read_source(tokenizer, _cleaned(call, text), **options) for text in texts]
    instruction = "\n".join(lines)
    options = filled(len(tokenizer.encode(instruction)) + length - 2)
    return [
        read_source(
            tokenizer,
            _cleaned(call, text).within(instruction, ""),
            keep=lambda n: [0, *range(n - length + 1, n)],
            padding_side="right",
            **options,
        )
        for text in texts
    ]


def _cleaned(call: PipelineCall, text: str) -> Source:
    """The prompt as DeepFloyd's ``_text_preprocessing`` leaves it, if it only lowers the case."""
    source = Source.of(text).lower().strip()
    if call.option("clean_caption"):
        (cleaned,) = call.pipe._text_preprocessing(text, clean_caption=True)
        if cleaned != source.text:
            raise ValueError(
                f"clean_caption=True, the default of some pipelines, has a "
                f"{type(call.pipe).__name__} read {cleaned!r} for {text!r}. Pass that as the "
                "prompt, or clean_caption=False to the run and here."
            )
    return source


def _qwen(call: PipelineCall, texts: list[str]) -> list[Prompt]:
    """Qwen2.5-VL inside a template, without its first tokens, cut, and filled with zeros up to the
    longest prompt of the batch. Source: pipeline_qwenimage.py, ``_get_qwen_prompt_embeds``."""
    pipe, tokenizer = call.pipe, call.pipe.tokenizer
    drop, most = pipe.prompt_template_encode_start_idx, call.option("max_sequence_length")
    before, _, after = pipe.prompt_template_encode.format(_MARK).partition(_MARK)
    read = [
        read_source(
            tokenizer,
            Source.of(text).within(before, after),
            keep=lambda n: range(drop, min(n, drop + most)),
            truncation=True,
            max_length=pipe.tokenizer_max_length + drop,
        )
        for text in texts
    ]
    longest = max(len(one.tokens) for one in read)
    if call.columns not in (None, longest):
        raise call.unexplained(
            f"max_sequence_length={most} makes {longest} of {texts}, as many as the longest needs"
        )
    return [
        Prompt(one.text, one.words, one.tokens + _padding(longest - len(one.tokens)))
        for one in read
    ]


def _klein(call: PipelineCall, texts: list[str]) -> list[Prompt]:
    """Qwen3's chat format. Source: pipeline_flux2_klein.py, ``_get_qwen3_prompt_embeds``."""
    tokenizer, options = call.pipe.tokenizer, filled(call.length())

    def render(text: str) -> str:
        chat = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )

    return [read_source(tokenizer, _rendered(text, render), **options) for text in texts]


def _flux2(call: PipelineCall, texts: list[str]) -> list[Prompt]:
    """Mistral's chat format behind a system message. Source: pipeline_flux2.py, ``format_input``
    and ``_get_mistral_3_small_prompt_embeds``."""
    processor = call.pipe.tokenizer
    tokenizer = getattr(processor, "tokenizer", processor)
    options = filled(call.length())

    def render(text: str) -> str:
        roles = {"system": call.pipe.system_message, "user": text.replace("[IMG]", "")}
        chat = [
            {"role": role, "content": [{"type": "text", "text": said}]}
            for role, said in roles.items()
        ]
        return processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=False)

    read = []
    for text in texts:
        source = _rendered(text, render)
        # A processor adds the start that the template lacks; a bare tokenizer adds nothing.
        begun = tokenizer.bos_token and source.text.startswith(tokenizer.bos_token)
        adds = processor is not tokenizer and not begun
        read.append(read_source(tokenizer, source, add_special_tokens=adds, **options))
    return read


def _rendered(text: str, render: Callable[[str], str]) -> Source:
    """The prompt inside what a chat template makes of it."""
    before, _, after = render(_MARK).partition(_MARK)
    source, found = Source.of(text), render(text)
    for inner in (source, source.strip()):
        whole = inner.within(before, after)
        if whole.text == found:
            return whole
    raise ValueError(
        f"The pipeline's chat template rewrites the prompt {text!r} to {found!r}. Leave out what "
        "has a meaning of its own there, or pass labels."
    )


FAMILIES: dict[str, Reader] = {
    **dict.fromkeys(
        (
            "StableDiffusion",
            "StableUnCLIP",
            "SDXL",  # community pipelines
            "LatentConsistencyModel",
            "AnimateDiff",
            "TextToVideo",
            "VideoToVideoSD",
            "PIA",
            "LEditsPP",
            "SemanticStableDiffusion",
            "CycleDiffusion",
            "AltDiffusion",
        ),
        _clip,
    ),
    "StableDiffusion3": _sd3,
    "Flux": _flux,
    "FluxPriorRedux": unknown,
    "Flux2": _flux2,
    "Flux2Klein": _klein,
    "QwenImage": _qwen,
    "QwenImage21": unknown,
    "QwenImageEdit": _with_images,
    "PixArt": _pixart,
    "Sana": _sana,
    "SanaWM": unknown,
}
