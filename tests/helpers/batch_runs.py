"""Small runs of many items, made of random maps without a model, and what they hold."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from helpers.tiny_tokenizers import tiny_tokenizer
from sdattn import Heatmaps, read_prompt
from sdattn.batch import Request, run_batch
from sdattn.batch.storage.folder import BatchFolder
from sdattn.batch.storage.manifest import Manifest
from sdattn.files.addresses import path_of
from sdattn.files.records import read_record, sealed
from sdattn.maps.aggregation import aggregate
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.presets import Preset
from sdattn.runs.folder import pack_with_page
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.settings import RunSettings

FORMATS = ("folder", "webdataset", "parquet")
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
    settings |= {"save": ["image", "maps"], "options": {}, "format": "folder"}
    settings |= {"shard_bytes": 10**9, "fingerprint": "f", "preset": BOTH.to_json()}
    made = {"source": "in.txt", "digest": "d", "part": "1/1", "items": 3, "all_items": 3}
    made |= {"bad_lines": 0}
    settings |= {name: one for name, one in changes.items() if name in settings}
    made |= {name: one for name, one in changes.items() if name in made}
    document = {"settings": settings, "input": made, "batch_size": 1, "versions": {}}
    return read_record(Manifest, document)


def new_run(root, items, /, unread=(), failed=(), **changes):
    """A finished run of these items, name to files; the changes are the manifest's."""
    folder = BatchFolder(root)
    folder.open("job")
    folder.claim(manifest(**changes), items)
    layout = folder.layout
    for line, (item, files) in enumerate(items.items(), 1):
        layout.add(item, line, files, lambda *whole: folder.note_whole("job-0", *whole))
    layout.flush()
    for row in failed:
        folder.journals.note("failed", "job-0", row)
    folder.journals.gather()
    folder.journals.gather_errors(unread, items)
    folder.lock.release()
    return path_of(root)


def three(parts=("image", "overlays", "maps")):
    return {name: pack(name, line, parts=parts) for line, name in enumerate("abc", 1)}


def rows_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def files_of(folder):
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def kept_of(root):
    return {name: data for name, data in files_of(root).items() if not name.startswith(".batch")}


def draw(model, out, *rows, **request):
    source = Path(f"{out}.jsonl")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"num_inference_steps": 1, "height": 64, "width": 64, "guidance_scale": 2.0}
    request = {"save": ("image", "maps"), "options": options, "batch_size": 1, **request}
    return run_batch(Request(source, out, str(model), device="cpu", **request))
