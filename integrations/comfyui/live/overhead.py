"""What watching costs: a whole sampler's run with and without the node, in pairs.

SD 1.5's UNet at its own widths, random weights. Pairs alternate in order, after a warm-up; the
median of the pairs' ratios is told, with the lowest and the highest. On a CPU one thread runs, and
its own processor time is counted, so that other programs of the machine matter little.
"""

import statistics
import time

import torch

from .checks import sample
from .models import Model, patcher
from .workflows import core

UNET = {
    "image_size": 32,
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 320,
    "num_res_blocks": [2, 2, 2, 2],
    "channel_mult": [1, 2, 4, 4],
    "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0],
    "transformer_depth_middle": 1,
    "transformer_depth_output": [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    "num_heads": 8,
    "num_head_channels": -1,
    "use_spatial_transformer": True,
    "use_temporal_attention": False,
    "legacy": False,
    "context_dim": 768,
    "adm_in_channels": None,
}
SETTINGS = (
    {},
    {"steps": "all steps"},
    {"steps": "all steps", "keep": "every step"},
    {"steps": "all steps", "heads": "every head"},
)


def measure(pairs, steps, pixels, device="cpu", dtype=torch.float32):
    """Yield (settings, seconds without, median ratio, lowest, highest) for the node's settings."""
    import comfy.supported_models

    torch.set_num_threads(1)
    held = patcher(comfy.supported_models.SD15, {**UNET, "dtype": dtype})
    held.load_device = torch.device(device)
    model = Model("sd15", held, None, cfg=7.0)
    texts = [[[torch.randn(1, 77, 768), {}]] for _ in range(2)]
    latent = torch.zeros(1, 4, pixels // 8, pixels // 8)
    watch = core.nodes().NODE_CLASS_MAPPINGS["SdattnWatchAttention"]

    def seconds(patched):
        clock = time.thread_time if device == "cpu" else time.perf_counter
        started = clock()
        sample(model, patched, *texts, latent, steps)
        if device != "cpu":
            torch.cuda.synchronize()
        return clock() - started

    seconds(held)
    for told in SETTINGS:
        patched = watch().watch(held, **told)[0]
        seconds(patched)
        ratios = []
        plain = []
        for number in range(pairs):
            both = {}
            for one in (held, patched) if number % 2 else (patched, held):
                both[one is patched] = seconds(one)
            plain.append(both[False])
            ratios.append(both[True] / both[False])
        middle = statistics.median(ratios)
        yield told, statistics.median(plain), middle, min(ratios), max(ratios)
