"""Many prompts, many processes, nothing lost.

    run_batch(Request("prompts.jsonl", "RUN"))       ->  Outcome, and a folder that holds every item
    open_batch("RUN")["000012"].heatmaps["cat"]      ->  items read back, whichever the format
    status("RUN")    verify("RUN")    merge(["RUN-1", "RUN-2"], "RUN")

items and lines read the input, plan groups it; engine runs it on a team of processes, drawing makes
the items; claims, folder, manifest and locks keep the run's folder, layouts and shards its items,
journals and rows what is known of them, whole compares the two.
"""

from .engine import Outcome, Request, run_batch
from .merging import merge
from .reading import SavedBatch, Status, open_batch, status, verify

__all__ = [
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
