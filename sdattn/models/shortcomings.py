"""Features of sdattn that do not work with a pipeline."""

from collections import Counter

from .denoiser import find_denoiser
from .families import edits_of
from .guidance import guided_order
from .pipeline import Pipeline
from .reading import read_prompts

UNSEEN = {
    "linear": "they have no softmax",
    "temporal": "they look at frames, not at the text",
    "text": "they are of the text alone",
    "audio": "their queries or keys are a video's sound",
}


def shortcomings(pipe: Pipeline) -> list[str]:
    """Return the features of sdattn that do not work with a pipeline, one line each."""
    kinds = Counter[str](layer.kind for layer in find_denoiser(pipe).layers)
    found = [
        f"{kinds[kind]} {kind} attention layers cannot be captured: {why}."
        for kind, why in UNSEEN.items()
        if kinds[kind]
    ]
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
