"""Many prompts, many processes, nothing lost."""

from .request import Request

__all__ = ["Request"]
