"""`CapturedMaps`, which a capture fills: one running mean per layer, or every head and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import warn
from ..follow.capture_warnings import Stopped
from ..follow.drawn import DrawnPrompts
from ..follow.passes import CaptureError, CaptureWarning, Pass
from ..follow.text_watch import TextsOfRun
from ..look.refined import Spreading
from ..models.denoiser_call import Size
from ..models.guidance import Branch
from ..models.layers import AttentionLayer, LayerSelection, select_layers
from .budget import Expected
from .keep import Keep, Selection
from .queue import Queue
from .running_sums import MapsByLayer, RunningSum
from .store_views import as_text, as_xarray, warn_of_calls
from .text_only import TextOnly

if TYPE_CHECKING:
    import xarray as xr


class CapturedMaps:
    """Maps that a capture collects; :class:`sdattn.MapStore` describes the contents."""

    drawn: DrawnPrompts | None = None

    def __init__(self, layers: Sequence[AttentionLayer], keep: Keep):
        self.layers = list(layers)
        self.keep = keep.without_run()
        self.text_only: list[AttentionLayer] = []  # watched for layers that spread their maps
        self.queue = Queue()
        self.sums = {layer.name: RunningSum(layer, keep, self.queue) for layer in layers}
        self.passes: list[Pass] = []
        self.texts = TextsOfRun()
        self.skipped = 0
        self.kernels: dict[str, float] = {}
        self.problem = ""  # why the maps cannot be read
        self.stopped: Stopped | None = None
        self.checks_itself = True
        self.has_no_guidance = False
        self.expected_nbytes: int | None = None

    def __repr__(self) -> str:
        if not self.passes:
            return f"MapStore({len(self.layers)} layers watched, nothing captured yet)"
        return (
            f"MapStore({len(self._maps)} of {len(self.layers)} layers, {self.images} image(s), "
            f"{len(self.passes)} steps run, kept: steps {self.steps}, heads {self.heads}, "
            f"{self.nbytes / 1e6:.2f} MB)"
        )

    def add_layer(self, layer: AttentionLayer) -> RunningSum:
        """Hold the maps of a layer that was found while the model ran."""
        layer_sum = RunningSum(layer, self.keep, self.queue)
        self.layers.append(layer)
        self.sums[layer.name] = layer_sum
        return layer_sum

    def watch_text(self, layers: Sequence[AttentionLayer], spreading: Spreading) -> None:
        """Watch further layers, whose text other layers spread and of which no map is held."""
        self.text_only = [layer for layer in layers if layer.name not in self.sums]
        self.sums |= {la.name: TextOnly(la, self.keep, spreading) for la in self.text_only}

    def choose(self, selection: tuple[LayerSelection, Sequence[str]], size: Size | None) -> None:
        """Watch only layers of the chosen resolutions, which are known in the first pass."""
        chosen = select_layers(self.watched, *selection, size)
        self.text_only = [layer for layer in self.text_only if layer in chosen]
        self.layers = [layer for layer in self.layers if layer in chosen]

    @property
    def watched(self) -> list[AttentionLayer]:
        """Watched layers; :attr:`layers` come last."""
        return [*self.text_only, *self.layers]

    @property
    def maps(self) -> Mapping[str, Tensor]:
        if self.problem:
            raise CaptureError(self.problem)
        return self._maps

    @property
    def _maps(self) -> Mapping[str, Tensor]:
        return MapsByLayer(self.sums)

    @property
    def steps(self) -> Selection:
        return self.keep.steps.given

    @property
    def heads(self) -> Selection:
        return self.keep.heads.given

    @property
    def frames(self) -> tuple[int, ...] | None:
        return self.keep.frames

    @property
    def tokens(self) -> tuple[int, ...] | None:
        return self.keep.tokens

    @property
    def timesteps(self) -> list[float]:
        """Timestep of each pass, in running order."""
        return [model_pass.timestep for model_pass in self.passes]

    @property
    def images(self) -> int:
        """Number of images: kept rows of the batch, or videos."""
        return len(self.passes[0].branches) if self.passes else 0

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Guidance branch of each image; empty before the model ran."""
        return self.passes[0].branches if self.passes else ()

    @property
    def latent_size(self) -> Size | None:
        """(rows, cols) of the latent, (frames, rows, cols) for a video; None if queries are a mere
        sequence, one row each.

        Raises:
            CaptureError: the model has not run.
        """
        if not self.passes:
            raise CaptureError("The store is empty: the model has not run inside capture().")
        return self.passes[0].latent_size

    @property
    def is_video(self) -> bool:
        """True if the maps have frames."""
        return bool(self.passes) and len(self.latent_size or ()) == 3

    @property
    def n_keys(self) -> int | None:
        """Token columns of the layers that see the text, kept or not; columns of image prompts
        (IP-Adapter) follow the text's. None before the layers ran."""
        sums = [total for total in self.sums.values() if total.layer.kind != "self" and total.keys]
        return sums[-1].keys if sums else None

    @property
    def n_text(self) -> int | None:
        """Token columns of the text, without image prompts; None before the model ran."""
        return (self.passes[0].n_text or self.n_keys) if self.passes else None

    @property
    def kept_passes(self) -> int:
        """Number of passes whose maps the layers added; with ``"last"`` each replaces the one
        before."""
        return sum(map(self.keeps, range(len(self.passes))))

    @property
    def seen(self) -> dict[str, tuple[int, ...]]:
        """Model calls, counted from 0, whose maps are held, for each layer that ran. They are the
        same for all layers, unless something skips some of them (a cache)."""
        numbers = {id(run_pass): number for number, run_pass in enumerate(self.passes)}
        return {name: tuple(numbers[id(p)] for p in self.sums[name].seen) for name in self._maps}

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(tensor.nbytes for layer in self.sums.values() for tensor in layer.tensors())

    def begin_pass(self, new: Pass) -> None:
        """Note that the model was called.

        Raises:
            CaptureError: another number of images, or another latent size, than before.
        """
        first = self.passes[0] if self.passes else new
        n_images = len(new.branches)
        if n_images != len(first.branches) or new.latent_size != first.latent_size:
            raise CaptureError(
                f"This capture holds {len(first.branches)} image(s) with a latent of "
                f"{first.latent_size}; the model was now called for {n_images} image(s) with "
                f"{new.latent_size}. Enter capture() once for each run."
            )
        if new.n_text != first.n_text:
            raise CaptureError(
                f"The text had {first.n_text} token columns at first and has {new.n_text} now: "
                "other text states were set inside the run, whose columns are other words. Enter "
                "capture() once for each text, or pad both to one length."
            )
        self.passes.append(new)
        self.texts.add(new.text_changed, new.text_by_frame)
        if self.keeps(len(self.passes) - 1):
            for layer in self.watched:
                self.sums[layer.name].running = new

    def end_pass(self) -> None:
        """Note that no pass is running, and add what waited for that."""
        self.queue.work_off()
        for layer_sum in self.sums.values():
            layer_sum.running = None

    def keeps(self, number: int) -> bool:
        """Check whether the maps of a pass, counted from 0, are kept. Its position in the run is
        read only if needed."""
        steps = self.keep.steps
        return steps.keeps(number, None if steps.part is None else self.passes[number].position)

    def foresee(self, columns: int, passes: int) -> Expected:
        """Estimate the memory of the maps before any is held.

        Args:
            columns: token columns of the layers that see the text.
            passes: calls of the model in the run.
        """
        assert self.latent_size is not None
        expected = Expected(
            keep=self.keep,
            layers=self.layers,
            latent_size=self.latent_size,
            columns=columns,
            rows=self.images,
            passes=passes,
            frame_rows=self.passes[0].frame_rows,
        )
        self.expected_nbytes = expected.nbytes
        return expected

    def missing(self) -> list[str]:
        """Return the names of the watched layers that never ran."""
        return [layer.name for layer in self.layers if layer.name not in self._maps]

    def check(self) -> None:
        """Raise if nothing was captured, warn if some layers are missing.

        Raises:
            CaptureError: the model did not run, or none of the layers did.
        """
        missing = self.missing()
        steps = self.keep.steps
        if not self.passes and self.problem:
            raise CaptureError(self.problem)
        if not self.passes and self.skipped:
            text = (
                f"The model was called {self.skipped} time(s), but never for the unconditional "
                "branch: no negative prompt or no guidance. Pass both, with a scale that acts."
            )
            if not (self.has_no_guidance and self.checks_itself):
                raise CaptureError(text)
            warn(text, CaptureWarning)
            return
        if not self.passes:
            raise CaptureError(
                f"{len(self.layers)} layers were watched, but the model was never called inside "
                "capture(). Call the pipeline inside the with block, in the same thread."
            )
        if len(missing) == len(self.layers) and self.stopped is not None:
            return  # before the steps that were to be kept, which a warning says
        if len(missing) == len(self.layers):
            asked = f" in steps {self.steps}" if steps.numbers or steps.part else ""
            raise CaptureError(
                f"The model ran {len(self.passes)} time(s), but none of the {len(missing)} "
                f"watched layers ran{asked}: {', '.join(missing[:3])}…"
            )
        if missing:
            warn(
                f"{len(missing)} of {len(self.layers)} watched layers never ran and have no map: "
                + ", ".join(missing),
                CaptureWarning,
            )
        warn_of_calls(self)

    def uneven(self) -> list[str]:
        """Return the names of layers that ran, but not exactly once in each kept pass."""
        return [n for n, held in self.sums.items() if held.calls not in (0, self.kept_passes)]

    def to_xarray(self, layer: str) -> xr.DataArray:
        """Return the maps of one layer as an xarray array, with the axes of :attr:`maps`.

        Args:
            layer: its name, one of ``list(store.maps)``.

        Returns:
            float32 ``(image, [step,] [head,] [frame,] row, col, token)`` on the CPU; ``key`` in
            place of ``token`` for self-attention. Coordinates: ``frame`` counts latent frames from
            0, ``token`` has the kept columns, ``step`` counts model calls from 0, with ``timestep``
            next to it, ``head`` has the model's numbers, ``row`` and ``col`` the centres of the
            cells as fractions of the image.

        Raises:
            ImportError: xarray is not installed.
            KeyError: no map of such a layer.
        """
        return as_xarray(self, layer)

    def report(self) -> str:
        """Return a few lines that say what was asked for and what was captured."""
        return as_text(self)
