"""The noise schedule that a pipeline's model was trained on."""

from ..models.families import image_latents_of
from ..models.pipeline import Pipeline
from .ddim import DDIM
from .flow import Flow


def schedule_of(pipe: Pipeline) -> DDIM | Flow:
    """DDIM's steps or a flow's, as the pipeline's family says.

    Raises:
        TypeError: a pipeline that makes its image of more than noise and prompts, or of a family
            whose latents are not known.
    """
    return Flow(pipe) if image_latents_of(pipe).noise == "flow" else DDIM(pipe)
