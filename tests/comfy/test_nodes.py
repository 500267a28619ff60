"""The nodes of integrations/comfyui, in the order of their workflow, on a double of ComfyUI."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import comfy_double as comfy
from helpers.tiny_tokenizers import tiny_t5, tiny_tokenizer

from integrations.comfyui import NODE_CLASS_MAPPINGS
from sdattn import CaptureError
from sdattn.comfy import MapRecorder

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "integrations" / "comfyui"
LATENT, PIXELS = (10, 14), (80, 112)
Watch, Draw, Mask = NODE_CLASS_MAPPINGS.values()
END = "<|endoftext|>"
CLIPS = {
    "unet": comfy.Clip(l=(tiny_tokenizer(), 77, END), g=(tiny_tokenizer(), 77, "!")),
    "flux": comfy.Clip(l=(tiny_tokenizer(), 77, END), t5xxl=(tiny_t5(), 40, "<pad>")),
}
PROMPT = "a red-haired cat, on the sofa"


def workflow(layout, columns, images=2):
    """Run the double behind the first node; return the attention and the decoded images."""
    model = comfy.UNet() if layout == "unet" else comfy.Flux()
    height, width = (0, 0) if layout == "unet" else PIXELS
    patched, recorder = Watch().watch(comfy.Patcher(model), width, height)
    conds = [comfy.Cond(0, comfy.states(1, columns)), comfy.Cond(1, comfy.states(2, columns))]
    comfy.sample(patched, comfy.latents(*LATENT, images=images), conds)
    shape = images, *PIXELS, 3
    return recorder, torch.rand(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("layout", "columns"), [("unet", 77), ("flux", 40)])
def test_words_are_drawn_over_the_images_and_masked(layout, columns):
    recorder, image = workflow(layout, columns)
    clip = CLIPS[layout]
    (drawn,) = Draw().draw(recorder, clip, PROMPT, image, "cat, red-haired, the sofa")
    assert drawn.shape[0] == 6 and drawn.shape[2] % PIXELS[1] == 0 and drawn.shape[3] == 3
    assert drawn.dtype == torch.float32 and 0 <= drawn.min() < drawn.max() <= 1
    (masks,) = Mask().mask(recorder, clip, PROMPT, image, "cat", 0.5)
    names = "l" if layout == "unet" else "t5xxl"
    ids = [token[0] for chunk in clip.tokenize(PROMPT)[names] for token in chunk]
    maps = recorder.heatmaps(ids, clip.tokenizer.parts[names].tokenizer)
    assert masks.shape == (2, *PIXELS)
    for mask, heatmaps in zip(masks, maps, strict=True):
        assert torch.equal(mask, heatmaps["cat"].mask(PIXELS, 0.5).float())
        assert 0 < mask.mean() < 1


def test_every_word_is_drawn_if_none_is_named():
    recorder, image = workflow("unet", 77, images=1)
    (drawn,) = Draw().draw(recorder, CLIPS["unet"], PROMPT, image, " ")
    assert len(drawn) == len(["a", "red-haired", "cat", ",", "on", "the", "sofa"])


def test_a_long_prompt_is_read_chunk_by_chunk():
    recorder, image = workflow("unet", 154, images=1)
    prompt = " ".join(["on"] * 40 + ["cat"])  # "on" has two tokens here
    (masks,) = Mask().mask(recorder, CLIPS["unet"], prompt, image, "cat", 0.5)
    labels = recorder.heatmaps({"cat": [77 + 1 + (40 - 37) * 2]})[0]
    assert torch.equal(masks[0], labels["cat"].mask(PIXELS, 0.5).float())


def test_the_first_node_changes_a_clone_only_and_keeps_an_override():
    patcher = comfy.Patcher(comfy.UNet())
    earlier = MapRecorder()
    patcher.model_options["transformer_options"]["optimized_attention_override"] = earlier
    patched, recorder = Watch().watch(patcher, 0, 0)
    held = patcher.model_options["transformer_options"]["optimized_attention_override"]
    assert held is earlier is recorder.override
    conds = [comfy.Cond(0, comfy.states(1, 7))]
    comfy.sample(patched, comfy.latents(*LATENT), conds)
    assert torch.equal(*(one.store().maps["middle.0.0"] for one in (earlier, recorder)))


def test_what_cannot_be_shown_is_said():
    recorder, image = workflow("unet", 77)
    read = recorder, CLIPS["unet"], PROMPT
    with pytest.raises(KeyError, match="zebra"):
        Draw().draw(*read, image, "zebra")
    with pytest.raises(ValueError, match=r"2 image\(s\), and 1"):
        Draw().draw(*read, image[:1], "cat")
    _, unused = Watch().watch(comfy.Patcher(comfy.UNet()), 0, 0)
    with pytest.raises(CaptureError, match="cross-attention call was seen"):
        Draw().draw(unused, CLIPS["unet"], PROMPT, image, "cat")


def test_the_workflow_names_the_nodes_and_their_inputs():
    steps = json.loads((FOLDER / "workflow.json").read_text(encoding="utf-8"))
    ours = {step["class_type"]: step for step in steps.values()}
    for name, node in NODE_CLASS_MAPPINGS.items():
        assert ours[name]["inputs"].keys() == node.INPUT_TYPES()["required"].keys()
        assert callable(getattr(node, node.FUNCTION)) and node.CATEGORY
    kinds = {"SdattnWatchAttention": Watch.RETURN_TYPES}
    for step in steps.values():
        for source in step["inputs"].values():
            if isinstance(source, list):
                number, output = source
                returned = kinds.get(steps[number]["class_type"])
                assert returned is None or output < len(returned)


@pytest.mark.weekly
def test_nothing_of_comfyui_is_imported():
    code = (
        "import sys, integrations.comfyui; "
        "print([m for m in sys.modules if m.split('.')[0] in ('comfy', 'nodes', 'folder_paths')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
