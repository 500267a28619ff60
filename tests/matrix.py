"""The support matrix: every pipeline that capture() is for, at a tiny size, and ways to run it.

One table for the tests (test_matrix.py) and for the README (scripts/support_matrix.py). A row says
for itself which rows of a guided batch belong to the prompt, read off the pipeline's own code.
"""

import torch
from rows import Way
from transformer_rows import TRANSFORMERS
from unet_rows import UNETS

ROWS = (*UNETS, *TRANSFORMERS)
WAYS = (
    Way(),
    Way(prompts=2, images=2, size=(128, 192)),
    Way(images=2, guided=False, size=(72, 136)),  # 9 x 17 cells, which round up on the way down
    Way(prompts=2, dtype=torch.bfloat16),
)
