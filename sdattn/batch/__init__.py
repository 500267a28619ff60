"""Many prompts, many processes, nothing lost."""

from .plan import Plan, Shard, make_plan
from .request import Request

__all__ = ["Plan", "Request", "Shard", "make_plan"]
