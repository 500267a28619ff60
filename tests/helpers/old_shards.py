"""A batch run as earlier versions wrote it with ``--format shard``, made of one of today's."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load, save

from sdattn.batch.storage.folder import BatchFolder
from sdattn.runs.info import FORMAT

NAME = "shards/0123456789abcdef.safetensors"


def as_old(root):
    """Turn a run of one shard into an old one, in place; returns its items' files."""
    folder = BatchFolder(root)
    items = {item: folder.layout.read(item, place) for item, place in folder.layout.find()}
    manifest = {name: one for name, one in folder.manifest.items() if name != "ended"}
    rows = [json.loads(line) for line in (root / "metadata.jsonl").read_bytes().splitlines()]
    shutil.rmtree(root / "shards")
    write_old(root / NAME, items)
    numbers = {}  # of maps an old row counts the numbers alone
    for item, files in items.items():
        maps = load(files["maps.safetensors"]).values() if "maps.safetensors" in files else ()
        numbers[item] = {"maps.safetensors": sum(2 * one.numel() for one in maps)}
    for row in rows:
        row["place"] = NAME
        for file in row["files"]:
            file["bytes"] = numbers[row["id"]].get(file["name"], file["bytes"])
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (root / "metadata.jsonl").write_text(text)
    (root / "README.md").unlink(missing_ok=True)
    folder.temporary.mkdir(parents=True, exist_ok=True)
    folder.write_manifest({**manifest, "settings": {**manifest["settings"], "format": "shard"}})
    return items


def write_old(path, items):
    """A shard: a tensor a layer of each item, and the bytes of every other file."""
    tensors = {}
    for item, files in items.items():
        for name, data in files.items():
            if name == "maps.safetensors":
                tensors |= {f"{item}/maps/{layer}": one for layer, one in load(data).items()}
            else:
                tensors[f"{item}/{name}"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    head = {"format": FORMAT, "items": sorted(items)}
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_bytes(save(tensors, metadata={"sdattn": json.dumps(head)}))
