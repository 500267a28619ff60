"""Many prompts, or photos, on many machines; nothing lost.

run_batch(Request("prompts.jsonl", "RUN"))       ->  Outcome, and a folder that holds every item
open_batch("RUN")["000012"].heatmaps["cat"]      ->  items read back, in any format
status("RUN")    verify("RUN")                   ->  how far a run is; whether every bit is right
"""

from ..errors import refuse_calls
from .checking import verify
from .reading import SavedBatch, Status, open_batch, status
from .request import Outcome, Request
from .run import run_batch

__all__ = [
    "Outcome",
    "Request",
    "SavedBatch",
    "Status",
    "open_batch",
    "run_batch",
    "status",
    "verify",
]

refuse_calls(__name__, "sdattn.batch.run_batch(request)")
