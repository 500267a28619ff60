"""Run the nodes for ComfyUI through its own core, on a CPU, with tiny random weights.

    python integrations/comfyui/live ../ComfyUI --install   # once: the core's packages, in a venv
    python integrations/comfyui/live ../ComfyUI             # every check on every model
    python integrations/comfyui/live ../ComfyUI maps --model flux
    python integrations/comfyui/live ../ComfyUI overhead --device cuda

Checks: ``double`` (the double in tests/ is called as the core calls), ``maps`` (latents are equal,
maps are the softmax in float64), ``places`` (of text and image, by what changes), ``columns``
(fifty prompts against the encoder's own ids), ``scenarios`` (conditionings, samplers, other nodes),
``workflows`` (the example files, by the core's executor). ``write`` makes the example files again,
``demo --images FOLDER`` draws SD 1.5's with the weights of sdattn's demo model.
"""

import argparse
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT))
# Not by sys.path: the folder above has a nodes.py, as ComfyUI's core has.
found = importlib.util.spec_from_file_location("live", HERE / "__init__.py")
sys.modules["live"] = importlib.util.module_from_spec(found)
CHECKS = ("double", "maps", "places", "columns", "scenarios", "workflows")
NOT_INSTALLED = {  # no build for a CPU beside torch's, or not needed by the core itself
    "torch",
    "torchvision",
    "torchaudio",
    "kornia",
    "spandrel",
    "comfyui-frontend-package",
    "comfyui-workflow-templates",
    "comfyui-embedded-docs",
    "PyOpenGL",
    "glfw",
}


def install(folder):
    """Make a venv in the core's folder with what the core and sdattn need."""
    home = folder / ".venv-sdattn"
    python = home / "bin" / "python"
    if not python.exists():
        venv.create(home, with_pip=True)
    lines = (folder / "requirements.txt").read_text(encoding="utf-8").splitlines()
    names = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    needed = [line for line in names if _name(line) not in NOT_INSTALLED]
    pip = [str(python), "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    subprocess.run([*pip, "torch==2.13.0", *needed, str(ROOT)], check=True)
    return python


def _name(line):
    return line.split(";")[0].split("~")[0].split(">")[0].split("=")[0].strip()


def embeddings():
    """Return a folder with an embedding of one vector and one of two."""
    import torch
    from safetensors.torch import save_file

    home = Path(tempfile.mkdtemp())
    one = {"clip_l": torch.randn(1, 32), "clip_g": torch.randn(1, 32), "t5xxl": torch.randn(1, 64)}
    save_file(one, home / "glow.safetensors")
    two = {"clip_l": torch.randn(2, 32), "clip_g": torch.randn(2, 32)}
    save_file(two, home / "twofold.safetensors")
    return str(home)


def run(name, checks, folder):
    """Run checks on one model; return how many failed."""
    from live import checks as known
    from live import models, scenarios, workflows

    failed = 0
    model = models.make(name, embeddings())
    steps = {
        "double": lambda: known.check_double(model) if name in ("sd15", "flux") else "left out",
        "maps": lambda: known.check_maps(model),
        "places": lambda: known.check_places(model),
        "columns": lambda: known.check_columns(model),
    }
    for check in checks:
        if check == "scenarios":
            todo = [(one.__name__, lambda one=one: one(model)) for one in scenarios.SCENARIOS]
        elif check == "workflows":
            is_example = name in workflows.graphs()
            todo = [(check, lambda: workflows.check(name, model, folder))] if is_example else []
        else:
            todo = [(check, steps[check])]
        for title, step in todo:
            started = time.perf_counter()
            try:
                told = step() or "right"
            except Exception as error:
                failed = failed + 1
                told = f"WRONG: {type(error).__name__}: {error}"
            took = time.perf_counter() - started
            print(f"{name:12} {title.replace('_', ' '):32} {told} ({took:.1f} s)", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("core", type=Path, help="ComfyUI's folder")
    parser.add_argument("checks", nargs="*", help=f"of {', '.join(CHECKS)}, write, demo, overhead")
    parser.add_argument("--model", action="append", help="only this model; may be repeated")
    parser.add_argument("--install", action="store_true", help="install the core's packages first")
    parser.add_argument("--images", type=Path, help="folder for what the workflows save")
    parser.add_argument("--device", default="cpu", help="of overhead")
    parser.add_argument("--pairs", type=int, default=5, help="of overhead")
    parser.add_argument("--steps", type=int, default=20, help="of overhead")
    parser.add_argument("--pixels", type=int, default=512, help="of overhead: side of the image")
    asked = parser.parse_args()
    home = asked.core.resolve()
    own = home / ".venv-sdattn" / "bin" / "python"
    if asked.install or (own.exists() and Path(sys.prefix) != own.parent.parent):
        python = install(home) if asked.install else own
        rest = [argument for argument in sys.argv[1:] if argument != "--install"]
        os.execv(python, [str(python), str(HERE), *rest])
    logging.getLogger().setLevel(logging.ERROR)
    from live import core, models, overhead, workflows

    core.load(home, asked.device)
    print(f"ComfyUI {core.version()}", flush=True)
    if "overhead" in asked.checks:
        for told, plain, middle, low, high in overhead.measure(
            asked.pairs, asked.steps, asked.pixels, device=asked.device
        ):
            ratios = f"x{middle:.3f} ({low:.3f} to {high:.3f})"
            print(f"{told or 'second half'}: {plain:.2f} s without, {ratios}", flush=True)
        return
    if "write" in asked.checks:
        workflows.write()
        return
    if "demo" in asked.checks:
        workflows.draw_demo(asked.images or Path())
        return
    folder = asked.images or Path(tempfile.mkdtemp())
    failed = 0
    for name in asked.model or models.MODELS:
        if name not in models.known():
            print(f"{name:12} left out: this version of ComfyUI has no such model")
            continue
        failed += run(name, asked.checks or CHECKS, folder)
    print(f"{failed} wrong" if failed else "all right")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
