"""Lists as a tiny pipeline's plan has them, and photos for them."""

import io
import json
import tarfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from helpers.tiny_pipelines import small_pipeline
from sdattn.batch.plan import make_plan
from sdattn.batch.request import Request

pipeline = cache(small_pipeline)


def line_of(**fields):
    """A line of JSON with a prompt."""
    return json.dumps({"prompt": "a red cat", **fields}).encode()


def planned(pipe=None, tell=lambda *_: None, **request):
    """The items of a plan, in the order of the list, and its bad lines."""
    with make_plan(Request(**request), pipe or pipeline(), tell) as plan:
        shards = [plan.shard(number) for number in range(len(plan))]
    jobs = sorted((job for shard in shards for job in shard.jobs), key=lambda job: job.item.line)
    assert plan.items == len(jobs)
    assert plan.bad_lines >= len(plan.bad)
    return [job.item for job in jobs], plan.bad


def read_items(data, kind="jsonl", **request):
    """The items and bad lines of a list's bytes."""
    with TemporaryDirectory() as folder:
        path = Path(folder, f"list.{kind}")
        path.write_bytes(data)
        return planned(source=path, **request)


def read_one(line, kind="jsonl", **request):
    [item], bad = read_items(line, kind, **request)
    assert bad == []
    return item


def check_message(bad):
    assert bad.reason.isprintable() and 10 < len(bad.reason) < 600
    assert bad.text.isprintable() and len(bad.text) <= 200


def photo(number=0, size=(128, 128), kind="PNG", **options):
    """The bytes of an image of noise."""
    noise = np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, kind, **options)
    return buffer.getvalue()


def write(folder, **files):
    """Write files at their names, where "/" may be "__" and "." the last "_"."""
    for name, data in files.items():
        put(folder, ".".join(name.replace("__", "/").rsplit("_", 1)), data)
    return folder


def put(folder, name, data):
    path = Path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def write_tar(path, members, **options):
    """Write a tar of bytes by name; other values are TarInfo."""
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members.items():
            info = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            data = b"" if isinstance(data, tarfile.TarInfo) else data
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
