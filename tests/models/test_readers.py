"""Each pipeline's columns, against the states that its own ``encode_prompt`` makes.

The text encoders are real ones of random weights whose states are overwritten with the number of
the token that they stand for. So what ``encode_prompt`` returns tells, for every column that the
denoiser would get, which token it came from.
"""

import diffusers
import pytest
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from helpers.newer import needs_argument, newer
from helpers.reading_pipelines import PROMPTS, assert_same_columns, made_by, telling
from helpers.tiny_processors import TextProcessor, tiny_qwen_processor
from helpers.tiny_tokenizers import tiny_mistral, tiny_qwen

from sdattn.models.call_options import call_options
from sdattn.models.encoders import refuse_unknown
from sdattn.models.families import reader_of
from sdattn.models.guidance import guidance_of
from sdattn.models.reading import read_prompts

# Some pipelines clean more of a prompt than its ends, which is refused.
CLEAN = ["a red cat on the sofa", "A turquoise Cat, a dog (on a cat's SOFA)!", "un café 😀 cat"]
SPACED = [*PROMPTS[:2], "  un caf\u00e9 \n cat\n", PROMPTS[3]]
ALONE = {"do_classifier_free_guidance": False}
ONE_EACH = {**ALONE, "num_images_per_prompt": 1}
LAYERS = {"text_encoder_out_layers": (0, 1)}
SHORT = {"template": "[INST]{}[/INST]", "crop_start": 2}
COUNTED = {"template": "[INST]a video of:{}[/INST]"}

pytestmark = pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")


def mistral_processor(side, starts=True):
    tokenizer = tiny_mistral(side)
    if not starts:  # the processor adds the start that the template lacks
        tokenizer.chat_template = tokenizer.chat_template.replace("{{ bos_token }}", "")
    return TextProcessor(tokenizer)


def case(kind, also, options, *, prompts=PROMPTS, tokenizer="tokenizer", **parts):
    """A pipeline, further options of its ``encode_prompt``, and those of the call that count."""
    return pytest.param(kind, also, options, prompts, tokenizer, parts)


def of_length(length, **more):
    return {"max_sequence_length": length, **more}


CASES = [
    case("StableDiffusionPipeline", ONE_EACH, {}),
    case("StableDiffusionXLPipeline", ONE_EACH, {}),
    case("ChromaPipeline", ALONE, of_length(60)),
    case("ChromaImg2ImgPipeline", ALONE, of_length(60)),
    case("BriaPipeline", ALONE, of_length(60), vae={}, transformer={}),
    case("FluxPipeline", {}, of_length(512), tokenizer="tokenizer_2"),
    case("FluxPipeline", {}, of_length(20), tokenizer="tokenizer_2"),
    case("PixArtAlphaPipeline", ALONE, of_length(120, clean_caption=False)),
    case("PixArtSigmaPipeline", ALONE, of_length(300, clean_caption=False)),
    *(
        case(kind, {}, of_length(512), tokenizer=tiny_qwen(side))
        for kind in ("QwenImagePipeline", "QwenImageImg2ImgPipeline")
        for side in ("right", "left")
    ),
    case("Flux2KleinPipeline", LAYERS, of_length(512)),
    case("Flux2KleinPipeline", LAYERS, of_length(10), prompts=PROMPTS[:1]),
    *(
        case("Flux2Pipeline", LAYERS, of_length(512), tokenizer=mistral_processor(side, starts))
        for side in ("right", "left")
        for starts in (True, False)
    ),
    case("OvisImagePipeline", ALONE, of_length(180)),
    case("OvisImagePipeline", ALONE, of_length(180), tokenizer=tiny_qwen("left")),
    case("Kandinsky5T2IPipeline", {}, {}, prompts=SPACED),
    case("Kandinsky5T2IPipeline", {}, {}, prompts=SPACED, tokenizer=tiny_qwen_processor("left")),
    case("CogView3PlusPipeline", ALONE, of_length(24)),
    case("CogView4Pipeline", ALONE, {}),
    case("CogView4Pipeline", ALONE, {}, prompts=["cat " * 14, "dog"]),
    case("CogView4Pipeline", ALONE, of_length(10)),
    *(
        case(kind, ALONE, of_length(length), prompts=CLEAN)
        for kind in (
            *("WanPipeline", "WanImageToVideoPipeline", "SkyReelsV2Pipeline", "LTXPipeline"),
            "MochiPipeline",
        )
        for length in (24, 6)
    ),
    case("CogVideoXPipeline", ALONE, of_length(24)),
    case("CogVideoXPipeline", ALONE, of_length(6)),
    # the pipeline's own template is some 500 tokens, spelled in letters; of one without crop_start
    # it counts
    *(
        case("HunyuanVideoPipeline", {}, of_length(length, prompt_template=template))
        for template, length in ((DEFAULT_PROMPT_TEMPLATE, 600), (SHORT, 6), (COUNTED, 20))
    ),
]
LONGEST = ("QwenImage", "Kandinsky5", "CogView4")  # which have as many columns as a batch needs


@pytest.mark.parametrize(("kind", "also", "options", "prompts", "tokenizer", "parts"), CASES)
def test_columns_are_those_of_encode_prompt(kind, also, options, prompts, tokenizer, parts):
    if not isinstance(tokenizer, str):
        parts = {**parts, "tokenizer": tokenizer}
    pipe = telling(kind, **parts)
    for name in also:
        if name == "do_classifier_free_guidance":
            needs_argument(pipe.encode_prompt, name)
    spelling = getattr(pipe, tokenizer if isinstance(tokenizer, str) else "tokenizer")
    spelling = getattr(spelling, "tokenizer", spelling)  # of a processor
    if kind == "HunyuanVideoPipeline":
        spelling.add_tokens(["{}"])  # as Llama has it
        spelling.model_max_length = 12
    for batch in (prompts, prompts[:1], prompts[::-1]):
        read = read_prompts(pipe, batch, **options)
        made = made_by(pipe, batch, **options, **also)
        assert_same_columns(read, made, spelling)
        assert [one.text for one in read] == batch
        if "max_sequence_length" in options and not kind.startswith(LONGEST):
            assert len(made[0]) == options["max_sequence_length"]
        assert read_prompts(pipe, batch, columns=len(made[0]), **options) == read
    wrong = len(made[0]) + 1
    if wrong != 78:  # CLIP's, which are in chunks
        with pytest.raises(ValueError, match=f"have {wrong} token columns"):
            read_prompts(pipe, prompts, columns=wrong, **options)


@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("SanaPipeline", 300),
        ("SanaPipeline", 24),
        ("SanaPAGPipeline", 300),
        ("SanaSprintPipeline", 24),
    ],
)
@pytest.mark.slow
def test_sana_reads_gemma_behind_an_instruction(kind, length):
    pipe = telling(kind)
    guided = {} if kind == "SanaSprintPipeline" else ALONE
    default = call_options(pipe)["complex_human_instruction"]
    for instruction in (default, ["draw:"], None):
        options = of_length(length, complex_human_instruction=instruction)
        made = made_by(pipe, PROMPTS, **options, **guided)
        read = read_prompts(pipe, PROMPTS, columns=length, **options)
        assert_same_columns(read, made, pipe.tokenizer)
        assert read[0].tokens[0].special == "<sos>"
        if instruction == ["draw:"]:
            assert read[0].find("<template>") == [(1,)]


# Classes, and one that reads as they do; None for those that nobody reads.
ALIKE = {
    "StableDiffusionXLControlNetPipeline": "StableDiffusionPipeline",
    "StableDiffusionPAGPipeline": "StableDiffusionPipeline",
    "LatentConsistencyModelPipeline": "StableDiffusionPipeline",
    "AnimateDiffSDXLPipeline": "StableDiffusionPipeline",
    "LEditsPPPipelineStableDiffusion": "StableDiffusionPipeline",
    "StableDiffusion3Img2ImgPipeline": "StableDiffusion3Pipeline",
    "StableDiffusion3ControlNetPipeline": "StableDiffusion3Pipeline",
    "FluxKontextPipeline": "FluxPipeline",
    "FluxPriorReduxPipeline": None,
    "QwenImageControlNetPipeline": "QwenImagePipeline",
    "QwenImageEditInpaintPipeline": "QwenImageEditPipeline",
    "PixArtSigmaPAGPipeline": "PixArtAlphaPipeline",
    "SanaControlNetPipeline": "SanaPipeline",
    "SanaVideoPipeline": "SanaPipeline",
    "KolorsImg2ImgPipeline": "KolorsPipeline",
    "BriaFiboPipeline": None,
    "LongCatImageEditPipeline": None,
    "ChromaInpaintPipeline": "ChromaPipeline",
    "HunyuanDiTPAGPipeline": "HunyuanDiTPipeline",
    "StableVideoDiffusionPipeline": None,
    "HunyuanSkyreelsImageToVideoPipeline": "HunyuanVideoPipeline",
    "HunyuanVideoImageToVideoPipeline": None,
    "HunyuanVideoFramepackPipeline": None,
    "HunyuanVideo15ImageToVideoPipeline": "HunyuanVideo15Pipeline",
    "ZImageImg2ImgPipeline": "ZImagePipeline",
    "ZImageControlNetPipeline": "ZImagePipeline",
    "ZImageOmniPipeline": None,
    "Flux3DistilledModularPipeline": "Flux3ModularPipeline",
    "Ideogram4ModularPipeline": "Ideogram4Pipeline",
    "QwenImage21TurboModularPipeline": "QwenImage21Pipeline",
}
APART = """
StableDiffusionPipeline StableDiffusion3Pipeline FluxPipeline Flux2Pipeline Flux3ModularPipeline
QwenImageEditPipeline QwenImageEditPlusPipeline QwenImage21Pipeline KolorsPipeline AuraFlowPipeline
MiniMaxH3ModularPipeline
"""


def reader_named(name):
    kind = newer(name)
    return reader_of(kind.__new__(kind))


@pytest.mark.parametrize(("name", "other"), ALIKE.items())
def test_each_class_is_read_as_its_kin(name, other):
    expected = reader_named(other) if other else refuse_unknown
    assert reader_named(name) is expected
    assert (expected is refuse_unknown) == (other is None)


def test_classes_with_names_alike_are_read_unlike():
    names = [name for name in APART.split() if hasattr(diffusers, name)]
    readers = [reader_named(name) for name in names]
    assert len({id(reader) for reader in (*readers, refuse_unknown)}) == len(names) + 1


@pytest.mark.parametrize(
    "name",
    [
        "WanVACEPipeline",
        "WanAnimatePipeline",
        "HunyuanVideoImageToVideoPipeline",
        "HunyuanVideo15ImageToVideoPipeline",
        "HunyuanVideoFramepackPipeline",
    ],
)
def test_videos_from_what_was_not_tested_are_refused_by_name(name):
    cls = getattr(diffusers, name)
    with pytest.raises(ValueError, match=f"{name}.*guidance"):
        guidance_of(cls.__new__(cls))
