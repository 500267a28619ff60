"""Tiny processors of text and images."""

from typing import Any

from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor
from transformers.processing_utils import ProcessorMixin

from helpers.tiny_tokenizers import VISION_CHAT, tiny_mistral, tiny_qwen


class TextProcessor(ProcessorMixin):
    """Pixtral's processor needs torchvision; this is its base with the text half only."""

    attributes = ("tokenizer",)
    tokenizer_class = "AutoTokenizer"

    def __init__(self, tokenizer: Any, chat_template: str | None = None):
        template = chat_template or tokenizer.chat_template
        super().__init__(tokenizer, chat_template=template)


class VisionTextProcessor(TextProcessor):
    """The half of Qwen3-VL's processor that a text alone needs."""

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        return self.tokenizer([text] if isinstance(text, str) else text, **options)

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        return [[0] * len(row) for row in ids]


class ImageProcessor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's without videos, which need torchvision."""

    attributes = ("image_processor", "tokenizer")
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor: Any, tokenizer: Any):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer)


def tiny_mistral_processor() -> TextProcessor:
    return TextProcessor(tiny_mistral())


def tiny_chat_processor() -> TextProcessor:
    return TextProcessor(tiny_qwen())


def tiny_vision_processor() -> VisionTextProcessor:
    return VisionTextProcessor(tiny_qwen(), VISION_CHAT)


def tiny_qwen_processor(padding_side: str = "right") -> ImageProcessor:
    """Of which an image has at most 12 tokens of 28x28 pixels."""
    images = Qwen2VLImageProcessor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 12)
    return ImageProcessor(images, tiny_qwen(padding_side))
