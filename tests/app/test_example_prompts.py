"""What the live page proposes and opens with, without a page and gradio."""

import pytest
from helpers.tiny_pipelines import small_pipeline

from sdattn import generate
from sdattn.app import example_prompts
from sdattn.app.recent_runs import RecentRuns


@pytest.mark.parametrize(
    ("name", "drawn_by", "prompt"),
    [
        (None, "demo", "a cat left of a pizza"),
        ("demo", None, "a cat left of a pizza"),
        ("mmdit", None, "a red circle left of a blue square"),
    ],
)
def test_a_demo_draws_the_first_run_itself_and_for_others(
    request, monkeypatch, tmp_path, name, drawn_by, prompt
):
    pipe = small_pipeline() if name is None else request.getfixturevalue(name)
    drawing = []

    def drawn(model, *given, **options):
        drawing.append(model)
        return generate(model, *given, num_inference_steps=1, **options)

    loaded = {"demo": request.getfixturevalue("demo")} if drawn_by else {}
    monkeypatch.setattr(example_prompts, "generate", drawn)
    monkeypatch.setattr(example_prompts, "load_pipeline", lambda named, device: loaded[named])
    run = example_prompts.first_run(pipe, RecentRuns(tmp_path))
    assert drawing == [loaded[drawn_by] if drawn_by else pipe]
    first, seed = example_prompts.examples_of(drawing[0]).prompts[0]
    assert (run.settings.prompt, run.settings.seed) == (first, seed) and first == prompt
    assert run.title == f"An example, drawn by the demo: {first} (seed {seed})"
    assert run.page.is_file()


def test_any_other_model_has_examples_of_its_own():
    theirs = example_prompts.examples_of(small_pipeline())
    words = theirs.prompts[0][0].split()
    assert theirs.prompts[0][0] == "a cat on a sofa" and theirs.swap[0] in words
