"""Measure the demo video model on videos it never saw: do the objects that were asked for go to the
right, and do the words' maps go with them?

Frames are read by ``sprite_checker``, which knows nothing of the model. The pointing game (Zhang et
al. 2016) is played frame by frame: is the highest cell of a word's map in this frame on the word's
object in this frame? Beside it stands the same game with one map for all frames, their mean, which
shows how much of it a map that stands still would get.

    python -m demos.evaluation.evaluate_demo_video --checker build/checker/checker.safetensors
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import sdattn
from sdattn.runs.imagerun import ImageRun

from ..moving import MovingScene, goes_right, random_video
from ..sprite_checker import CELLS
from .seeing import Checker, Seen, Subject, maps_of, subject_of

BATCH = 4  # videos drawn at a time
KINDS = ("colour", "noun")
GROUPS = {
    None: "one object",
    "and": "and",
    **dict.fromkeys(("above", "below"), "one above the other"),
    **dict.fromkeys(("left of", "right of"), "side by side"),
}


@dataclass
class Verdict:
    """One video against its prompt.

    Attributes:
        group: the row of the table that it counts for.
        way: whether all its objects went to the right, half the shortest way at least; None if
            the first frame or the last has other objects.
        right: a frame each: whether it has the objects that were asked for, and no others.
        colours: for each frame that has, and each of its objects with an adjective, if it has
            that colour.
        hits: by kind of word, a frame and word each: (the number of the frame, whether the word's
            map in it points at its object there, whether the mean of all frames does).
    """

    prompt: str
    group: str
    way: bool | None
    right: list[bool]
    colours: list[bool]
    hits: dict[str, list[tuple[int, bool, bool]]] = field(default_factory=dict)


def judge(video: MovingScene, prompt: str, item: ImageRun, see: Checker) -> Verdict:
    """Compare one video and its heatmaps with what the prompt asked for."""
    frames = item.video.frames if item.video else ()
    seen = see([video.scene] * len(frames), frames)
    verdict = Verdict(
        prompt,
        GROUPS[video.scene.relation],
        went(seen),
        [one.objects for one in seen],
        [right for one in seen for right in one.colours],
    )
    words = video.scene.words(prompt)
    every = [maps_of(words, item.frame(n).heatmaps) for n in range(len(frames))]
    for kind in KINDS:
        chosen = [i for i, word in enumerate(words) if word.kind == kind]
        maps = [[found[i].resize((CELLS, CELLS)) for i in chosen] for found in every]
        still = [torch.stack(of_word).mean(0) for of_word in zip(*maps, strict=True)]
        owners = [words[i].owner for i in chosen]
        verdict.hits[kind] = [
            (number, points_at(one, here.masks[owner]), points_at(mean, here.masks[owner]))
            for number, (here, found) in enumerate(zip(seen, maps, strict=True))
            if here.masks is not None
            for owner, one, mean in zip(owners, found, still, strict=True)
        ]
    return verdict


def points_at(heatmap: torch.Tensor, mask: Any) -> bool:
    """Tell if the highest cell of a map [64, 64] is on a mask of that shape."""
    row, col = divmod(int(heatmap.argmax()), CELLS)
    return bool(mask[row, col])


def went(seen: list[Seen]) -> bool | None:
    """Tell if every object went to the right; None if the first frame or the last has others."""
    ends = [one.masks for one in (seen[0], seen[-1])]
    if ends[0] is None or ends[1] is None:
        return None
    objects = [[centre(mask) for mask in places] for places in zip(ends[0], ends[1], strict=True)]
    return all(goes_right(places) for places in objects)


def centre(mask: Any) -> tuple[float, float]:
    """Return the centre (x, y) of a mask, in parts of its side."""
    rows, cols = np.nonzero(mask)
    return float(cols.mean() + 0.5) / CELLS, float(rows.mean() + 0.5) / CELLS


def evaluate(
    subject: Subject, videos: list[MovingScene], seed: int, preset: str
) -> tuple[list[Verdict], list[NDArray[np.uint8]]]:
    """Draw every video with a seed of its own and judge it; also returns each video's frames side
    by side."""
    rng = np.random.default_rng(seed)
    prompts = [video.caption(rng) for video in videos]
    verdicts, rows = [], []
    for start in range(0, len(videos), BATCH):
        said = prompts[start : start + BATCH]
        run = sdattn.generate(
            subject.pipe, said, seed=seed + start, preset=preset, **subject.settings
        )
        for video, prompt, item in zip(videos[start : start + BATCH], said, run, strict=True):
            verdicts.append(judge(video, prompt, item, subject.see))
            rows.append(np.hstack([np.asarray(frame) for frame in item.video or ()]))
    return verdicts, rows


def share(values: Iterable[bool | None]) -> float | None:
    """Return the part of the values that are true, of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def summarise(verdicts: list[Verdict]) -> dict[str, Any]:
    """Return the figures of some verdicts."""
    found: dict[str, Any] = {
        "videos": len(verdicts),
        "way": share(bool(one.way) for one in verdicts),
        "frames": share(right for one in verdicts for right in one.right),
        "all frames": share(all(one.right) for one in verdicts),
        "colours": share(right for one in verdicts for right in one.colours),
    }
    for kind in KINDS:
        hits = [hit for one in verdicts for hit in one.hits[kind]]
        frames = sorted({number for number, *_ in hits})
        found[kind] = {
            "frame by frame": share(hit for _, hit, _ in hits),
            "mean of the frames": share(hit for *_, hit in hits),
            "by frame": [share(hit for at, hit, _ in hits if at == number) for number in frames],
        }
    return found


def table(figures: dict[str, dict[str, Any]]) -> str:
    """Return the figures as text, a row a group: shares of videos and frames, then for words of
    each kind the share that points, frame by frame and by its mean map."""
    heads = ("videos", "way", "frames", "all", "colours", "colour", "its mean", "noun", "its mean")
    lines = [f"{'':28}" + "".join(f"{head:>11}" for head in heads)]
    for group, row in figures.items():
        cells = [row["way"], row["frames"], row["all frames"], row["colours"]]
        for kind in KINDS:
            cells += [row[kind]["frame by frame"], row[kind]["mean of the frames"]]
        told = "".join(f"{'-' if cell is None else f'{cell:.1%}':>11}" for cell in cells)
        lines.append(f"{group:28}{row['videos']:>11}{told}")
    return "\n".join(lines)


def main() -> None:
    """Read the options, measure, print a table and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo-video", help="demo-video, or a folder")
    parser.add_argument(
        "--checker", type=Path, default=Path("build/checker/checker.safetensors"), help="weights"
    )
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, or cuda")
    parser.add_argument("--videos", type=int, default=100)
    parser.add_argument("--scene-seed", type=int, default=2024, help="which unseen videos")
    parser.add_argument("--seed", type=int, default=0, help="of the first video's noise")
    parser.add_argument("--preset", default="default", help="of the heatmaps")
    parser.add_argument("--out", type=Path, help="a JSON file with the figures")
    parser.add_argument("--sheet", type=Path, help="an image file: a row a video, the first 16")
    args = parser.parse_args()
    subject = subject_of(args.model, args.checker, args.device)
    rng = np.random.default_rng(args.scene_seed)
    videos = [random_video(rng, held_out=True) for _ in range(args.videos)]
    verdicts, rows = evaluate(subject, videos, args.seed, args.preset)
    groups = defaultdict(list)
    for verdict in verdicts:
        groups["all"].append(verdict)
        groups[verdict.group].append(verdict)
    figures = {group: summarise(groups[group]) for group in sorted(groups)}
    print(table(figures))
    for kind in KINDS:
        told = ", ".join(f"{hit:.1%}" for hit in figures["all"][kind]["by frame"])
        print(f"{kind} words point at their objects, by frame: {told}")
    if args.sheet:
        Image.fromarray(np.vstack(rows[:16])).save(args.sheet)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
