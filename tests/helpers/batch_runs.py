"""Small runs of many items, made of random maps without a model, and what they hold."""

import json
from functools import cache

import numpy as np
import torch
from PIL import Image

from helpers.tiny_tokenizers import tiny_tokenizer
from sdattn import Heatmaps, read_prompt
from sdattn.batch.checking import write_summaries
from sdattn.batch.formats import format_of
from sdattn.batch.records import BatchInput, Manifest, ShardRecord, record_name, row_of
from sdattn.files.place import Place
from sdattn.files.records import read_record, sealed
from sdattn.files.writing import sha256
from sdattn.maps.aggregation import aggregate
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.presets import Preset
from sdattn.runs.folder import pack_with_page
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.info import RunSettings, read_info

FORMATS = ("folder", "webdataset")
TOKENIZER = tiny_tokenizer()
PROMPT = "a red cat"
BOTH = Preset("both", ("down", "up"))  # of the layers that items have here


def pack(item, line=1, **more):
    """The files of an item with maps and an image of its own."""
    return dict(_pack(item, line, **more))


@cache
def _pack(
    item,
    line,
    *,
    prompt=PROMPT,
    fingerprint=None,
    parts=("image", "overlays", "maps"),
    empty=(),  # token columns without attention
    **options,
):
    numbers = torch.Generator().manual_seed(line)
    maps = {
        "down.a": torch.rand(4, 6, 77, generator=numbers).softmax(-1),
        "up.b": torch.rand(2, 3, 77, generator=numbers).softmax(-1),
    }
    for held in maps.values():
        held[..., list(empty)] = 0
    noise = np.random.default_rng(line).integers(0, 256, (64, 96, 3), np.uint8)
    layers = as_layers(maps)
    own = {"id": item, "line": line, "fingerprint": fingerprint or f"of-{item}"}
    info = RunSettings(**own, prompt=prompt, seed=line, options=options, size=(96, 64))
    heatmaps = Heatmaps(read_prompt(TOKENIZER, prompt), aggregate(layers, BOTH)[0], preset=BOTH)
    return pack_with_page(ImageRun(Image.fromarray(noise), heatmaps, layers, info), parts).files


def without_columns(files):
    """As if the text encoder had seen none of the words."""
    info = json.loads(files["run.json"])
    for word in info["words"]:
        word["columns"] = []
    return {**files, "run.json": sealed({**info, "statistics": []})}


def as_layers(maps):
    """Layers of one image, from ``[rows, cols, tokens]`` each."""
    layers = {
        name: LayerMap(name.split(".")[0], level, 2, one[None])
        for level, (name, one) in enumerate(maps.items())
    }
    return LayerMaps(layers, tuple(range(77)), passes=2)


def manifest(**changes):
    """A batch.json; changes of ``input`` and ``settings`` by name."""
    settings = {"model": "tiny", "weights": "w", "pipeline": "P", "dtype": "float32"}
    settings |= {"save": ["image", "maps"], "options": {}, "format": "folder", "batch_size": 1}
    settings |= {"shard_items": 2, "fingerprint": "f", "preset": BOTH.to_json()}
    made = {"source": "in.txt", "digest": "d", "items": 3, "shards": 2, "bad_lines": 0}
    made |= {"shards": ["of the shard"] * changes.pop("shards", 2)}
    of_input = BatchInput.__dataclass_fields__
    settings |= {name: one for name, one in changes.items() if name not in of_input}
    made |= {name: one for name, one in changes.items() if name in of_input}
    return read_record(Manifest, {"settings": settings, "input": made, "versions": {}})


def new_run(root, items, /, failed=(), **changes):
    """A finished run of these items, name to files, two in a shard, then of failed ones, a row
    each; the changes are the manifest's."""
    whole = [*items.items()]
    made = manifest(
        items=len(whole) + len(failed), shards=-(-len(whole) // 2) + bool(failed), **changes
    )
    place = Place(root)
    place.begin()
    place.publish("batch.json", made.sealed())
    number = 0
    for number, start in enumerate(range(0, len(whole), 2), 1):
        publish_shard(place, made, number - 1, dict(whole[start : start + 2]))
    if failed:
        record = ShardRecord(number, "of the shard", None, None, failed)
        place.publish(record_name(number), record.packed())
    write_summaries(place, made)
    return place.root


def publish_shard(place, made, number, items):
    with format_of(place, made).writer(number) as writer:
        for item, files in items.items():
            writer.add(item, files)
        data, locations = writer.finish()
    rows = [row_for(files, locations[item]) for item, files in items.items()]
    record = ShardRecord(number, "of the shard", data, None, rows)
    place.publish(record_name(number), record.packed())
    return record


def row_for(files, location):
    info, sizes = read_info(files, location), {name: len(data) for name, data in files.items()}
    return {**row_of(info, location, sha256(files["run.json"]), sizes), "thumb": None}


def three(parts=("image", "overlays", "maps")):
    return {name: pack(name, line, parts=parts) for line, name in enumerate("abc", 1)}


def rows_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]
