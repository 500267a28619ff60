"""`verify` names every harm, litter goes, and a run's command writes its summaries again."""

import io
import os
import random
import shutil
from datetime import datetime, timezone
from pathlib import Path

import fsspec
import pytest
from helpers.batch_draws import draw, watch_models  # noqa: F401
from helpers.batch_runs import FORMATS, files_of, manifest, new_run, pack, rows_of, three
from helpers.storages import memory_run, quick_waits  # noqa: F401
from PIL import Image

from sdattn.batch import verify
from sdattn.batch.checking import card_of, remove_litter
from sdattn.batch.gallery.sheets import make_sheet, tile_of_images
from sdattn.batch.records import ShardFile, read_manifest, read_record, record_name
from sdattn.files.place import Place
from sdattn.files.writing import sha256

each_format = pytest.mark.parametrize("format", FORMATS)
BAD = b'{"line": 5, "reason": "no prompt", "text": "{}"}\n'
FAILED = {"id": "d", "line": 4, "prompt": "a cat", "seed": 4, "failed": "no", "traceback": "no"}
TOP = ("batch.json", "bad_lines.jsonl", "metadata.jsonl", "errors.jsonl", "README.md", "index.html")


def finished(root, format):
    """A run with all kinds of files: items a, b with a sheet, and c; d has failed."""
    more = {"bad_lines": 1, "bad_lines_sha256": sha256(BAD), "save": ["image", "overlays", "maps"]}
    new_run(root, three(), failed=[FAILED], format=format, **more)
    place = Place(root)
    place.publish("bad_lines.jsonl", BAD)
    record, tile = read_record(place, 0), tile_of_images(Image.new("RGB", (96, 64)), None)
    image, _ = make_sheet([tile, tile])
    checksum = sha256(image)
    sheet = ShardFile(f"shards/000000-{checksum[:6]}.webp", len(image), checksum)
    place.publish(sheet.name, image)
    place.publish(record_name(0), type(record)(0, "f", record.data, sheet, record.rows).packed())
    assert verify(root) == (3, ["index.html is not what was written; the run's command writes it again"])
    return place


@pytest.fixture(scope="module", params=FORMATS)
def whole(tmp_path_factory, request):
    return finished(tmp_path_factory.mktemp("whole") / "run", request.param)
