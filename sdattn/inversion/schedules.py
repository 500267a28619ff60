from ..models.families import image_latents_of
from ..models.pipeline import Pipeline
from .ddim import DDIM
from .flow import Flow


def schedule_of(pipe: Pipeline) -> DDIM | Flow:
    """Return the noise schedule, DDIM's or a flow's, that the family's models were trained on;
    raise TypeError if it is unknown, or a pipeline needs more than noise and prompts."""
    return Flow(pipe) if image_latents_of(pipe).noise == "flow" else DDIM(pipe)
