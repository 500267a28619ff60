"""Where in a run a pass is, by the timesteps of its scheduler."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..models.denoiser_call import Timestep


class Schedule:
    """The timesteps of one run, and where in them a pass is.

    Args:
        timesteps: as the scheduler holds them.
    """

    def __init__(self, timesteps: Any):
        self.timesteps = timesteps
        self._kept = timesteps.clone() if isinstance(timesteps, Tensor) else timesteps

    def __len__(self) -> int:
        return len(self.timesteps)

    @cached_property
    def _values(self) -> list[float]:
        values: list[float] = torch.as_tensor(self._kept).float().tolist()
        return values

    def index(self, timestep: float | Timestep, scheduler: Any) -> int | None:
        """Which entry a pass is of, as far as the host knows: that which the model got a view of
        or, where the pipeline computed with it (FLUX, Sana), the one that the scheduler has come
        to. It moves on between steps only, however often the model is called in one."""
        found = timestep.index_in(self.timesteps) if isinstance(timestep, Timestep) else None
        if found is None:
            step = getattr(scheduler, "step_index", None)
            found = step if isinstance(step, int) and 0 <= step < len(self) else None
        return found

    def position(self, index: int | None, timestep: float | Timestep) -> float:
        """The middle of the part of the run that a pass is: of the entry ``index``, or of the one
        nearest to its timestep. Of entries that are alike (second order) it is the first."""
        values = self._values
        if index is None:
            at = float(timestep)
            index = min(range(len(values)), key=lambda i: abs(values[i] - at))
        return (values.index(values[index]) + 0.5) / len(values)
