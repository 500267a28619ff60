"""Repositories as people publish them on a hub, of tiny models: acme/sd and its kin.

diffusers loads all that are pipelines. ``single`` and ``several`` hold checkpoints, whose settings
are in the repository that diffusers names for them.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from helpers.hub_repository import Repository
from helpers.ldm_checkpoints import filled, sd1
from helpers.ldm_folders import save_settings
from helpers.loras import save_lora
from helpers.tiny_encoders import tiny_llama
from helpers.tiny_pipelines import make_sdxl_pipeline, small_pipeline

SETTINGS = "stable-diffusion-v1-5/stable-diffusion-v1-5"  # of checkpoints like SD 1.5
CHECKPOINT = "acme_v7.safetensors"
LORA_FILE = "pytorch_lora_weights.safetensors"
_RUNS = "print('code of the repository runs')\n"


def make_repositories(folder: Path) -> dict[str, Repository]:
    """Write the repositories below a folder; return them by their names."""
    acme = folder / "acme"
    pipe = small_pipeline()
    pipe.save_pretrained(acme / "sd")
    for name in ("private", "gated", "refused", "stray", "code", "code-part", "pickles", "both"):
        shutil.copytree(acme / "sd", acme / name)
    half = pipe.to(torch.float16)
    half.save_pretrained(acme / "fp16", variant="fp16")
    half.save_pretrained(acme / "both", variant="fp16")
    make_sdxl_pipeline().save_pretrained(acme / "sharded", max_shard_size="200KB")
    _pickle(acme / "pickles")
    _name_class(acme / "code", "_class_name", ["pipeline", "AcmePipeline"], "pipeline.py")
    _name_class(acme / "code-part", "unet", ["acme_unet", "AcmeUNet"], "unet/acme_unet.py")
    _save_checkpoints(acme)
    _save_loras(acme)
    tiny_llama().save_pretrained(acme / "llm")
    (acme / "empty").mkdir()
    save_settings("sd1", folder / SETTINGS)
    for weights in (folder / SETTINGS).rglob("*.safetensors"):
        weights.unlink()
    gates = {"private": "private", "gated": "gated", "refused": "refused"}
    repositories = {SETTINGS: Repository(folder / SETTINGS)}
    for path in acme.iterdir():
        if path.name not in ("lora-bare", "empty"):
            _write_card(path, {"license": "mit", "library_name": "diffusers"})
        repositories[f"acme/{path.name}"] = Repository(path, gates.get(path.name, "public"))
    _write_card(acme / "lora", {"license": "mit", "base_model": "acme/sd", "tags": ["lora"]})
    return repositories


def _pickle(folder: Path) -> None:
    """Put a folder's weights into pickles instead."""
    for file in folder.rglob("*.safetensors"):
        name = "pytorch_model.bin" if file.stem == "model" else f"{file.stem}.bin"
        torch.save(load_file(file), file.with_name(name))
        file.unlink()


def _name_class(folder: Path, key: str, entry: list[str], file: str) -> None:
    """Have a pipeline's index name a class from a Python file next to it."""
    index = folder / "model_index.json"
    told = json.loads(index.read_text())
    index.write_text(json.dumps({**told, key: entry}))
    (folder / file).write_text(_RUNS)


def _save_checkpoints(acme: Path) -> None:
    weights = {name: value.half() for name, value in filled(sd1()).items()}
    for name in ("single", "several"):
        (acme / name).mkdir()
        save_file(weights, acme / name / CHECKPOINT)
    shutil.copy(acme / "single" / CHECKPOINT, acme / "several" / "acme_v8.safetensors")
    shutil.copy(acme / "single" / CHECKPOINT, acme / "stray" / CHECKPOINT)


def _save_loras(acme: Path) -> None:
    """Save a LoRA of acme/sd with a card, and one with what trainers write into the file alone."""
    pipe = small_pipeline()
    file = save_lora(acme / "lora", pipe, pipe.unet)
    (acme / "lora-bare").mkdir()
    metadata = {
        "ss_network_module": "networks.lora",
        "ss_base_model_version": "sd_v1",
        "ss_sd_model_name": "acme/sd",
        "modelspec.architecture": "stable-diffusion-v1/lora",
    }
    save_file(load_file(file), acme / "lora-bare" / "style.safetensors", metadata)


def _write_card(folder: Path, matter: Mapping[str, Any]) -> None:
    import yaml

    text = yaml.safe_dump(dict(matter))
    (folder / "README.md").write_text(f"---\n{text}---\n# {folder.name}\n", encoding="utf-8")
