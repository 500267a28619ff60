"""Options of other projects' stores, refused with an explanation."""

from collections.abc import Mapping, Sequence

from ..errors import InvalidTypeError

_TAKEN = "pipeline, guidance, max_queries, kinds, keep_steps, save_global_store"
_RESOLUTION = (
    "a resolution, attn_res in diffusers' Attend-and-Excite and SynGen. Choose one where maps are "
    "read, store.aggregate_attention(from_where, res=16), or keep larger maps with max_queries"
)
_LOW_RESOURCE = (
    "low_resource in forks of prompt-to-prompt: guidance='batch' for False, 'passes' for True"
)
_NAMES = dict.fromkeys(("low_resource", "LOW_RESOURCE"), _LOW_RESOURCE)
_NAMES |= dict.fromkeys(("attn_res", "res", "max_resolution"), _RESOLUTION)


def refuse_foreign_options(
    name: str, given: Sequence[object], others: Mapping[str, object]
) -> None:
    """Raise TypeError for positional or unknown arguments; name signatures that may be meant."""
    if given:
        raise InvalidTypeError(
            f"{name}({', '.join(map(repr, given))}): in first place this may be "
            f"{_meant(given[0])}. Pass options by name: {_TAKEN}."
        )
    for option, value in others.items():
        what = f"{_NAMES[option]}." if option in _NAMES else f"pass {_TAKEN}."
        raise InvalidTypeError(f"{name} has no option {option}={value!r}: {what}")


def _meant(value: object) -> str:
    if isinstance(value, bool):
        return f"save_global_store={value} of Attend-and-Excite; or {_LOW_RESOURCE}"
    if isinstance(value, (int, tuple, list)):
        return _RESOLUTION
    if isinstance(value, Mapping):
        return "the dictionary of Dataset-Diffusion's store, whose entries have no names here"
    if any(hasattr(value, part) for part in ("unet", "transformer", "forward")):
        return f"the model, pipeline={type(value).__name__}"
    return "an option"
