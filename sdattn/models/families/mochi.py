"""Mochi 1 (Genmo 2024): videos as one sequence, joint attention with T5, the video first. Each row
of a batch attends alone, to the text that its mask leaves."""

from ..denoiser_call import grid_of_patches
from ..encoders import read_t5
from ..family import NEGATIVE_FIRST, Family

FAMILY = Family(
    name="Mochi",
    denoisers=("MochiTransformer3DModel",),
    layers={"transformer_blocks.*.attn1": ("double", "joint")},
    joined="image first",
    grid=grid_of_patches,
    video=True,
    fps=30,
    readers={"Mochi": read_t5},
    guidance={"MochiPipeline": NEGATIVE_FIRST},
)
