"""`Recorder`: what the image attends to in each text, while ComfyUI's sampler runs.

    recorder = Recorder(Settings())
    patched = model.clone()
    recorder.install(patched)
    ...                                      # sample with the patched model
    recorder.runs                            # a sampler's run, with a sum of maps for each text

ComfyUI's own wrappers tell when a run begins and ends, when a step calls the model, and which texts
are the rows of a call. The attention function is overridden inside such a call alone, in front of
any other override, so the order of nodes does not matter. The output is the attention function's,
and nothing raises while the sampler runs: what could not be followed is said when maps are read.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sdattn.errors import CaptureError

from .layouts import Layout, ModelCall, read_layout
from .notes import (
    ANOTHER_ATTENTION,
    ANOTHER_BLOCK,
    ANOTHER_PATCH,
    DRAWN_AGAIN,
    FEWER_LAYERS,
    OTHER_TEXTS,
    UNKNOWN_TO_OTHERS,
    names_of,
)
from .runs import Conditioning, Run, Settings, executing_node
from .stand_in import OVERRIDE, StandIn, selected
from .summing import Chunk, add, by_head, grouped, rows_of

KEY = "sdattn"


def _watches(method: Callable[..., Any]) -> Callable[..., Any]:
    """Make a method that only watches: what it raises becomes the run's problem."""

    @functools.wraps(method)
    def watch(self: "Recorder", *args: Any, **kwargs: Any) -> Any:
        try:
            with torch.no_grad():
                return method(self, *args, **kwargs)
        except Exception as error:  # any: an image is worth more than its maps
            if self._run is not None:
                self._run.problem = self._run.problem or str(error) or repr(error)

    return watch


class Recorder:
    """Watches the model that it was installed in, for one sampler or several."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.runs: dict[str | None, Run] = {}  # the last run of each sampler
        self._run: Run | None = None
        self._conds: Sequence[Any] = ()  # texts of this step's call, by ComfyUI's numbers
        self._names: Mapping[int, str] = {}  # of the sampler's inputs
        self._drawn: set[tuple[str, object]] = set()  # in this step
        self._size = (0, 0)  # of the whole latent
        self._batch = 0  # rows of this call of the model
        self._layout: Layout | None = None
        self._chunks: list[Chunk] = []
        self._given: Tensor | None = None  # keys that another node's attention was given
        self._selected: Any = None  # the override that chooses what would run without one

    def __deepcopy__(self, memo: object) -> "Recorder":
        return self  # a model's options are copied

    def install(self, patcher: Any) -> None:
        """Add the wrappers to a clone of the model."""
        self._selected = selected(patcher)
        for kind in ("outer_sample", "predict_noise", "calc_cond_batch", "apply_model"):
            patcher.add_wrapper_with_key(kind, KEY, getattr(self, f"_{kind}"))

    def _outer_sample(
        self,
        executor: Any,
        noise: Tensor,
        latent: Tensor,
        sampler: Any,
        sigmas: Tensor,
        mask: Tensor | None = None,
        callback: Callable[..., Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        node = executing_node()
        self.runs.pop(node, None)  # a sampler's new run becomes the last
        run = self.runs[node] = self._run = Run(node, max(len(sigmas) - 1, 1))

        def count(step: int, *told: Any) -> Any:
            run.step = step + 1
            return None if callback is None else callback(step, *told)

        try:
            output = executor(noise, latent, sampler, sigmas, mask, count, *args, **kwargs)
            run.is_whole = True
            return output
        finally:
            self._end_run(run)
            self._run = None
            self._conds = ()

    def _predict_noise(self, executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        conds = getattr(executor.class_obj, "conds", {})
        self._names = {id(texts): name for name, texts in conds.items()}
        self._drawn = set()
        self._end_steps()
        return executor(*args, **kwargs)

    def _calc_cond_batch(
        self,
        executor: Any,
        model: Any,
        conds: Sequence[Any],
        latent: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        before = self._conds
        self._conds = conds
        self._size = tuple(latent.shape[-2:])
        try:
            return executor(model, conds, latent, *args, **kwargs)
        finally:
            self._conds = before

    def _apply_model(
        self,
        executor: Any,
        latent: Tensor,
        sigma: Tensor,
        concat: Tensor | None = None,
        text: Tensor | None = None,
        control: Any = None,
        transformer_options: Mapping[str, Any] = {},
        **given: Any,
    ) -> Tensor:
        options = dict(transformer_options)
        self._begin_call(executor.class_obj, latent, text, given, options)
        run = self._run
        before = 0 if run is None else run.shown
        if self._chunks:
            override = options.get(OVERRIDE)
            attend = functools.partial(self._attend, override)
            known = self._selected if override is None else override
            options[OVERRIDE] = StandIn(attend, known, self._note_asked)
            options["patches_replace"] = self._watched(options.get("patches_replace", {}))
        try:
            output = executor(latent, sigma, concat, text, control, options, **given)
            if run is not None:
                run.most = max(run.most, run.shown - before)
            return output
        finally:
            self._layout = None
            self._chunks = []  # which hold the latent and the text

    @_watches
    def _begin_call(
        self,
        base: Any,
        latent: Tensor,
        text: Tensor | None,
        given: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        run = self._run
        self._chunks = []
        if run is None or run.problem or text is None:
            return
        run.calls += 1
        if "attn2_patch" in options.get("patches", {}):
            run.notes[ANOTHER_PATCH.format(names_of(options["patches"]["attn2_patch"]))] = None
        kinds = options["cond_or_uncond"]
        each = len(latent) // len(kinds)
        is_kept = not self.settings.second_half or 2 * run.step + 1 >= run.n_steps
        call = ModelCall(base.diffusion_model, type(base).__name__, latent, text, given)
        self._batch = len(latent)
        self._layout = read_layout(call)
        chunks = []
        for number, (kind, uuid) in enumerate(zip(kinds, options["uuids"], strict=True)):
            key = self._names.get(id(self._conds[kind]), str(kind)), uuid
            if key in self._drawn:
                run.notes[DRAWN_AGAIN.format(key[0])] = None
                continue
            self._drawn.add(key)
            drawn = run.conditionings.get(key) or self._conditioning(key[0], kind, uuid)
            run.conditionings[key] = drawn
            drawn.steps.add(run.step)
            repeats = text.shape[1] // drawn.text.shape[1]
            if is_kept:
                drawn.facts = self._layout.facts(repeats)
                drawn.images = each
                chunks.append(Chunk(drawn, slice(number * each, (number + 1) * each), repeats))
        self._chunks = chunks
        if chunks:
            run.layers = run.layers or self._layout.layers()

    def _conditioning(self, name: str, kind: int, uuid: object) -> Conditioning:
        cond = next(cond for cond in self._conds[kind] if cond["uuid"] == uuid)
        states = cond["model_conds"].get("c_crossattn")
        text = cond["cross_attn"] if states is None else states.cond
        return Conditioning(name, text, cond.get("area"), self._size)

    def _attend(
        self,
        override: Callable[..., Tensor] | None,
        func: Callable[..., Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return a layer's attention as it would be, and look at what it was computed from."""
        inner = func if override is None else functools.partial(override, func)
        output = inner(*args, **kwargs)
        self._see(*args, **kwargs)
        return output

    def _watched(self, replaced: Mapping[str, Any]) -> dict[str, Any]:
        """Return other nodes' replacements, those of the attention to the text and of whole blocks
        watched."""
        watched = dict(replaced)
        for kind, watch in (("attn2", self._replaced), ("dit", self._replaced_block)):
            if kind in replaced:
                watched[kind] = {
                    block: StandIn(functools.partial(watch, patch), patch)
                    for block, patch in replaced[kind].items()
                }
        return watched

    def _note_asked(self, module: str, name: str) -> None:
        if self._run is not None:
            self._run.notes[UNKNOWN_TO_OTHERS.format(module, name)] = None

    def _replaced(
        self, patch: Any, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """Run another node's attention. If it does not show its attention to the text, its queries
        and keys are those that it was given."""
        run = self._run
        self._given = key
        before = 0 if run is None else run.shown
        try:
            output = patch(query, key, value, options)
        finally:
            self._given = None
        if run is not None and run.shown == before:
            run.notes[ANOTHER_ATTENTION.format(names_of([patch]))] = None
            self._see(query, key, value, options["n_heads"], transformer_options=options)
        return output

    def _replaced_block(self, patch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run another node's block of the model, and note if it shows no attention to the text."""
        run = self._run
        before = 0 if run is None else run.shown
        output = patch(*args, **kwargs)
        if run is not None and run.shown == before:
            run.notes[ANOTHER_BLOCK.format(names_of([patch]))] = None
        return output

    @_watches
    def _see(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: object = None,
        skip_reshape: bool = False,
        transformer_options: Mapping[str, Any] = {},
        **others: Any,
    ) -> None:
        run = self._run
        layout = self._layout
        if run is None or run.problem or layout is None or not self._chunks:
            return
        run.attended += 1
        look = layout.look(query.shape[-2], key.shape[-2], transformer_options)
        if look is None:
            return
        if look.texts and self._given is not None and key.data_ptr() != self._given.data_ptr():
            run.notes[OTHER_TEXTS] = None
            return
        if len(query) != self._batch:
            raise CaptureError(
                f"A layer ran on {len(query)} rows in a call of {self._batch}, so which text each "
                "row belongs to is not known. Another node splits the batch (regional prompting "
                "does so); take it out."
            )
        run.shown += bool(look.texts)
        dim = query.shape[-1] if skip_reshape else query.shape[-1] // heads
        query = by_head(query, dim, skip_reshape)
        key = grouped(by_head(key, dim, skip_reshape), query.shape[1])
        for chunk in self._chunks:
            row_look = layout.of_row(look, chunk.rows.start)
            add(
                self.settings,
                run,
                chunk,
                row_look,
                query=query[chunk.rows][:, :, row_look.queries],
                key=key[chunk.rows],
                mask=rows_of(mask, chunk.rows, row_look.queries),
                scale=others.get("scale"),
            )

    @_watches
    def _end_steps(self) -> None:
        """Move the maps of steps that are done off the model's device."""
        if self._run is None or not self.settings.every_step:
            return
        for text in self._run.conditionings.values():
            for step, sums in text.by_step.items():
                if step < self._run.step:
                    sums.leave_device()

    @_watches
    def _end_run(self, run: Run) -> None:
        if 0 < run.most < run.layers:
            run.notes[FEWER_LAYERS.format(run.most, run.layers)] = None
        for text in run.conditionings.values():
            text.leave_device()
