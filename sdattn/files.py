"""A run's folder: what is in it, written whole or not at all, and read back with checks.

image.png  heatmaps/NN-word.png  grid.png  maps.safetensors  run.json
negative/heatmaps/NN-word.png  negative/grid.png      (where they were asked for)
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from . import render
from .heatmaps import Heatmap, Heatmaps, average_layers
from .tokens import Prompt, Token, Word

FORMAT = "sdattn-run-1"


@dataclass
class SavedRun:
    """A run's folder, read back.

    Attributes:
        folder: where it is.
        image: the picture.
        heatmaps: made anew from the saved maps.
        info: what ``run.json`` says.
    """

    folder: Path
    image: Image.Image
    heatmaps: Heatmaps
    info: dict[str, Any]


def save_run(
    folder: str | Path,
    image: Image.Image,
    heatmaps: Heatmaps,
    layers: Mapping[str, Tensor],
    info: Mapping[str, Any],
    *,
    negative: Heatmaps | None = None,
    force: bool = False,
) -> Path:
    """Write the folder of one image's run.

    Args:
        folder: must not exist yet, unless ``force``.
        image: the picture.
        heatmaps: its heatmaps.
        layers: layer name to ``[rows, cols, tokens]``; kept as float16.
        info: settings of the run, anything JSON can hold.
        negative: the heatmaps of the negative prompt, drawn into ``negative/``.
        force: replace a run folder that is there already.

    Returns:
        The folder.

    Raises:
        FileExistsError: there is something at ``folder`` already.
        OSError: the folder cannot be written.
    """
    with new_folder(folder, force=force) as temporary:
        image.save(temporary / "image.png")
        digest = _sha256(temporary / "image.png")
        save_file(
            {name: one.to("cpu", torch.float16).contiguous() for name, one in layers.items()},
            temporary / "maps.safetensors",
            metadata={"format": FORMAT, "image_sha256": digest},
        )
        document = {
            "format": FORMAT,
            "image_sha256": digest,
            **info,
            "words": [asdict(word) for word in heatmaps.prompt.words],
            "truncated": [word.text for word in heatmaps.prompt.truncated],
            "tokens": [asdict(token) for token in heatmaps.prompt.tokens],
            "columns": heatmaps.columns,
            "layers": {name: list(one.shape[:2]) for name, one in layers.items()},
        }
        text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
        (temporary / "run.json").write_text(text + "\n", encoding="utf-8")
        draw(temporary, image, heatmaps.occurrences(), heatmaps.prompt.text)
        if negative is not None:
            (temporary / "negative").mkdir()
            draw(temporary / "negative", image, negative.occurrences(), negative.prompt.text)
    return Path(folder)


def draw(folder: Path, image: Image.Image, maps: list[Heatmap], title: str) -> list[Path]:
    """Write ``heatmaps/NN-word.png`` for each map and ``grid.png``; returns their paths."""
    (folder / "heatmaps").mkdir(exist_ok=True)
    paths = []
    for number, one in enumerate(maps, start=1):
        paths.append(folder / "heatmaps" / f"{number:02d}-{file_name(one.label)}.png")
        one.overlay(image).save(paths[-1])
    sheet = render.grid(image, [(one.label, one.values.numpy()) for one in maps], title)
    sheet.save(folder / "grid.png")
    return [*paths, folder / "grid.png"]


def load_run(folder: str | Path) -> SavedRun:
    """Read a run's folder.

    Raises:
        FileNotFoundError: no such folder, or a part of it is missing.
        ValueError: it is no run of sdattn, a part is corrupt, or the parts are not of one run.
    """
    folder = Path(folder)
    for part in ("run.json", "image.png", "maps.safetensors"):
        if not (folder / part).is_file():
            raise FileNotFoundError(
                f"{folder} has no {part}, so it is no run's folder. Runs are made by "
                "`sdattn generate`."
            )
    info = _read_json(folder / "run.json")
    if info.get("image_sha256") != _sha256(folder / "image.png"):
        raise ValueError(
            f"{folder / 'image.png'} is not the image that this run made: its checksum differs "
            "from run.json. Restore the image or generate the run again."
        )
    layers = _read_maps(folder / "maps.safetensors", info)
    image = Image.open(folder / "image.png").convert("RGB")
    prompt = Prompt(
        info["prompt"],
        tuple(Word(**{**word, "columns": tuple(word["columns"])}) for word in info["words"]),
        tuple(Token(**token) for token in info["tokens"]),
    )
    values = average_layers({name: one[None] for name, one in layers.items()})[0]
    return SavedRun(folder, image, Heatmaps(prompt, values, info["columns"]), info)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is corrupt: {error}.") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        found = info.get("format") if isinstance(info, dict) else type(info).__name__
        raise ValueError(f"{path} is not of this version's format {FORMAT!r}; found {found!r}.")
    return info


def _read_maps(path: Path, info: Mapping[str, Any]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            layers = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is corrupt: {error}. Generate the run again.") from error
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{path} holds no maps of sdattn: its format is {metadata.get('format')!r}, wanted "
            f"{FORMAT!r}."
        )
    expected = {name: (*grid, len(info["columns"])) for name, grid in info["layers"].items()}
    found = {name: tuple(one.shape) for name, one in layers.items()}
    if metadata.get("image_sha256") != info["image_sha256"] or found != expected:
        raise ValueError(
            f"{path} belongs to another run than {path.parent / 'run.json'}. Restore the maps of "
            "this run or generate it again."
        )
    return layers


def file_name(word: str) -> str:
    """A word as part of a file name: letters, digits and ``-``, 1 to 40 characters."""
    safe = "".join(char if char.isalnum() else "-" for char in word)
    return "-".join(part for part in safe.split("-") if part)[:40].strip("-") or "sign"


def check_target(folder: str | Path, *, force: bool = False) -> None:
    """Raise now what :func:`new_folder` would raise after the work is done."""
    folder = Path(folder)
    if folder.exists() or folder.is_symlink():
        if not force:
            raise FileExistsError(f"{folder} exists already. Choose another --out, or --force.")
        if not (folder / "run.json").is_file():
            raise FileExistsError(
                f"{folder} exists and is no run's folder, so it is not replaced. Choose another "
                "--out, or remove it yourself."
            )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder.parent).close()
    except OSError as error:
        raise OSError(f"Cannot write to {folder.parent}: {error.strerror}.") from error


@contextmanager
def new_folder(folder: str | Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its place when the block ends well.

    Whatever ends the block otherwise, Ctrl-C too, leaves nothing behind.
    """
    check_target(folder, force=force)
    folder = Path(folder)
    mark = f"{folder.name[:40]}.{uuid.uuid4().hex[:8]}"
    temporary, old = folder.parent / f".{mark}.tmp", folder.parent / f".{mark}.old"
    temporary.mkdir()
    try:
        yield temporary
        if folder.exists():
            os.replace(folder, old)
        os.replace(temporary, folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
