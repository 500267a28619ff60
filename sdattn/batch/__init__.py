"""Many prompts, many processes, nothing lost.

run_batch(Request("prompts.jsonl", "RUN"))       ->  Outcome, and a folder that holds every item
open_batch("RUN")["000012"].heatmaps["cat"]      ->  items read back, whichever the format
status("RUN")    verify("RUN")    merge(["RUN-1", "RUN-2"], "RUN")
rows.map_batches(Draw, ...)                      ->  rows of pictures and maps, in Ray Data
"""

from .engine import run_batch
from .merging import merge
from .raydata import Draw
from .reading import SavedBatch, Status, open_batch, status, verify
from .request import Outcome, Request

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
