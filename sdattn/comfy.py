"""Heatmaps in ComfyUI, from an override of its attention function; nothing of ComfyUI is imported.

recorder = MapRecorder()
patched = model.clone()
patched.model_options["transformer_options"]["optimized_attention_override"] = recorder
...                                                     # sample with the patched model
recorder.heatmaps(["<sos>", "a", "cat", "<eos>"])[0]["cat"].overlay(image)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .attention import level_grids, split_heads
from .attention.calls import ALL, AttentionCall, four_axes
from .errors import CaptureError, InvalidValueError, refuse
from .follow.passes import Pass
from .keep.keep import Keep
from .keep.running_sums import RunningSum
from .look.attended import softmax_of
from .maps.capture import MapStore
from .maps.heatmaps import Heatmaps
from .maps.presets import Preset
from .models.attention_layer import AttentionLayer, Kind, Place
from .models.denoiser_call import Timestep
from .models.guidance import Branch
from .prompts.pieces import read_pieces
from .prompts.tokens import Prompt, join_prompts

Options = Mapping[str, Any]  # ComfyUI's transformer_options
BRANCHES: tuple[Branch, ...] = ("conditional", "unconditional")  # 0 and 1 in cond_or_uncond
_PLACES: dict[str | None, Place] = {"input": "down", "middle": "mid", "output": "up"}
_PLACES |= {"double": "double", "single": "single"}


class MapRecorder:
    """An ``optimized_attention_override`` that records what the image attends to in the text: a
    running mean for each block and each branch of the guidance.

    It returns what the attention function returned, and never raises: what it could not follow is
    said when maps are read. A new run, of other conditionings, replaces the maps of the last one.

    Args:
        override: the override that was set before, if any; it is called with the function.
        grid: (rows, cols) of the image's tokens for models that do not name their
            ``activations_shape`` (FLUX: height and width in pixels divided by 16). If text and
            image share a sequence, the text comes first.
        device: device that holds the maps (default: the model's).
    """

    def __init__(
        self,
        override: Callable[..., Tensor] | None = None,
        *,
        grid: tuple[int, int] | None = None,
        device: torch.device | str | None = None,
    ):
        self.override, self.grid, self.device = override, grid, device
        self.reset()

    def reset(self) -> None:
        """Forget all maps."""
        self._stores: dict[Branch, MapStore] = {}
        self._texts: dict[int, object] = {}  # uuid of each branch's conditioning
        self._sigmas: Tensor | None = None  # of this pass
        self._begun: dict[int, Tensor | None] = {}  # sigmas of each branch's last pass
        self._chunks: list[tuple[int, object]] | None = None  # branch and uuid, of this pass
        self._running: list[MapStore] = []  # in this pass
        self._calls = self._skipped = self._recorded = 0  # the last in this pass
        self._problem = ""

    def __deepcopy__(self, memo: object) -> "MapRecorder":
        return self  # ComfyUI copies a model's options when it clones the model

    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        args_of = args if self.override is None else (func, *args)
        output = (self.override or func)(*args_of, **kwargs)
        try:
            self._see(*args, **kwargs)
        except Exception as error:  # any: an image is worth more than its maps
            self._problem = self._problem or str(error) or repr(error)
        return output

    @torch.no_grad()
    def _see(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: object = None,
        skip_reshape: bool = False,
        transformer_options: Options = {},  # noqa: B006
        **others: Any,
    ) -> None:
        self._follow(transformer_options)
        self._calls += 1
        cells, keys = query.shape[-2], key.shape[-2]
        shape = transformer_options.get("activations_shape")
        grid = self.grid if shape is None else (int(shape[-2]), int(shape[-1]))
        is_joint = shape is None and grid is not None and cells == keys > math.prod(grid)
        if grid is None or (cells == keys and not is_joint):
            self._skipped += 1
        elif not self._problem:
            n_text = cells - math.prod(grid) if is_joint else keys
            if not skip_reshape:
                query, key = split_heads(query, heads), split_heads(key, heads)
            mask = mask[:, None] if mask is not None and mask.ndim == 3 else mask
            call = AttentionCall(query, key, mask=four_axes(mask), scale=others.get("scale"))
            self._record(call, transformer_options, grid, n_text, is_joint)

    def _record(
        self, call: AttentionCall, options: Options, grid: tuple[int, int], n_text: int, joint: bool
    ) -> None:
        if not self._running:
            self._begin_pass(len(call.query), grid, n_text)
        layer = self._layer(options, grid, call.query.shape[1], "joint" if joint else "cross")
        attended = softmax_of(call, slice(n_text, None) if joint else ALL, slice(0, n_text))
        for store in self._running:
            if layer.name not in store.sums:
                store.layers.append(layer)
                store.sums[layer.name] = RunningSum(layer, store.keep)
            store.sums[layer.name].running = store.passes[-1]
            store.sums[layer.name].take(attended)

    def _follow(self, options: Options) -> None:
        """Notice that another call of the model began, and whether it begins a run."""
        sigmas, kinds = options.get("sigmas"), options.get("cond_or_uncond") or ()
        chunks = list(zip(kinds, options.get("uuids") or (None,) * len(kinds), strict=True))
        if sigmas is self._sigmas and chunks == self._chunks:
            return
        others = bool(self._texts) and not {text for _, text in chunks} & {*self._texts.values()}
        # Noise is read from the device only then: within a run a later conditioning has less.
        again = others and sigmas is not self._sigmas
        if again and float(Timestep(sigmas)) >= float(Timestep(self._sigmas)):
            self.reset()
        self._sigmas, self._chunks, self._running, self._recorded = sigmas, chunks, [], 0
        self._texts = {**dict(chunks), **self._texts}

    def _begin_pass(self, batch: int, grid: tuple[int, int], n_text: int) -> None:
        chunks = self._chunks or []
        kinds = [kind for kind, _ in chunks]
        images, rest = divmod(batch, max(len(kinds), 1))
        if rest or not kinds or not {*kinds} <= {0, 1}:
            raise CaptureError(f"cond_or_uncond is {kinds}, for a batch of {batch} rows.")
        again = any(self._begun.get(kind, ()) is self._sigmas for kind in kinds)
        if again or len({*kinds}) < len(kinds) or {*chunks} - {*self._texts.items()}:
            raise CaptureError(
                "One branch had several conditionings (combined, by area or by time) or was drawn "
                "twice in a step (perturbed-attention guidance), so which text a column belongs to "
                "is unknown. Draw each branch once, from one conditioning."
            )
        self._begun |= dict.fromkeys(kinds, self._sigmas)
        for number, branch in enumerate(BRANCHES[kind] for kind in kinds):
            store = self._stores.setdefault(branch, MapStore([], Keep.of(device=self.device)))
            rows = tuple(range(number * images, (number + 1) * images))
            about = batch, None, rows, (branch,) * images, n_text
            store.begin_pass(Pass(Timestep(self._sigmas), grid, *about))
            self._running.append(store)

    def _layer(
        self, options: Options, grid: tuple[int, int], heads: int, attends: Kind
    ) -> AttentionLayer:
        block, number = options.get("block"), options.get("block_index", 0)
        kind = block[0] if block else options.get("block_type")
        parts = (*(block or (kind,)), number) if kind else ("call", self._recorded)
        name = ".".join(map(str, parts))
        self._recorded += 1
        finest = cast(tuple[int, int], self._running[0].latent_size)  # it comes first
        if grid not in (grids := level_grids(finest, 8)):
            raise CaptureError(f"{name} ran on {grid} cells, which is no level of {finest}.")
        place, level = _PLACES.get(kind, "block"), grids.index(grid)
        return AttentionLayer(name, place, attends, level, heads, module=None)

    def store(self, branch: str = "conditional") -> MapStore:
        """Return the maps of a branch in the last run, ``"conditional"`` for the prompt or
        ``"unconditional"``; raise CaptureError if none were seen, or not all."""
        if branch not in BRANCHES:
            raise refuse("branch", branch, BRANCHES)
        if self._problem:
            raise CaptureError(self._problem)
        if branch not in self._stores:
            raise CaptureError(
                f"No cross-attention call was seen for the {branch} text: the override was called "
                f"{self._calls} times; {self._skipped} were self-attention, or the image's grid is "
                "unknown. Sample with the model that has the override, and only then read maps. "
                "For models that name no activations_shape (FLUX) pass `grid=(rows, cols)`."
            )
        return self._stores[branch]

    def heatmaps(
        self,
        tokens: str | Mapping[str, Sequence[int]] | Prompt | Sequence[str] | Sequence[int],
        tokenizer: Any = None,
        *,
        branch: str = "conditional",
        preset: str | Preset = "default",
    ) -> list[Heatmaps]:
        """Return the heatmaps of each image, as :func:`sdattn.heatmaps` does.

        Args:
            tokens: the text's token columns, in order, a long prompt's chunks one after the other:
                words, a tokenizer's pieces (``"cat</w>"``), or ids; labels, ``{"cat": [2]}``; or
                the text, if ``tokenizer`` cuts it as ComfyUI did.
            tokenizer: tokenizer of transformers, for ids and text.
            branch, preset: as for :meth:`store`, and a preset that reads means.

        Raise ValueError for other tokens than the attention has columns.
        """
        store = self.store(branch)
        if not isinstance(tokens, (str, Mapping, Prompt)):
            if not all(isinstance(token, str) for token in tokens):
                tokens = tokenizer.convert_ids_to_tokens([*tokens])
            tokens = _repeated(read_pieces(cast(Sequence[str], tokens)), store)
        return store.heatmaps(tokenizer, tokens, preset=preset)


def _repeated(prompt: Prompt, store: MapStore) -> Prompt:
    """Return a prompt as often as ComfyUI repeated its columns, to batch it with a longer one;
    raise ValueError if the maps do not repeat."""
    found, n_text = len(prompt.tokens), store.n_text or 0
    times, rest = divmod(n_text, found)
    parts = next(iter(store.maps.values()))[..., : times * found].unflatten(-1, (-1, found))
    if rest or not times or not torch.allclose(parts, parts[..., :1, :], rtol=1e-3, atol=1e-6):
        raise InvalidValueError(
            f"The attention has {n_text} columns of text, and there are {found} tokens. Pass all "
            "that the text encoder read, with padding, a long prompt's chunks one after the other."
        )
    return join_prompts([prompt] * times)
