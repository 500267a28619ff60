"""The nodes through ComfyUI's own core, if ``COMFY_CORE`` names its folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "integrations" / "comfyui" / "live"
CORE = os.environ.get("COMFY_CORE", "")
MODELS = (
    "sd15",
    "sdxl",
    "sd3",
    "flux",
    "flux2_klein",
    "chroma",
    "qwen_image",
    "lumina2",
    "hidream",
    "z_image",
    "z_image_omni",
)


@pytest.mark.slow
@pytest.mark.skipif(not CORE, reason="COMFY_CORE names no folder with ComfyUI's core")
@pytest.mark.parametrize("model", MODELS)
def test_the_nodes_run_through_the_core(model):
    python = os.environ.get("COMFY_PYTHON", sys.executable)
    command = [python, str(SCRIPT), CORE, "--model", model]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
