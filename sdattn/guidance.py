"""Which rows of a denoiser's batch belong to which branch of the guidance.

With classifier-free guidance (Ho and Salimans 2022) a pipeline runs the prompt and the negative
prompt in one batch. Their order is the pipeline's own affair: it is looked up here, never guessed
from the batch.
"""

from typing import Any, Literal

Branch = Literal["conditional", "unconditional"]

# Pipelines whose __call__ concatenates [negative prompt, prompt] before it calls the UNet.
NEGATIVE_FIRST = (
    "StableDiffusionPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionDepth2ImgPipeline",
    "StableDiffusionControlNetPipeline",
    "StableDiffusionControlNetImg2ImgPipeline",
    "StableDiffusionControlNetInpaintPipeline",
    "StableDiffusionAdapterPipeline",
    "StableDiffusionXLPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLInpaintPipeline",
    "StableDiffusionXLControlNetPipeline",
    "StableDiffusionXLControlNetImg2ImgPipeline",
    "StableDiffusionXLControlNetInpaintPipeline",
    "StableDiffusionXLAdapterPipeline",
    "PAGMixin",
    "LatentConsistencyModelPipeline",
    "LatentConsistencyModelImg2ImgPipeline",
)
# [prompt and image, image only, neither]: Brooks et al. 2022, section 3.2.1.
THREE_WAY = ("StableDiffusionInstructPix2PixPipeline",)


def guided_order(pipeline: Any) -> tuple[Branch | None, ...]:
    """The chunks of a guided batch of this class of pipeline, in order; None is neither branch.

    Raises:
        ValueError: the batch layout of this class of pipeline is not known.
    """
    names = {cls.__name__ for cls in type(pipeline).__mro__}
    if names.intersection(THREE_WAY):
        return "conditional", None, "unconditional"
    if names.intersection(NEGATIVE_FIRST):
        return "unconditional", "conditional"
    raise ValueError(
        f"How a {type(pipeline).__name__} lays out guidance in its batch is not known. Capture "
        "its UNet instead (capture(pipe.unet)): every batch row is then an image of its own."
    )


def branch_order(pipeline: Any) -> tuple[Branch | None, ...]:
    """The chunks of the batch that ``pipeline`` is running now.

    To be asked at every call of the UNet, since guidance may be turned off in the middle of a run.
    The perturbed copy that PAG appends (Ahn et al. 2024) is neither branch.
    """
    order = guided_order(pipeline)
    if not pipeline.do_classifier_free_guidance:
        order = ("conditional",)
    if getattr(pipeline, "do_perturbed_attention_guidance", False):
        order = (*order, None)
    return order


def branch_rows(order: tuple[Branch | None, ...], batch: int) -> dict[Branch, slice]:
    """The rows of each branch in a batch of ``batch`` rows made of equal chunks in ``order``.

    Raises:
        ValueError: the batch does not divide into that many chunks.
    """
    images, rest = divmod(batch, len(order))
    if rest or not images:
        raise ValueError(
            f"The model was called with a batch of {batch}, which does not divide into "
            f"{len(order)} chunks of guidance {order}. Was the UNet called outside its pipeline? "
            "Then capture the UNet itself."
        )
    chunks = {name: slice(i * images, (i + 1) * images) for i, name in enumerate(order)}
    return {name: rows for name, rows in chunks.items() if name is not None}
