"""Rows of the support matrix: videos that are one sequence, with cross-attention."""

from functools import partial
from typing import Any

from helpers.rows import Options, Row, second_half, sized
from helpers.tiny_pipelines import by_default, tiny, tiny_model

FRAMES = 5  # of the video, two of a latent that is cut by four
wan = by_default("WanPipeline")
ltx = by_default("LTXPipeline")
skyreels = by_default("SkyReelsV2Pipeline")
wan_transformer = partial(tiny_model, "WanTransformer3DModel")
video = partial(sized, num_frames=FRAMES, max_sequence_length=12)
long_video = partial(video, num_frames=9)  # two frames of a latent that is cut by eight


def wan_of_two() -> Any:
    """Wan 2.2: another transformer in the second half of the schedule."""
    return tiny("WanPipeline", transformer_2=wan_transformer(1), boundary_ratio=0.5)


VIDEO: Options = {
    "frames": 2,
    "prompt_rows": None,
    "unit": 16,
    "cell": 16,
    "layers": 2,
    "processors": (),
    "images_option": "num_videos_per_prompt",
}
BATCHED: Options = {**VIDEO, "prompt_rows": second_half}
BY_32: Options = {**BATCHED, "unit": 32, "cell": 32}

VIDEOS = (
    Row("Wan 2.1", wan, video, in_turn=True, **VIDEO),
    Row("SkyReels V2", skyreels, video, in_turn=True, **VIDEO),
    Row("LTX-Video", ltx, long_video, **BY_32),
)
