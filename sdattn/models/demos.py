"""Demo models inside this package, and the facts recorded next to their weights.

    demo_named("demo-mmdit")        demo model by name
    demo_of(pipe)                   demo model of a pipeline, or None

Each demo is a folder of weights, with its facts in ``demo.json``.
"""

import json
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from ..files.terminal import counted
from .pipeline import Options, Pipeline

HOME = Path(__file__).parent
DEMO = HOME / "demo"
DEMOS = {"demo": DEMO, **{name: HOME / name for name in ("demo-mmdit", "demo-video")}}
RECORD = "demo.json"
_MOST_NAMED = 5  # unknown words in a message


@dataclass(frozen=True)
class Demo:
    """Facts about a demo model, from ``demo.json`` next to its weights.

    Attributes:
        name: name as :func:`sdattn.load_pipeline` takes it.
        settings: defaults for the pipeline's call.
        inversion: options of :func:`sdattn.edit.invert` for the same number of steps.
        words: words of its training prompts, by kind (colours, shapes, ...).
    """

    name: str
    settings: Options
    inversion: Options
    words: Mapping[str, list[str]]

    def things(self) -> list[str]:
        """Return the words for what it can draw, each once: things, colours and backgrounds."""
        found = dict[str, None]()
        for kind, words in self.words.items():
            if kind != "further":
                found |= dict.fromkeys(words)
        return list(found)

    def strange(self, words: Iterable[str]) -> list[str]:
        """Return the words, each once, that the model never learnt."""
        known = {""}.union(*self.words.values())
        said = dict.fromkeys(words)
        return [word for word in said if word.strip(string.punctuation).lower() not in known]

    def unlearnt(self, words: Iterable[str]) -> str:
        """Return a message that names the words the model never learnt, so that their maps mean
        nothing, with those that it knows which are spelled alike, or its first three; "" if all are
        known. Ignores punctuation and case, as the tokenizer lowercases.
        """
        strange = self.strange(words)
        if not strange:
            return ""
        things = self.things()
        near = dict[str, None]()
        for word in strange[:_MOST_NAMED]:
            near |= dict.fromkeys(get_close_matches(word.lower(), things))
        more = len(strange) - _MOST_NAMED
        named = ", ".join(map(repr, strange[:_MOST_NAMED]))
        named += f" and {counted(more, 'more word')}" if more > 0 else ""
        advice = (
            f"Spelled like it: {', '.join(near)}."
            if near
            else f"It knows {', '.join(things[:3])} …"
        )
        return (
            f"The demo model never learnt {named}: what it draws for that, and its heatmaps, mean "
            f"nothing. {advice}"
        )

    def learnt(self) -> str:
        """Return all words that it knows, as text."""
        return "; ".join(", ".join(kind) for kind in self.words.values())


@cache
def demo_named(name: str) -> Demo | None:
    """Return the demo model of that name, or None."""
    if name not in DEMOS:
        return None
    return Demo(name, **json.loads((DEMOS[name] / RECORD).read_text(encoding="utf-8")))


def demo_of(pipe: Pipeline) -> Demo | None:
    """Return the demo model that a pipeline was loaded from, or None for any other."""
    name = folder_name(Path(str(getattr(pipe, "name_or_path", ""))))
    return demo_named(name) if name else None


def folder_name(folder: Path) -> str | None:
    """Return the name of the demo model in a folder, or None for any other folder."""
    return next((name for name, place in DEMOS.items() if place == folder), None)


def demo_settings(pipe: Pipeline) -> Options:
    """Return a demo model's defaults for the pipeline's call; empty for any other model."""
    demo = demo_of(pipe)
    return demo.settings if demo else {}


def model_name(pipe: Pipeline) -> str:
    """Return the model's name for a run's record: a demo's name, else the folder or hub id."""
    demo = demo_of(pipe)
    names = ("name_or_path", "_pretrained_model_name_or_path")  # the other of modular pipelines
    held = next((name for name in names if getattr(pipe, name, None)), names[0])
    return demo.name if demo else str(getattr(pipe, held, ""))
