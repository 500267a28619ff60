"""LocalBlend against its definition written out cell by cell."""

import pytest
import torch
from helpers.tiny_tokenizers import tiny_tokenizer

from sdattn.edit import AttentionReplace, LocalBlend
from sdattn.prompts.tokens import read_prompt

T = 8


def read(*texts):
    return [read_prompt(tiny_tokenizer(T), text) for text in texts]


PROMPTS = read("a red cat", "a red dog", "a dog cat")


def make_store(grids, seed=0):
    """Sums of maps, heads 2, three prompts, at the given (rows, cols)."""
    generator = torch.Generator().manual_seed(seed)
    store = {f"{place}_{kind}": [] for kind in ("cross", "self") for place in ("down", "mid", "up")}
    for place, rows, cols in grids:
        # a power makes peaks, so that a threshold of 0.3 cuts
        maps = torch.rand(6, rows * cols, T, generator=generator) ** 8
        store[f"{place}_cross"].append(maps)
    return store


def mask_of(maps, columns, size, threshold, spread):
    """bool [prompts, height, width]: the mask of each prompt, one cell at a time."""
    masks = []
    height, width = size
    for prompt, chosen in enumerate(columns):
        heads = [m[h] for m in maps for h in (2 * prompt, 2 * prompt + 1)]
        rows, cols = heads[0].shape[:2]
        heat = sum(head[..., chosen].sum(-1) for head in heads) / len(heads)
        if spread:
            wide = torch.zeros_like(heat)
            for r in range(rows):
                for c in range(cols):
                    wide[r, c] = heat[max(r - 1, 0) : r + 2, max(c - 1, 0) : c + 2].max()
            heat = wide
        big = torch.stack(
            [torch.stack([heat[r * rows // height, c * cols // width] for c in range(width)])
             for r in range(height)]
        )  # fmt: skip
        masks.append(big / big.max() > threshold)
    return torch.stack(masks)


@pytest.mark.parametrize("size", [(16, 16), (16, 32)])
@pytest.mark.parametrize("subtract", [None, [["red"], ["red"], ["dog"]]])
def test_blends_where_either_image_has_the_words(size, subtract):
    rows, cols = size
    grids = [("down", rows, cols), ("down", rows // 2, cols // 2), ("up", rows // 2, cols // 2)]
    store = make_store(grids)
    grid = (rows // 2, cols // 2)
    blend = LocalBlend(
        PROMPTS, [["cat"], "dog", ["dog", "cat"]], 10, subtract=subtract, start=0.0, grid=grid
    )
    latents = torch.randn(3, 4, *size, generator=torch.Generator().manual_seed(1))
    maps = [store[k][i].unflatten(1, grid) for k, i in (("down_cross", 1), ("up_cross", 0))]
    mask = mask_of(maps, [[3], [3], [2, 3]], size, 0.3, spread=True)
    mask = mask | mask[:1]
    if subtract:
        taken = mask_of(maps, [[2], [2], [2]], size, 0.3, spread=False)
        mask = mask & ~(taken | taken[:1])
    assert 0 < mask.float().mean() < 1
    expected = torch.where(mask[:, None], latents, latents[:1])
    torch.testing.assert_close(blend(latents, store), expected)
    assert torch.equal(blend(latents, store)[0], latents[0])


def test_the_layers_are_chosen_by_resolution():
    """At 64x64 latents the 16x16 maps, wherever they stand in the lists."""
    small = [("down", 16, 16), ("mid", 8, 8), ("up", 16, 16)]
    big = [("down", 32, 32), ("down", 32, 32), ("up", 32, 32)]
    alone = make_store([one for one in small if one[1] == 16])
    mixed = make_store(small + big, seed=3)
    mixed["down_cross"] = [mixed["down_cross"][1], alone["down_cross"][0]]
    mixed["up_cross"] = [mixed["up_cross"][1], alone["up_cross"][0]]
    latents = torch.randn(3, 4, 64, 64, generator=torch.Generator().manual_seed(1))
    blends = [LocalBlend(PROMPTS, [["red"], ["red"], ["cat"]], 1, start=0.0) for _ in range(2)]
    assert torch.equal(blends[0](latents, mixed), blends[1](latents, alone))


def test_larger_latents_take_larger_maps():
    """96x96 latents, SD 2.x's own: a quarter of the side is 24x24, not 12x12."""
    store = make_store([("down", 24, 24), ("mid", 12, 12), ("up", 24, 24)])
    blend = LocalBlend(PROMPTS, [["a"]] * 3, 1)
    assert blend._maps(store, (96, 96)).shape == (3, 4, 24, 24, T)


@pytest.mark.parametrize("factor", [-2.0, 0.0])
def test_a_word_weighted_to_nothing_masks_nothing(factor):
    store = make_store([("up", 16, 16)])
    store["up_cross"][0] *= factor
    latents = torch.randn(3, 4, 16, 16)
    blended = LocalBlend(PROMPTS, [["a"]] * 3, 1, start=0.0)(latents, store)
    assert torch.equal(blended, latents[:1].expand_as(latents))


def test_blending_starts_when_told_and_a_controller_does_it():
    blend = LocalBlend(PROMPTS, [["cat"], ["dog"], ["cat"]], 4, start=0.5, threshold=1.0)
    control = AttentionReplace(PROMPTS, 4, local_blend=blend)
    control.full_attention_store = make_store([("up", 16, 16)])
    latents = torch.randn(3, 4, 16, 16)
    for step in range(4):
        blended = control.step_callback(latents)
        if step < 2:
            assert torch.equal(blended, latents)
        else:  # nothing exceeds the peak, so all is the source's
            assert torch.equal(blended, latents[:1].expand_as(latents))
    control.reset()
    assert blend.counter == 0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LocalBlend(PROMPTS, [["cat"]], 4), ValueError, "each of the 3 prompts"),
        (lambda: LocalBlend(PROMPTS, "cat", 4), ValueError, "each of the 3 prompts"),
        (lambda: LocalBlend(PROMPTS, [["cat"]] * 3, 4), KeyError, "'cat'.*prompt"),
        (lambda: LocalBlend(PROMPTS, [["a"]] * 3, 4, start=1.5), ValueError, "start=1.5"),
        (lambda: LocalBlend(PROMPTS, [["a"]] * 3, 4, threshold=-1), ValueError, "threshold=-1"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_what_does_not_fit_the_run_is_refused():
    blend = LocalBlend(PROMPTS, [["a"]] * 3, 1, start=0.0)
    with pytest.raises(ValueError, match="3 prompts.*6.*num_images_per_prompt=1"):
        blend(torch.randn(6, 4, 16, 16), make_store([("up", 16, 16)]))
    with pytest.raises(ValueError, match="the store holds none"):
        blend(torch.randn(3, 4, 16, 16), {})
    blend = LocalBlend(PROMPTS, [["a"]] * 3, 1, start=0.0, grid=(4, 4))
    with pytest.raises(ValueError, match=r"\(4, 4\).*\(16, 16\)"):
        blend(torch.randn(3, 4, 16, 16), make_store([("up", 16, 16)]))


def test_packed_latents_are_blended_as_unpacked_ones_are():
    """FLUX has a row of channels for each query: [prompts, N, C], row by row of the image."""
    prompts = PROMPTS[:2]
    generator = torch.Generator().manual_seed(0)
    latents = torch.rand(2, 5, 4, 6, generator=generator)
    maps = torch.rand(2 * 3, 24, T, generator=generator) ** 8
    found = []
    for given in (latents, latents.flatten(2).mT):
        blend = LocalBlend(prompts, ["cat", "dog"], 2, start=0.0, threshold=0.5)
        control = AttentionReplace(prompts, 2, local_blend=blend)
        control.full_attention_store, control.latent_size = {"double_cross": [maps]}, (4, 6)
        found.append(control.step_callback(given))
    unpacked, packed = found
    assert torch.equal(packed.mT.unflatten(2, (4, 6)), unpacked)
    changed = (unpacked[1] == latents[1]).all(0)  # inside of the mask
    assert changed.any() and not changed.all()
