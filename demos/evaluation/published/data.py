"""The data sets, as their authors hand them out, read sample by sample.

imagenet-seg   gtsegs_ijcv.mat (Guillaumin et al. 2014), LOC_synset_mapping.txt of ImageNet
voc            VOC2012: JPEGImages, SegmentationClass, ImageSets/Segmentation/val.txt
coco-gen       DAAM's: NUMBER/prompt.txt, NUMBER/seed.txt, NUMBER/WORD.gt.png
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .scores import IGNORED, Labels, Mask

VOC_CLASSES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair"),
    *("cow", "dining table", "dog", "horse", "motorbike", "person", "potted plant", "sheep"),
    *("sofa", "train", "tv monitor"),
)


@dataclass(frozen=True)
class Sample:
    """An image and what is where in it.

    Attributes:
        name: of the sample, for messages.
        image: PIL, RGB.
        truth: uint8 ``[rows, cols]``, a class a pixel, 255 for none.
        words: of the classes that are in it, by their number.
    """

    name: str
    image: Image.Image
    truth: Labels
    words: Mapping[int, str]


@dataclass(frozen=True)
class Drawing:
    """A prompt that is to be drawn, and the words whose place in the image is known.

    Attributes:
        masks: bool ``[rows, cols]``, by word.
    """

    name: str
    prompt: str
    seed: int
    masks: Mapping[str, Mask]


def imagenet_seg(folder: Path) -> Iterator[Sample]:
    """ImageNet-Segmentation: each image has one object, of class 1.

    Raises:
        FileNotFoundError: a file is missing, by name.
        KeyError: an image of a synset that the mapping does not name.
    """
    import h5py

    names = _synsets(_there(folder / "LOC_synset_mapping.txt", "ImageNet's names of synsets"))
    with h5py.File(_there(folder / "gtsegs_ijcv.mat", "ImageNet-Segmentation's file")) as file:
        value = file["value"]
        for i in range(len(value["img"])):
            image = _followed(file, value["img"][i, 0]).transpose(2, 1, 0)
            truth = _followed(file, value["gt"][i, 0]).T
            text = "".join(map(chr, _followed(file, value["id"][i, 0]).ravel()))
            synset = Path(text).name.split("_")[0]
            if synset not in names:
                raise KeyError(f"Image {text} is of {synset}, which the mapping does not name.")
            labels = (truth > 0).astype(np.uint8)
            yield Sample(text, Image.fromarray(image.astype(np.uint8)), labels, {1: names[synset]})


def _followed(file: Any, reference: Any) -> NDArray[Any]:
    """What a MATLAB cell holds, also a cell in a cell."""
    found = np.array(file[reference])
    while found.dtype == object:
        found = np.array(file[found.flat[0]])
    return found


def _synsets(path: Path) -> dict[str, str]:
    """``n01440764 tench, Tinca tinca`` a line: the synset and its first lemma."""
    lines = (line.split(maxsplit=1) for line in path.read_text().splitlines() if line.strip())
    return {synset: names.split(",")[0].strip() for synset, names in lines}


def voc(folder: Path) -> Iterator[Sample]:
    """The validation images of VOC 2012; 255, at outlines, is no class.

    Raises:
        FileNotFoundError: a file is missing, by name.
    """
    listed = _there(folder / "ImageSets/Segmentation/val.txt", "VOC's list of images")
    for name in listed.read_text().split():
        with Image.open(_there(folder / f"JPEGImages/{name}.jpg", "an image of the list")) as file:
            image = file.convert("RGB")
        path = _there(folder / f"SegmentationClass/{name}.png", "the truth of an image")
        with Image.open(path) as file:  # a palette, whose numbers are the classes
            truth = np.array(file, dtype=np.uint8)
        found = [int(number) for number in np.unique(truth) if number not in (0, IGNORED)]
        yield Sample(name, image, truth, {number: VOC_CLASSES[number] for number in found})


def coco_gen(folder: Path) -> Iterator[Drawing]:
    """DAAM's prompts with hand-drawn masks: a word is where the alpha of its image is not 0.

    Raises:
        FileNotFoundError: there is no sample, or a sample without its prompt or seed.
    """
    found = sorted({path.parent for path in folder.glob("*/*.gt.png")})
    if not found:
        raise FileNotFoundError(f"{folder} has no */WORD.gt.png. Pass the folder of the samples.")
    for sample in found:
        prompt = _there(sample / "prompt.txt", "the prompt of a sample").read_text().strip()
        seed = int(_there(sample / "seed.txt", "the seed of a sample").read_text())
        masks = {}
        for path in sorted(sample.glob("*.gt.png")):
            with Image.open(path) as file:
                masks[path.name.removesuffix(".gt.png")] = (
                    np.array(file.convert("RGBA"))[..., 3] > 0
                )
        yield Drawing(sample.name, prompt, seed, masks)


def _there(path: Path, what: str) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path}, {what}, is not there. Pass the data set's own folder.")
    return path
