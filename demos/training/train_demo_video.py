"""Train the motion modules of the small video model: AnimateDiff for the demo model.

The demo model is taken as it is, and what is learnt is how its images of one prompt become the
frames of one video (Guo et al. 2023, "AnimateDiff"). No mask and no attention map is ever shown to
it. With ``--device cuda`` a step is a CUDA graph.

A run is kept in ``--work`` and taken up again where it stopped by the same options. ``--snapshot``
writes what the last checkpoint holds to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import AnimateDiffPipeline

from sdattn.loading.folder import LENT
from sdattn.models.demos import DEMO, RECORD

from .fit import rank, say
from .lent import leave_out_what_is_lent
from .motion import (
    SETTINGS,
    adapter_of,
    all_videos,
    assemble,
    new_adapter,
    snapshot,
    train_motion,
    video_latents,
)
from .record import ANY_TIME, begin_sitting, write_record
from .sprite_parts import WORDS

PARTS = ("vae", "text_encoder", "tokenizer", "unet", "scheduler")  # of the demo
NOT_OF_VIDEOS = ("safety_checker", "requires_safety_checker")


def train(process: int, args: argparse.Namespace) -> None:
    """One training process; all of them do the same, each on its part of every batch."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.processes))
    if args.processes > 1:
        store = f"file://{(args.work / 'processes').resolve()}"
        day = timedelta(days=1)
        dist.init_process_group("gloo", store, timeout=day, rank=process, world_size=args.processes)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    torch.manual_seed(args.seed)
    pipe = assemble(args.start, new_adapter()).to(args.device)
    videos = all_videos(args.seed, args.chunks)
    latents = video_latents(pipe.vae, args.seed, args.chunks, args.work)
    made = train_motion(
        pipe, videos, latents, args.work, args.motion_steps, args.seed + 1, args.batch
    )
    if rank() == 0:
        write(made, args.work, args.out, args.start)


def write(made: AnimateDiffPipeline, work: Path, out: Path, start: Path) -> None:
    """The model's folder: the parts of the demo as they are, the motion modules in float16,
    the record of how they were made and of what videos are drawn with."""
    adapter = adapter_of(made.unet).half()
    adapter.save_pretrained(out / "motion_adapter", safe_serialization=True)
    for part in PARTS:
        shutil.copytree(start / part, out / part, dirs_exist_ok=True)
    index = json.loads((start / "model_index.json").read_text(encoding="utf-8"))
    index = {name: entry for name, entry in index.items() if name not in NOT_OF_VIDEOS}
    index |= {
        "_class_name": "AnimateDiffPipeline",
        "motion_adapter": ["diffusers", "MotionAdapter"],
    }
    (out / "model_index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    record = {"settings": SETTINGS, "inversion": {}, "words": WORDS}
    (out / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    write_record(work, out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    say(f"{out}: {size / 1e6:.1f} MB")


def run(args: argparse.Namespace) -> None:
    """Begin a run, or take it up again."""
    args.work.mkdir(parents=True, exist_ok=True)
    begin_sitting(args.work, args, (*ANY_TIME, "processes", "device"))
    (args.work / "processes").unlink(missing_ok=True)
    if args.processes == 1:
        train(0, args)
    else:
        pipe = assemble(args.start, new_adapter())
        video_latents(pipe.vae, args.seed, args.chunks, args.work)
        torch.multiprocessing.spawn(train, (args,), nprocs=args.processes)


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/video/model"), help="model folder")
    parser.add_argument("--work", type=Path, default=Path("build/video"), help="checkpoints")
    parser.add_argument("--start", type=Path, default=DEMO, help="the model of images")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=16, help="of 250 training videos each")
    parser.add_argument("--motion-steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=16, help="videos a step")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda, with one process")
    parser.add_argument("--processes", type=int, default=1, help="all cores in one, by default")
    parser.add_argument(
        "--snapshot",
        action="store_true",
        help="write what the last checkpoint holds; train nothing",
    )
    parser.add_argument(
        "--lean",
        action="store_true",
        help="leave the weights that another demo has out of the folder in --out, as it ships",
    )
    args = parser.parse_args()
    if args.lean:
        leave_out_what_is_lent(args.out, LENT["demo-video"])
    elif args.snapshot:
        write(snapshot(args.work, args.start), args.work, args.out, args.start)
    else:
        run(args)


if __name__ == "__main__":
    main()
