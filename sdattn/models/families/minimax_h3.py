"""MiniMax-H3: one stream of joint attention over text, keyframes, sound and, last, the video; the
prompt is read as it is."""

from collections.abc import Sequence

from ...attention.joint_processor import Spans
from ...errors import InvalidTypeError
from ...prompts.tokens import Prompt
from ...prompts.words import Source
from ..denoiser_call import Timestep, grid_of_places
from ..encoders import TextCall, read_inside
from ..family import IN_TURN, Family
from ..pipeline import Given, Model


def read_h3(call: TextCall, texts: list[str]) -> list[Prompt]:
    """Read Qwen3-VL without a chat. Source: modular_pipelines/minimax_h3/encoders.py,
    ``MiniMaxH3TextEncoderStep``."""
    if any(call.options.get(name) is not None for name in ("image", "last_image", "references")):
        raise InvalidTypeError(
            f"The text encoder of a {type(call.pipe).__name__} reads images before the prompt, so "
            f"the columns of {texts[0]!r} depend on them. Pass labels, for example {{'cat': [2]}}, "
            "and columns=."
        )
    sources = map(Source.of, texts)
    read = read_inside(call.pipe.tokenizer, sources, add_special_tokens=False)
    for one in read:
        if call.columns not in (None, len(one.tokens)):
            raise call.unexplained(f"{one.text!r} makes {len(one.tokens)}")
    return read


def _grid(_model: Model, given: Given) -> tuple[int, ...]:
    """Return the grid from the (time, row, col) of the tokens after the sound, the video's."""
    places = given["position_ids"][int(given["audio_indices"].max()) + 1 :]
    return grid_of_places("position_ids", places)


def _spans(_model: Model, given: Given, cells: int) -> Sequence[Spans]:
    """Return the spans: the text first, the generated video last."""
    length, text = len(given["position_ids"]), given["encoder_hidden_states"]
    return [(slice(length - cells, length), slice(0, text.shape[1]))] * len(text)


class _H3(Family):
    """MiniMax-H3, which gets one timestep for each noise level, and the index of each token's."""

    def timestep(self, _model: Model, given: Given) -> Timestep:
        last = given["timestep_indices"][-1:]  # of the generated video
        return Timestep(given["timestep"].index_select(0, last))


FAMILY = _H3(
    name="MiniMax-H3",
    denoisers=("MiniMaxH3Transformer3DModel",),
    layers={
        "token_refiner.refiner_blocks.*.attn": ("block", "text"),
        "transformer_blocks.*.attn": ("single", "joint"),
    },
    joined="text first",
    grid=_grid,
    grid_argument="position_ids",
    spans=_spans,
    video=True,
    fps=24,
    default_frames=124,
    patch=2,
    readers={"MiniMaxH3": read_h3},
    guidance={"MiniMaxH3ModularPipeline": IN_TURN},
    text_options=("image", "last_image", "references"),
    reads_ids="model",
    preset="joint",
)
