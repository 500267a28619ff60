"""The seven laws, for every row of the support matrix, against matrix_oracle.py.

Each case looks at one run with capture. What cases of a row have in common is made once: the
pipeline, and the record of what its own attention did in the first way.
"""

import re
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from helpers.matrix import CASES, PROCESSORS, ROWS, WAYS, few_are_quick, marks_of
from helpers.matrix_oracle import expected_maps, processors, run_recorded
from helpers.rows import PROMPTS

from sdattn import CaptureError, CaptureWarning, capture, heatmaps
from sdattn.models.denoiser import find_denoiser

DECODED = {"output_type": "np"}  # in the third way; in others latents are compared
LOSSY = ("fused", torch.bfloat16)  # ways of changing a pipeline that are not undone
# each prompt has a call of a text encoder of its own: which is of which is not known
QUOTING = ("HunyuanImage 2.1, quoted text", "HunyuanVideo 1.5, quoted text")
ONE_BY_ONE = ("Bria", "ERNIE-Image", *QUOTING)
PERTURBED = ("PAG", "PixArt Sigma, PAG")  # their self-attention runs on some rows at a time
FURTHER_TEXTS = ("GLIGEN", "Semantic guidance")  # beside both prompts, by the same text encoder


def state(pipe, model):
    """Everything that capture() could leave behind."""
    parts = [part for part in vars(pipe).values() if isinstance(part, torch.nn.Module)]
    modules = [module for part in parts for module in part.modules()]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules]
    return processors(model), hooks, set(vars(pipe)), set(vars(model))


@lru_cache(maxsize=1)
def first_run(row):
    """A row's pipeline and its run in the first way; cases of a row come one after the other."""
    pipe = row.make()
    return pipe, run_recorded(row, pipe, row.fitted(WAYS[0]))


@contextmanager
def pipeline(row, processor, dtype):
    """The row's pipeline with such processors, for one case."""
    if processor in LOSSY or dtype in LOSSY:
        pipe = row.make().to(dtype)
        PROCESSORS[processor](find_denoiser(pipe).model)
        yield pipe
        return
    pipe, _ = first_run(row)
    model = find_denoiser(pipe).model
    own = processors(model)
    try:
        PROCESSORS[processor](model)
        yield pipe
        for module, held in own.items():
            if module.processor is not held:
                module.set_processor(held)
    except BaseException:
        first_run.cache_clear()  # the next case begins with a pipeline of its own
        raise


@pytest.mark.parametrize(
    ("row", "processor", "way"),
    [pytest.param(*case, id="-".join(map(str, case)), marks=marks_of(*case)) for case in CASES],
)
def test_the_seven_laws(row, processor, way):
    first, more = way == WAYS[0], DECODED if way == WAYS[2] else {}
    way = row.fitted(way)
    with pipeline(row, processor, way.dtype) as pipe:
        model = find_denoiser(pipe).model
        plain, record, calls = first_run(row)[1] if first else run_recorded(row, pipe, way, **more)
        if processor != "own":  # the record is of torch's own attention, the image of this one
            plain = row.run(pipe, way, **more)
        before = state(pipe, model)
        with capture(pipe) as store:
            watched = row.run(pipe, way, **more)

        assert (plain == watched).all()  # 1: looking changes nothing
        after = state(pipe, model)  # 3 and 7: leaving restores
        assert all(after[0][one] is before[0][one] for one in before[0])
        assert after[1:] == before[1:]

        # 2: what is shown is what was used, also of attention that is nearly even: tiny random
        # weights give maps whose spread is a few thousandths
        texts = {
            layer.name for layer in find_denoiser(model).layers if layer.kind in ("cross", "joint")
        }
        assert set(store.maps) == texts  # 4: never silently empty
        assert len(texts) == row.layers
        lengths = None if row.lengths is None else row.lengths(pipe, way)
        for layer in texts:
            found = store.maps[layer].flatten(1, -2).double()
            expected = expected_maps(record[layer], calls, row, way, lengths)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

        known = pipe.scheduler.timesteps.double()
        rounds = way.autocast or way.dtype != torch.float32
        slack = 1e-2 if rounds else 1e-4  # some pipelines hand them on rounded
        assert all((known - t).abs().min() <= slack * max(t, 1) for t in store.timesteps)

        assert store.nbytes == store.expected_nbytes  # 5: memory is what was said
        assert store.images == way.total  # 6: nothing assumed of batch and size
        assert store.latent_size == row.grid(way)
        if way.prompts > 1 and row.name in ONE_BY_ONE:
            assert store.drawn is None or "conditional" not in store.drawn.texts
        elif way.guided and row.name in FURTHER_TEXTS:
            assert store.drawn is None
        elif processor == "own":
            assert_it_says_what_it_drew(store, pipe, row, way)


def assert_it_says_what_it_drew(store, pipe, row, way):
    """Heatmaps are those of the prompts that were drawn, and other prompts are refused."""
    options = row.options(pipe, way)
    given = options.pop("prompt", list(PROMPTS[: way.prompts]))  # some rows have their own
    right = [given] if isinstance(given, str) else list(given)
    for one, other in zip(store.heatmaps(), heatmaps(store, pipe, right, **options), strict=True):
        assert torch.equal(one.maps, other.maps) and one.prompt == other.prompt
    wrong = ["a blue dog", *right[1:]]
    # Z-Image leaves the chat that it made of a prompt in the prompt's place
    said = f"heatmaps of 'a blue dog', but the .* was .*{re.escape(right[0])}"
    with pytest.raises(ValueError, match=said):
        heatmaps(store, pipe, wrong, **options)
    if len(right) == 2:
        said = f"of {right[1]!r}, but the prompt .*{re.escape(right[0])}"
        with pytest.raises(ValueError, match=said):
            heatmaps(store, pipe, right[::-1], **options)


def spots_of(row, way):
    """Two cells, each the other's mirror where the grid is square: rows and columns are told."""
    *frames, rows, cols = row.grid(way)
    frames = [] if row.frame_rows > 1 else [number - 1 for number in frames]
    return [(*frames, rows // 4, cols - 1), (*frames, rows - 1, cols // 4)]


def numbers_of(cells, grid, latent):
    """Queries of a layer on a grid that divides the latent's."""
    steps = [most // here for most, here in zip(latent, grid, strict=True)]
    at = [[a // step for a, step in zip(cell, steps, strict=True)] for cell in cells]
    return [int(torch.arange(torch.Size(grid).numel()).view(grid)[tuple(one)]) for one in at]


@pytest.mark.parametrize("row", few_are_quick(ROWS), ids=str)
def test_where_cells_and_the_text_looked(row):
    way = row.fitted(WAYS[0])
    with pipeline(row, "own", way.dtype) as pipe:
        model, (plain, record, calls) = find_denoiser(pipe).model, first_run(row)[1]
        cells, kinds = (
            spots_of(row, way),
            {one.name: one.kind for one in find_denoiser(model).layers},
        )
        asked = [{"queries": cells}] if {"self", "joint"} & {*kinds.values()} else []
        if row.joint and not row.in_parts:
            asked += [{"queries": "text"}, {"queries": "text", "keys": "text"}]
        else:
            why = "to itself alone" if row.in_parts else "joint"
            with pytest.raises(ValueError, match=why), capture(pipe, queries="text"):
                pass
        if not asked:
            with pytest.raises(ValueError, match="self"), capture(pipe, queries=cells):
                pass
            return
        before = state(pipe, model)
        if row.name in PERTURBED:
            with pytest.warns(CaptureWarning, match="replaced"):
                with pytest.raises(CaptureError, match="Leave this layer out"):
                    with capture(pipe, queries=cells):
                        row.run(pipe, way)
            return
        with ExitStack() as stack:
            stores = [stack.enter_context(capture(pipe, **options)) for options in asked]
            if row.name == "SAG":  # puts a processor of its own into a layer
                stack.enter_context(pytest.warns(CaptureWarning, match="replaced"))
            watched = row.run(pipe, way)
        assert (plain == watched).all()
        assert state(pipe, model) == before
        lengths = None if row.lengths is None else row.lengths(pipe, way)
        latent = row.grid(way)[row.frame_rows > 1 :]
        for store, options in zip(stores, asked, strict=True):
            of_cells, keys = options["queries"] == cells, options.get("keys", "image")
            seen = ("self", "joint") if of_cells else ("joint",)
            assert set(store.maps) == {name for name, kind in kinds.items() if kind in seen}
            assert store.nbytes == store.expected_nbytes
            for name, maps in store.maps.items():
                if row.name == "SAG" and not record[name]:
                    continue  # its processor does not call torch's attention
                grid = tuple(maps.shape[1 + (row.frame_rows > 1) : -1])
                picked = numbers_of(cells, grid, latent) if of_cells else None
                told = row if kinds[name] == "joint" else replace(row, joint=None)
                sides = ("image" if of_cells else "text", keys)
                expected = expected_maps(record[name], calls, told, way, lengths, sides, picked)
                found = (maps.flatten(1, -2) if keys == "image" else maps).double()
                if row.name == "Z-Image, ControlNet":  # it runs the model's refiner before it
                    expected = expected[:, -found.shape[1] :]
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
