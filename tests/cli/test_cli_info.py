"""`sdattn info` of a model."""

import json

import pytest
from diffusers import DiTTransformer2DModel
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import sana


@pytest.mark.slow
def test_info_lists_layers_and_bytes(invoke, whole_model):
    code, out, _ = invoke("info", whole_model)
    assert code == 0
    assert out.count(".attn2 ") == 16
    assert max(map(len, out.splitlines())) <= 80
    # cells of the 16 cross layers at 16x16: 5*256 + 5*64 + 5*16 + 4, times 77 float32
    assert "tokenizer: CLIPTokenizer" in out and "77 token columns" in out
    assert f"{(5 * 256 + 5 * 64 + 5 * 16 + 4) * 77 * 4 / 1e6:.1f} MB" in out


def test_the_bytes_of_50_steps_are_those_of_every_head_and_step(invoke):
    held = json.loads(invoke("info", "demo", "--json")[1])["bytes_held"]
    cells = 5 * 256 + 5 * 64 + 5 * 16 + 4
    assert held == {"default": cells * 77 * 4, "all_of_50_steps": 50 * 4 * cells * 77 * 4}


def test_info_of_a_transformer_tells_what_does_not_apply(invoke, tmp_path):
    sana().save_pretrained(tmp_path / "sana")
    code, out, _ = invoke("info", str(tmp_path / "sana"))
    said = " ".join(out.split())
    assert code == 0
    assert "heads block transformer_blocks.0.attn1 linear" in said
    assert "300 token columns" in said
    assert "2 linear attention layers cannot be captured" in said
    assert "found a SanaPipeline" in said


def test_info_of_a_demo_counts_the_columns_that_it_is_drawn_with(invoke):
    code, out, _ = invoke("info", "demo-mmdit")
    assert code == 0
    # 32 of CLIP, and 8 of zeros in T5's place
    assert "40 token columns" in out


@pytest.fixture
def unknown(tmp_path):
    """The folder of a pipeline whose transformer no family claims."""
    folder = tmp_path / "unknown"
    make_pipeline().save_pretrained(folder)
    shape = {"num_attention_heads": 2, "attention_head_dim": 4, "num_layers": 3, "in_channels": 4}
    model = DiTTransformer2DModel(**shape, norm_num_groups=4, num_embeds_ada_norm=10)
    model.save_pretrained(folder / "transformer")
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "DiTTransformer2DModel"]
    del index["unet"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def test_info_of_an_unknown_model_says_how_its_record_is_drafted(invoke, unknown):
    code, out, err = invoke("info", unknown)
    said = " ".join(err.split())
    assert code == 2 and out == ""
    assert "holds a DiTTransformer2DModel, of no family" in said
    assert "docs/contributing/family.md" in said
    assert "python -m scripts.new_family MODEL" in said


def test_programs_get_the_error_alone(invoke, unknown):
    code, out, _ = invoke("info", unknown, "--json")
    assert code == 2 and set(json.loads(out)) == {"error"}
