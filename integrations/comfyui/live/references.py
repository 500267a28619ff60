"""Conditionings with reference images, by the core's own nodes, and where their text stands."""

import types

import torch

from .checks import SIZES, outputs
from .models import SIGLIP, TEXT

SIDE = 5  # patches of the vision encoder's image
REFERENCES = {  # of the reference latents; Z-Image's model takes whole patches alone
    "flux": ((9, 12), (17, 7)),
    "flux2_klein": ((9, 12), (17, 7)),
    "qwen_image": ((9, 12), (17, 7)),
    "z_image": ((8, 12), (10, 6)),
    "z_image_omni": ((8, 12), (10, 6)),
}


def encode(model, prompt, images):
    """Return the CONDITIONING of a prompt with one or two images, by the model's node."""
    pictures = {f"image{number + 1}": torch.rand(1, 64, 96, 3) for number in range(images)}
    vae = Encoder(model)
    if model.name in ("flux", "flux2_klein"):
        import comfy_extras.nodes_edit_model as nodes

        positive = model.encode(prompt)
        for picture in pictures.values():
            latent = {"samples": vae.encode(picture)}
            (positive,) = outputs(nodes.ReferenceLatent, conditioning=positive, latent=latent)
        return positive
    told = {"clip": model.clip, "prompt": prompt, "vae": vae, **pictures}
    if model.name == "qwen_image":
        import comfy_extras.nodes_qwen as nodes

        model.clip.cond_stage_model.qwen25_7b.transformer.visual.forward = see
        if images == 1:
            told["image"] = told.pop("image1")
            (positive,) = outputs(nodes.TextEncodeQwenImageEdit, **told)
        else:
            (positive,) = outputs(nodes.TextEncodeQwenImageEditPlus, **told)
        return positive
    import comfy_extras.nodes_zimage as nodes

    vision = Vision() if model.name == "z_image_omni" else None
    (positive,) = outputs(nodes.TextEncodeZImageOmni, image_encoder=vision, **told)
    return positive


def places(model, positive):
    """Return where the text stands in a joint call, for the oracle; counted by Z-Image's paddings:
    [captions of references, text, captions left] [features] [references, image]."""
    ((states, told),) = positive
    if not model.name.startswith("z_image"):
        return {}
    latents = told["reference_latents"]
    captions = [padded(caption.shape[1]) for caption in told["reference_latents_text_embeds"]]
    before = sum(captions[: len(latents)])
    vision = [padded(SIDE * SIDE) for _ in told.get("clip_vision_outputs", ())]
    vision += [32] if vision else []
    cells = [padded(latent.shape[-2] * latent.shape[-1] // 4) for latent in latents]
    rows, cols = SIZES[model.name]
    image = padded(((rows + 1) // 2) * ((cols + 1) // 2))
    text = sum(captions) + padded(states.shape[1])
    return {"text_from": before, "tokens": text + sum(vision) + sum(cells) + image}


def padded(tokens):
    return -(-tokens // 32) * 32


class Encoder:
    """A VAE that gives random latents, each of its own odd size where the model takes such."""

    def __init__(self, model):
        self.model = model
        self.sizes = list(REFERENCES[model.name])

    def encode(self, _):
        return torch.rand_like(self.model.latent(*self.sizes.pop(0)))


class Vision:
    """A vision encoder that gives random features, as ComfyUI's CLIPVision does."""

    def encode_image(self, _):
        features = torch.randn(1, SIDE * SIDE, SIGLIP)
        sizes = [(3, 16 * SIDE, 16 * SIDE)]
        return types.SimpleNamespace(last_hidden_state=features, image_sizes=sizes)


def see(pixels, grid):
    """Stand in for Qwen's tower of 0.6 billion weights: as many features as it gives."""
    return torch.randn(int(grid.prod()) // 4, TEXT)
