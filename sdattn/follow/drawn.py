"""Texts of a run: the texts in the pipeline's call, and the tokens that its encoders got.

Each text encoder gets a forward pre-hook that copies the token ids on their device, without
waiting. Tokenizers lose case and spaces, so the texts are read from the pipeline's call. Both are
compared with a prompt only when heatmaps are asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import local
from typing import Any

from torch import Tensor, nn

from ..errors import InvalidValueError
from ..models.denoiser import Denoiser
from ..models.guidance import Branch
from ..models.pipeline import Given
from ..models.running_call import running_call, running_variables
from ..prompts.tokens import Prompt
from .installer import Installation

_NAMES: dict[Branch, str] = {"conditional": "prompt", "unconditional": "negative prompt"}


@dataclass(frozen=True, eq=False)
class DrawnPrompts:
    """Prompts of one run, and its negative prompts if they were encoded.

    Attributes:
        texts: for each guidance branch its texts, one per prompt, as typed.
        ids: for each branch the tokens of each text encoder, by the encoder's name in the pipeline,
            in the order of names: integers ``[texts, length]``.
        options: arguments of the call that decide what the text encoders get, see
            :attr:`sdattn.models.Family.text_options`.
        pipeline: pipeline that ran; None once it is gone. It is neither kept alive nor pickled.
    """

    texts: Mapping[Branch, tuple[str, ...]]
    ids: Mapping[Branch, Mapping[str, Tensor]]
    options: Mapping[str, Any]
    _pipeline: Callable[[], Any] = field(repr=False)

    @property
    def pipeline(self) -> Any:
        return self._pipeline()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pipeline": _gone}

    def check(self, branches: Sequence[Branch], prompts: Sequence[Prompt]) -> None:
        """Refuse prompts that the images were not drawn from.

        Args:
            branches: guidance branch of each image.
            prompts: each for the same number of consecutive images; labels are not checked.

        Raises:
            ValueError: a text encoder got other tokens than the prompt of an image has.
        """
        for i, branch, number in self._pairs(branches, len(prompts)):
            got = {name: ids[number].tolist() for name, ids in self.ids[branch].items()}
            if _are_read(prompts[i].encoded, list(got.values())):
                continue
            self._refuse_another(prompts[i].text, branch, number)
            raise InvalidValueError(
                f"The {_NAMES[branch]} {prompts[i].text!r} was drawn, but read with this pipeline "
                f"and these options it becomes other tokens than {' and '.join(got)} got. Pass the "
                "pipeline that ran and the options of its call that change what is read, or "
                "labels, e.g. {'cat': [2]}."
            )

    def check_texts(self, branches: Sequence[Branch], texts: Sequence[object]) -> None:
        """Raise ValueError for texts that could not be read, if other texts were drawn."""
        for i, branch, number in self._pairs(branches, len(texts)):
            text = texts[i]
            if isinstance(text, str):
                self._refuse_another(text, branch, number)

    def _pairs(self, branches: Sequence[Branch], prompts: int) -> list[tuple[int, Branch, int]]:
        """Return (number of a prompt, branch, number of the text that it must match)."""
        each = len(branches) // prompts
        pairs = set()
        for branch, texts in self.texts.items():
            images = [i for i, side in enumerate(branches) if side == branch]
            drawn_each, rest = divmod(len(images), len(texts))
            if drawn_each and not rest:
                pairs |= {(i // each, branch, n // drawn_each) for n, i in enumerate(images)}
        return sorted(pairs)

    def _refuse_another(self, text: str, branch: Branch, number: int) -> None:
        what = _NAMES[branch]
        drawn = self.texts[branch][number]
        if text != drawn:
            raise InvalidValueError(
                f"Asked for the heatmaps of {text!r}, but the {what} of this run was {drawn!r}, so "
                f"the words would get each other's maps. Pass the {what} that was drawn, or leave "
                "it out."
            )


def _gone() -> None:
    """Stand in for a reference to a pipeline that is gone."""


def _are_read(encoded: Sequence[Sequence[int]], got: Sequence[Sequence[int]]) -> bool:
    """Check whether each list of tokens is what one of the encoders got, in the encoders' order;
    some encoders give no columns and are passed over."""
    first = 0
    for tokens in encoded:
        while first < len(got) and not _same(tokens, got[first]):
            first += 1
        if first == len(got):
            return False
        first += 1
    return True


def _same(tokens: Sequence[int], got: Sequence[int]) -> bool:
    """Check whether an encoder got these tokens, followed by nothing but padding."""
    return list(got[: len(tokens)]) == list(tokens) and len(set(got[len(tokens) :])) <= 1


class _Noted(local):
    """Tokens that each text encoder got in this thread within the last call of the pipeline."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, call: int | None) -> None:
        self.call = call  # its number
        self.is_read = False  # another call may get that number later
        self.ids: dict[str, list[Tensor]] = {}


class PromptWatch:
    """Listener to a pipeline's text encoders, which knows the prompts of a run.

    They are unknown if text states were passed (``prompt_embeds``), if a pipeline calls its
    encoders in its own way, or for a bare model.
    """

    def __init__(self, denoiser: Denoiser):
        pipeline = denoiser.pipeline
        family = denoiser.family
        self._pipeline: Callable[[], Any] = _gone if pipeline is None else weakref.ref(pipeline)
        self._argument = family.text_argument
        self._options = family.text_options
        self._reads_ids = family.reads_ids
        self._noted = _Noted()

    def listen(self, installed: Installation) -> None:
        """Listen to the text encoders until the installation is removed."""
        for name, encoder in _text_encoders(self._pipeline()):
            installed.watch(encoder.get_submodule(self._reads_ids), self._listener(name))

    def drawn(self) -> DrawnPrompts | None:
        """Return the prompts of the running call, or None if unknown; ask before a pass."""
        pipeline = self._pipeline()
        noted = self._noted
        variables = running_variables(pipeline)
        if variables is None or noted.call != running_call(pipeline):
            return None
        noted.is_read = True
        negative_names = (f"negative_{self._argument}", "negative_prompt")
        prompt = _first_text(variables, self._argument, "prompt")
        negative = _first_text(variables, *negative_names)
        branches: list[tuple[Branch, object]] = [("unconditional", negative)]
        if prompt is not None:  # else text states came in its place, whose text is not known
            branches.insert(0, ("conditional", prompt))
        # Prompt and negative prompt, a call of each encoder for either. More calls are chunks of a
        # long prompt, or something else of the pipeline's own.
        if any(len(calls) > len(branches) for calls in noted.ids.values()):
            return None  # which call had which text is not known
        texts = {}
        ids = {}
        most = max(map(len, noted.ids.values()), default=0)
        for number, (branch, text) in enumerate(branches[:most]):
            # The prompts are encoded first. What an encoder got that is not called for every text
            # (ByT5, for quoted text alone) may be of either branch.
            got = {name: calls[min(number, len(calls) - 1)] for name, calls in noted.ids.items()}
            rows = _text_of_each_row("" if text is None else text, list(got.values()))
            if rows is not None:
                texts[branch] = rows
                ids[branch] = got
        if not texts:
            return None
        options = {name: variables.get(name) for name in self._options}
        options = {name: value for name, value in options.items() if value is not None}
        return DrawnPrompts(texts, ids, options, self._pipeline)

    def _listener(self, encoder: str) -> Callable[..., None]:
        """Return the forward pre-hook of a text encoder."""

        def hear(_model: nn.Module, args: tuple[object, ...], kwargs: Given) -> None:
            ids = kwargs.get("input_ids", *args[:1])
            call = running_call(self._pipeline())
            if call is None or not isinstance(ids, Tensor) or ids.ndim != 2:
                return  # called by hand, or with embeddings
            noted = self._noted
            if noted.is_read or noted.call != call:
                noted.begin(call)
            noted.ids.setdefault(encoder, []).append(ids.detach().clone())

        return hear


def _text_encoders(pipeline: object) -> list[tuple[str, nn.Module]]:
    """Return the text encoders with their names, in order, but none that a hook would recompile."""
    encoders = []
    for name, part in sorted(getattr(pipeline, "__dict__", {}).items()):
        if not name.startswith("text_encoder") or not isinstance(part, nn.Module):
            continue
        if vars(part).get("_compiled_call_impl") is None:
            encoders.append((name, part))
    return encoders


def _first_text(variables: Given, *names: str) -> Any:
    """Return the first of these variables that holds text, else the last one's value."""
    values = [variables.get(name) for name in names]
    return next((v for v in values if isinstance(v, (str, list, tuple)) and v), values[-1])


def _text_of_each_row(text: object, ids: Sequence[Tensor]) -> tuple[str, ...] | None:
    """Return the text of each row that the encoders got, or None if it is not known."""
    rows = {len(tokens) for tokens in ids}
    if len(rows) != 1:
        return None
    texts = (text,) * min(rows) if isinstance(text, str) else text
    if not isinstance(texts, (list, tuple)) or not all(isinstance(one, str) for one in texts):
        return None
    return tuple(texts) if len(texts) == min(rows) else None
