"""``sdattn info``: a model's attention layers, and the features that do not work with it."""

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import SdattnError, size_text
from .options import DEVICES, DTYPE, LOADING, Given, Group, load, one_of
from .output import Output

if TYPE_CHECKING:
    from ..loading.hub import HubModel
    from ..models.layers import AttentionLayer
    from ..models.pipeline import Pipeline

_UNSEEN = {  # kinds of layers that no capture sees, and why
    "linear": "they have no softmax",
    "temporal": "they look at frames, not at the text",
    "text": "they are of the text alone",
    "audio": "their queries or keys are a video's sound",
}


def info(
    output: Output,
    model: Annotated[str, typer.Argument(help="As for generate --model.")] = "demo",
    device: Annotated[
        str,
        typer.Option(help="Device to load it on, e.g. cuda:1.", autocompletion=one_of(*DEVICES)),
    ] = "cpu",
    *,
    loading: Annotated[Given, Group({"dtype": DTYPE, **LOADING})],
) -> None:
    """List a model's attention layers, the memory that capture would hold, and the features
    that do not work with the model. A model of the hub is told of before its weights are
    fetched, with what they would take.

    Examples:
      sdattn info
      sdattn info owner/name --json
    """
    from ..loading.devices import checked_dtype
    from ..loading.options import options_of
    from ..loading.pipelines import pipeline_without_weights
    from ..models.denoiser import find_denoiser
    from ..models.facts import PipelineFacts, latent_size
    from ..runs.info import LayerEntry

    waiting = _not_fetched(output, model, loading)
    if waiting is None:
        pipe = load({"model": model, "device": device, **loading}, output)
        device = str(PipelineFacts(pipe).device)
        dtype = pipe.dtype
    else:
        asked = checked_dtype(loading.get("dtype"))
        dtype = waiting.folder.dtype(asked, half=device.startswith("cuda"))
        pipe = pipeline_without_weights(waiting.folder)
        _print_download(output, waiting, pipe)
    found = find_denoiser(pipe).layers
    latent = latent_size(pipe)
    columns = _columns(pipe)
    lacks = shortcomings(pipe)
    held = _held(found, latent, columns or 1)
    kind = type(pipe).__name__
    scheduler = type(pipe.scheduler).__name__
    how = options_of(pipe)
    parts = {}
    for name, part in pipe.components.items():
        if name.startswith("tokenizer") and part is not None:
            parts[name] = type(part).__name__
    output.print(f"{kind} {model}, {scheduler}")
    _print_layers(output, found, latent)
    for name, tokenizer in parts.items():
        output.print(f"{name}: {tokenizer}")
    unknown = "How many token columns it makes of a prompt is not known; for one of them:"
    output.print(unknown if columns is None else f"{columns} token columns")
    output.print(
        f"Capture of one image holds {held['default'] / 1e6:.1f} MB, however many steps; with "
        f"every head and step of 50 steps {held['all_of_50_steps'] / 1e6:,.0f} MB."
    )
    for lack in lacks:
        output.print(f"- {lack}")
    layers = []
    for layer in found:
        entry = LayerEntry(layer.place, layer.level, layer.heads, layer.grid(latent))
        layers.append({"name": layer.name, "kind": layer.kind, **entry.to_json()})
    output.answer(
        {
            "model": model,
            "pipeline": kind,
            "device": device,
            "dtype": str(dtype).removeprefix("torch."),
            "scheduler": scheduler,
            "loading": how.to_json() if how else {},
            "layers": layers,
            "tokenizers": parts,
            "token_columns": columns,
            "bytes_held": held,
            "shortcomings": lacks,
        }
    )


def _not_fetched(output: Output, model: str, loading: Given) -> "HubModel | None":
    """Return a model of the hub with its settings, or None for a model that is on this machine."""
    from ..loading.hub import HubModel, named_on_hub
    from ..loading.locating import find_model
    from ..loading.options import LoadingOptions
    from ..loading.quiet import quiet_libraries
    from ..loading.repository import HubName

    name = HubName.read(model, loading.get("revision")) if find_model(model) is None else None
    if name is None:
        return None
    output.note(f"asking the hub about {name} …")
    options = LoadingOptions(**{key: value for key, value in loading.items() if key != "dtype"})
    options.check_files(model)
    quiet_libraries(downloads=not (output.quiet or output.as_json))
    with named_on_hub(name):
        found = HubModel.find(name, options, settings=True)
    return found if found.missing or found.repository.refused else None


def _print_download(output: Output, model: "HubModel", pipe: "Pipeline") -> None:
    """Print what is to be fetched, on which terms, and the memory that the weights take."""
    from torch import nn

    repository = model.repository
    told: dict[str, Any] = {}
    if repository.refused is None:
        size = repository.size(model.missing)
        terms = _license(repository.card)
        access = "after its terms are accepted" if repository.gated else "for everybody"
        output.print(
            f"{repository.name} on the hub: {len(model.missing)} of {len(repository.files)} files "
            f"to fetch, {size_text(size)}; license {terms}, {access}"
        )
        told = {"files": len(model.missing), "bytes": size, "license": terms}
        told["gated"] = bool(repository.gated)
    weights = 0
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            weights += sum(weight.numel() for weight in part.parameters())
    output.print(
        f"its {weights / 1e6:,.0f} million weights take {size_text(4 * weights)} in float32, and "
        f"{size_text(2 * weights)} in a half type"
    )
    told["weights"] = weights
    output.answer({"model": str(repository.name), "hub": told})


def _license(card: Mapping[str, Any]) -> str:
    """Return what a card says of the license; of one that the hub does not know, its own name."""
    told = card.get("license") or "not told"
    told = card.get("license_name") or told if told == "other" else told
    return ", ".join(map(str, told)) if isinstance(told, list) else str(told)


def _print_layers(output: Output, layers: "list[AttentionLayer]", latent: tuple[int, int]) -> None:
    """Print one line per layer below its place, so that names stay whole, to be copied."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("layer", overflow="fold")
    for name in ("kind", "grid", "heads"):
        table.add_column(name)
    for place, in_place in groupby(layers, key=lambda layer: layer.place):
        table.add_row(place, style="bold cyan")
        for layer in in_place:
            rows, cols = layer.grid(latent)
            table.add_row(layer.name, layer.kind, f"{rows}x{cols}", str(layer.heads))
    output.print(table)


def _held(layers: "list[AttentionLayer]", latent: tuple[int, int], columns: int) -> dict[str, int]:
    """Return the bytes that a capture of one image holds."""
    from ..keep.keep import Keep
    from ..models.layers import TEXT_KINDS

    texts = [layer for layer in layers if layer.kind in TEXT_KINDS]
    full = Keep.of(steps="all", heads="all").nbytes(texts, latent, columns, passes=50)
    return {"default": Keep.of().nbytes(texts, latent, columns), "all_of_50_steps": full}


def shortcomings(pipe: "Pipeline") -> list[str]:
    """Return the features of sdattn that do not work with a pipeline, one line each."""
    from ..models.denoiser import find_denoiser
    from ..models.families import edits_of
    from ..models.guidance import guided_order
    from ..models.reading import read_prompts

    kinds = Counter[str](layer.kind for layer in find_denoiser(pipe).layers)
    found = []
    for kind, why in _UNSEEN.items():
        if kinds[kind]:
            found.append(f"{kinds[kind]} {kind} attention layers cannot be captured: {why}.")
    if kinds["joint"]:
        found.append("joint attention: the text's columns are captured, not the image's own.")
    for check in (guided_order, lambda pipe: read_prompts(pipe, "a")):
        try:
            check(pipe)
        except (TypeError, ValueError) as error:
            found.append(str(error))
    try:
        edits_of(pipe)
    except TypeError as error:
        found.append(f"sdattn edit: {error}")
    return found


def _columns(pipe: "Pipeline") -> int | None:
    """Return the number of token columns for a prompt, or None if not known."""
    from ..models.demos import demo_settings
    from ..models.reading import read_prompts

    try:
        return len(read_prompts(pipe, "a", **demo_settings(pipe))[0].tokens)
    except SdattnError:
        return None
