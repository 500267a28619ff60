"""Families that need no code of their own: facts alone, a row each."""

from functools import partial

from ..denoiser_call import grid_of_patches
from ..encoders import read_clip, read_t5
from ..family import IN_TURN, NEGATIVE_FIRST, Family
from ..parts import Names
from .flux import flux_like
from .unet import UNets, cells

_ANIMATEDIFF = """
AnimateDiffPipeline AnimateDiffControlNetPipeline AnimateDiffSDXLPipeline
AnimateDiffSparseControlNetPipeline AnimateDiffVideoToVideoPipeline
AnimateDiffVideoToVideoControlNetPipeline
"""

FAMILIES = (
    # Guo et al. 2023: frames are consecutive rows of the batch, each with the attention of an
    # image. Only the motion modules attend across frames; they are not captured.
    UNets(
        name="AnimateDiff",
        denoisers=("UNetMotionModel",),
        half="float16",
        grid=cells,
        video=True,
        patch=1,
        names=Names(latents="sample"),
        readers={"AnimateDiff": read_clip, "PIA": read_clip},
        guidance=dict.fromkeys(_ANIMATEDIFF.split(), NEGATIVE_FIRST),
    ),
    # Without CLIP, and with a mask over T5's padding: pipeline_chroma.py, _get_t5_prompt_embeds.
    flux_like(
        name="Chroma",
        denoisers=("ChromaTransformer2DModel",),
        readers={"Chroma": partial(read_t5, most=512)},
        guidance=dict.fromkeys(
            ("ChromaPipeline", "ChromaImg2ImgPipeline", "ChromaInpaintPipeline"), IN_TURN
        ),
    ),
    # Genmo 2024: each row of a batch attends alone, to the text that its mask leaves.
    Family(
        name="Mochi",
        denoisers=("MochiTransformer3DModel",),
        layers={"transformer_blocks.*.attn1": ("double", "joint")},
        joined="image first",
        grid=grid_of_patches,
        video=True,
        fps=30,
        readers={"Mochi": read_t5},
        guidance={"MochiPipeline": NEGATIVE_FIRST},
    ),
)
