"""ComfyUI's own models and text encoders at tiny widths, with random weights.

Each is the core's class, made the way its loader makes it; only the widths are small. Tokenizers
are the core's, with their whole vocabularies. Two come with a checkpoint or are too large for a
snapshot: Gemma's is trained on the prompts here by sentencepiece, Llama's is the core's Qwen file
under Llama's class if its own is missing.
"""

import inspect
import io
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

TEXT = 64  # width of the tiny text encoders
SIGLIP = 48  # width of a vision encoder's features
LLAMA = {
    "hidden_size": TEXT,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
}
T5 = {"d_model": TEXT, "d_ff": 96, "num_layers": 2, "num_heads": 2, "d_kv": 16}
ROPE = [8, 12, 12]
UNET = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1, 1],
    "channel_mult": [1, 2, 2],
    "transformer_depth": [1, 1, 0],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1, 0, 0],
    "num_heads": 2,
    "num_head_channels": -1,
    "use_spatial_transformer": True,
    "use_temporal_attention": False,
    "legacy": False,
}
FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 32,
    "context_in_dim": TEXT,
    "hidden_size": 64,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": ROPE,
    "theta": 10000,
    "qkv_bias": True,
}
NEXT_DIT = {
    "image_model": "lumina2",
    "patch_size": 2,
    "in_channels": 16,
    "dim": 64,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "multiple_of": 32,
    "ffn_dim_multiplier": 1.0,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "cap_feat_dim": TEXT,
    "axes_dims": ROPE,
    "axes_lens": [300, 512, 512],
}


@dataclass
class Model:
    """A tiny model of ComfyUI.

    Attributes:
        name: as in :data:`MODELS`.
        patcher: the core's ``ModelPatcher``.
        clip: the core's ``CLIP``.
        channels: channels of its latent.
        frames: its latent has a frame axis.
        cfg: scale of the guidance.
    """

    name: str
    patcher: object
    clip: object
    channels: int = 4
    frames: bool = False
    cfg: float = 4.0
    words: dict = field(default_factory=dict)

    def latent(self, rows, cols, images=1):
        shape = (images, self.channels, *((1,) if self.frames else ()), rows, cols)
        return torch.zeros(shape)

    def encode(self, text, **options):
        """Return a CONDITIONING, as CLIP Text Encode does."""
        return self.clip.encode_from_tokens_scheduled(self.clip.tokenize(text, **options))


def fill(module, seed=0, scale=1.6):
    """Give weights random values that spread attention, so that maps are far from flat."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if name.startswith(("visual.", "transformer.visual.")) or ".visual." in name:
            continue  # a tower of 0.6 billion weights that no text goes through
        weight.requires_grad_(False)
        if weight.ndim < 2:
            is_scale = name.endswith("weight") or "scale" in name
            weight.normal_(1.0 if is_scale else 0.0, 0.05, generator=generator)
        else:
            fan_in = weight[0].numel()
            weight.normal_(0.0, scale / fan_in**0.5, generator=generator)
    for name, table in module.named_buffers():
        if name.endswith("pos_embed"):  # SD 3's, which a checkpoint has
            table.normal_(generator=generator)


def patcher(config_class, unet_config, seed=0, **settings):
    """Return the core's ModelPatcher of a model with random weights."""
    import comfy.model_management
    import comfy.model_patcher

    config = config_class({"dtype": torch.float32, **unet_config})
    config.unet_config |= unet_config
    for name, value in settings.items():
        setattr(config, name, value)
    model = config.get_model({}, "")
    fill(model.diffusion_model, seed)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def clip(tokenizer, encoder, embeddings=None, tokenizer_data=None, **configs):
    """Return the core's CLIP of a text encoder with random weights."""
    import comfy.sd
    import comfy.sd1_clip
    import comfy.supported_models_base

    target = comfy.supported_models_base.ClipTarget(tokenizer, encoder)
    options = {f"{name}_model_config": config for name, config in configs.items()}
    made = comfy.sd.CLIP(
        target,
        embedding_directory=embeddings,
        tokenizer_data=tokenizer_data or {},
        model_options={"dtype": torch.float32, **options},
    )
    fill(made.cond_stage_model, 1, scale=1.0)
    for part in vars(made.tokenizer).values():
        if isinstance(part, comfy.sd1_clip.SDTokenizer):  # embeddings are as wide as the networks
            own = configs.get(part.embedding_key, {})
            part.embedding_size = own.get("hidden_size") or own.get("d_model")
    return made


def sd15(embeddings=None):
    import comfy.sd1_clip
    import comfy.supported_models as known

    model = patcher(known.SD15, {**UNET, "context_dim": 32, "adm_in_channels": None}, num_heads=2)
    encoder = clip(
        comfy.sd1_clip.SD1Tokenizer, comfy.sd1_clip.SD1ClipModel, embeddings, clip_l=CLIP
    )
    return Model("sd15", model, encoder)


def sdxl(embeddings=None):
    import comfy.sdxl_clip
    import comfy.supported_models as known

    unet = {**UNET, "context_dim": 64, "num_classes": "sequential", "adm_in_channels": 1568}
    unet |= {"use_linear_in_transformer": True}
    encoder = clip(
        comfy.sdxl_clip.SDXLTokenizer,
        comfy.sdxl_clip.SDXLClipModel,
        embeddings,
        clip_l=CLIP,
        clip_g=CLIP,
    )
    return Model("sdxl", patcher(known.SDXL, unet), encoder)


def sd3(embeddings=None):
    import comfy.supported_models as known
    import comfy.text_encoders.sd3_clip as sd3_clip

    unet = {
        "in_channels": 16,
        "patch_size": 2,
        "depth": 2,
        "input_size": None,
        "adm_in_channels": 64,
        "context_embedder_config": {
            "target": "torch.nn.Linear",
            "params": {"in_features": 4096, "out_features": 128},
        },
        "pos_embed_max_size": 64,
        "num_patches": 64 * 64,
        "qk_norm": "rms",
        "x_block_self_attn_layers": [0],
    }
    encoder = clip(
        sd3_clip.SD3Tokenizer,
        sd3_clip.sd3_clip(dtype_t5=torch.float32),
        embeddings,
        clip_l=CLIP,
        clip_g=CLIP,
        t5xxl={**T5, "d_model": 4096},  # CLIP's states are filled up to this width
    )
    return Model("sd3", patcher(known.SD3, unet), encoder, channels=16)


def flux(embeddings=None):
    import comfy.ldm.flux.model
    import comfy.supported_models as known
    import comfy.text_encoders.flux as text

    unet = {**FLUX, "image_model": "flux", "guidance_embed": True}
    unet |= newer(comfy.ldm.flux.model.FluxParams, txt_ids_dims=[])
    encoder = clip(
        text.FluxTokenizer,
        text.flux_clip(dtype_t5=torch.float32),
        embeddings,
        clip_l=CLIP,
        t5xxl=T5,
    )
    return Model("flux", patcher(known.Flux, unet), encoder, channels=16, cfg=1.0)


def flux2_klein(embeddings=None):
    import comfy.supported_models as known
    import comfy.text_encoders.flux as text

    layers = {**LLAMA, "num_hidden_layers": 28}
    unet = {**FLUX, "image_model": "flux2", "guidance_embed": False, "context_in_dim": 3 * TEXT}
    unet |= {"patch_size": 1, "vec_in_dim": None, "global_modulation": True, "ops_bias": False}
    unet |= {"mlp_silu_act": True, "txt_ids_dims": [3], "axes_dim": [8, 8, 8, 8], "qkv_bias": False}
    unet |= {"in_channels": 128, "out_channels": 128, "theta": 2000, "txt_norm": False}
    encoder = clip(text.KleinTokenizer, text.klein_te(), embeddings, qwen3_4b=layers)
    return Model("flux2_klein", patcher(known.Flux2, unet), encoder, channels=128)


def chroma(embeddings=None):
    import comfy.ldm.chroma.model
    import comfy.supported_models as known
    import comfy.text_encoders.pixart_t5 as text

    unet = {**FLUX, "image_model": "chroma", "in_dim": 64, "hidden_dim": 64, "n_layers": 1}
    unet |= {"in_channels": 64, "out_channels": 64, "out_dim": 64}
    del unet["vec_in_dim"]
    unet |= newer(comfy.ldm.chroma.model.ChromaParams, txt_ids_dims=[], vec_in_dim=None)
    encoder = clip(
        text.PixArtTokenizer, text.pixart_te(dtype_t5=torch.float32), embeddings, t5xxl=T5
    )
    return Model("chroma", patcher(known.Chroma, unet), encoder, channels=16)


def qwen_image(embeddings=None):
    import comfy.supported_models as known
    import comfy.text_encoders.qwen_image as text

    unet = {
        "image_model": "qwen_image",
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 2,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT,
        "axes_dims_rope": ROPE,
    }
    encoder = clip(text.QwenImageTokenizer, text.te(), embeddings, qwen25_7b=LLAMA)
    model = patcher(known.QwenImage, unet)
    return Model("qwen_image", model, encoder, channels=16, frames=True)


def z_image(embeddings=None, name="z_image", **further):
    import comfy.supported_models as known
    import comfy.text_encoders.z_image as text

    unet = {**NEXT_DIT, "z_image_modulation": True, "pad_tokens_multiple": 32}
    unet |= {"dim": 256, "n_heads": 8, "n_kv_heads": 8}
    unet |= {"rope_theta": 256.0, "time_scale": 1000.0, **further}
    encoder = clip(text.ZImageTokenizer, text.te(), embeddings, qwen3_4b=LLAMA)
    return Model(name, patcher(known.ZImage, unet), encoder, channels=16)


def z_image_omni(embeddings=None):
    """Z-Image with the layers for a vision encoder's features of reference images."""
    return z_image(embeddings, "z_image_omni", siglip_feat_dim=SIGLIP)


def lumina2(embeddings=None):
    import comfy.supported_models as known
    import comfy.text_encoders.lumina2 as text

    encoder = clip(
        text.LuminaTokenizer,
        text.te(),
        embeddings,
        {"spiece_model": trained_pieces()},
        gemma2_2b={**LLAMA, "vocab_size": 2000},
    )
    return Model("lumina2", patcher(known.Lumina2, NEXT_DIT), encoder, channels=16)


def hidream(embeddings=None):
    import comfy.supported_models as known
    import comfy.text_encoders.hidream as text

    give_llama()
    unet = {
        "image_model": "hidream",
        "in_channels": 16,
        "out_channels": 16,
        "patch_size": 2,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "caption_channels": [TEXT, TEXT],
        "text_emb_dim": 64,
        "num_routed_experts": 2,
        "num_activated_experts": 1,
        "axes_dims_rope": (16, 8, 8),
        "llama_layers": [0, 1],
        "max_resolution": (128, 128),
    }
    encoder = clip(
        text.HiDreamTokenizer,
        text.hidream_clip(dtype_t5=torch.float32, dtype_llama=torch.float32),
        embeddings,
        clip_l=CLIP,
        clip_g=CLIP,
        t5xxl=T5,
        llama={**LLAMA, "num_hidden_layers": 3, "vocab_size": 152064},
    )
    return Model("hidream", patcher(known.HiDream, unet), encoder, channels=16)


def trained_pieces():
    """Return a SentencePiece model, as a checkpoint holds it, trained on the prompts."""
    import sentencepiece

    from .prompts import PROMPTS, SYSTEM

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*PROMPTS, *SYSTEM] * 4),
        model_writer=made,
        vocab_size=1000,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.999,
        add_dummy_prefix=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return torch.frombuffer(bytearray(made.getvalue()), dtype=torch.uint8)


def give_llama():
    """Stand in for Llama's tokenizer if the core's folder lacks the file, which is large."""
    import comfy.text_encoders.hunyuan_video as text

    home = Path(text.__file__).parent
    if not (home / "llama_tokenizer" / "tokenizer.json").exists():
        from transformers import Qwen2Tokenizer

        print("stood in for Llama's tokenizer, which this folder lacks: Qwen's, with a start token")

        class Started(Qwen2Tokenizer):
            @classmethod
            def from_pretrained(cls, path, **options):
                return super().from_pretrained(str(home / "qwen25_tokenizer"), **options)

            def __call__(self, text, **options):
                return {"input_ids": [151646, *super().__call__(text, **options)["input_ids"]]}

        text.LlamaTokenizerFast = Started


def newer(params, **given):
    """Return those of some parameters that this version of the core has."""
    fields = inspect.signature(params).parameters
    return {name: value for name, value in given.items() if name in fields}


MODELS = {
    "sd15": sd15,
    "sdxl": sdxl,
    "sd3": sd3,
    "flux": flux,
    "flux2_klein": flux2_klein,
    "chroma": chroma,
    "qwen_image": qwen_image,
    "z_image": z_image,
    "z_image_omni": z_image_omni,
    "lumina2": lumina2,
    "hidream": hidream,
}


def known():
    """Return the names of the models that this version of the core has."""
    import comfy.supported_models as models

    has = {"z_image": "ZImage", "z_image_omni": "ZImage", "flux2_klein": "Flux2"}
    return [name for name in MODELS if hasattr(models, has.get(name, "SD15"))]


def make(name, embeddings=None):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return MODELS[name](embeddings)
