"""Parts of a run: what is saved of it, and the files in its folder. No torch."""

import re
from typing import Literal, NamedTuple


class FurtherKind(NamedTuple):
    """A kind of further maps of an image.

    Attributes:
        title: title on a run's page.
        changes: they show changes of the image, not attention.
    """

    title: str
    changes: bool = False


FURTHER = {  # by the folder that they are in
    "negative": FurtherKind("Negative prompt"),
    "asked": FurtherKind("Asked about"),
    "causal": FurtherKind("What changes without", changes=True),
}


class RunFile(NamedTuple):
    """A file in a run's folder.

    Attributes:
        path: path in the folder; ``NN-word`` stands for the number and the name of a map.
        part: the part that it belongs to; "" for a file that belongs to none.
        is_read: True if reading the run reads it.
        is_further: True if each kind of further maps has such a file in a folder of its own.
    """

    path: str
    part: str = ""
    is_read: bool = False
    is_further: bool = False


MAPS = "maps.safetensors"
STEPS = "steps.safetensors"
HEADS = "heads.safetensors"
SPOTS = "spots.safetensors"
VIDEOS: dict[str, Literal["mp4", "webp"]] = {"video.mp4": "mp4", "video.webp": "webp"}
FILES = (
    RunFile("run.json", is_read=True),
    RunFile("image.png", "image", is_read=True),  # of a video its middle frame
    *(RunFile(name, "video", is_read=True) for name in VIDEOS),
    RunFile("heatmaps/NN-word.png", "overlays", is_further=True),
    RunFile("heatmaps/NN-word.mp4", "overlays", is_further=True),
    RunFile("heatmaps/NN-word.webp", "overlays", is_further=True),
    RunFile("grid.png", "grid", is_further=True),
    RunFile("strips.png", "grid", is_further=True),  # of a video
    RunFile(MAPS, "maps", is_read=True, is_further=True),
    *(RunFile(name, "maps", is_read=True) for name in (STEPS, HEADS, SPOTS)),  # if kept
    RunFile("masks/NN-word.png", "masks", is_further=True),
    RunFile("masks/NN-word.webp", "masks", is_further=True),
    RunFile("report.html", "report"),
    *(RunFile(name) for name in ("preview.webp", "source.png", "edit.html")),  # in a batch
)
PARTS = tuple(dict.fromkeys(file.part for file in FILES if file.part))
USUAL = tuple(part for part in PARTS if part != "masks")
USUAL_OF_IMAGES = tuple(part for part in USUAL if part != "video")
READ = (
    *(file.path for file in FILES if file.is_read),
    *(f"{kind}/{MAPS}" for kind in FURTHER),
)
_NAMES = []  # a pattern for each file
for _file in FILES:
    _name = re.escape(_file.path).replace(r"NN\-word", "[0-9]{2,}-[^/]+")
    _NAMES.append(f"((?:{'|'.join(FURTHER)})/)?{_name}" if _file.is_further else _name)
RUN_FILE = re.compile("|".join(_NAMES))
