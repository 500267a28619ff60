"""Tiny processors of text and images."""

from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor
from transformers.processing_utils import ProcessorMixin

from helpers.tiny_tokenizers import tiny_qwen


class ImageProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's without videos, which need torchvision."""

    attributes = ("image_processor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor, tokenizer):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer)


def tiny_qwen_processor(padding_side="right"):
    """Of which an image has at most 12 tokens of 28x28 pixels."""
    tokenizer = tiny_qwen(padding_side)
    names = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    images = Qwen2VLImageProcessor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 12)
    return ImageProcessor(images, tokenizer)
