"""Which files of a folder are read, by their names, as diffusers chooses them."""

import pytest
from diffusers.pipelines.pipeline_loading_utils import variant_compatible_siblings

from sdattn.loading.weights import choose_files

MODEL = "diffusion_pytorch_model"
PARTS = {"unet": "weights", "text_encoder": "weights", "scheduler": "all", "tokenizer": "all"}
SETTINGS = ("model_index.json", "unet/config.json", "text_encoder/config.json")
SETTINGS += ("scheduler/scheduler_config.json", "tokenizer/merges.txt", "tokenizer/a.tiktoken")
PLAIN = (f"unet/{MODEL}.safetensors", "text_encoder/model.safetensors")
HALF = (f"unet/{MODEL}.fp16.safetensors", "text_encoder/model.fp16.safetensors")
SHARDS = tuple(f"text_encoder/model-0000{n}-of-00002.safetensors" for n in (1, 2))
SHARDS += ("text_encoder/model.safetensors.index.json",)
HALF_SHARDS = tuple(f"text_encoder/model.fp16-0000{n}-of-00002.safetensors" for n in (1, 2))
HALF_SHARDS += ("text_encoder/model.safetensors.index.fp16.json",)
OLD_SHARDS = tuple(f"text_encoder/model-0000{n}-of-00002.fp16.safetensors" for n in (1, 2))
OLD_SHARDS += ("text_encoder/model.safetensors.fp16.index.json",)
NOT_READ = (
    "README.md",
    "a.png",
    "stray.safetensors",
    "unet/notes.py",
    "tokenizer/notes.py",
    "unet/a/b.json",
)
NOT_READ += (f"unet/{MODEL}.bin", "text_encoder/openvino.safetensors", "text_encoder/model.onnx")
NOT_READ += ("text_encoder/pytorch_model.bin.index.json", "vae/config.json")


def chosen(names, variant=None):
    return choose_files(names, PARTS, variant, "folder")


FOLDERS = {
    "plain": (PLAIN, None),
    "both": (PLAIN + HALF, None),
    "a variant of both": (PLAIN + HALF, "fp16"),
    "shards": (PLAIN[:1] + SHARDS, None),
    "shards of a variant": (PLAIN + HALF[:1] + SHARDS + HALF_SHARDS, "fp16"),
    "old shards of a variant": (PLAIN + HALF[:1] + OLD_SHARDS, "fp16"),
    "a variant that one part lacks": (PLAIN + HALF[:1], "fp16"),
    "a name with an underscore": ((*PLAIN, f"unet/{MODEL}.non_ema.safetensors"), "non_ema"),
    "a name with a hyphen": ((*PLAIN, f"unet/{MODEL}.my-run.safetensors"), "my-run"),
    "shards next to a whole file": (PLAIN + SHARDS, None),
    "shards next to a whole file of a variant": (PLAIN + HALF + HALF_SHARDS, "fp16"),
}


@pytest.mark.parametrize("which", FOLDERS)
def test_weights_are_those_that_diffusers_would_fetch(which):
    weights, variant = FOLDERS[which]
    names = {*SETTINGS, *weights, *NOT_READ}
    files = chosen(names, variant)
    ignored = ["*.bin", "*.onnx"]
    expected, _ = variant_compatible_siblings(names, variant, ignored)
    of_parts = {n for n in expected if n.split("/")[0] in PARTS and ".bin" not in n}
    assert set(files.weights) == of_parts
    assert sorted(files.settings) == sorted(SETTINGS)
    assert (files.variant, files.chosen) == (variant, False)


@pytest.mark.parametrize("left", ["model-00001-of-00003", "model-00004-of-00007", "other"])
def test_what_an_earlier_save_left_next_to_whole_weights_is_not_read(left):
    """from_pretrained reads the shards that the list names."""
    files = chosen([*SETTINGS, PLAIN[0], *SHARDS, f"text_encoder/{left}.safetensors"])
    assert set(files.weights) == {PLAIN[0], *SHARDS}


def test_a_list_of_shards_may_name_them_as_it_likes():
    names = ["unet/part-00001-of-00002.safetensors", "unet/second.safetensors"]
    names += [f"unet/{MODEL}.safetensors.index.json"]
    assert set(chosen([*SETTINGS, *names, PLAIN[1]]).weights) == {*names, PLAIN[1]}


@pytest.mark.parametrize(
    ("weights", "variant"),
    [
        (HALF, "fp16"),
        (HALF[:1] + HALF_SHARDS, "fp16"),
        (HALF[:1] + PLAIN[1:], "fp16"),
        ((f"unet/{MODEL}.bf16.safetensors", "text_encoder/model.bf16.safetensors"), "bf16"),
    ],
)
def test_a_variant_that_is_all_there_is_is_chosen_and_said(weights, variant):
    files = chosen([*SETTINGS, *weights])
    assert set(files.weights) == set(weights)
    assert (files.variant, files.chosen) == (variant, True)


def test_of_two_variants_of_all_parts_fp16_is_chosen():
    others = (f"unet/{MODEL}.bf16.safetensors", "text_encoder/model.bf16.safetensors")
    files = chosen([*SETTINGS, *HALF, *others])
    assert (set(files.weights), files.variant) == (set(HALF), "fp16")


@pytest.mark.parametrize(
    ("weights", "variant", "message"),
    [
        (PLAIN[:1], None, "folder/text_encoder has no weights that diffusers reads"),
        ((f"unet/{MODEL}.bin", *PLAIN[1:]), None, "folder/unet holds its weights as .*Pickles"),
        (PLAIN, "fp16", "no part of folder has files of it. Leave it out"),
        (PLAIN + HALF, "bf16", "no part of folder has files of it. It has fp16"),
        (PLAIN[:1] + SHARDS[1:], None, "folder/text_encoder has 1 of the 2 files of its weights"),
        (
            (f"unet/{MODEL}.bf16.safetensors", *HALF[1:]),
            None,
            "folder/unet only as bf16; folder/text_encoder only as fp16",
        ),
        (
            (f"unet/{MODEL}.bf16.safetensors", *PLAIN[1:], *HALF[1:]),
            "fp16",
            "folder/unet has no files of it, and no plain ones. It has bf16",
        ),
    ],
)
def test_weights_that_are_not_there_are_named(weights, variant, message):
    with pytest.raises(ValueError, match=message):
        chosen([*SETTINGS, *weights], variant)


def test_of_a_model_that_is_given_the_settings_alone_are_read():
    files = choose_files([*SETTINGS, *PLAIN], {**PARTS, "unet": "settings"}, None, "folder")
    assert files.weights == [PLAIN[1]]
    assert "unet/config.json" in files.settings
