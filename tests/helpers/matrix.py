"""The support matrix: every pipeline that capture() is for, at a tiny size, and ways to run it.

One table for the tests (test_matrix.py) and for docs/models.md (tests/support_matrix.py). A row
states for itself which rows of a guided batch belong to the prompt, read off the pipeline's own
code.
"""

from collections.abc import Callable, Iterable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, SlicedAttnProcessor

from helpers.cross_rows import CROSS
from helpers.from_video_rows import FROM_VIDEOS
from helpers.further_rows import FURTHER
from helpers.joint_rows import HUNYUAN_IMAGES, JOINT, QWEN_EDITS
from helpers.joint_video_rows import JOINT_VIDEOS
from helpers.ltx2_rows import LTX2_VIDEOS
from helpers.modular_rows import MODULAR
from helpers.padded_rows import PADDED
from helpers.rows import Row, Way
from helpers.transformer_rows import TRANSFORMERS
from helpers.unet_rows import UNETS
from helpers.video_rows import VIDEOS
from helpers.wan_rows import WAN_VIDEOS
from sdattn import TorchAttnProcessor

_KNOWN = (
    *UNETS,
    *FURTHER,
    *TRANSFORMERS,
    *PADDED,
    *JOINT,
    *HUNYUAN_IMAGES,
    *QWEN_EDITS,
    *MODULAR,
    *CROSS,
    *VIDEOS,
    *WAN_VIDEOS,
    *LTX2_VIDEOS,
    *JOINT_VIDEOS,
    *FROM_VIDEOS,
)
ROWS = tuple(row for row in _KNOWN if row.needs is None or hasattr(diffusers, row.needs))


def same(_model: Any) -> None:
    """The pipeline's own processors."""


def fused(model: Any) -> None:
    model.fuse_qkv_projections()


# What a user may have set, by the processors that a row allows.
PROCESSORS: dict[str, Callable[[Any], None]] = {
    "own": same,
    "AttnProcessor": lambda model: model.set_attn_processor(AttnProcessor()),
    "sliced": lambda model: model.set_attn_processor(SlicedAttnProcessor(1)),
    "TorchAttnProcessor": lambda model: model.set_attn_processor(TorchAttnProcessor()),
    "fused": fused,
}
WAYS = (
    Way(),
    Way(prompts=2, images=2, size=(128, 192)),
    Way(images=2, guided=False, size=(72, 136)),  # 9 x 17 cells, which round up on the way down
    Way(prompts=2, dtype=torch.bfloat16),
    Way(autocast=True),
)


def ways_of(row: Row) -> list[Way]:
    return [way for way in WAYS if row.casts or not way.autocast]


CASES = [
    (row, processor, way)
    for row in ROWS
    for processor in ("own", *row.processors)
    for way in (ways_of(row) if processor == "own" else WAYS[:1])
]


# Rows that scripts/test runs, of a test over many rows.
QUICK = ("Stable Diffusion 1.x", "Stable Diffusion 3", "FLUX.1", "Wan 2.1")


def few_are_quick(rows: Iterable[Any], others: Iterable[str] = ()) -> list[Any]:
    """Return rows, or their names, as parameters of a test: slow, but for QUICK ones and others."""
    rows, quick = list(rows), (*QUICK, *others)
    assert {*others} <= {str(one) for one in rows}
    return [pytest.param(one, marks=_marks(str(one) in quick)) for one in rows]


def marks_of(row: Any, processor: str, way: Way) -> list[Any]:
    """Return a case's marks.

    In the first way, and under autocast, QUICK rows are quick with their own processors. In the
    first each other processor is on the first UNet and the first transformer that may have it.
    """
    group = UNETS if row in UNETS else TRANSFORMERS
    first = next((one for one in group if processor in one.processors), None)
    own = processor == "own" and row.name in QUICK
    if way.autocast:
        return _marks(own)
    return _marks(way == WAYS[0] and (own or row is first))


def _marks(quick: bool) -> list[Any]:
    return [] if quick else [pytest.mark.slow]
