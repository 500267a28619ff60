"""Names that a run's page and the command line share, by those in Python.

A page shows the command that makes its run again, whoever made it, so these lie below the command
line. They import nothing, so that it starts at once.
"""

PIPELINE = {
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "negative_prompt": "negative",
    "width": "width",
    "height": "height",
    "num_frames": "frames",
}
LOADING = {
    "variant": "variant",
    "revision": "revision",
    "lora": "lora",
    "quantization": "quantize",
    "offload": "offload",
    "scheduler": "scheduler",
    "tokenizer": "tokenizer",
    "config": "single-file-config",
}
FURTHER = {"negative": "negative-maps", "causal": "causal"}  # by a run's folders; flags
