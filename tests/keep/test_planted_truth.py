"""Cells and columns are where pixels and tokens are, for every row of the support matrix.

test_matrix.py compares maps with a softmax over rows and columns that the matrix states, so an
order that both read wrongly would pass. Here nobody states one. A pipeline runs twice from one
seed: as it is, and with other noise in one square of one image (in its last frame) and another word
of as many tokens in its last prompt. Attention to the text must change in the square's cells, and
in the columns that sdattn calls that word's, in each image of that prompt, and nowhere else. The
square is one of pixels; which keys the word changes is up to the tokenizer and the model.

To make this exact, nothing may mix places or tokens on the way to a layer, see ``unmix``. So all
layers are compared, not only the first.
"""

import re
from dataclasses import dataclass, replace

import pytest
import torch
from diffusers.pipelines.ltx2 import connectors
from helpers.matrix import ROWS, few_are_quick
from helpers.rows import Way

from sdattn import capture, heatmaps

WAY = Way(prompts=2, images=2, size=(128, 192))
# As long in each tokenizer, since some of diffusers' pipelines mix up masks of several images. The
# last token is in no prompt the word's: Kolors' pooled text is its state.
PROMPTS = ("a cat on the sofa", "a red dog on sofa")
OTHER = {"cat": "dog", "dog": "cat"}  # one token each
QUOTED = ("HunyuanImage 2.1, quoted text", "HunyuanVideo 1.5, quoted text")
OWN_PROMPTS = ("textual inversion", *QUOTED)
# DiffEdit's latents are given for each prompt; the other mixes up masks of quoted texts.
ONE_IMAGE = ("DiffEdit", QUOTED[0])

# Axes of the noise that a pipeline draws: batch, frames, channels, rows (y) and columns (x).
AXES = {4: "bcyx", 5: "bcfyx"}  # of images of Qwen-Image the frames' axis is that of channels
OWN_AXES = {
    "CogVideoX": "bfcyx",  # pipeline_cogvideox.py, prepare_latents
    "Kandinsky 5": "bfyxc",  # pipeline_kandinsky.py, prepare_latents
    "DiffEdit": "bfcyx",  # a latent for each step
    "Ideogram 4": "b(yx)c",  # pipeline_ideogram4.py, where __call__ decodes
}
MIXERS = re.compile(
    # what attention puts out, in diffusers and in transformers
    r"\.(to_out(_t)?(\.0(\.base_layer|\.lora_B\.style)?)?|to_add_out|out_proj|o_proj"
    r"|\w+_attention\.out_layer|SelfAttention\.o|(attention\.output|self_attention)\.dense"
    # what a block of one stream puts out, which attention is a part of
    r"|single_transformer_blocks\.\d+\.proj_out"
    # the mean of a text's tokens, in HunyuanVideo and Mochi
    r"|context_embedder\.time_text_embed\.text_embedder\.linear_2|pooler\.to_out)$"
)


def unmix(pipe, patch):
    """Take away what mixes places of an image or tokens of a text: attention puts out its bias
    alone, norms over places put out what they get, and convolutions keep the middle of their
    kernel."""
    for part in pipe.components.values():
        for name, module in part.named_modules() if isinstance(part, torch.nn.Module) else ():
            weight = getattr(module, "weight", None)
            if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
                keep_middle(module)
            elif weight is not None and MIXERS.search(f".{name}"):
                weight.data.zero_()
            elif weight is not None and re.search(r"norm_(added_)?[qk]$", name):
                weight.data /= 8  # else most attention is too little to compare
    patch.setattr(torch.nn.GroupNorm, "forward", lambda _, states: states)
    # LTX-2's, over all tokens of a text
    patch.setattr(
        connectors,
        "per_layer_masked_mean_norm",
        lambda text_hidden_states, **_: text_hidden_states.flatten(2),
        raising=False,
    )


def keep_middle(convolution):
    """Zero all but the middle of a kernel whose places overlap."""
    for axis, size in enumerate(convolution.kernel_size):
        if size > convolution.stride[axis]:
            weight = convolution.weight.data.transpose(axis + 2, -1)
            weight *= torch.arange(size) == size // 2


@dataclass(frozen=True)
class Square:
    """A square of one image's pixels, in the last frame of a video."""

    image: int
    images: int
    top: int
    left: int
    side: int
    size: tuple[int, int]
    frames: int

    @classmethod
    def of(cls, row, way, side):
        """Return a square where another order of images, frames, rows or columns moves it."""
        top, left = way.size[0] // side // 4 * side, way.size[1] - 2 * side
        image = max(way.total - 2, 0)
        return cls(image, way.total, top, left, side, way.size, row.frames or 1)

    def within(self, axes, shape):
        """Return the index of the square in an array with such axes."""
        index = []
        for axis, length in zip(axes, shape, strict=True):
            first, end, whole = {
                "b": (self.image, self.image + 1, length),
                "f": (self.frames - 1, self.frames, self.frames),
                "c": (0, 1, 1),
                "y": (self.top, self.top + self.side, self.size[0]),
                "x": (self.left, self.left + self.side, self.size[1]),
            }[axis]
            index.append(slice(first * length // whole, end * length // whole))
        return tuple(index)

    def fits(self, axes, shape):
        """Check that such an array is of images of the square's size."""
        lengths = dict(zip(axes, shape, strict=True))
        cells = [side // lengths[axis] for axis, side in zip("yx", self.size, strict=True)]
        return lengths["b"] == self.images and cells[0] == cells[1] > 1


def draws_otherwise(square, own_axes, cell):
    """Return torch.randn with other noise in the square, and a list of where."""
    real, planted = torch.randn, []

    def randn(*size, **options):
        noise = unpacked = real(*size, **options)
        axes = own_axes or AXES.get(noise.ndim, "")
        if axes == "b(yx)c" and noise.ndim == 3:
            unpacked = noise.unflatten(1, [side // cell for side in square.size])
        axes = axes.replace("(", "").replace(")", "")
        if len(axes) == unpacked.ndim > 0 and square.fits(axes, unpacked.shape):
            place = square.within(axes, unpacked.shape)
            other = torch.Generator().manual_seed(5)
            unpacked[place] = 3 * real(unpacked[place].shape, generator=other, dtype=noise.dtype)
            planted.append(place)
        return noise

    return randn, planted


def ran(row, pipe, way, prompts):
    with capture(pipe, steps=[0], heads=[0]) as store:
        row.run(pipe, way, prompt=prompts if way.prompts > 1 else prompts[0])
    return store


def moved(before, after):
    """Return how far the log of attention moved from the median over columns, which all move with
    the sum over all keys. Values that are nearly 0 are left out."""
    least = 1e-20
    held = (before > least) & (after > least)
    moved = torch.where(held, after.double().log() - before.double().log(), torch.nan)
    return (moved - moved.nanmedian(-1, keepdim=True).values).nan_to_num(0).abs()


# Beside the quick rows: videos, a second text encoder, other orders of text and image
OTHERS = ("CogVideoX", "HunyuanImage 2.1", "Kandinsky 5", "Lumina 2", "Sana", "SDXL")


@pytest.mark.parametrize("row", few_are_quick(ROWS, OTHERS), ids=str)
def test_what_is_planted_is_found_there_and_nowhere_else(row, monkeypatch):
    way = row.fitted(replace(WAY, images=1) if row.name in ONE_IMAGE else WAY)
    pipe = row.make()
    unmix(pipe, monkeypatch)
    options = row.options(pipe, way)
    own = options.pop("prompt", None)
    prompts = list(own if row.name in OWN_PROMPTS else PROMPTS[: way.prompts])
    word = re.findall("cat|dog", prompts[-1])[-1]
    others = [*prompts[:-1], OTHER[word].join(prompts[-1].rsplit(word, 1))]
    levels = len(pipe.unet.config.block_out_channels) if hasattr(pipe, "unet") else 0
    # a cell of a UNet's deepest layer, of which its finest layers have many
    square = Square.of(row, way, 8 << (levels - 1) if levels else row.cell)
    axes = next((axes for name, axes in OWN_AXES.items() if name in row.name), None)

    before = ran(row, pipe, way, prompts)
    randn, planted = draws_otherwise(square, axes, row.cell)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", randn)
        after = ran(row, pipe, way, others)
    assert planted

    [*_, prompt] = [found.prompt for found in heatmaps(before, pipe, prompts, **options)]
    # an image prompt's columns have a softmax of their own
    text = [i for i, token in enumerate(prompt.tokens) if "<image" not in token.special]
    columns = torch.zeros(way.total, len(text), dtype=torch.bool)
    columns[-way.images :, list(prompt.find(word)[-1])] = True
    for name, maps in before.maps.items():
        if row.name == "FreeU" and "up_blocks" in name:
            continue  # its filter mixes places
        # [images, 1, 1, (frames,) rows, cols, columns]
        shift = moved(maps[:, 0, 0], after.maps[name][:, 0, 0])[..., text]
        cells = torch.zeros(shift.shape[:-1], dtype=torch.bool)
        cells[square.within("byx" if row.frames is None else "bfyx", cells.shape)] = True
        for image, own in enumerate(shift):
            of_cells = own[..., ~columns[image]].amax(-1)
            of_columns = own[~cells[image]].amax(0)
            assert torch.equal(of_cells > 5e-5, cells[image]), name
            assert torch.equal(of_columns > 5e-5, columns[image]), name
