"""A pipeline's own ``encode_prompt``, run without the weights of its text encoders.

A copy of the pipeline encodes the texts. In it tokenizers note what they are asked, and each text
encoder has a stand-in, whose states hold the number of the token that they stand for. So the text
states that ``encode_prompt`` returns tell from which token each column came, whatever is put around
the prompt, dropped, or filled up. The pipeline itself is left as it is.
"""

import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidValueError
from .call_options import is_modular
from .pipeline import Options, Pipeline

CPU = torch.device("cpu")
_LAYERS = 128  # a stand-in has as many hidden states: more than any text encoder
_TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"  # a tokenizer's warning

Column = list[tuple[int, int]]  # (row of Overheard.encoded, token in it), none for zeros


@dataclass
class Tokenized:
    """A text that a tokenizer was given, with which options, and the ids that it made."""

    tokenizer: Any
    text: str
    options: Options
    ids: list[int]


@dataclass
class Encoded:
    """Tokens in a row of a text encoder's call, and their attention mask or None."""

    ids: list[int]
    seen: list[int] | None


@dataclass
class Overheard:
    """Tokens that tokenizers and text encoders got while a pipeline encoded texts.

    Attributes:
        tokenized: texts that were tokenized, in order.
        encoded: rows of all calls of text encoders, in order.
        outputs: text states that ``encode_prompt`` returned, as a list of columns per row.
    """

    tokenized: list[Tokenized] = field(default_factory=list)
    encoded: list[Encoded] = field(default_factory=list)
    outputs: list[list[list[Column]]] = field(default_factory=list)


def overhear(
    pipe: Pipeline, texts: Sequence[str], options: Options, *, negative: bool = False
) -> Overheard:
    """Encode texts with a copy of a pipeline.

    Args:
        options: further arguments of ``encode_prompt``; those that it lacks are left out.
        negative: True to pass the texts as negative prompts too, whose states come last.

    Raises:
        ValueError: the pipeline computes with the text encoders' states.
    """
    noted = Overheard()
    copy = _copy(pipe, noted)
    with _hushed(pipe), torch.no_grad():
        if is_modular(pipe):
            outputs = _run_block(copy, texts, options)
        else:
            given = {
                "device": CPU,
                "dtype": torch.float32,
                **options,
                "prompt": list(texts),
                "batch_size": len(texts),
                "num_images_per_prompt": 1,
                "num_videos_per_prompt": 1,
                "do_classifier_free_guidance": negative,
                "negative_prompt": list(texts) if negative else None,
                **dict.fromkeys(("prompt_2", "prompt_3", "prompt_4")),
            }
            known = inspect.signature(copy.encode_prompt).parameters
            outputs = copy.encode_prompt(**{name: given[name] for name in known if name in given})
    origins: Column = []
    for row, one in enumerate(noted.encoded):
        origins += [(row, k) for k in range(len(one.ids))]
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        is_batch = isinstance(output, Tensor) and output.ndim > 2
        rows = list(output) if is_batch or isinstance(output, list) else []
        if any(isinstance(row, Tensor) and _holds_numbers(row) for row in rows):
            noted.outputs.append([_columns(row, origins) for row in rows])
    return noted


def _holds_numbers(row: Tensor) -> bool:
    return row.ndim > 1 and row.is_floating_point() and bool(row.any())


def _columns(row: Tensor, origins: Column) -> list[Column]:
    if (row != row.round()).any() or row.min() < 0 or row.max() > len(origins):
        raise InvalidValueError("it computes with the states of its text encoders")
    numbers = row.flatten(1).long().tolist()  # [length, width]
    columns = []
    for column in numbers:
        columns.append([origins[number - 1] for number in dict.fromkeys(column) if number])
    return columns


def _copy(pipe: Pipeline, noted: Overheard) -> Any:
    """Return a copy of a pipeline, on the CPU, with tokenizers that note and with stand-ins."""
    kind = type(pipe)
    members = {"device": CPU, "_execution_device": CPU, "__module__": kind.__module__}
    copy: Any = object.__new__(type(kind.__name__, (kind,), members))
    parts = vars(copy)
    parts.update(vars(pipe))
    hints = inspect.signature(kind.__init__).parameters
    encoders = {}
    for name, part in vars(pipe).items():
        if callable(part) and (name.startswith("tokenizer") or name == "processor"):
            parts[name] = _noting(part, noted)
        elif name.startswith("text_encoder") and (part is None or callable(part)):
            encoders[name] = part
    # Encoders that were freed, after a run on prompt_embeds, are stood in for too. SD3's third may
    # be missing in the run itself, with columns of zeros.
    are_gone = not any(part is not None for part in encoders.values())
    for name, part in encoders.items():
        twin = parts.get(name.replace("text_encoder", "tokenizer"))
        if part is not None:
            parts[name] = StandIn(name, type(part), noted)
        elif twin is not None and (are_gone or name != "text_encoder_3"):
            parts[name] = StandIn(name, getattr(hints.get(name), "annotation", ""), noted)
    return copy


def _noting(part: Any, noted: Overheard) -> Any:
    """Return a copy of a tokenizer, or of a processor with one, that notes what it is asked."""
    kind = type(part)
    if getattr(part, "tokenizer", None) is not None:
        copy: Any = object.__new__(kind)
        vars(copy).update(vars(part), tokenizer=_noting(part.tokenizer, noted))
        return copy

    def note(self: Any, text: Any = None, *args: Any, **options: Any) -> Any:
        found = kind.__call__(self, text, *args, **options)
        texts = [text] if isinstance(text, str) else text
        ids = found["input_ids"]
        ids = ids.tolist() if isinstance(ids, Tensor) else ids
        if ids and not isinstance(ids[0], list):
            ids = [ids]
        for one, own in zip(texts, ids, strict=False):
            noted.tokenized.append(Tokenized(self, one, options, own))
        return found

    copy = object.__new__(type(kind.__name__, (kind,), {"__call__": note}))
    # a text that is too long is said in the run, once per tokenizer
    vars(copy).update(vars(part), deprecation_warnings={_TOO_LONG: True})
    return copy


class StandIn(nn.Module):
    """Text encoder that computes nothing: its states ``[B, length, width]`` hold the number of each
    token, counted from 1 over all that were encoded."""

    dtype = torch.float32
    device = CPU

    def __init__(self, name: str, kind: object, noted: Overheard):
        super().__init__()
        self._pools_first = "WithProjection" in str(kind)
        self._noted = noted
        # SD3 fills up the states of its CLIPs, side by side, to the width of T5's.
        self._width = int(name[-1]) if name[-1].isdigit() else 1
        self.config = SimpleNamespace(
            hidden_size=self._width, d_model=self._width, num_hidden_layers=_LAYERS - 1
        )
        self.config.text_config = self.config
        self.norm = nn.Identity()  # where Qwen-Image 2.1 puts a hook

    @property
    def model(self) -> "StandIn":
        """Return the part without a head, which some pipelines call."""
        return self

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **_: object
    ) -> "_Output":
        rows, length = input_ids.shape
        first = 1 + sum(len(one.ids) for one in self._noted.encoded)
        numbers = torch.arange(first, first + rows * length, dtype=self.dtype, device=CPU)
        states = numbers.view(rows, length, 1).expand(rows, length, self._width)
        for i, ids in enumerate(input_ids.tolist()):
            seen = None if attention_mask is None else attention_mask[i].int().tolist()
            self._noted.encoded.append(Encoded(ids, seen))
        pooled = torch.zeros(rows, self._width, device=CPU)
        found = _Output(text_embeds=pooled) if self._pools_first else _Output()
        found.update(last_hidden_state=states, pooler_output=pooled)
        found["hidden_states"] = (states,) * _LAYERS
        return found


class _Output(dict[str, Any]):
    """Output of a text encoder, by name or number."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


def _run_block(copy: Any, texts: Sequence[str], options: Options) -> tuple[Any, ...]:
    """Run the block of a modular pipeline that encodes its prompt."""
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    block = copy.blocks.sub_blocks["text_encoder"]
    state = PipelineState()
    for one in block.inputs:
        if one.name is not None:
            state.set(one.name, options.get(one.name, one.default))
    state.set("prompt", texts[0] if len(texts) == 1 else list(texts))
    _, state = block(copy, state)
    return tuple(state.get(one.name) for one in block.intermediate_outputs)


@contextmanager
def _hushed(pipe: Pipeline) -> Iterator[None]:
    """Keep a pipeline's warnings in this thread from its log: its run has given them."""
    thread = get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = []
    for kind in type(pipe).__mro__:
        encoders = f"{kind.__module__.rpartition('.')[0]}.encoders"  # of a modular pipeline
        for name in (kind.__module__, encoders):
            logger = getattr(sys.modules.get(name), "logger", None)
            if isinstance(logger, logging.Logger):
                loggers.append(logger)
    try:
        for logger in loggers:
            logger.addFilter(is_of_others)
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_of_others)
