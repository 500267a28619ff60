"""`RunWatch`: where one run of a pipeline ends and the next one begins."""

from typing import Any

from ..models.running_call import running_call as running_call
from ..models.running_call import running_variables as running_variables


class RunWatch:
    """Tells the first pass of a run of a pipeline from the others.

    Each call of the pipeline is a run, and each schedule is one: FreeInit goes through several in
    one call, and a loop of a user's own has schedules and no call. A model without its pipeline
    has no runs.

    Attributes:
        schedule: the timesteps of the run, as its scheduler holds them; None where none are known.
    """

    def __init__(self) -> None:
        self.schedule: Any = None
        self._call: object | None = None

    def begins(self, pipeline: Any) -> bool:
        """Whether the pass that begins now is the first of a run. To be asked once a pass."""
        schedule = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
        call = running_call(pipeline)
        is_new = schedule is not self.schedule or (call is not None and call is not self._call)
        self.schedule, self._call = schedule, call or self._call
        return is_new
