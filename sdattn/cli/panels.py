"""The panels of a command's help, in their order. An option that is in none is the command's own
and comes first."""

from typing import Any

PANELS = {
    "Image": (
        *("seed", "num_inference_steps", "guidance_scale", "negative_prompt", "width", "height"),
        "num_frames",
    ),
    "Heatmaps": ("preset", "refine", "ask", "causal", "keep", "negative_maps"),
    "Output": ("folder", "force", "json_", "quiet"),
    "Model": ("model", "device", "dtype", "lora", "scheduler"),
    "Advanced": (
        *("set_", "max_bytes", "variant", "revision", "quantization", "offload", "tokenizer"),
        *("config", "config_file", "help"),
    ),
}
_PLACES = {name: panel for panel, names in PANELS.items() for name in names}


def put_in_panels(params: list[Any]) -> list[Any]:
    """Return a command's parameters in the order of the panels, each option in its own."""
    for param in params:
        if param.param_type_name == "option":
            param.rich_help_panel = _PLACES.get(param.name)
    order = [None, *PANELS]
    return sorted(params, key=lambda param: order.index(_PLACES.get(param.name)))
