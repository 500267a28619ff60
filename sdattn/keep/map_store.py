"""`CapturedMaps`, which a capture fills: one running mean per layer, or every head and step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..attention.core import grid_text
from ..errors import NotFoundError, warn
from ..files.tables import labelled
from ..follow.capture_warnings import Stopped
from ..follow.drawn import DrawnPrompts
from ..follow.passes import CaptureError, CaptureWarning, Pass
from ..follow.text_watch import TextsOfRun
from ..look.attended import HeadSums
from ..look.refined import Spreading
from ..models.denoiser_call import Size
from ..models.guidance import Branch
from ..models.layers import AttentionLayer, LayerSelection, select_layers
from .budget import Expected
from .keep import Keep, Selection
from .layer_part import LayerPart
from .queue import Queue
from .sums import Sum

if TYPE_CHECKING:
    import xarray as xr


class TextOnly(Sum):
    """Layer whose attention to the text is handed to the layers that spread it; it holds nothing.

    Args:
        spreading: shared by all layers of the capture.
    """

    def __init__(self, layer: AttentionLayer, keep: Keep, spreading: Spreading):
        super().__init__(layer, keep)
        self.spreading = spreading
        self.may_wait = False

    def add_now(self, part: LayerPart, attended: HeadSums) -> None:
        self.spreading.text.add(attended.add_to(None, part.columns) / attended.heads)


class MapsByLayer(Mapping[str, Tensor]):
    """Maps of a store's layers, in order, each computed on access."""

    def __init__(self, sums: Mapping[str, Sum]):
        self._sums = sums

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:  # asks that layer only
            raise NotFoundError(
                f"No map of a layer {name!r}. The store has: {', '.join(self) or 'none yet'}."
            )
        return self._sums[name].map()

    def __contains__(self, name: object) -> bool:
        held = self._sums.get(name) if isinstance(name, str) else None
        return held is not None and bool(held.calls)

    def __iter__(self) -> Iterator[str]:
        return (name for name, held in self._sums.items() if held.calls)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class CapturedMaps:
    """Maps that a capture collects; :class:`sdattn.MapStore` describes the contents."""

    drawn: DrawnPrompts | None = None

    def __init__(self, layers: Sequence[AttentionLayer], keep: Keep):
        self.layers = list(layers)
        self._candidates = list(layers)  # of all resolutions
        self.keep = keep.without_run()
        self.queue = Queue()
        self.sums = {layer.name: Sum(layer, self.keep, self.queue) for layer in layers}
        self._text_sums: dict[str, TextOnly] = {}  # of layers that others spread
        self._text_candidates: dict[str, TextOnly] = {}
        self._spreading: Spreading | None = None
        self.passes: list[Pass] = []
        self._running: Pass | None = None
        self.skipped = 0
        self.kernels: dict[str, float] = {}
        self.problem = ""  # why the maps cannot be read
        self.bypass = ""  # why layers may not have run
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

    def add_layer(self, layer: AttentionLayer) -> Sum:
        """Hold the maps of a layer that was found while the model ran."""
        layer_sum = Sum(layer, self.keep, self.queue)
        self.layers.append(layer)
        self.sums[layer.name] = layer_sum
        return layer_sum

    def watch_text(self, layers: Sequence[AttentionLayer], spreading: Spreading) -> None:
        """Watch further layers, whose text other layers spread and of which no map is held."""
        self._spreading = spreading
        for layer in layers:
            if layer.name not in self.sums:
                self._text_candidates[layer.name] = TextOnly(layer, self.keep, spreading)
        self._text_sums = dict(self._text_candidates)

    def sum_of(self, layer: AttentionLayer) -> Sum:
        """Return what takes the calls of a watched layer."""
        return self.sums.get(layer.name) or self._text_sums[layer.name]

    @property
    def text_only(self) -> list[AttentionLayer]:
        """Layers that are watched for others, which spread their maps."""
        return [held.layer for held in self._text_sums.values()]

    @property
    def texts(self) -> TextsOfRun:
        """Texts that the passes were drawn from."""
        found = TextsOfRun()
        for one in self.passes:
            found.add(one.text_changed, one.text_by_frame)
        return found

    def choose(self, selection: tuple[LayerSelection, Sequence[str]], size: Size | None) -> None:
        """Watch only layers of the chosen resolutions, which are known in the first pass."""
        text_only = self._text_candidates
        every = [*(held.layer for held in text_only.values()), *self._candidates]
        chosen = select_layers(every, *selection, size)
        self._text_sums = {name: held for name, held in text_only.items() if held.layer in chosen}
        self.layers = [layer for layer in self._candidates if layer in chosen]

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
        parts = [held.part for held in self.sums.values() if held.layer.kind != "self"]
        keys = [part.keys for part in parts if part is not None]
        return keys[-1] if keys else None

    @property
    def n_text(self) -> int | None:
        """Token columns of the text, without image prompts; None before the model ran."""
        return (self.passes[0].n_text or self.n_keys) if self.passes else None

    @property
    def kept(self) -> list[int]:
        """Passes, counted from 0, whose maps were added; with ``"last"`` each replaces the one
        before."""
        return [number for number in range(len(self.passes)) if self.keeps(number)]

    @property
    def kept_passes(self) -> int:
        """Number of passes whose maps the layers added."""
        return len(self.kept)

    @property
    def seen(self) -> dict[str, tuple[int, ...]]:
        """Model calls, counted from 0, whose maps are held, for each layer that ran. They are the
        same for all layers, unless something skips some of them (a cache)."""
        numbers = {id(run_pass): number for number, run_pass in enumerate(self.passes)}
        seen = {}
        for name in self._maps:
            seen[name] = tuple(numbers[id(run_pass)] for run_pass in self.sums[name].held)
        return seen

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        nbytes = 0
        for layer in self.sums.values():
            nbytes += sum(tensor.nbytes for tensor in layer.tensors())
        return nbytes

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
        self._running = new
        if self.keeps(len(self.passes) - 1):
            for layer in self.layers:
                self.sums[layer.name].running = new
            for held in self._text_sums.values():
                held.running = new

    def end_pass(self) -> None:
        """Note that the running pass has ended, and add what waited for that."""
        self.queue.end_pass()
        self._rest()

    def drop_pass(self) -> None:
        """Forget a pass that did not end, since an error broke it off; it adds nothing."""
        broken = self._running
        if broken is None:
            return
        self.queue.drop()
        if self._spreading is not None:
            self._spreading.drop_pass()
        for layer_sum in (*self.sums.values(), *self._text_sums.values()):
            layer_sum.drop(broken)
        self.passes = [one for one in self.passes if one is not broken]
        self._rest()

    def close(self) -> None:
        """End the block: forget a pass that did not end, and let go of the model. Names and shapes
        of its layers stay. Nothing is computed, so that this cannot fail where memory did."""
        self.drop_pass()
        self.queue.close()
        self._text_sums = {}
        self._text_candidates = {}
        self._candidates = []
        self._spreading = None
        for layer_sum in self.sums.values():
            layer_sum.close(replace(layer_sum.layer, module=None))
        self.layers = [replace(layer, module=None) for layer in self.layers]

    def _rest(self) -> None:
        self._running = None
        for layer_sum in (*self.sums.values(), *self._text_sums.values()):
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
                "The model was watched, but never called inside capture(). Call it or its pipeline "
                "inside the with block, in the same thread. A function that torch.compile compiled "
                "around it before has no hooks in its graph: call the plain function."
            )
        if len(missing) == len(self.layers) and self.stopped is not None:
            return  # before the steps that were to be kept, which a warning says
        if len(missing) == len(self.layers):
            asked = f" in steps {self.steps}" if steps.numbers or steps.part else ""
            raise CaptureError(
                f"The model ran {len(self.passes)} time(s), but none of the {len(missing)} "
                f"watched layers ran{asked}: {', '.join(missing[:3])}… {self.bypass}".rstrip()
            )
        if missing:
            warn(
                f"{len(missing)} of {len(self.layers)} watched layers never ran and have no map: "
                f"{', '.join(missing)}. {self.bypass}".rstrip(". "),
                CaptureWarning,
            )
        self._warn_of_calls()

    def _warn_of_calls(self) -> None:
        """Warn of layers that did not run once in each kept pass, and of chosen passes that never
        came."""
        # A cache (FirstBlockCache, DeepCache, FasterCache) skips layers in some steps.
        if uneven := self.uneven():
            some = [f"{name} in {', '.join(map(str, self.seen[name]))}" for name in uneven[:3]]
            often = any(self.sums[name].calls > self.kept_passes for name in uneven)
            why = "some were called several times in one" if often else "is a cache enabled?"
            warn(
                f"{len(uneven)} watched layers did not run once in each of {self.kept_passes} "
                f"steps ({why}). Their maps are of these alone: {'; '.join(some)}.",
                CaptureWarning,
            )
        chosen = () if self.stopped else self.keep.steps.numbers or ()
        if skipped := [step for step in chosen if step >= len(self.passes)]:
            warn(
                f"Asked for steps {list(chosen)}, but the model ran {len(self.passes)} times (0 to "
                f"{len(self.passes) - 1}): nothing is held of {skipped}.",
                CaptureWarning,
            )

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
        maps = self.maps[layer].detach().float().cpu()
        [watched] = [one for one in self.layers if one.name == layer]
        calls = self.seen[layer]
        each = self.keep.steps.each
        axes: dict[str, Sequence[Any] | None] = {"image": range(len(maps))}
        if each:
            axes["step"] = calls
        if self.keep.heads.each:
            axes["head"] = self.keep.heads.numbers or range(watched.heads)
        columns = range(maps.shape[-1])
        tokens = self.tokens or columns
        if self.keep.queries.in_text:
            axes |= {"query": range(maps.shape[-2]), "token": tokens}
        else:
            if maps.dim() - len(axes) == 4:
                axes["frame"] = self.frames or range(maps.shape[len(axes)])
            axes |= {"row": None, "col": None}
            if self.keep.queries.cells is not None:
                axes["query"] = columns
            elif watched.kind == "self":
                axes["key"] = columns
            else:
                axes["token"] = tokens
        found = labelled(maps.numpy(), axes, layer=layer, place=watched.place)
        times = [self.passes[call].timestep for call in calls]
        return found.assign_coords(timestep=("step", times)) if each else found

    def report(self) -> str:
        """Return a few lines that say what was asked for and what was captured."""
        if not self.passes:
            return f"layers     {len(self.layers)} watched\npasses     none yet"
        first = self.passes[0]
        missing = self.missing()
        grids = {held.part.grid for held in self.sums.values() if held.part is not None}
        layout = " | ".join(chunk or "neither" for chunk in first.order or ())
        times = [f"{t:g}" for t in self.timesteps]
        if len(times) > 6:
            times = [*times[:3], "…", *times[-2:]]
        kept = "all" if self.tokens is None else f"columns {list(self.tokens)}"
        lines = {
            "layers": f"{len(self.layers) - len(missing)} of {len(self.layers)} seen",
            "missing": ", ".join(missing) or "none",
            "grids": ", ".join(map(grid_text, sorted(grids, reverse=True))),
            "passes": f"{len(self.passes)}, timesteps {', '.join(times)}",
            "skipped": f"{self.skipped} passes that are not the branch's",
            "guidance": f"{layout} in a batch of {first.batch}",
            "images": f"{self.images}, {' and '.join(dict.fromkeys(first.branches))}",
            "kept": f"steps {self.steps}, heads {self.heads}, tokens {kept}",
            "held": f"{self.nbytes / 1e6:.2f} MB",
        }
        return "\n".join(f"{name:10} {text}" for name, text in lines.items())
