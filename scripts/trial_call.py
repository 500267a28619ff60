"""A small model of a class of which nothing is known, and made-up arguments to call it with."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sdattn.errors import InvalidValueError

N_TEXT, FRAMES, ROWS, COLS = 11, 6, 8, 12  # all different, and rows and columns divide by 4
LARGEST = 6e8  # parameters of a model that is built with values
TEXT_WIDTHS = (  # of the configuration, the first that is there
    *("joint_attention_dim", "caption_channels", "text_embed_dim", "text_dim", "caption_dim"),
    *("cap_feat_dim", "context_in_dim", "cross_attention_input_dim", "cross_attention_dim"),
)
UNLESS_NEEDED = {"encoder_attention_mask", "encoder_hidden_states_mask"}
TEXT = "encoder_hidden_states"
IMAGES = ("hidden_states", "sample", "x")


def small_model(model: Any) -> Any:
    """Build a model of the same class and configuration, with two blocks of each sort and values.

    Raises:
        ValueError: it cannot be built.
    """
    kind = type(model)
    if not hasattr(kind, "from_config"):
        raise InvalidValueError("it is not of diffusers, so how to build one small is not known")
    # Entries of diffusers' own begin with "_": one lists what from_config takes no value for.
    config = {k: v for k, v in getattr(model, "config", {}).items() if not k.startswith("_")}
    config |= _two_blocks(kind, config)
    few_heads = {"num_attention_heads": 2} if "num_attention_heads" in config else {}
    try:
        for small in (config, config | few_heads):
            with torch.device("meta"):
                held = sum(part.numel() for part in kind.from_config(small).parameters())
            if held <= LARGEST:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(0)
                    return kind.from_config(small).eval()
    except Exception as error:  # of any kind: it is the model's own code
        problem = f"it cannot be built small ({type(error).__name__}: {error})"
        raise InvalidValueError(problem) from error
    raise InvalidValueError(f"two of its blocks have more than {LARGEST:.0e} parameters")


def _two_blocks(cls: Any, config: Mapping[str, Any]) -> dict[str, int]:
    """Return the entries of a configuration that count blocks, each at most 2."""
    defaults = {name: p.default for name, p in inspect.signature(cls.__init__).parameters.items()}
    counts = {name: config.get(name, default) for name, default in defaults.items()}
    return {
        name: min(count, 2)
        for name, count in counts.items()
        if re.fullmatch(r"(num|n)_(\w+_)?layers", name) and isinstance(count, int)
    }


def trial_calls(model: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a call, by name, for each layout that latents have: ``[1, C, rows,
    cols]``, with frames behind or before the channels, or a row of tokens.

    There are those that ``forward`` needs, and those that it asks for by its configuration.

    Raises:
        ValueError: it needs one that is not known, or has none for the latents.
    """
    signature = inspect.signature(model.forward).parameters
    if not any(name in signature for name in IMAGES):
        raise InvalidValueError(f"its forward has no argument named {' or '.join(IMAGES)}")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for latents in _layouts(model):
        made_up = _made_up(model, latents)
        given = {}
        for name, parameter in signature.items():
            is_needed = parameter.default is parameter.empty and parameter.kind not in variable
            if is_needed and name not in made_up:
                raise InvalidValueError(f"its argument {name} cannot be made up")
            if is_needed or name in made_up.keys() - UNLESS_NEEDED:
                given[name] = made_up[name]()
        yield given


def _layouts(model: Any) -> Iterator[Tensor]:
    names = inspect.signature(model.forward).parameters
    channels = int(getattr(model.config, "in_channels", None) or model.config.get("in_dim", 4))
    shapes: tuple[tuple[int, ...], ...] = (
        (channels, ROWS, COLS),
        (channels, FRAMES, ROWS, COLS),
        (FRAMES, channels, ROWS, COLS),
        (ROWS * COLS, channels),
        (channels, ROWS * COLS),
    )
    if "img_ids" in names or "img_shapes" in names:
        shapes = ((ROWS * COLS, channels),)
    for shape in shapes:
        yield torch.randn(1, *shape, generator=torch.Generator().manual_seed(1))


def _made_up(model: Any, latents: Tensor) -> dict[str, Callable[[], Any]]:
    """Return how to make arguments up, by their names."""
    config = model.config

    def text() -> Tensor:
        width = next((width for name in TEXT_WIDTHS if (width := config.get(name))), None)
        if width is None:
            raise InvalidValueError(f"its configuration does not say how wide {TEXT} are")
        return torch.randn(1, N_TEXT, width, generator=torch.Generator().manual_seed(2))

    def ids(count: int) -> Tensor:
        axes = len(config.get("axes_dims_rope") or (0, 0, 0))
        return torch.zeros(count, axes)

    def image_ids() -> Tensor:
        made = ids(ROWS * COLS)
        made[:, 1:3] = torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLS))
        return made

    def sizes() -> Tensor:
        return torch.tensor([[8.0 * ROWS, 8.0 * COLS]])

    def vector(width: int | None, *shape: int) -> Tensor | None:
        return None if width is None else torch.zeros(*shape, width)

    return {
        **dict.fromkeys(IMAGES, lambda: latents),
        TEXT: text,
        "timestep": lambda: torch.ones(1),
        "guidance": lambda: torch.ones(1) if config.get("guidance_embeds") else None,
        "pooled_projections": lambda: vector(config.get("pooled_projection_dim"), 1),
        "global_hidden_states": lambda: vector(config.get("global_states_input_dim"), 1, 1),
        "class_labels": lambda: (
            torch.zeros(1, dtype=torch.long) if config.get("num_embeds_ada_norm") else None
        ),
        "added_cond_kwargs": lambda: {"resolution": None, "aspect_ratio": None},
        "img_ids": image_ids,
        "txt_ids": lambda: ids(N_TEXT),
        "img_shapes": lambda: [[(1, ROWS, COLS)]],
        "encoder_attention_mask": lambda: torch.ones(1, N_TEXT, dtype=torch.long),
        "encoder_hidden_states_mask": lambda: torch.ones(1, N_TEXT, dtype=torch.long),
        "original_size": sizes,
        "target_size": sizes,
        "crop_coords": lambda: torch.zeros(1, 2),
    }
