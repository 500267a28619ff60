"""`LatentSizes`: the size of each call's latent, with as few looks at the device as can be."""

from torch import Tensor

from ..models.denoiser_call import DenoiserCall, Size


class LatentSizes:
    """The grids of a model's calls, those of one model and run after the other.

    Of some models (FLUX) a grid follows from ids on the device, which waits when they are read.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, int, Size] | None = None  # ids, version, their grid

    def of(self, call: DenoiserCall, in_run: bool) -> Size | None:
        """(rows, cols) of a call's queries. Ids from which it follows are read when they are other
        than before; in a run of a pipeline once, since its picture keeps its shape.

        Args:
            call: that begins now.
            in_run: whether it is of the run that the call before was of.
        """
        ids = call.grid_ids
        if ids is None:
            return call.latent_size
        version = 0 if ids.is_inference() else ids._version
        if self._known is not None:
            known, known_version, size = self._known
            same = ids is known and version == known_version
            if same or (in_run and ids.shape == known.shape):
                return size
        if call.latent_size is not None:
            self._known = ids, version, call.latent_size
        return call.latent_size
