"""Every argument of the public functions of sdattn.edit and control, with values of other types."""

import inspect
from functools import cache

import pytest
import torch
from helpers.edit_rows import SOURCE, TARGET
from helpers.tiny_pipelines import small_pipeline
from helpers.wrong_values import wrong
from PIL import Image

import sdattn
from sdattn import edit

FAST = {"num_inference_steps": 2, "height": 32, "width": 32}
BOX = (0.0, 0.0, 0.5, 0.5)
IMAGE = Image.new("RGB", (32, 32))


@cache
def pipe():
    return small_pipeline()


@cache
def read(*texts):
    return sdattn.read_prompts(pipe(), list(texts))


@cache
def store():
    """Of a run of two images, whose finest maps have 4x4 cells."""
    filled = sdattn.AttentionStore(pipeline=pipe())
    with filled.attached(pipe()):
        pipe().unet.set_attn_processor(sdattn.TorchAttnProcessor(filled))
        pipe()([SOURCE, TARGET], **FAST, output_type="latent")
    return filled


STORE = {
    "pipeline": "optional",
    "guidance": "optional",
    "max_queries": "count",
    "kinds": "optional",
    "keep_steps": "truth",
    "save_global_store": "optional truth",
}
CONTROL = {
    "prompts": "nothing",
    "num_steps": "count",
    "cross_replace_steps": "parts by word",
    "self_replace_steps": "nothing",
    "local_blend": "optional",
    "max_self_queries": "count",
    **STORE,
}
# By function: a call that is taken, and what each argument takes.
TABLE = {
    edit.edit: (
        lambda: {"pipe": pipe(), "source": SOURCE, "target": TARGET, **FAST},
        {
            "pipe": "nothing",
            "source": "text",
            "target": "text",
            "seed": "seed",
            "mode": "nothing",
            "cross_replace_steps": "parts by word",
            "self_replace_steps": "optional",
            "blend": "words",
            "weights": "weights",
            "max_self_queries": "optional count",
            "inversion": "optional",
            "preset": "nothing",
            "refine": "optional",
            "max_bytes": "optional count",
        },
    ),
    edit.AttentionReplace: (lambda: {"prompts": read(SOURCE, TARGET), "num_steps": 3}, CONTROL),
    edit.AttentionRefine: (lambda: {"prompts": read(SOURCE, TARGET), "num_steps": 3}, CONTROL),
    edit.AttentionReweight: (
        lambda: {"prompts": read(SOURCE, SOURCE), "num_steps": 3},
        {**CONTROL, "weights": "weights", "controller": "optional"},
    ),
    edit.LocalBlend: (
        lambda: {"prompts": read(SOURCE, TARGET), "words": ["cat", "dog"], "num_steps": 3},
        {
            "prompts": "nothing",
            "words": "nothing",
            "num_steps": "count",
            "subtract": "optional",
            "start": "nothing",
            "threshold": "nothing",
            "grid": "optional",
        },
    ),
    edit.register_attention_control: (
        lambda: {"target": pipe(), "controller": edit.EmptyControl()},
        {"target": "nothing", "controller": "optional", "layers": "optional count"},
    ),
    edit.step_end: (lambda: {"controller": edit.EmptyControl()}, {"controller": "nothing"}),
    edit.invert: (
        lambda: {
            "pipe": pipe(),
            "image": IMAGE,
            "prompt": SOURCE,
            "num_inference_steps": 2,
            "null_text": False,
        },
        {
            "pipe": "nothing",
            "image": "nothing",
            "prompt": "text",
            "num_inference_steps": "count",
            "guidance_scale": "number",
            "null_text": "optional truth",
            "inner_steps": "count",
            "learning_rate": "positive",
            "refinements": "optional count",
        },
    ),
    edit.psnr: (
        lambda: {"image": IMAGE, "other": IMAGE},
        {"image": "nothing", "other": "nothing"},
    ),
    edit.inside: (lambda: {"word": "cat", "box": BOX}, {"word": "text", "box": "nothing"}),
    edit.boxdiff: (
        lambda: {"word": "cat", "box": BOX},
        {"word": "text", "box": "nothing", "part": "nothing"},
    ),
    edit.apart: (
        lambda: {"word": "cat", "other": "dog"},
        {"word": "text", "other": "text"},
    ),
    edit.share_inside: (
        lambda: {"values": torch.ones(2, 2), "box": BOX},
        {"values": "map", "box": "nothing"},
    ),
    sdattn.knockout: (
        lambda: {"pipe": pipe(), "prompt": SOURCE, "word": "cat", **FAST},
        {
            "pipe": "nothing",
            "prompt": "nothing",  # the word is not in another text
            "word": "nothing",
            "seed": "seed",
            "layers": "optional count",
            "steps": "nothing",
            "queries": "optional",
        },
    ),
    sdattn.AttentionStore: (dict, STORE),
    sdattn.aggregate_attention: (
        lambda: {
            "store": store(),
            "res": 4,
            "from_where": ["down", "up"],
            "is_cross": True,
            "select": 0,
        },
        {
            "store": "nothing",
            "res": "nothing",
            "from_where": "nothing",
            "is_cross": "truth",
            "select": "index",
            "prompts": "one",  # or a list of one
        },
    ),
}
ROWS = [(function, name) for function, (_, taken) in TABLE.items() for name in taken]
NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@pytest.mark.parametrize(
    ("function", "name"), ROWS, ids=lambda value: getattr(value, "__name__", value)
)
def test_another_type_is_refused_before_anything_is_drawn(function, name):
    given, taken = TABLE[function]
    given()  # the run of a store is none of what follows
    ran = []
    hook = pipe().unet.register_forward_pre_hook(lambda *_: ran.append(name))
    try:
        for written, value in wrong(taken[name]).items():
            try:
                function(**{**given(), name: value})
            except sdattn.SdattnError as error:
                told = str(error)
            except Exception as error:
                pytest.fail(f"{name}={written}: {type(error).__name__}: {error}")
            else:
                pytest.fail(f"{name}={written} was taken")
            assert told and not ran, f"{name}={written}: {told}"
    finally:
        hook.remove()


def test_the_table_has_every_argument_of_every_public_function():
    # excite() takes words alone, EmptyControl nothing; guide()'s are in test_guiding.py,
    # guide_missing()'s are its own and guide()'s.
    elsewhere = {"AttentionControlEdit", "ControlHandle", "EditRun", "EmptyControl", "Inversion"}
    elsewhere |= {"excite", "guide", "guide_missing"}
    functions = {getattr(edit, name) for name in set(edit.__all__) - elsewhere}
    functions |= {sdattn.knockout, sdattn.AttentionStore, sdattn.aggregate_attention}
    assert functions == set(TABLE)
    for function, (_, taken) in TABLE.items():
        own = inspect.signature(function).parameters.values()
        assert {one.name for one in own if one.kind in NAMED} <= set(taken)


@pytest.mark.parametrize("words", [["cat", 3], [None, "dog"], [["cat"], [None]], [b"cat", "dog"]])
@pytest.mark.parametrize("name", ["words", "subtract"])
def test_words_to_blend_are_words(name, words):
    with pytest.raises(ValueError, match=f"`{name}=.*the words of each of the 2 prompts"):
        edit.LocalBlend(read(SOURCE, TARGET), **{"words": ["cat", "dog"], name: words}, num_steps=3)


@pytest.mark.parametrize("words", [(), ("cat", 3), (None,), (["cat"],)])
def test_excite_takes_words_alone(words):
    with pytest.raises(TypeError, match="words of the prompt"):
        edit.excite(*words)


@pytest.mark.parametrize("factor", ["2", None, [2.0], float("nan"), float("inf"), True])
def test_a_weight_that_is_no_finite_number_is_named(factor):
    with pytest.raises(ValueError, match="'cat'.*finite number"):
        edit.AttentionReweight(read(SOURCE, SOURCE), 3, weights={"cat": factor})


def test_numbers_of_numpy_and_torch_are_numbers():
    weights = {"cat": torch.tensor(2.5), "red": torch.ones(1).numpy()[0]}
    control = edit.AttentionReweight(
        read(SOURCE, SOURCE), torch.tensor(3), weights=weights, max_self_queries=torch.tensor(16)
    )
    assert control.num_steps == 3 and control.max_self_queries == 16
    assert sorted(set(control.equalizer[0].tolist())) == [1.0, 2.5]


def test_the_calls_of_the_table_are_taken():
    """Else every refusal could be of something else."""
    for function in (sdattn.aggregate_attention, sdattn.AttentionStore, edit.LocalBlend):
        function(**TABLE[function][0]())
    assert store().aggregate_attention(res=4).shape == (4, 4, 77)
    for wrong_res in (0, [], "4", torch.ones(2)):
        with pytest.raises(ValueError, match="`res="):
            store().aggregate_attention(res=wrong_res)
