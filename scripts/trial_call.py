"""One small call of a model of which nothing is known, and which tokens its attention got.

The call has three rows: the same image and text; another text; another image. Every attention
puts out zeros, so that no token learns of another. Then in any layer, however deep, a query or key
that differs in the second row is one of the text, and one that differs in the third of the image.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sdattn.look.sdpa import SdpaWatch
from sdattn.models.denoiser_call import holds_processor, unwrapped

N_TEXT, FRAMES, ROWS, COLS = 11, 6, 8, 12  # all different, and rows and columns divide by 4
LARGEST = 6e8  # parameters of a model that is built with values
DIFFERENT = 1e-3  # of the largest value: far above what rounding makes of two equal rows
TEXT_WIDTHS = (  # of the configuration, the first that is there
    *("joint_attention_dim", "caption_channels", "text_embed_dim", "text_dim", "caption_dim"),
    *("cross_attention_input_dim", "cross_attention_dim"),
)
UNLESS_NEEDED = {"encoder_attention_mask", "encoder_hidden_states_mask"}
TEXTS = ("encoder_hidden_states",)
IMAGES = ("hidden_states", "sample", "x")


@dataclass(frozen=True)
class SeenAttention:
    """What one call of the attention kernel got.

    Attributes:
        layer: the path of the innermost module that ran.
        has_processor: whether that holds one.
        gets_text: whether the module was handed the text beside the image.
        queries, keys: a letter a token: ``"t"`` of the text, ``"p"`` of the image, ``"b"`` of
            both, ``"-"`` of neither; ``"?"`` where the rows did not come together.
        rows: of the kernel's batch for one of the model's.
    """

    layer: str
    has_processor: bool
    gets_text: bool
    queries: str
    keys: str
    rows: int


@dataclass(frozen=True)
class Trial:
    """What a call showed.

    Attributes:
        given: the arguments of the call, by name.
        seen: in the order in which the layers ran.
        error: with which the call ended; "" where it did not.
        modules: how many were called until then.
    """

    given: Mapping[str, Any]
    seen: tuple[SeenAttention, ...]
    error: str = ""
    modules: int = 0


def trial_call(model: Any) -> Trial:
    """Build a model of a class and configuration small, with two blocks of each sort, and call it.

    Args:
        model: of diffusers, on any device; it is not called itself.

    Returns:
        The call with the layout of the latents that got furthest: ``[B, C, rows, cols]``, with
        frames behind or before the channels, or a row of tokens.
    """
    model = unwrapped(model)
    # Entries of diffusers' own begin with "_": one lists what from_config takes no value for.
    config = {k: v for k, v in getattr(model, "config", {}).items() if not k.startswith("_")}
    small = _small(type(model), config)
    if isinstance(small, str):
        return Trial({}, (), small)
    trials = []
    for latents in _layouts(small):
        try:
            given = _arguments(small, latents)
        except KeyError as missing:
            return Trial({}, (), f"its argument {missing.args[0]} cannot be made up")
        trials.append(_watched(small, given))
        if not trials[-1].error:
            return trials[-1]
    return max(trials, key=lambda trial: trial.modules)


def _small(kind: Any, config: Mapping[str, Any]) -> Any | str:
    """A model with values; or why there is none."""
    if not hasattr(kind, "from_config"):
        return "it is not of diffusers, so how to build one small is not known"
    blocks = two_blocks(kind, config)
    problem = f"two of its blocks have more than {LARGEST:.0e} parameters"
    for heads in ({}, {"num_attention_heads": 2}):
        if heads and "num_attention_heads" not in config:
            continue
        try:
            small = {**config, **blocks, **heads}
            with torch.device("meta"):
                held = sum(part.numel() for part in kind.from_config(small).parameters())
            if held <= LARGEST:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    return kind.from_config(small).eval()
        except Exception as error:  # of any kind: it is the model's own code
            problem = f"it cannot be built small ({type(error).__name__}: {error})"
    return problem


def two_blocks(cls: Any, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the entries of a configuration that count blocks, each at most 2."""
    defaults = {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items()}
    counts = {name: config.get(name, default) for name, default in defaults.items()}
    return {
        name: min(count, 2)
        for name, count in counts.items()
        if re.fullmatch(r"(num|n)_(\w+_)?layers", name) and isinstance(count, int)
    }


def _layouts(model: Any) -> Iterator[Tensor]:
    """Latents ``[3, ...]`` in the layouts that there are, of which the third row differs."""
    names = inspect.signature(model.forward).parameters
    channels = int(getattr(model.config, "in_channels", None) or model.config.get("in_dim", 4))
    if "img_ids" in names or "img_shapes" in names:
        shapes: tuple[tuple[int, ...], ...] = ((ROWS * COLS, channels),)
    else:
        shapes = (
            (channels, ROWS, COLS),
            (channels, FRAMES, ROWS, COLS),
            (FRAMES, channels, ROWS, COLS),
            (ROWS * COLS, channels),
            (channels, ROWS * COLS),
        )
    for shape in shapes:
        one, other = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
        yield torch.stack([one, one, other])


def _arguments(model: Any, latents: Tensor) -> dict[str, Any]:
    """The arguments of ``forward``: those that it needs, and those that it asks for by its
    configuration.

    Raises:
        KeyError: one that it needs and that is not known.
    """
    made_up, given = _made_up(model, latents), {}
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        needed = parameter.default is parameter.empty
        if needed or name in made_up.keys() - UNLESS_NEEDED:
            given[name] = made_up[name]()
    return given


def _made_up(model: Any, latents: Tensor) -> dict[str, Callable[[], Any]]:
    """How to make arguments up, by their names."""
    config, batch = model.config, len(latents)

    def text() -> Tensor:
        width = next(w for name in TEXT_WIDTHS if (w := config.get(name)))
        one, other = torch.randn(2, N_TEXT, width, generator=torch.Generator().manual_seed(2))
        return torch.stack([one, other, one])

    def ids(count: int) -> Tensor:
        axes = len(config.get("axes_dims_rope") or (0, 0, 0))
        return torch.zeros(count, axes)

    def image_ids() -> Tensor:
        made = ids(ROWS * COLS)
        made[:, 1:3] = torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLS))
        return made

    def sizes() -> Tensor:
        return torch.tensor([[8.0 * ROWS, 8.0 * COLS]]).expand(batch, -1)

    def vector(width: int | None, *shape: int, **options: Any) -> Tensor | None:
        return None if width is None else torch.zeros(*shape, width, **options)

    return {
        **dict.fromkeys(IMAGES, lambda: latents),
        **dict.fromkeys(TEXTS, text),
        "timestep": lambda: torch.ones(batch),
        "guidance": lambda: torch.ones(batch) if config.get("guidance_embeds") else None,
        "pooled_projections": lambda: vector(config.get("pooled_projection_dim"), batch),
        "global_hidden_states": lambda: vector(config.get("global_states_input_dim"), batch, 1),
        "class_labels": lambda: vector(
            config.get("num_embeds_ada_norm") and batch, dtype=torch.long
        ),
        "added_cond_kwargs": lambda: {"resolution": None, "aspect_ratio": None},
        "img_ids": image_ids,
        "txt_ids": lambda: ids(N_TEXT),
        "img_shapes": lambda: [[(1, ROWS, COLS)]] * batch,
        "encoder_attention_mask": lambda: torch.ones(batch, N_TEXT),
        "encoder_hidden_states_mask": lambda: torch.ones(batch, N_TEXT),
        "original_size": sizes,
        "target_size": sizes,
        "crop_coords": lambda: torch.zeros(batch, 2),
    }


@torch.no_grad()
def _watched(model: Any, given: Mapping[str, Any]) -> Trial:
    watch, error = _ZeroWatch(), ""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(_noted(name, module, watch))
        stack.enter_context(watch)
        try:
            model(**given)
        except Exception as problem:  # of any kind: it is the model's own code
            error = f"{type(problem).__name__}: {problem}"
    return Trial(given, tuple(watch.seen), error, watch.modules)


@contextmanager
def _noted(name: str, module: nn.Module, watch: "_ZeroWatch") -> Iterator[None]:
    """Note in a watch while a module runs."""

    def begins(_module: Any, args: Any, kwargs: Any) -> None:
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor)]
        states = [one for one in tensors[1:] if one.ndim == 3 and not len(one) % 3]
        text = any("t" in _letters(one[:, None]) for one in states)
        watch.running.append((name, holds_processor(module), text))
        watch.modules += 1

    def ends(*_: Any) -> None:
        watch.running.pop()

    hooks = (
        module.register_forward_pre_hook(begins, with_kwargs=True),
        (module.register_forward_hook(ends, always_call=True)),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _ZeroWatch(SdpaWatch):
    """Note what each call of the kernel gets, and put out zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[tuple[str, bool, bool]] = []  # name, has a processor, gets the text
        self.seen: list[SeenAttention] = []
        self.modules = 0

    def attend(
        self, attend: Any, by: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        name, has_processor, gets_text = self.running[-1]
        tokens, rows = (_letters(query), _letters(key)), len(query) // 3
        self.seen.append(SeenAttention(name, has_processor, gets_text, *tokens, rows))
        return query.new_zeros(*query.shape[:-1], value.shape[-1])


def _letters(tokens: Tensor) -> str:
    """What each of the tokens ``[3 * rows, heads, N, d]`` is of, see :class:`SeenAttention`."""
    if len(tokens) % 3:
        return "?" * tokens.shape[-2]
    rows = tokens.unflatten(0, (3, -1)).float()  # [3, rows, heads, N, d]
    far = DIFFERENT * rows.abs().max()
    of_text, of_image = (((rows[i] - rows[0]).abs().amax((0, 1, 3)) > far).tolist() for i in (1, 2))
    return "".join("-tpb"[text + 2 * image] for text, image in zip(of_text, of_image, strict=True))
