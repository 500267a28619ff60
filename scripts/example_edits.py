"""Draw four word swaps: outputs/evaluation/edits.png, for README.md and docs/editing.md.

From top to bottom: the source, the edit, and where its new word went.
"""

from pathlib import Path

import sdattn
from sdattn.maps.render import caption, enlarge
from sdattn.maps.sheets import columns

OUT = Path("outputs/evaluation/edits.png")
SWAPS = (  # prompt, word, the word in its place, seed; chosen by eye
    ("a cat left of a pizza", "cat", "dog", 3),
    ("a red umbrella above a dog on grass", "red", "blue", 3),
    ("a guitar right of a frog on grass", "guitar", "cactus", 1),
    ("a rocket above a house at night", "rocket", "balloon", 3),
)


def main() -> None:
    pipe = sdattn.load_pipeline("demo", device="cpu")
    parts = []
    for source, word, other, seed in SWAPS:
        target = source.replace(word, other)
        run = sdattn.edit_image(pipe, source, target, seed=seed)
        before, after = run.images
        edited = caption(enlarge(after), target)
        parts.append((before, source, [edited, run[1].heatmaps[other].overlay(after)]))
    columns(parts).save(OUT)


if __name__ == "__main__":
    main()
