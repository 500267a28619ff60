import io
import json
from collections.abc import Collection, Iterator, Mapping

from PIL import Image, UnidentifiedImageError
from safetensors.torch import load

from ...files.writing import sha256
from ...runs.info import RunInfo, read_info
from ...runs.parts import MAPS, VIDEOS
from ...runs.unpacking import map_shapes
from .layouts import Layout
from .rows import line_of, row_of, sizes_in

_FILES = {"image": "image.png", "grid": "grid.png", "report": "report.html", "maps": MAPS}


def check_item(
    layout: Layout, item: str, location: str, row: bytes | None, save: Collection[str]
) -> list[str]:
    """Return an item's problems, a line each; none if every bit is as written. ``row`` is its line
    of ``metadata.jsonl``, if any; ``save`` are the parts that the run saves."""
    problems: list[str] = []
    try:
        files = layout.read(item, location)
        info = read_info(files, location)
        if info.id != item:
            problems.append(f"run.json names item {info.id!r}")
        elif row is not None:
            problems += _compare_row(layout, row, info, files, location)
        saved = [_FILES[part] for part in save if part in _FILES]
        lacking = [name for name in saved if name not in info.files]
        if "video" in save and info.files.keys().isdisjoint(VIDEOS):
            lacking.append("video")
        for name in lacking:
            problems.append(f"run.json names no {name}, which the run saves of each item")
        for name, digest in info.files.items():
            problems += _check_file(name, files.get(name), digest, info)
    except (OSError, ValueError) as error:
        problems.append(str(error))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        problems.append(f"run.json is damaged: it is incomplete ({type(error).__name__}: {error})")
    return [" ".join(problem.split()) for problem in problems]


def _compare_row(
    layout: Layout, row: bytes, info: RunInfo, files: Mapping[str, bytes], location: str
) -> Iterator[str]:
    """Compare ``run.json`` with its row; problems of other files are reported elsewhere."""
    said, checksum = json.loads(row), sha256(files["run.json"])
    sizes, intact = sizes_in(said), {"run.json"}
    if said.get("run_sha256") != checksum:
        yield "run.json is not what was written: its checksum differs from metadata.jsonl's"
        return
    digests = info.files.items()
    intact |= {name for name, digest in digests if sha256(files.get(name, b"")) == digest}
    expected = row_of(
        info, location, checksum, {**(sizes or {}), **layout.sizes(info.id or "", location, intact)}
    )
    if line_of(expected) != row:
        names = [name for name in {**expected, **said} if expected.get(name) != said.get(name)]
        of = f", of {', '.join(names[:3])}" if names else ""
        yield f"its row in metadata.jsonl is not what run.json says{of}"


def _check_file(name: str, data: bytes | None, digest: str, info: RunInfo) -> Iterator[str]:
    if data is None:
        yield f"{name} is missing"
    elif sha256(data) != digest:
        yield f"{name} is not what was written: its checksum differs"
    elif name.endswith(".png"):
        try:
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                image.load()
        except (OSError, UnidentifiedImageError, SyntaxError) as error:
            yield f"{name} does not open: {error}"
    elif name == MAPS:
        maps = load(data)
        if {name: tuple(held.shape) for name, held in maps.items()} != map_shapes(info):
            yield "maps.safetensors has other layers or sizes than run.json says"
        if bad := [name for name, held in maps.items() if not held.isfinite().all()]:
            yield f"maps.safetensors holds values that are not finite, in {bad[0]}"
