"""The items of a batch run in Parquet files: one row per item, each a row group of its own.

    image                 {bytes, path}, as datasets has images        image.png
    video                 {bytes, path}, as datasets has videos        video.mp4, video.webp
    id, line, prompt, ... its row in ``metadata.jsonl``
    maps                  [{layer, shape, values}], float16            maps.safetensors
    files                 [{name, bytes}]                              its other files
    run                   bytes                                        run.json

A column that is empty in all items of a file is left out, unless ``metadata.jsonl`` has it.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ...errors import InvalidValueError, optional
from ...maps.statistics import NUMBERS
from ...runs.info import read_info
from ...runs.packing import pack_maps
from ...runs.parts import MAPS, VIDEOS
from .rows import OWN_NAMES, row_of
from .shards import FileSpan, Index, Shards
from .storage import Files

_FEATURES = json.dumps({"info": {"features": {"image": {"_type": "Image"}}}})
_COLUMNS = {
    **{"image.png": ("image",), "run.json": ("run",), MAPS: ("maps", "files")},
    **dict.fromkeys(VIDEOS, ("video",)),
}


class Parquets(Shards):
    """Shards as Parquet files."""

    ending = ".parquet"

    def _pack(self, items: Mapping[str, Files]) -> bytes:
        import pyarrow as pa
        from pyarrow import parquet

        ordered = sorted(items.items())
        rows = [_row(item, files) for item, files in ordered]
        sizes = [(item, {name: len(files[name]) for name in files}) for item, files in ordered]
        there = {name for row in rows for name, value in row.items() if value}
        schema = _schema(there, sorted({name for row in rows for name in row} - OWN_NAMES))
        head = {"sdattn": json.dumps(sizes, sort_keys=True), "huggingface": _FEATURES}
        packed = io.BytesIO()
        how = {"compression": "zstd", "use_dictionary": False, "write_page_checksum": True}
        with parquet.ParquetWriter(packed, schema.with_metadata(head), **how) as writer:
            for row in rows:
                writer.write_table(pa.Table.from_pylist([row], schema))
        return packed.getvalue()

    def _index(self, path: Path) -> Index:
        try:
            with _open(path) as file:
                sizes = json.loads((file.metadata.metadata or {})[b"sdattn"])
            return {
                item: {name: FileSpan(group, nbytes) for name, nbytes in files.items()}
                for group, (item, files) in enumerate(sizes)
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidValueError("it has no list of items") from error

    def _read(self, path: Path, item: str, held: Mapping[str, FileSpan]) -> dict[str, bytes]:
        columns = sorted({column for name in held for column in _COLUMNS.get(name, ("files",))})
        found: dict[str, bytes] = {}
        for group in {where.at for where in held.values()}:  # one
            with _open(path) as file:
                row = file.read_row_group(group, columns=columns)
                found |= _files(row)
        return {name: data for name, data in found.items() if name in held}


def require_pyarrow() -> None:
    optional("pyarrow.parquet", "Parquet", "sdattn[parquet]")


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    require_pyarrow()
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (ArrowException, OSError) as error:
        raise InvalidValueError(" ".join(str(error).split())) from error


def _schema(there: set[str], further: Iterable[str]) -> Any:
    """Return the columns: those files that are ``there``, and the list's ``further`` ones."""
    import pyarrow as pa

    text, texts, whole = pa.string(), pa.list_(pa.string()), pa.int64()
    numbers = {"word": text, **dict.fromkeys(NUMBERS, pa.float64())}
    maps = {"layer": text, "shape": pa.list_(pa.int32()), "values": pa.list_(pa.float16())}
    columns = {
        "image": pa.struct({"bytes": pa.binary(), "path": text}),
        "video": pa.struct({"bytes": pa.binary(), "path": text}),
        **{"id": text, "line": whole, "prompt": text, "source_prompt": text},
        **{"source_file": text, "negative_prompt": text, "seed": whole},
        **{"width": whole, "height": whole, "frames": whole, "num_inference_steps": whole},
        **{"guidance_scale": pa.float64(), "words": texts, "masks": texts, "truncated": texts},
        "statistics": pa.list_(pa.struct(numbers)),
        **{"blanked": pa.bool_(), "fingerprint": text, **dict.fromkeys(further, text)},
        "maps": pa.list_(pa.struct(maps)),
        "files": pa.list_(pa.struct({"name": text, "bytes": pa.binary()})),
        "run": pa.binary(),
    }
    # A column that is empty throughout is left out of the file; datasets could not tell its type.
    apart = {"image", "video", "frames", "masks", "maps", "files"} - there
    apart |= {"source_prompt", "source_file"} - there
    return pa.schema([field for field in columns.items() if field[0] not in apart])


def _row(item: str, files: Files) -> dict[str, object]:
    rest, row = dict(files), dict[str, object]()
    with suppress(ValueError):  # a damaged item that lies among others
        row = row_of(read_info(files, item), "shards/", "", {})
    row |= {"id": item, "run": rest.pop("run.json", None), "files": None}
    if "image.png" in rest:
        row["image"] = {"bytes": rest.pop("image.png"), "path": f"{item}.png"}
    for name in VIDEOS.keys() & rest.keys():  # one of them
        row["video"] = {"bytes": rest.pop(name), "path": f"{item}.{VIDEOS[name]}"}
    # Maps become columns that other programs can read, if the same bytes can be made from them.
    with suppress(SafetensorError):
        maps = load(rest.get(MAPS, b""))
        if pack_maps(maps) == rest[MAPS]:  # otherwise a run did not write it: keep it unchanged
            del rest[MAPS]
            row["maps"] = [
                {"layer": name, "shape": list(held.shape), "values": held.flatten().numpy()}
                for name, held in sorted(maps.items())
            ]
    row["files"] = [{"name": name, "bytes": rest[name]} for name in sorted(rest)]
    return row


def _files(row: Any) -> dict[str, bytes]:
    """Return the files in a table of one row and some columns."""
    columns = set(row.column_names)
    [rest] = row.select(sorted(columns - {"maps"})).to_pylist()
    found = {file["name"]: file["bytes"] for file in rest.get("files") or ()}
    if rest.get("image"):
        found["image.png"] = rest["image"]["bytes"]
    if rest.get("video"):
        ending = rest["video"]["path"].rpartition(".")[2]
        found[f"video.{ending}"] = rest["video"]["bytes"]
    if rest.get("run") is not None:
        found["run.json"] = rest["run"]
    if "maps" in columns and row["maps"][0].is_valid:
        maps = {}
        for entry in row["maps"][0].values:  # a list of a million floats would be slow
            values = torch.from_numpy(entry["values"].values.to_numpy(zero_copy_only=False).copy())
            maps[entry["layer"].as_py()] = values.reshape(entry["shape"].as_py())
        found[MAPS] = pack_maps(maps)
    return found
