"""What is known of diffusers' models; loading them. :class:`Family` says what, a file each in
:mod:`sdattn.models.families`, and :func:`register` adds one."""

from .families import register as register
from .families import unregister as unregister
from .family import Family as Family
