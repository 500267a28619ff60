"""guide_missing(): what did not arrive is drawn again by guidance, and the better image stays."""

import pytest
from helpers.refusals import refused_unrun
from helpers.tiny_pipelines import small_pipeline

from sdattn import generate
from sdattn.edit import excite, guide, guide_missing, missing

PROMPT = "a red cat and a dog"
FAST = {"num_inference_steps": 4, "height": 64, "width": 64}
ARRIVAL = "sdattn.maps.arrival.WEAK"


@pytest.fixture(scope="module")
def pipe():
    return small_pipeline()


@pytest.fixture
def guided(monkeypatch):
    """The losses' words and the runs of guide(), as guide_missing() called it."""
    told = []

    def noted(*words):
        told.append(words)
        return excite(*words)

    def run(*args, **options):
        told.append(guide(*args, **options))
        return told[-1]

    monkeypatch.setattr(missing, "excite", noted)
    monkeypatch.setattr(missing, "guide", run)
    return told


def test_only_the_missing_words_are_excited_from_the_same_noise(pipe, guided, monkeypatch):
    monkeypatch.setattr(ARRIVAL, 1e9)  # all words are weak
    plain = generate(pipe, PROMPT, seed=3, **FAST)
    run = guide_missing(pipe, PROMPT, seed=3, guiding={"scale": 0.2}, steps=(0.3, 1.0), **FAST)
    words, other = guided
    assert sorted(words) == ["cat", "dog"]
    assert other.seeds == [3] and other.image.tobytes() != plain.image.tobytes()
    scores = [one.heatmaps[0].score() for one in (plain, other)]
    best = other if scores[1] > scores[0] else plain
    assert run.image.tobytes() == best.image.tobytes()
    assert run.heatmaps[0].score() == max(scores)


def test_the_plain_image_stays_if_guidance_does_not_help(pipe, guided, monkeypatch):
    monkeypatch.setattr(ARRIVAL, 1e9)
    run = guide_missing(pipe, PROMPT, seed=None, guiding={"scale": 0}, **FAST)
    assert len(guided) == 2 and run is not guided[1]
    assert run.seeds == guided[1].seeds
    assert run.image.tobytes() == guided[1].image.tobytes()  # the same, so not better


def test_nothing_is_guided_if_all_words_arrived(pipe, guided, monkeypatch):
    monkeypatch.setattr(ARRIVAL, 0.0)
    run = guide_missing(pipe, PROMPT, ["red", "cat"], seed=3, **FAST)
    assert guided == []
    assert run.image.tobytes() == generate(pipe, PROMPT, seed=3, **FAST).image.tobytes()


def test_several_prompts_are_refused(pipe):
    with refused_unrun(pipe, "one image of one text.*list", TypeError):
        guide_missing(pipe, [PROMPT], **FAST)
