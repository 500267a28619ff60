"""Prompts that the live page proposes, and the run that it opens with. Needs no gradio."""

from dataclasses import replace
from typing import Any, NamedTuple

from ..loading.pipelines import load_pipeline
from ..models.demos import demo_of
from ..runs.generation import generate
from .recent_runs import RecentRun, RecentRuns


class Examples(NamedTuple):
    prompts: list[tuple[str, int]]  # with the seed of a good image
    swap: tuple[str, str]  # a word of the first prompt, and one for its place


_EXAMPLES = {
    "demo": Examples(
        [
            ("a cat left of a pizza", 3),
            ("a red umbrella above a dog on grass", 3),
            ("a blue car right of a tree in the snow", 1),
            ("an owl below a moon at night", 1),
            ("a penguin left of a cactus at the beach", 1),
            ("a rocket above a house at night", 3),
            ("a butterfly above a sunflower on a blue background", 2),
            ("a guitar right of a frog on grass", 1),
        ],
        ("cat", "dog"),
    ),
    "demo-mmdit": Examples(
        [
            ("a red circle left of a blue square", 0),
            ("on the left a green star, on the right a ring", 0),
        ],
        ("circle", "star"),
    ),
    "demo-video": Examples(
        [("a cat above a pizza", 0), ("a red car above a tree", 0)], ("cat", "dog")
    ),
}
_ANY_EXAMPLES = Examples(
    [("a cat on a sofa", 0), ("an astronaut riding a horse on the moon", 0)], ("cat", "dog")
)


def examples_of(pipe: Any) -> Examples:
    """Return the demo's own examples, or those for any other model."""
    demo = demo_of(pipe)
    return _EXAMPLES[demo.name] if demo else _ANY_EXAMPLES


def first_run(pipe: Any, kept: RecentRuns) -> RecentRun:
    """Return the run that the page opens with, always drawn by a demo: that takes seconds on any
    machine."""
    demo = pipe if demo_of(pipe) else load_pipeline("demo", device="cpu")
    prompt, seed = examples_of(demo).prompts[0]
    run = kept.write(generate(demo, prompt, seed=seed), "example")
    return replace(run, title=f"An example, drawn by the demo: {run.title}")
