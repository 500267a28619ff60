"""Checking items against the pipeline that will draw them, and grouping them into batches."""

import hashlib
import inspect
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

from ...edit.editing import EditOptions, prepare
from ...errors import InvalidValueError
from ...files.terminal import say, shown
from ...files.writing import sha256
from ...inversion.images import fitted_size
from ...models.facts import images_a_prompt, makes_videos
from ...models.pipeline import Options, Pipeline
from ...models.pipeline_call import checked_options
from ...models.reading import read_prompts
from ...models.values import check_text
from ...runs.explaining import check_explained, is_decided
from .columns import OWN
from .items import KEPT, REFUSED, BadLine, Item, printable
from .values import number

_WHOLE = (int, int | None)  # annotations of integer options
_BLOCK = 2**22  # numbers added up at a time


@dataclass(frozen=True, slots=True)
class Job:
    """An item that the pipeline can draw or explain, and its ``options`` without the negative
    prompt; items of one ``shape`` can run in one batch."""

    item: Item
    options: Options
    shape: int


def check_items(
    pipe: Pipeline, items: Iterable[Item], defaults: Options
) -> tuple[list[Job], list[BadLine]]:
    """Return the jobs, and the items that a pipeline or its outline cannot draw; ``defaults`` are
    for options that an item does not have. Next to items to draw, those that an image decides are
    not for images."""
    items = list(items)
    checks = _Checks(pipe, defaults, drawn=any(item.image is None for item in items))
    jobs, bad = [], []
    for item in items:
        try:
            jobs.append(checks.job(item))
        except (ValueError, TypeError, KeyError) as error:
            reason = str(error.args[0] if error.args else error)
            reason = printable(" ".join(reason.split()))
            bad.append(BadLine(item.line, reason, printable(item.prompt[:200])[:200]))
    if checks.left_out:
        names = ", ".join(map(shown, checks.left_out))
        why = f"not used, as no {type(pipe).__name__} has such options"
        say(f"{why}: {names}. keep_columns keeps them in the rows.")
    if checks.decided:
        say(f"not used, as an image decides them: {', '.join(map(shown, checks.decided))}")
    return jobs, bad


class _Checks:
    """Checks that run once for each set of options: most items have the same."""

    def __init__(self, pipe: Pipeline, defaults: Options, drawn: bool):
        self.pipe, self.defaults = pipe, dict(defaults)
        self.of_images = {
            name: value for name, value in defaults.items() if not (drawn and is_decided(name))
        }
        self.negative = self.defaults.pop("negative_prompt", None)
        parameters = inspect.signature(pipe.__call__).parameters.items()
        self.kinds = {n: p.annotation for n, p in parameters if p.kind is not p.VAR_KEYWORD}
        self.foreign: dict[str, bool] = {}  # names in the list: True if unknown
        self.left_out: dict[str, None] = {}
        self.decided: dict[str, None] = {}  # left out for images
        self.checked: dict[str, dict[str, Any] | Exception] = {}
        self.shapes: dict[tuple[str, bool, int, bool], int] = {}
        # Some pipelines pad prompts only to the longest of a batch.
        self.of_length = _columns(pipe, "a") != _columns(pipe, "a cat and a dog and a cat")

    def job(self, item: Item) -> Job:
        item = self._known(item)
        if item.negative_prompt is None and item.image is None:
            item = replace(item, negative_prompt=self.negative)
        for text in (item.prompt, item.text):
            check_text(text, "prompt")
        check_text(item.negative_prompt or "", "negative prompt")
        key, options = self._options(item)
        columns = 0
        if item.words is not None or self.of_length:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # truncated words are in the item's row
                [read] = read_prompts(self.pipe, item.text, **options)
            for word in item.words or ():
                read.find(word)
            columns = len(read.tokens) if self.of_length else 0
        if item.edit_to is not None and makes_videos(self.pipe):
            raise InvalidValueError(
                f"A {type(self.pipe).__name__} makes videos, not images to edit. Leave edit_to out."
            )
        if item.edit_to is not None:  # its prompts run together, and with no other's
            prepare(self.pipe, item.prompt, item.edit_to, EditOptions(**item.edit), options)
        shape = (key, item.negative_prompt is not None, columns, item.edit_to is not None)
        return Job(item, options, self.shapes.setdefault(shape, len(self.shapes)))

    def _known(self, item: Item) -> Item:
        """Return the item with the pipeline's options, and the others as columns."""
        foreign = [name for name in item.options if self._is_foreign(name)]
        if foreign and item.foreign == REFUSED:
            raise InvalidValueError(
                f"A {type(self.pipe).__name__} has no option {foreign[0]!r}. Leave it out, or name "
                "it in keep_columns to keep it as a column."
            )
        kept = item.foreign == KEPT
        self.left_out |= {} if kept else dict.fromkeys(foreign)
        options = {name: item.options[name] for name in item.options if name not in foreign}
        if item.image is not None and item.foreign != REFUSED:
            given = {**options, "negative_prompt": item.negative_prompt or None}
            decided = [name for name in given if is_decided(name) and given[name] is not None]
            self.decided |= dict.fromkeys(decided)
            options = {name: value for name, value in options.items() if name not in decided}
            item = replace(item, negative_prompt=None)
        for name, value in options.items():
            if self.kinds.get(name) in _WHOLE:
                options[name] = number(value, whole=True)
        columns = {n: text for n, text in item.columns.items() if not kept or self._is_foreign(n)}
        return replace(item, options=options, columns=columns)

    def _is_foreign(self, name: str) -> bool:
        """Check that no option has this name, or nearly this name, which may be a typo."""
        if name not in self.foreign:
            near = get_close_matches(name.lower(), [*self.kinds, *OWN], n=1, cutoff=0.85)
            self.foreign[name] = name not in self.kinds and not near
        return self.foreign[name]

    def _options(self, item: Item) -> tuple[str, dict[str, Any]]:
        size = None if item.image is None else fitted_size(self.pipe, item.image.size)
        given = {**(self.of_images if size else self.defaults), **item.options}
        if item.negative_prompt is not None:
            given["negative_prompt"] = item.negative_prompt
        # Options are checked once for all items that share them; for the negative prompt it only
        # matters whether there is one.
        key = json.dumps([{**given, "negative_prompt": bool(item.negative_prompt)}], sort_keys=True)
        key = f"{key} {size}" if size else key
        if key not in self.checked:
            try:
                if size:
                    check_explained(self.pipe, size, **given)
                    self.checked[key] = given
                    return key, given
                found = checked_options(self.pipe, given, videos=True)
                if images_a_prompt(self.pipe, found) != 1:
                    raise InvalidValueError(
                        f"A {type(self.pipe).__name__} makes {images_a_prompt(self.pipe, found)} "
                        "per item. A batch takes pipelines that make one."
                    )
                found.pop("negative_prompt", None)
                self.checked[key] = found
            except (ValueError, TypeError) as error:
                self.checked[key] = error
        found_or_error = self.checked[key]
        if isinstance(found_or_error, Exception):
            raise found_or_error
        return key, found_or_error


def _columns(pipe: Pipeline, text: str) -> int:
    try:
        return len(read_prompts(pipe, text)[0].tokens)
    except (TypeError, ValueError):  # reported for each item that needs it
        return 0


def plan_batches(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """Return batches of jobs of one shape, ``size`` together, in the order of the input: they
    depend on nothing else, so a run that is resumed anywhere makes the same bits."""
    # Items of one shape, wherever they are in the input; then batches in the order of their first
    # lines.
    by_shape: dict[int, list[Job]] = {}
    for job in jobs:
        by_shape.setdefault(job.shape, []).append(job)
    batches = [
        group[start : start + size]
        for group in by_shape.values()
        for start in range(0, len(group), size)
    ]
    return sorted(batches, key=lambda batch: batch[0].item.line)


def digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=list)
    return sha256(text.encode())[:16]


def fingerprint(job: Job, settings: str) -> str:
    """Return a checksum of what determines an item's files: fields, options, the run's settings."""
    item = job.item
    fields = item.prompt, item.seed, item.negative_prompt, item.words
    edit = [] if item.edit_to is None else [item.edit_to, item.edit]
    columns = [item.columns] if item.columns else []
    image = [] if item.image is None else [item.image.name, item.image.sha256]
    return digest([settings, *fields, job.options, *edit, *columns, *image])


def digest_inputs(jobs: Iterable[Job]) -> str:
    told = (f"{job.item.id}\n{job.item.line}\n{fingerprint(job, '')}\n" for job in jobs)
    return sha256("".join(told).encode())[:16]


def digest_model(pipe: Pipeline) -> str:
    """Return a checksum of a loaded pipeline: its parts' configurations and every weight.

    Bit patterns of weights are summed along rows and columns: the same on every device.
    """
    parts: dict[str, list[object]] = {"": [type(pipe).__name__, _config(pipe)]}
    for name, part in pipe.components.items():
        parts[name] = [type(part).__name__, _config(part)]
        if hasattr(part, "get_vocab"):  # which tokens a text becomes
            parts[name].append([part.get_vocab(), part.model_max_length])
        if isinstance(part, torch.nn.Module):
            parts[name].append({key: _sum(weight) for key, weight in _weights(part).items()})
            # A LoRA's scale is not one of its weights.
            own = [(n, m) for n, m in part.named_modules() if hasattr(m, "base_layer")]
            scales = [[n, m.scaling] for n, m in own if isinstance(getattr(m, "scaling", 0), dict)]
            parts[name] += [scales] if scales else []
    return digest(parts)


def _weights(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return a model's weights, even if they are elsewhere, with hooks of accelerate."""
    found = model.state_dict()
    if any(weight.is_meta for weight in found.values()):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        found = get_state_dict_offloaded_model(model)
    return found


def _config(part: object) -> dict[str, object]:
    config = getattr(part, "config", {})
    found = config.to_diff_dict() if hasattr(config, "to_diff_dict") else dict(config)
    apart = ("transformers_version", "dtype", "torch_dtype")
    kept = {k: value for k, value in found.items() if not k.startswith("_") and k not in apart}
    return json.loads(json.dumps(kept, default=str))


def _sum(tensor: torch.Tensor) -> list[object]:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    # As a matrix of bit patterns: two exchanged weights change a sum of a row or of a column.
    rows = len(tensor) if tensor.ndim and tensor.numel() else 1
    bits = tensor.detach().contiguous().view(whole).reshape(rows, -1)
    by_column = torch.zeros(bits.shape[1], dtype=torch.int64, device=bits.device)
    by_row = []
    # In blocks: torch copies the summands to int64.
    for block in bits.split(max(1, _BLOCK // max(1, bits.shape[1]))):
        by_column += block.sum(0, dtype=torch.int64)
        by_row.append(block.sum(1, dtype=torch.int64))
    sums = hashlib.sha256()
    for part in (by_column, torch.cat(by_row)):
        sums.update(part.cpu().numpy().tobytes())
    return [str(tensor.dtype), list(tensor.shape), sums.hexdigest()]
