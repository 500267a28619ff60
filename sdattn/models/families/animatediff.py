"""AnimateDiff (Guo et al. 2023): videos from Stable Diffusion's UNets with motion modules.

Frames are consecutive rows of the batch, each with the attention of an image. Only the motion
modules attend across frames; they are not captured.
"""

from ..encoders import read_clip
from ..family import NEGATIVE_FIRST
from ..parts import Names
from .unet import UNets, cells

_NEGATIVE_FIRST = """
AnimateDiffPipeline AnimateDiffControlNetPipeline AnimateDiffSDXLPipeline
AnimateDiffSparseControlNetPipeline AnimateDiffVideoToVideoPipeline
AnimateDiffVideoToVideoControlNetPipeline
"""

FAMILY = UNets(
    name="AnimateDiff",
    denoisers=("UNetMotionModel",),
    half="float16",
    grid=cells,
    video=True,
    patch=1,
    names=Names(latents="sample"),
    readers={"AnimateDiff": read_clip, "PIA": read_clip},
    guidance=dict.fromkeys(_NEGATIVE_FIRST.split(), NEGATIVE_FIRST),
)
