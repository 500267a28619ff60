"""AnimateDiff (Guo et al. 2023): videos by the UNets of Stable Diffusion with motion modules.

The frames are rows of the batch one after the other, each with the attention of an image; only the
motion modules' own, which is not captured, is over frames.
"""

from ..encoders import read_clip
from ..family import NEGATIVE_FIRST
from ..names import Names
from .unet import UNets, cells

_NEGATIVE_FIRST = """
AnimateDiffPipeline AnimateDiffControlNetPipeline AnimateDiffSDXLPipeline
AnimateDiffSparseControlNetPipeline AnimateDiffVideoToVideoPipeline
AnimateDiffVideoToVideoControlNetPipeline
"""

FAMILY = UNets(
    name="AnimateDiff",
    denoisers=("UNetMotionModel",),
    grid=cells,
    video=True,
    patch=1,
    names=Names(latents="sample"),
    readers={"AnimateDiff": read_clip, "PIA": read_clip},
    guidance=dict.fromkeys(_NEGATIVE_FIRST.split(), NEGATIVE_FIRST),
)
