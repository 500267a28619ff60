from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import InvalidValueError, OptionError, RunError, refuse
from ..loading.pipelines import load_pipeline
from ..loading.quiet import quiet_libraries
from ..maps.presets import Preset, preset_of
from ..models.facts import makes_videos
from ..models.pipeline import Options
from ..runs.editrun import EditRun
from ..runs.imagerun import ImageRun
from ..runs.packing import heatmaps_from, pack_run
from ..runs.parts import MAPS
from .checks import Job, check_items
from .drawing import BatchDrawer
from .items import BadLine, Item, item_of, number
from .shard import of_words

USUAL = ("image", "heatmaps", "maps")
PARTS = (*USUAL, "video")


class Draw:
    """A pipeline that draws rows, each of which is a line of ``sdattn batch``.

        rows = ray.data.from_items([{"prompt": "a cat", "seed": 1}, ...])
        rows.map_batches(Draw, fn_constructor_kwargs={"model": "owner/name"}, batch_size=8,
                         concurrency=4, num_gpus=1)

    It needs no Ray: ``Draw()({"prompt": ["a cat"]})`` does the same. Rows of one shape run
    together, so the same rows in the same batches give the same bits, as in ``sdattn batch``.

    Args:
        model, device, dtype, loading: arguments for :func:`sdattn.load_pipeline`, ``loading``
            holding the others.
        preset: preset of the heatmaps, or its name.
        options, seed: arguments of the pipeline's call, and the seed, for rows that have none.
        save: columns to add: ``"image"``, ``"heatmaps"``, ``"maps"`` and, for models that make
            videos, ``"video"``.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        preset: str | Preset = "default",
        options: Options | None = None,
        seed: int = 0,
        save: Sequence[str] = USUAL,
        device: str | None = None,
        dtype: torch.dtype | str | None = None,
        loading: Options | None = None,
    ):
        if unknown := sorted(set(save) - set(PARTS)):
            raise refuse("save", unknown, PARTS)
        self.options = dict(options or {})
        preset_of(preset)  # or refuse, before the model is loaded
        self.seed = seed
        self.save = save
        quiet_libraries(prompts=True)
        self.pipe = load_pipeline(model, device=device, dtype=dtype, **(loading or {}))
        if "video" in save and not makes_videos(self.pipe):
            raise OptionError("save", list(save), f"{model} makes images. Leave video out.")
        self.pipe.set_progress_bar_config(disable=True)
        self._drawer = BatchDrawer(self.pipe, preset, self._store, self._fail)
        self._drawn: dict[str, dict[str, Any]] = {}  # by the row's number in its batch

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Draw a batch of rows.

        Args:
            batch: columns by name, arrays or lists of one length: ``prompt``; optionally ``id``,
                ``seed``, ``negative_prompt``, ``words`` and options of the pipeline, None or NaN in
                rows that do not have them. A whole float, 5.0, stands for 5.

        Returns:
            The batch's columns, and for each row: ``words`` that have a map, in the prompt's order;
            ``truncated`` words; ``blanked``, whether the safety checker blanked it; ``statistics``,
            a mapping per word, see :meth:`WordStatistics.flat`; ``image``, uint8 ``[rows, cols,
            3]``, a video's middle frame, and, if a row of the batch has ``edit_to``,
            ``source_image``, None in rows without it; ``heatmaps``, float32 ``[words, (frames,)
            rows, cols]``, from float16 maps as files hold them; ``maps``, the bytes of
            ``maps.safetensors``, float16 ``[(frames,) rows, cols, tokens]`` per layer; ``video``,
            uint8 ``[frames, rows, cols, 3]``.

        Raises:
            ValueError: an invalid row, by its number in the batch, from 1; nothing was drawn.
            RuntimeError: a row that could not be drawn.
        """
        items = list(self._items(batch))
        jobs, bad = check_items(self.pipe, items, self.options)
        if bad:
            raise _refused(bad[0])
        self._drawn.clear()
        by_shape: dict[int, list[Job]] = {}
        for job in jobs:
            by_shape.setdefault(job.shape, []).append(job)
        for part in by_shape.values():
            self._drawer.draw(part, {job.item.id for job in part})
        # In the order of the rows, whatever the order of their shapes.
        rows = [self._drawn.pop(item.id) for item in items]
        if any(item.edit_to is not None for item in items) and "image" in self.save:
            rows = [{"source_image": None, **row} for row in rows]
        made = {name: _column([row[name] for row in rows]) for name in (rows[0] if rows else ())}
        return {**batch, **made}

    def _items(self, batch: Mapping[str, Any]) -> Iterator[Item]:
        columns = {name: _plain(column) for name, column in batch.items() if name != "id"}
        for line, values in enumerate(zip(*columns.values(), strict=True), 1):
            fields = dict(zip(columns, values, strict=True))
            try:
                yield item_of({"id": str(line), "seed": self.seed}, fields, line)
            except ValueError as error:
                raise _refused(BadLine(line, str(error), "")) from error

    def _store(self, job: Job, run: ImageRun, edit: EditRun | None) -> None:
        run = of_words(job.item, run)
        packed = pack_run(run, ["maps"])
        heatmaps = run.heatmaps
        found: dict[str, object] = {
            "words": list(heatmaps.words),
            "truncated": packed.info.truncated,
            "blanked": bool(packed.info.blanked),
            "statistics": [word.flat() for word in packed.info.statistics],
        }
        if "image" in self.save:
            found["image"] = np.asarray(run.image.convert("RGB"))
            if edit is not None:
                found["source_image"] = np.asarray(edit.images[0].convert("RGB"))
        if "video" in self.save and run.video is not None:
            found["video"] = np.stack([np.asarray(frame.convert("RGB")) for frame in run.video])
        if "heatmaps" in self.save:
            saved = heatmaps_from(run.layers.as_saved(), heatmaps.prompt, heatmaps.preset)
            found["heatmaps"] = np.stack([word.map.numpy() for word in saved.occurrences()])
        if "maps" in self.save:
            found["maps"] = packed.files[MAPS]
        self._drawn[job.item.id] = found

    def _fail(self, job: Job, reason: str, _: str) -> None:
        raise RunError(f"Row {job.item.line} of the batch, {job.item.prompt!r}: {reason}")


def _refused(bad: BadLine) -> ValueError:
    return InvalidValueError(f"Row {bad.line} of the batch: {bad.reason}")


def _plain(column: Any) -> list[Any]:
    """Return a column's values as Python's numbers and lists, None for missing ones."""
    if hasattr(column, "to_numpy"):  # pandas, whose NA is not even equal to itself
        column = column.to_numpy(object, na_value=math.nan)
    return [_value(value) for value in column]


def _value(value: Any) -> Any:
    """Return Python's own value; integer columns with gaps come as floats, with NaN in the gaps."""
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else number(value, whole=True)


def _column(values: list[Any]) -> Any:
    """Return one array if all are arrays of one shape, else an array of objects."""
    shapes = {getattr(value, "shape", None) for value in values}
    if len(shapes) == 1 and None not in shapes:
        return np.stack(values)
    column = np.empty(len(values), object)
    for i, value in enumerate(values):
        column[i] = value
    return column
