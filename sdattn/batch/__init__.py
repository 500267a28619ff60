"""Many prompts, many processes, nothing lost.

run_batch(Request("prompts.jsonl", "RUN"))       ->  Outcome, and a folder that holds every item
open_batch("RUN")["000012"].heatmaps["cat"]      ->  items read back, in any format
status("RUN")    verify("RUN")    merge(["RUN-1", "RUN-2"], "RUN")
rows.map_batches(Draw, ...)                      ->  rows of images and maps, in Ray Data
"""

from .engines.raydata import Draw
from .input.request import Outcome, Request
from .merging import merge
from .reading import SavedBatch, Status, open_batch, status, verify
from .run import run_batch

__all__ = [
    "Draw",
    "Outcome",
    "Request",
    "SavedBatch",
    "Status",
    "merge",
    "open_batch",
    "run_batch",
    "status",
    "verify",
]
