"""The nodes of integrations/comfyui in the order of a graph, on a double of a sampler's run."""

import pytest
import torch
from helpers import comfy_double as comfy
from helpers.tiny_tokenizers import tiny_tokenizer

from integrations.comfyui import NODE_CLASS_MAPPINGS
from integrations.comfyui.reading import Asked, heatmaps
from sdattn import CaptureError
from sdattn.errors import InvalidValueError

Watch, Heatmaps, Mask, Spot, Regions, SelfAttention = NODE_CLASS_MAPPINGS.values()
PROMPT = "a cat on the sofa"
LATENT = (8, 12)
PIXELS = (64, 96)
CLIP = comfy.Clip(l=comfy.Part(tiny_tokenizer(), 77))


def graph(images=1, texts=1, **settings):
    """Run a sampler behind Watch attention; return what the nodes that read are told."""
    model = comfy.Patcher(comfy.Base(comfy.UNetModel()))
    patched, attention = Watch().watch(model, **settings)
    positive = [[comfy.states(seed, 77), {}] for seed in range(texts)]
    comfy.Guider(patched, positive, [[comfy.states(9, 77), {}]]).sample(
        comfy.latents(*LATENT, images)
    )
    image = torch.rand(images, *PIXELS, 3, generator=torch.Generator().manual_seed(0))
    return {"attention": attention, "clip": CLIP, "image": image, "prompt": PROMPT}, positive


def test_heatmaps_in_a_grid_or_one_each():
    told, _ = graph(images=2)
    (grids,) = Heatmaps().draw(**told)
    (each,) = Heatmaps().draw(**told, words="cat, the sofa", layout="one each")
    assert len(grids) == 2 and len(each) == 4
    assert each.dtype == torch.float32 and 0 <= each.min() < each.max() <= 1


def test_heatmaps_of_every_step():
    told, _ = graph(steps="all steps", keep="every step")
    (drawn,) = Heatmaps().draw(**told, words="cat", layout="one each", steps="every step")
    assert len(drawn) == 3
    with pytest.raises(CaptureError, match="every step"):
        Heatmaps().draw(**graph()[0], steps="every step")


def test_heatmaps_of_every_head_or_of_one_of_a_step():
    told, _ = graph(steps="all steps", keep="every step", heads="every head")
    cat = {"words": "cat", "layout": "one each"}
    (heads,) = Heatmaps().draw(**told, **cat, heads="every head")
    (each,) = Heatmaps().draw(**told, **cat, heads="every head", steps="every step")
    (single,) = Heatmaps().draw(**told, **cat, head=1, step=2)
    assert len(heads) == comfy.HEADS and len(each) == 3 * comfy.HEADS
    assert torch.equal(single[0], each[2 * comfy.HEADS + 1])
    assert not torch.equal(heads[0], heads[1])
    with pytest.raises(InvalidValueError, match="2 heads"):
        Mask().mask(**told, word="cat", head=2)
    with pytest.raises(CaptureError, match="step 3"):
        Mask().mask(**told, word="cat", step=3)
    with pytest.raises(InvalidValueError, match="every one"):
        Heatmaps().draw(**told, heads="every head", head=0)
    with pytest.raises(CaptureError, match="every head"):
        Mask().mask(**graph()[0], word="cat", head=0)


def test_what_a_spot_attends_to_in_the_image():
    told, _ = graph(images=2, spread=True)
    of_image = {name: told[name] for name in ("attention", "image")}
    drawn, mask = SelfAttention().show(**of_image, x=81, y=10)
    assert drawn.shape == (2, *PIXELS, 3) and mask.shape == (2, *PIXELS)
    run = next(iter(told["attention"].runs.values()))
    text = next(text for text in run.conditionings.values() if text.name == "positive")
    (affinity,) = text.affinity.means().values()
    cell = affinity[:, 1 * LATENT[1] + 10]  # row 1, col 10 of cells of 8x8 pixels
    pooled = torch.nn.functional.avg_pool2d(mask, 8).flatten(1)
    for image in range(2):
        assert torch.corrcoef(torch.stack([cell[image], pooled[image]]))[0, 1] > 0.9
    with pytest.raises(InvalidValueError, match="outside the image"):
        SelfAttention().show(**of_image, x=0, y=64)
    with pytest.raises(CaptureError, match="spread"):
        SelfAttention().show(graph()[0]["attention"], 0, 0, image=told["image"][:1])


@pytest.mark.parametrize("method", ["share of range", "otsu", "top percent"])
def test_a_mask_grows_is_blurred_and_inverted(method):
    told, _ = graph()
    cut = {"word": "cat", "method": method, "level": 0.4}
    (mask,) = Mask().mask(**told, **cut)
    (grown,) = Mask().mask(**told, **cut, grow=2)
    (soft,) = Mask().mask(**told, **cut, blur=2.0)
    (other,) = Mask().mask(**told, **cut, invert=True)
    assert mask.shape == (1, *PIXELS) and set(mask.unique().tolist()) == {0.0, 1.0}
    assert (grown >= mask).all() and grown.sum() > mask.sum()
    assert ((soft > 0) & (soft < 1)).any()
    assert torch.equal(other, 1 - mask)


def test_words_of_a_spot_come_by_their_share():
    told, _ = graph()
    found = Spot().tell(**told, x=40, y=30, most=2)
    words, table = found["result"]
    assert len(words.split(", ")) == 2 and table.count("\n") == 1
    assert found["ui"] == {"text": [table]}  # which web/words_at_spot.js shows
    with pytest.raises(InvalidValueError, match="outside the image of 96x64"):
        Spot().tell(**told, x=96, y=0)


def test_masks_of_regions_do_not_overlap():
    told, _ = graph(images=2)
    *masks, rest, every = Regions().masks(**told, words="cat\nsofa, a", level=0.2)
    assert torch.equal(sum(masks) + rest, torch.ones(2, *PIXELS))
    assert every.shape == (6, *PIXELS) and not masks[3].any()
    with pytest.raises(InvalidValueError, match="1 to 6"):
        Regions().masks(**told, words="")


def test_of_several_texts_the_connected_one_is_meant():
    told, positive = graph(texts=2)
    with pytest.raises(CaptureError, match="Connect the conditioning"):
        Mask().mask(**told, word="cat")
    masks = [Mask().mask(**told, word="cat", conditioning=[one])[0] for one in positive]
    assert not torch.equal(*masks)
    (negative,) = Mask().mask(**told, word="cat", side="negative")
    assert negative.any()


def test_what_the_sampler_got_tells_concatenated_prompts_from_one_with_a_line_of_dashes():
    """Both have two chunks of 77 columns."""
    parts = " ".join(["cat"] * 50), " ".join(["a"] * 40)
    both = "\n---\n".join(parts)
    found = []
    for texts in (parts, (both,)):
        encoded = [CLIP.encode_from_tokens(CLIP.tokenize(text)) for text in texts]
        patched, attention = Watch().watch(comfy.Patcher(comfy.Base(comfy.UNetModel())))
        positive = [[torch.cat(encoded, 1), {}]]
        comfy.Guider(patched, positive, [[comfy.states(9, 77), {}]]).sample(comfy.latents(*LATENT))
        asked = Asked(CLIP, both, torch.rand(1, *PIXELS, 3))
        found.append(heatmaps(attention, asked)[0].prompt.find("a")[0])
    assert found == [(78,), (54,)]


def test_other_images_words_and_a_sampler_that_did_not_run_are_refused():
    told, _ = graph()
    with pytest.raises(InvalidValueError, match="64x200"):
        Mask().mask(**{**told, "image": torch.rand(1, 64, 200, 3)}, word="cat")
    with pytest.raises(InvalidValueError, match="1 image"):
        Mask().mask(**{**told, "image": torch.rand(2, *PIXELS, 3)}, word="cat")
    with pytest.raises(KeyError, match="dog"):
        Mask().mask(**told, word="dog")
    _, attention = Watch().watch(comfy.Patcher(comfy.Base(comfy.UNetModel())))
    with pytest.raises(CaptureError, match="No sampler has run"):
        Mask().mask(**{**told, "attention": attention}, word="cat")
