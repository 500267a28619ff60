"""The noise schedule that a pipeline's model was trained on."""

from ..models.families import image_latents_of
from ..models.pipeline import Pipeline
from .ddim import DDIM
from .flow import Flow


def schedule_of(pipe: Pipeline) -> DDIM | Flow:
    """Return DDIM's steps or a flow's, as the pipeline's family says; raise TypeError if that is
    unknown, or a pipeline needs more than noise and prompts."""
    return Flow(pipe) if image_latents_of(pipe).noise == "flow" else DDIM(pipe)
