"""Facts about diffusers' models.

A `Family` (`family`, one file each in `families`) describes a kind of denoiser: where its attention
is, how a call is read, how its pipelines read prompts and run guidance. `layers` finds a pipeline's
denoiser and its layers, `reading` its prompts' columns, `guidance` the rows of each branch.

`sizes`, `call_facts` and `shortcomings` answer questions about a pipeline, `pipeline_call` calls it
with checked options, and `demos` knows the demo models inside this package. :func:`register` adds a
family; `image_latents` describes how its pipelines take an image.
"""

from .edits import Edits
from .families import register, unregister
from .family import Family
from .image_latents import ImageLatents
from .names import Names

__all__ = ["Edits", "Family", "ImageLatents", "Names", "register", "unregister"]
