"""What the command line calls the options of a pipeline's call that have an option of their own,
and those of its loading.

It imports nothing, so that the command line starts at once.
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
