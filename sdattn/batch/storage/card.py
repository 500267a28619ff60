"""``README.md`` of a batch run: what ``datasets.load_dataset`` is to read, and as what."""

import json
from collections.abc import Sequence

from .formats import FORMATS
from .manifest import BatchSettings

_DATA = """---
configs:
- config_name: default
  data_files:
  - split: train
    path:
"""
# Named one by one: else datasets goes by the first items of all, and those of a run can differ in
# their options, have no word that was cut off, or overlays for words that others lack.
_JSON = """\
  - name: json
    struct:
    - name: id
      dtype: string
    - name: line
      dtype: int64
    - name: prompt
      dtype: string
    - name: seed
      dtype: int64
    - name: size
      list: int64
    - name: options
      struct:
      - name: negative_prompt
        dtype: string
      - name: num_inference_steps
        dtype: int64
      - name: guidance_scale
        dtype: float64
    - name: words
      list:
      - name: text
        dtype: string
      - name: columns
        list: int64
    - name: statistics
      list:
      - name: word
        dtype: string
      - name: columns
        list: int64
      - name: peak
        dtype: float64
      - name: mean
        dtype: float64
      - name: mass
        dtype: float64
      - name: centre
        list: float64
      - name: area
        dtype: float64
      - name: entropy
        dtype: float64
    - name: truncated
      list: string
"""


def card_of(settings: BatchSettings, columns: Sequence[str] = ()) -> bytes:
    """Return the card of a run with these settings and these further columns of its list."""
    has_image, has_maps = not {"image", "film"}.isdisjoint(settings.save), "maps" in settings.save
    files, features = [FORMATS[settings.format].data], ""
    if settings.format == "folder" and has_image:
        # Without it datasets takes "train" or "test" in a drawing's name for the name of a split.
        files.append("items/*/*/image.png")
    if settings.format == "webdataset":
        features = "dataset_info:\n  features:\n"
        features += "  - name: png\n    dtype: image\n" if has_image else ""
        features += "  - name: maps.safetensors\n    dtype: binary\n" if has_maps else ""
        if "film" in settings.save:
            features += f"  - name: film.{settings.film_format}\n    dtype: binary\n"
        features += _JSON
        if columns:
            features += "    - name: list_columns\n      struct:\n"
        for name in columns:
            features += f"      - name: {json.dumps(name)}\n        dtype: string\n"
    paths = "".join(f"    - {path}\n" for path in files)
    return f"{_DATA}{paths}{features}---\n".encode()
