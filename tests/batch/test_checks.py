"""Items against the pipeline that will draw them: what cannot be, and what runs together."""

import json

import pytest
from helpers.item_lines import pipeline
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_sdxl_pipeline
from helpers.transformer_rows import qwen_image
from helpers.unet_rows import animatediff

from sdattn.batch import checks as module
from sdattn.batch.checks import Checks, Job
from sdattn.batch.items import BadLine, item_of
from sdattn.models.reading import read_prompts


def items_of(*rows):
    rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    return [
        item_of({"id": f"{line:06d}", "seed": line - 1}, row, line)
        for line, row in enumerate(rows, 1)
    ]


def checked(checks, items):
    """The jobs, and the bad lines."""
    found = [*checks.check(items)]
    assert [getattr(one, "item", one).line for one in found] == [item.line for item in items]
    jobs = [one for one in found if isinstance(one, Job)]
    return jobs, [one for one in found if isinstance(one, BadLine)]


def test_a_set_of_options_is_checked_once_good_or_bad(monkeypatch):
    asked = []
    real = module.checked_options
    monkeypatch.setattr(
        module, "checked_options", lambda *args, **how: asked.append(1) or real(*args, **how)
    )
    good = [{"prompt": f"{n} cats", "width": 64} for n in range(20)]
    poor = [{"prompt": f"{n} dogs", "width": 63} for n in range(20)]
    jobs, bad = checked(Checks(pipeline(), {"height": 64}), items_of(*good, *poor))
    assert [one.item.line for one in jobs] == [*range(1, 21)]
    assert [one.line for one in bad] == [*range(21, 41)]
    assert len(asked) == 2
    assert len({id(one.options) for one in jobs}) == 1
    assert jobs[0].options == {"height": 64, "width": 64}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"width": 65}, "width=65`"),
        ({"guidance_scal": 3}, "no option 'guidance_scal'. Did you mean 'guidance_scale'?"),
        ({"num_inference_steps": 1001}, "pass 1 to 1000, the scheduler's most"),
        ({"candidates": 0}, "candidates=0`: pass a whole number from 1"),
        ({"candidates": 2, "decide_at": 2}, "decide_at=2`: pass a number from 0 to 1"),
        (
            {"candidates": 2, "decide_at": 0.07, "num_inference_steps": 7},
            "decide_at=0.07`: no step of this run's 7 has its middle in that part. Pass 0.072 or "
            "more.",
        ),
        (
            {"candidates": 2, "decide_at": 0.4, "num_inference_steps": 1},
            "decide_at=0.4`: no step of this run's 1 has",
        ),
        ({"candidates": 2, "decide_at": 0.009}, "Pass 0.01 or more"),  # of the pipeline's own 50
        ({"candidates": 2, "edit_to": "a red dog"}, "candidates is for an image, not an edit"),
        ({"negative_prompt": "dog", "guidance_scale": 1}, "`guidance_scale` above 1"),
        ({"words": ["<nothing>"]}, "'<nothing>' is not in the prompt. Its words are: a, red, cat"),
        ({"words": ["cat", "dog"]}, "'dog' is not in the prompt"),
        ({"prompt": f"{'a ' * 80} cat", "words": ["cat"]}, "'cat' is in the prompt but was cut"),
        ({"prompt": "a \x1b]0;mine\x07cat", "width": 65}, "width=65"),
    ],
)
def test_what_cannot_be_drawn_is_told_and_stops_no_other(row, reason):
    items = items_of("a dog", {"prompt": "a red cat", **row}, "red")
    jobs, [bad] = checked(Checks(pipeline(), {}), items)
    assert [one.item.line for one in jobs] == [1, 3]
    assert bad.line == 2
    assert reason in bad.reason
    assert bad.reason.isprintable() and bad.text.isprintable()


def test_a_negative_prompt_of_all_gives_way_to_an_items_own():
    rows = ["a cat", {"prompt": "a cat", "negative_prompt": "red"}]
    rows.append({"prompt": "a cat", "negative_prompt": ""})
    jobs, bad = checked(Checks(pipeline(), {"negative_prompt": "dog"}), items_of(*rows))
    assert bad == []
    assert [one.item.negative_prompt for one in jobs] == ["dog", "red", ""]
    assert all("negative_prompt" not in one.options for one in jobs)
    jobs, _ = checked(Checks(pipeline(), {}), items_of(*rows))
    assert [one.item.negative_prompt for one in jobs] == [None, "red", ""]
    assert jobs[0].shape != jobs[1].shape  # a list of negative prompts has one for each


def test_options_of_all_give_way_to_an_items_own():
    rows = ["a cat", {"prompt": "a cat", "width": 64}, {"prompt": "a dog", "width": 128}]
    jobs, _ = checked(Checks(pipeline(), {"width": 128, "height": 64}), items_of(*rows))
    assert [one.options["width"] for one in jobs] == [128, 64, 128]
    assert jobs[0].shape == jobs[2].shape != jobs[1].shape


def test_a_video_is_one_of_an_item():
    jobs, bad = checked(Checks(animatediff(), {"num_frames": 2}), items_of("a cat", "a dog"))
    assert (len(jobs), bad) == (2, [])
    jobs, bad = checked(Checks(animatediff(), {"num_videos_per_prompt": 2}), items_of("a cat"))
    assert jobs == []
    assert "makes 2 per item" in bad[0].reason


@pytest.mark.slow
def test_prompts_of_other_lengths_run_apart_where_a_batch_shares_its_columns():
    prompts = ("a cat", "dog and a red cat", "a dog", "cat and a red dog")
    jobs, bad = checked(Checks(qwen_image(), {"height": 64, "width": 64}), items_of(*prompts))
    assert bad == []
    shapes = [one.shape for one in jobs]
    assert shapes[0] == shapes[2] != shapes[1] == shapes[3]


# Words are checked without reading each text, with the same outcome

TEXTS = [
    *("a red cat", "a red-haired cat, a cat's toy", "Red, CAT!", "'cat' and \"dog\"", "cat-"),
    *("a_cat", "8k cat (red:1.3)", "red  cat", "a <cat> &amp; dog", "ein Bär", "猫 cat"),
    "cat\u200b",
    *("a " * 74 + "cat", "a " * 75 + "cat", "a " * 200 + "cat", "cat " * 100, "dog, " * 36 + "cat"),
]
PHRASES = ["cat", "CAT", "red cat", "red", "red-haired", "cat's toy", "ca", "dog", "<eos>"]
PHRASES += ["Bär", "猫", ","]


def outcome(check):
    try:
        check()
    except (KeyError, ValueError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("make", tiered([pipeline, make_sdxl_pipeline]))
def test_words_are_found_as_heatmaps_find_them(make):
    pipe = make()
    words = Checks(pipe, {}).words
    words.count(TEXTS)
    assert len(words.counts) >= 10
    for text in TEXTS:
        for phrase in PHRASES:
            ours = outcome(lambda: words.check(text, [phrase], {}))  # noqa: B023
            full = outcome(lambda: words.read(text, {}).find(phrase))  # noqa: B023
            assert ours == full, (text, phrase)


def test_an_added_token_is_read_in_full():
    pipe = make_sdxl_pipeline()
    pipe.tokenizer.add_tokens(["red cat"])
    words = Checks(pipe, {}).words
    words.count(["a red cat", "a dog"])
    assert [*words.counts] == ["a dog"]


def test_many_texts_take_one_call_of_the_tokenizer(monkeypatch):
    read = []
    monkeypatch.setattr(
        module,
        "read_prompts",
        lambda *args, **how: read.append(args[1]) or read_prompts(*args, **how),
    )
    checks = Checks(pipeline(), {})
    calls = []
    real = module._lengths
    monkeypatch.setattr(
        module, "_lengths", lambda t, texts: calls.append(len(texts)) or real(t, texts)
    )
    rows = [{"prompt": f"a red cat and {n} dogs", "words": ["cat", "dogs"]} for n in range(300)]
    before = len(read)
    jobs, bad = checked(checks, items_of(*rows, *rows))
    assert (len(jobs), bad) == (600, [])
    assert max(calls) == 300 and sum(calls) <= 302
    assert len(read) - before == 1  # how many tokens are seen
    jobs, _ = checked(checks, items_of({**rows[0], "width": 64}, {**rows[1], "guidance_scale": 3}))
    assert len(jobs) == 2 and len(read) - before == 1
    assert json.dumps(jobs[0].options)
