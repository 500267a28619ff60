"""``README.md`` of a batch run: which files ``datasets.load_dataset`` reads, and their types."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .formats import FORMATS
from .manifest import BatchSettings

_DATA = """---
configs:
- config_name: default
  data_files:
  - split: train
    path:
"""
# Every field is named: datasets otherwise infers them from the first items of all, and those can
# differ in their options, truncated words, and overlays.
_NUMBER, _COLUMNS = "float64", ["int64"]
_RUN = {
    **{"id": "string", "line": "int64", "prompt": "string", "seed": "int64", "size": _COLUMNS},
    "options": {
        **{"negative_prompt": "string", "num_inference_steps": "int64", "guidance_scale": _NUMBER}
    },
    "words": [{"text": "string", "columns": _COLUMNS}],
    "statistics": [
        {
            **{"word": "string", "columns": _COLUMNS, "peak": _NUMBER, "mean": _NUMBER},
            **{"mass": _NUMBER, "centre": [_NUMBER], "area": _NUMBER, "entropy": _NUMBER},
        }
    ],
    "truncated": ["string"],
}


def card_of(settings: BatchSettings, columns: Sequence[str] = ()) -> bytes:
    """Return the card of a run with these settings and these further columns of its list."""
    has_image = not {"image", "video"}.isdisjoint(settings.save)
    files, features = [FORMATS[settings.format].data], ""
    if settings.format == "folder" and has_image:
        # Without it datasets takes "train" or "test" in a drawing's name for the name of a split.
        files.append("items/*/*/image.png")
    if settings.format == "webdataset":
        kinds: dict[str, Any] = {"png": "image"} if has_image else {}
        kinds |= {"maps.safetensors": "binary"} if "maps" in settings.save else {}
        kinds |= {f"video.{settings.video_format}": "binary"} if "video" in settings.save else {}
        own = {"list_columns": {json.dumps(name): "string" for name in columns}} if columns else {}
        features = f"dataset_info:\n  features:\n{_yaml({**kinds, 'json': {**_RUN, **own}}, '  ')}"
    paths = "".join(f"    - {path}\n" for path in files)
    return f"{_DATA}{paths}{features}---\n".encode()


def _yaml(fields: Mapping[str, Any], indent: str) -> str:
    """Return features as datasets writes them: a name, and a type, a list of one or a struct."""
    text = ""
    for name, kind in fields.items():
        key = "list" if isinstance(kind, list) else "struct" if isinstance(kind, dict) else "dtype"
        held = kind[0] if isinstance(kind, list) else kind
        below = f" {held}\n" if isinstance(held, str) else f"\n{_yaml(held, indent + '  ')}"
        text += f"{indent}- name: {name}\n{indent}  {key}:{below}"
    return text
