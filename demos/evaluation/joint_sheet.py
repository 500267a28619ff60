"""A sheet of the MM-DiT's images with the maps of two words, way by way.

python -m demos.evaluation.joint_sheet
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .images import unseen_scenes
from .joint import drawn
from .seeing import maps_of, subject_of

WAYS = ("default", "columns", "output, 3", "rescaled", "asked")
OUT = Path("outputs/evaluation/joint/sheet.png")
SCENES = 3


def main() -> None:
    """Draw the first unseen scenes of two objects whose words differ."""
    subject = subject_of("demo-mmdit", Path())
    apart = [
        one
        for one in unseen_scenes(subject.make, 40, 2028)
        if len({word.text for word in one[1].words(one[2]) if word.kind == "noun"}) == 2
    ]
    images = list(drawn(subject, apart[:SCENES], 0))
    rows = [(image, kind) for image in images for kind in ("colour", "noun")]
    size = 1.6 * (1 + len(WAYS)), 1.75 * len(rows)
    figure, axes = plt.subplots(len(rows), 1 + len(WAYS), figsize=size, layout="constrained")
    for (image, kind), row in zip(rows, axes, strict=True):
        words = image.scene.words(image.prompt)
        first = next(i for i, word in enumerate(words) if word.kind == kind and word.owner == 0)
        row[0].imshow(image.image)
        row[0].set_ylabel(words[first].text)
        for axis, way in zip(row[1:], WAYS, strict=True):
            values = np.asarray(maps_of(words, image.heatmaps[way])[first].values)
            axis.imshow(values, cmap="magma", vmin=values.min(), vmax=values.max())
        for axis in row:
            axis.set(xticks=[], yticks=[])
    for axis, title in zip(axes[0], ("the image", *WAYS), strict=True):
        axis.set_title(title, fontsize=8)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT, dpi=110)


if __name__ == "__main__":
    main()
