"""What is known of diffusers' models.

A `Family` (`family`, a file each in `families`) says of a kind of denoiser where its attention is,
how a call is read, how its pipelines read prompts and run guidance. `layers` finds a pipeline's
denoiser and its layers, `reading` its prompts' columns, `guidance` which rows are whose.

`sizes`, `call_facts` and `shortcomings` answer questions about a pipeline, `pipeline_call` calls it
with checked options; `demos` knows the two models inside this package.
:func:`register` adds a family; `image_latents` says how its pipelines take an image.
"""

from .edits import Edits
from .families import register, unregister
from .family import Family
from .image_latents import ImageLatents
from .names import Names

__all__ = ["Edits", "Family", "ImageLatents", "Names", "register", "unregister"]
