"""Prompt-to-prompt editing: change words of a prompt and keep the picture.

    sdattn.edit(pipe, source, target)           both pictures and their heatmaps, in one call: the
                                                module is called as its function edit() is
    register_attention_control(pipe, control)   any controller under a pipeline call of your own
    AttentionReplace, AttentionRefine, AttentionReweight, LocalBlend, EmptyControl
    step_end(control)                           for ``callback_on_step_end`` of the pipeline
    invert(pipe, image, prompt)                 the noise of a real picture, for ``edit``

    prompts = sdattn.read_prompts(pipe, ["a red circle", "a red star"])
    control = AttentionReplace(prompts, num_steps=20)
    with register_attention_control(pipe, control):
        pipe([prompt.text for prompt in prompts], generator=[...], num_inference_steps=20,
             callback_on_step_end=step_end(control))

Source: Hertz et al. 2022, "Prompt-to-Prompt Image Editing with Cross Attention Control".
"""

import inspect
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..control.blend import LocalBlend
from ..control.controllers import (
    AttentionControlEdit,
    AttentionRefine,
    AttentionReplace,
    AttentionReweight,
    EmptyControl,
)
from ..control.registration import ControlHandle, register_attention_control, step_end
from ..inversion.invert import Inversion, invert, psnr
from ..runs.editrun import EditRun
from .editing import edit

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
    "edit",
    "invert",
    "psnr",
    "register_attention_control",
    "step_end",
]


class _Called(ModuleType):
    """This module, so that ``sdattn.edit(...)`` is :func:`edit`."""

    __call__ = staticmethod(edit)


sys.modules[__name__].__class__ = _Called
__signature__ = inspect.signature(edit)

if TYPE_CHECKING:
    # No module can be called that type checkers know of: they read sdattn.edit as a class, which is
    # made as edit() is called, is an EditRun then, and has the public names of this module.
    from collections.abc import Callable
    from typing import Concatenate, ParamSpec

    _Given = ParamSpec("_Given")
    _edit, _invert, _psnr, _step_end = edit, invert, psnr, step_end
    _register = register_attention_control

    def _made_as(
        call: Callable[_Given, Any],
    ) -> Callable[[Any], Callable[Concatenate[Any, _Given], None]]: ...

    class CalledModule(EditRun):
        from ..control.blend import LocalBlend as LocalBlend
        from ..control.controllers import AttentionControlEdit as AttentionControlEdit
        from ..control.controllers import AttentionRefine as AttentionRefine
        from ..control.controllers import AttentionReplace as AttentionReplace
        from ..control.controllers import AttentionReweight as AttentionReweight
        from ..control.controllers import EmptyControl as EmptyControl
        from ..control.registration import ControlHandle as ControlHandle
        from ..inversion.invert import Inversion as Inversion
        from ..runs.editrun import EditRun as EditRun

        @_made_as(_edit)
        def __init__(self) -> None: ...

        edit = staticmethod(_edit)
        invert = staticmethod(_invert)
        psnr = staticmethod(_psnr)
        register_attention_control = staticmethod(_register)
        step_end = staticmethod(_step_end)
