"""The demo model of this repository under ComfyUI's own classes, so that a graph draws something.

UNet, text encoder, tokenizer and sampling are the core's classes with the demo's weights; the UNet
gives what diffusers' does (checked here). The demo's VAE has no counterpart in the core, so
diffusers' decodes.
"""

from pathlib import Path

import torch

from .models import Model

GROUPS = 8  # of the demo's norms; the core's have 32
UNET = {
    "image_size": 32,
    "in_channels": 16,
    "out_channels": 16,
    "model_channels": 64,
    "num_res_blocks": [2, 2, 2, 2],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "num_heads": 4,
    "num_head_channels": -1,
    "use_spatial_transformer": True,
    "use_temporal_attention": False,
    "use_linear_in_transformer": False,
    "legacy": False,
    "context_dim": 128,
    "adm_in_channels": None,
    "dtype": torch.float32,
}
CLIP = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
}


class Ratio(float):
    """A channel multiplier that need not be whole: its product with a width is."""

    def __mul__(self, width):
        return int(super().__mul__(width))

    __rmul__ = __mul__


def operations():
    import comfy.ops

    class Demo(comfy.ops.disable_weight_init):
        class GroupNorm(comfy.ops.disable_weight_init.GroupNorm):
            def __init__(self, num_groups, num_channels, **options):
                super().__init__(GROUPS, num_channels, **options)

    return Demo


def make():
    import comfy.latent_formats
    import comfy.model_base
    import comfy.model_patcher
    import comfy.sd1_clip
    import comfy.supported_models
    import comfy.utils

    import sdattn

    pipe = sdattn.load_pipeline("demo")
    config = comfy.supported_models.SD15({**UNET})
    config.unet_config |= {**UNET, "channel_mult": [Ratio(1), Ratio(1.25), Ratio(1.5), Ratio(1)]}
    config.custom_operations = operations()
    config.sampling_settings = {"zsnr": True}
    config.latent_format = comfy.latent_formats.LatentFormat()
    config.latent_format.latent_channels = 16
    base = comfy.model_base.BaseModel(config, comfy.model_base.ModelType.V_PREDICTION)
    names = comfy.utils.unet_to_diffusers({**UNET, "channel_mult": [1, 1, 1, 1]})
    weights = pipe.unet.state_dict()
    renamed = {own: weights[name] for name, own in names.items() if name in weights}
    base.diffusion_model.load_state_dict(renamed)
    cpu = torch.device("cpu")
    patcher = comfy.model_patcher.ModelPatcher(base, load_device=cpu, offload_device=cpu)
    model = Model("sd15", patcher, _clip(pipe), channels=16, cfg=5.0)
    model.vae = Decoder(pipe.vae)
    _check(pipe, base)
    return model


def _clip(pipe):
    import comfy.sd1_clip

    from .models import clip

    home = str(Path(pipe.tokenizer.name_or_path))

    class Tokenizer(comfy.sd1_clip.SDTokenizer):
        def __init__(self, **options):
            super().__init__(tokenizer_path=home, **options)

    class Tokenizers(comfy.sd1_clip.SD1Tokenizer):
        def __init__(self, **options):
            super().__init__(tokenizer=Tokenizer, **options)

    class Encoder(comfy.sd1_clip.SD1ClipModel):
        def __init__(self, **options):
            ends = {"start": 718, "end": 719, "pad": 719}
            super().__init__(clip_model=comfy.sd1_clip.SDClipModel, special_tokens=ends, **options)

    made = clip(Tokenizers, Encoder, clip_l=CLIP)
    own = made.cond_stage_model.clip_l.transformer.text_model
    weights = pipe.text_encoder.state_dict()
    weights = {name.removeprefix("text_model."): value for name, value in weights.items()}
    for name, weight in own.state_dict().items():
        weight[: len(weights[name])].copy_(weights[name])  # the core's table has more rows
    return made


class Decoder:
    """A VAE as the node VAE Decode calls it."""

    def __init__(self, vae):
        self.vae = vae

    @torch.inference_mode()
    def decode(self, samples):
        images = self.vae.decode(samples / self.vae.config.scaling_factor).sample
        return (images / 2 + 0.5).clamp(0, 1).movedim(1, -1)


def _check(pipe, base):
    """The core's UNet gives what diffusers' gives."""
    latent = torch.randn(1, 16, 16, 20, generator=torch.Generator().manual_seed(0))
    text = torch.randn(1, 77, 128, generator=torch.Generator().manual_seed(1))
    time = torch.tensor([400.0])
    with torch.inference_mode():
        own = base.diffusion_model(latent, time, context=text, transformer_options={})
        other = pipe.unet(latent, time, text).sample
    assert (own - other).abs().max() < 1e-4, (own - other).abs().max()
