"""What a repository of the hub is taken for, by the names of its files and its card: listings as
well-known repositories have them."""

import pytest

from sdattn.loading.hub import _only_checkpoint
from sdattn.loading.repository import HubFile, HubName, Repository

VAE = ("config.json", "diffusion_pytorch_model.bin", "diffusion_pytorch_model.safetensors")


def repository(*names, **card):
    files = {name: HubFile(1, None) for name in (".gitattributes", "README.md", *names)}
    return Repository(HubName("owner/name"), files, "0123abc", card)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("model_index.json", "sd_xl_base_1.0.safetensors", "unet/config.json"), None),
        (("model_index.json", "pytorch_lora_weights.safetensors"), None),
        (("v7.safetensors", "v7.ckpt", "v7.yaml", "unet/model.safetensors"), "v7.safetensors"),
    ],
)
def test_a_folder_or_its_only_checkpoint(names, expected):
    assert _only_checkpoint(repository(*names)) == expected


@pytest.mark.parametrize(
    ("names", "card", "message"),
    [
        (("pytorch_lora_weights.safetensors",), {"base_model": ["a/b", "c/d"]}, "a LoRA for a/b"),
        (("adapter_model.safetensors", "adapter_config.json"), {"base_model": []}, "is a LoRA, no"),
        (("s-000100.safetensors", "s-000200.safetensors"), {"tags": ["lora"]}, "is a LoRA, not a"),
        (
            ("a.safetensors", "b.safetensors"),
            {},
            r"2 checkpoints.*name/a.safetensors, owner/name/b",
        ),
        (("learned_embeds.bin", "token_identifier.txt"), {}, "textual inversion"),
        (("learned_embeds.safetensors",), {}, "textual inversion"),
        (("v1-5-pruned.ckpt", "v1-inference.yaml"), {}, "as v1-5-pruned.ckpt .*Pickles"),
        (("flux1-dev-Q4_0.gguf", "flux1-dev-Q8_0.gguf"), {}, "gguf:FILE"),
        (("modular_model_index.json", "unet/config.json"), {}, "modular pipeline"),
        (("v1/a.safetensors", "v2/b.safetensors"), {}, "It has .*v1/a.safetensors"),
        ((), {}, "no model_index.json .*README.md"),
    ],
)
def test_anything_else_is_told_by_what_it_is(names, card, message):
    with pytest.raises(ValueError, match=f"^owner/name on the hub .*{message}"):
        _only_checkpoint(repository(*names, **card))


@pytest.mark.parametrize(
    ("names", "config", "what"),
    [
        (VAE, '{"_class_name": "AutoencoderKL"}', "one model, AutoencoderKL, not a"),
        (("config.json", "model.safetensors"), '{"architectures": ["T5"]}', "one model, T5, not a"),
        (("config.json", "model.safetensors"), "{}", "one model, not a"),
    ],
)
def test_a_part_is_told_by_its_class(monkeypatch, tmp_path, names, config, what):
    (tmp_path / "config.json").write_text(config)
    monkeypatch.setattr(Repository, "fetch", lambda repository, names: tmp_path)
    with pytest.raises(ValueError, match=f"^owner/name on the hub is {what} text-to-image"):
        _only_checkpoint(repository(*names))
