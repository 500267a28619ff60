"""The demo models inside this package, and what is recorded of each beside its weights.

demo_named("demo-mmdit")        by its name
LORAS["demo-lora"]              the file of a LoRA of the first, which teaches it a word
demo_of(pipe)                   the one that a pipeline is, None for any other
"""

import json
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .pipeline import Options, Pipeline

HOME = Path(__file__).parent
DEMO = HOME / "demo"
DEMO_LORA = HOME / "demo-lora" / "gold.safetensors"
LORAS = {"demo-lora": DEMO_LORA}  # of the first demo
TAUGHT = {"demo-lora": "gold"}  # the words that they teach
DEMOS = {"demo": DEMO, **{name: HOME / name for name in ("demo-mmdit", "demo-video")}}
RECORD = "demo.json"


@dataclass(frozen=True)
class Demo:
    """What is recorded of a demo model beside its weights, in ``demo.json``.

    Attributes:
        name: as :func:`sdattn.load_pipeline` takes it.
        settings: options of the pipeline's call which it is drawn with where nothing else is said.
        inversion: options of :func:`sdattn.edit.invert` for as many steps.
        words: the words of its training's prompts, by kind (colours, shapes, ...).
    """

    name: str
    settings: Options
    inversion: Options
    words: Mapping[str, list[str]]

    def unlearnt(self, words: Iterable[str], loras: Iterable[str] = ()) -> str:
        """Which of the words no image of its training was described with, so that what the model
        makes of them means nothing, and which words there are; "" if all are known. Punctuation
        is ignored, and so is case, since the tokenizer lowercases.

        Args:
            words: of a prompt.
            loras: the names of those that the model was loaded with, which may teach some.
        """
        taught = [TAUGHT[name] for name in loras if name in TAUGHT]
        known = {"", *taught, *(word for kind in self.words.values() for word in kind)}
        said = dict.fromkeys(words)
        strange = [word for word in said if word.strip(string.punctuation).lower() not in known]
        if not strange:
            return ""
        kinds = [*self.words.values(), *([taught] if taught else [])]
        learnt = "; ".join(", ".join(kind) for kind in kinds)
        return (
            f"The demo model never learnt {', '.join(map(repr, strange))}: what it draws for that, "
            f"and its heatmaps, mean nothing. It knows only: {learnt}."
        )


@cache
def demo_named(name: str) -> Demo | None:
    """The demo model of that name; None if there is none."""
    if name not in DEMOS:
        return None
    return Demo(name, **json.loads((DEMOS[name] / RECORD).read_text(encoding="utf-8")))


def demo_of(pipe: Pipeline) -> Demo | None:
    """The demo model inside this package that a pipeline is; None for any other."""
    name = folder_name(Path(str(getattr(pipe, "name_or_path", ""))))
    return demo_named(name) if name else None


def folder_name(folder: Path) -> str | None:
    """The name of the demo model that a folder is; None for any other."""
    return next((name for name, place in DEMOS.items() if place == folder), None)


def demo_settings(pipe: Pipeline) -> Options:
    """Options of the pipeline's call which a demo model is drawn with; empty for any other."""
    demo = demo_of(pipe)
    return demo.settings if demo else {}


def model_name(pipe: Pipeline) -> str:
    """How a run's record names a model: a demo by its name, any other by its folder or hub id."""
    demo = demo_of(pipe)
    names = ("name_or_path", "_pretrained_model_name_or_path")  # the other of modular pipelines
    held = next((name for name in names if getattr(pipe, name, None)), names[0])
    return demo.name if demo else str(getattr(pipe, held, ""))
