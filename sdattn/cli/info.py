"""``sdattn info``: what a model has that can be captured, and what of sdattn does not apply."""

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from .options import Device, Dtype, load
from .printing import Console


def info(
    model: Annotated[str, typer.Argument(help="As --model of generate.")] = "demo",
    device: Device = "cpu",
    dtype: Dtype = None,
) -> None:
    """List a model's attention layers, how much memory capture would hold, and what of sdattn
    does not apply to the model."""
    from ..hooks.keep import Keep
    from ..models.layers import TEXT_KINDS, find_denoiser, find_layers
    from ..models.loading import latent_size, shortcomings

    pipe = load(model, device, dtype)
    latent = latent_size(pipe)
    found = find_layers(find_denoiser(pipe).model)
    table = Table(title=f"{type(pipe).__name__} {model}")
    table.add_column("layer", overflow="fold")  # names are to be copied
    for column in ("place", "kind", "grid", "heads"):
        table.add_column(column)
    for layer in found:
        rows, cols = layer.grid(latent)
        table.add_row(layer.name, layer.place, layer.kind, f"{rows}x{cols}", str(layer.heads))
    console = Console()
    console.print(table)
    lacks = shortcomings(pipe)
    columns = _print_columns(console, pipe)
    texts = [layer for layer in found if layer.kind in TEXT_KINDS]
    default = Keep.of().nbytes(texts, latent, columns)
    full = Keep.of(steps="all", heads="all").nbytes(texts, latent, columns, passes=50)
    console.print(
        f"Capture of one image holds {default / 1e6:.1f} MB, however many steps; with every head "
        f"and step of 50 steps {full / 1e6:,.0f} MB."
    )
    for lack in lacks:
        console.print(Text(f"- {lack}"))


def _print_columns(console: Console, pipe: Any) -> int:
    """Print the tokenizers and how many columns they make of a prompt; returns that, or 1."""
    from ..models.reading import read_prompts

    for name, part in pipe.components.items():
        if name.startswith("tokenizer") and part is not None:
            console.print(f"{name}: {type(part).__name__}")
    try:
        columns = len(read_prompts(pipe, "a")[0].tokens)
    except (TypeError, ValueError):
        console.print("How many token columns it makes of a prompt is not known; for one of them:")
        return 1
    console.print(f"{columns} token columns")
    return columns
