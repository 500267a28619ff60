"""Edit images by their attention: change words and keep the image, or move words in it.

    edit(pipe, source, target)                  both images and their heatmaps, in one call;
                                                ``sdattn.edit_image`` is the same function
    register_attention_control(pipe, control)   any controller under your own pipeline call
    AttentionReplace, AttentionRefine, AttentionReweight, LocalBlend, EmptyControl
    step_end(control)                           for ``callback_on_step_end`` of the pipeline
    invert(pipe, image, prompt)                 the noise of a real image, for ``edit``
    guide(pipe, prompt, losses)                 an image whose heatmaps are as asked, with
                                                ``inside``, ``boxdiff``, ``excite``, ``apart``
    guide_missing(pipe, prompt)                 the same for the words that did not arrive

    prompts = sdattn.read_prompts(pipe, ["a cat", "a dog"])
    control = AttentionReplace(prompts, num_steps=20)
    with register_attention_control(pipe, control):
        pipe([prompt.text for prompt in prompts], generator=[...], num_inference_steps=20,
             callback_on_step_end=step_end(control))

Sources: Hertz et al. 2022, "Prompt-to-Prompt Image Editing with Cross Attention Control"; for
``guide`` and its losses see there.
"""

from ..control.blend import LocalBlend
from ..control.controllers import (
    AttentionControlEdit,
    AttentionRefine,
    AttentionReplace,
    AttentionReweight,
    EmptyControl,
    step_end,
)
from ..control.registration import ControlHandle, register_attention_control
from ..errors import refuse_calls
from ..inversion.invert import Inversion, invert, psnr
from ..runs.editrun import EditRun
from .editing import edit
from .guiding import guide
from .losses import apart, boxdiff, excite, inside, share_inside
from .missing import guide_missing

__all__ = [
    "AttentionControlEdit",
    "AttentionRefine",
    "AttentionReplace",
    "AttentionReweight",
    "ControlHandle",
    "EditRun",
    "EmptyControl",
    "Inversion",
    "LocalBlend",
    "apart",
    "boxdiff",
    "edit",
    "excite",
    "guide",
    "guide_missing",
    "inside",
    "invert",
    "psnr",
    "register_attention_control",
    "share_inside",
    "step_end",
]

refuse_calls(__name__, "sdattn.edit_image(pipe, source, target)")
