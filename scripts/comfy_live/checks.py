"""What is checked against the core: each check raises AssertionError with what it found."""

import contextlib
import copy
import functools
import importlib.util
import re
import sys

import torch

from . import core
from .oracle import Oracle
from .prompts import PROMPTS

SIZES = {  # odd ones, in cells of the latent
    "sd15": (13, 22),
    "sdxl": (25, 17),
    "sd3": (15, 21),
    "flux": (17, 24),
    "flux2_klein": (7, 11),
    "chroma": (18, 13),
    "qwen_image": (13, 20),
    "z_image": (19, 26),
    "lumina2": (12, 23),
    "hidream": (14, 19),
}
TOLERANCE = 1e-5
OVERRIDE = "optimized_attention_override"


def sample(model, patcher, positive, negative, latent, steps=3, seed=7, cfg=None, **options):
    """Return latents by the core's KSampler."""
    import comfy.sample

    noise = comfy.sample.prepare_noise(latent, seed)
    if (change := options.pop("change", None)) is not None:
        noise[..., change[0], change[1]] += 1.0
    with torch.inference_mode():
        return comfy.sample.sample(
            patcher,
            noise,
            steps,
            model.cfg if cfg is None else cfg,
            options.pop("sampler", "euler"),
            options.pop("scheduler", "normal"),
            positive,
            negative,
            latent,
            disable_pbar=True,
            seed=seed,
            **options,
        )


def watched(patcher, oracle=None, inner=None, **settings):
    """Return the model with the node behind an override that keeps what it is given."""
    model = patcher.clone()
    if oracle is not None:
        oracle.inner = inner
        model.model_options["transformer_options"] = {
            **model.model_options.get("transformer_options", {}),
            OVERRIDE: oracle,
        }
    node = core.nodes().NODE_CLASS_MAPPINGS["SdattnWatchAttention"]
    return node().watch(model, **settings)


def images_for(latent, scale=8):
    rows, cols = latent.shape[-2:]
    return torch.rand(len(latent), rows * scale, cols * scale, 3)


def check_maps(model, images=1, prompt="a cat left of a pizza", negative="", **options):
    """Latents are equal, and maps are the softmax in float64 of what the core's attention got."""
    latent = model.latent(*SIZES[model.name], images)
    with torch.inference_mode():
        positive, other = model.encode(prompt), model.encode(negative)
    plain = sample(model, model.patcher, positive, other, latent, **options)
    oracle = Oracle()
    patched, recorder = watched(model.patcher, oracle, steps="all steps")
    seen = sample(model, patched, positive, other, latent, **options)
    assert torch.equal(plain, seen), f"{model.name}: latents differ by {(plain - seen).abs().max()}"
    assert plain.isfinite().all(), f"{model.name}: latents are not finite"
    run = recorder.runs[None]
    assert not run.problem, f"{model.name}: {run.problem}"
    worst, compared = 0.0, 0
    for one in run.conditionings.values():
        kind = ("positive", "negative").index(one.name)
        expected = oracle.means(
            model.name, model.patcher.model.diffusion_model, latent.shape, one.facts.columns, kind
        )
        found = one.sums.means()
        assert found.keys() == expected.keys(), (model.name, one.name, [*found], [*expected])
        for key, maps in found.items():
            worst = max(worst, float((maps - expected[key]).abs().max()))
            compared += 1
        spread = max(float((maps.std(1) / maps.mean(1)).max()) for maps in found.values())
        assert spread > 0.05, f"{model.name}: maps are flat, so this shows nothing: {spread}"
    assert compared and worst < TOLERANCE, f"{model.name}: maps differ by {worst}"
    return worst, recorder, positive, other, latent


def check_places(model):
    """A patch of the latent changes the image's queries, a token's state the text's keys."""
    latent = model.latent(*SIZES[model.name])
    with torch.inference_mode():
        positive = model.encode("a cat left of a pizza")
    recording = __import__(f"{core.nodes().__name__}.recording", fromlist=["read_layout"])
    changed, layouts, original = {}, [], recording.read_layout
    recording.read_layout = lambda call: layouts.append(original(call)) or layouts[-1]
    for what in ("nothing", "patch", "token"):
        oracle = Oracle()
        patched, recorder = watched(model.patcher, oracle, steps="all steps")
        change = (4, 6) if what == "patch" else None
        given = copy.deepcopy(positive)
        if what == "token":
            given[0][0][:, -1] += 1.0
            if "conditioning_llama3" in given[0][1]:
                given[0][1]["conditioning_llama3"][:, :, -1] += 1.0
        sample(model, patched, given, given, latent, steps=1, cfg=1.0, change=change)
        changed[what] = oracle, recorder
    recording.read_layout = original
    oracle, _ = changed["nothing"]
    number, look = _first_joint(layouts[0], oracle)
    for what, tensor in (("patch", "query"), ("token", "key")):
        before = getattr(oracle.seen[number], tensor)
        after = getattr(changed[what][0].seen[number], tensor)
        moved = (before - after).abs().amax((0, 1, 3)) > 1e-6
        where = set(moved.nonzero().flatten().tolist())
        assert where, f"{model.name}: a {what} changed no {tensor}"
        (_check_patch if what == "patch" else _check_token)(model, look, len(moved), where)


def _first_joint(layout, oracle):
    """Return the number of the first call that shows the text, and its places."""
    for number, seen in enumerate(oracle.seen):
        look = layout.look(seen.query.shape[2], seen.key.shape[2], _options(seen))
        if look is not None and look.texts:
            return number, layout.of_row(look, 0)
    raise AssertionError("no call shows the text")


def _check_patch(model, look, tokens, where):
    if model.name in ("sd15", "sdxl"):  # convolutions spread a change
        return
    image = range(tokens)[look.queries]
    cell = image[4 // _patch(model) * look.grid[1] + 6 // _patch(model)]
    assert cell in where, f"{model.name}: cell {cell} did not change"
    if model.name in ("z_image", "lumina2"):  # whose refiner mixes cells, and their padding
        last = tokens if model.name == "z_image" else image[-1] + 1
        assert where <= set(range(image[0], last)), f"{model.name}: {where - set(image)} changed"
    else:
        assert where == {cell}, f"{model.name}: {where} changed, not {cell}"


def _check_token(model, look, tokens, where):
    columns = [range(tokens)[part][-1] for part in look.texts]
    assert set(columns) <= where, f"{model.name}: the last token is not at {columns}"
    if model.name not in ("z_image", "lumina2"):
        assert where <= set(columns) | {columns[0] - 128}, (model.name, where, columns)


def _options(seen):
    return {**seen.options, "activations_shape": seen.options["shape"]}


def _patch(model):
    return 1 if model.name == "flux2_klein" else 2


class Spy:
    """Wrappers that keep what they are called with, in few words."""

    def __init__(self):
        self.told = []

    def install(self, patcher):
        for kind in ("outer_sample", "predict_noise", "calc_cond_batch", "apply_model"):
            patcher.add_wrapper_with_key(kind, "spy", functools.partial(self.wrap, kind))

    def wrap(self, kind, executor, *args, **kwargs):
        told = [kind, *map(_briefly, args)]
        if kind == "apply_model":  # what of the options of models the recorder reads
            keys = ("cond_or_uncond", "uuids", "sigmas")
            told[-1] = {key: _briefly(args[5][key]) for key in keys}
        self.told.append(told)
        return executor(*args, **kwargs)


def _briefly(one):
    if isinstance(one, torch.Tensor):
        return f"tensor of {one.ndim} axes"
    if isinstance(one, (list, tuple)):
        return [_briefly(part) for part in one]
    return "number" if isinstance(one, int) else type(one).__name__ if one is None else "object"


def check_double(model):
    """The double in tests/ calls wrappers as the core does: which, in which order, with what."""
    double = _double()
    with torch.inference_mode():
        positive, negative = model.encode("a cat"), model.encode("a dog")
    patched, ours = model.patcher.clone(), Spy()
    ours.install(patched)
    sample(model, patched, positive, negative, odd_latent(model), steps=2, cfg=2.0)
    kind = double.UNetModel if model.name == "sd15" else double.Flux
    other, theirs = double.Patcher(double.Base(kind())), Spy()
    theirs.install(other)
    text = [[double.states(seed, 6), {}] for seed in (1, 2)]
    double.Guider(other, text[:1], text[1:]).sample(double.latents(7, 10), steps=2)
    kinds = [[one[0] for one in spy.told] for spy in (ours, theirs)]
    assert kinds[0] == kinds[1], kinds
    for own, made in zip(ours.told, theirs.told, strict=True):
        if own[0] == "outer_sample":  # the double has no sampler and no noise mask
            own, made = own[:3], made[:3]
        assert own == made, (own, made)


def _double():
    """Import the double by its file: the core has a package of tests too."""
    path = core.NODES.parents[1] / "tests" / "helpers" / "comfy_double.py"
    spec = importlib.util.spec_from_file_location("comfy_double", path)
    module = sys.modules["comfy_double"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def odd_latent(model):
    return model.latent(*SIZES[model.name])


@contextlib.contextmanager
def encoded(encoder):
    """Yield what each of an encoder's networks embeds while it encodes: (module, embeddings)."""
    import comfy.sd1_clip

    kept, original = [], comfy.sd1_clip.SDClipModel.process_tokens

    def process(self, tokens, device):
        found = original(self, tokens, device)
        kept.append((self, found[0].clone()))  # networks add to it in place
        return found

    comfy.sd1_clip.SDClipModel.process_tokens = process
    try:
        yield kept
    finally:
        comfy.sd1_clip.SDClipModel.process_tokens = original


def check_columns(model, embeddings=None, prompts=PROMPTS):
    """Columns are those of the encoder's own ids, and every word of each prompt is found."""
    nodes = core.nodes()
    columns = __import__(f"{nodes.__name__}.columns", fromlist=["read"])
    layouts = __import__(f"{nodes.__name__}.layouts", fromlist=["TextFacts"])
    skips = ("l", "g") if model.name in ("flux", "hidream") else ()
    for prompt in prompts:
        with encoded(model.clip) as kept, torch.inference_mode():
            states, extra = model.encode(prompt)[0]
        n_text = states.shape[1]
        if "conditioning_llama3" in extra:
            n_text += extra["conditioning_llama3"].shape[2]
        read = columns.read(model.clip, prompt, layouts.TextFacts(n_text, skips))
        _check_ids(model, prompt, read, kept)
        _check_words(model, prompt, read)


def _check_ids(model, prompt, read, kept):
    """Each column's token has the embedding that the network got there."""
    tables = []  # [T, width] by network, with the network's table
    names = {id(getattr(model.clip.cond_stage_model, name, None)): name for name in _NETWORKS}
    for network, embeddings in kept:
        name = names.get(id(network))
        if model.name in ("flux", "hidream") and name in ("clip_l", "clip_g"):
            continue
        if model.name in ("sdxl", "sd3") and name == "clip_l":
            continue  # side by side with CLIP-G's, which is checked
        table = network.transformer.get_input_embeddings()
        rows = _sections(model, network, name, prompt)
        tables.append((name, embeddings[:rows].flatten(0, 1), table))
    order = {"clip_g": 0, "clip_l": 0, "t5xxl": 1, "llama": 2}
    tables.sort(key=lambda one: order.get(one[0], 0))
    got = [(row, table) for _, rows, table in tables for row in rows]
    got = got[len(got) - len(read.tokens) :]
    assert len(got) == len(read.tokens), (model.name, prompt, len(got), len(read.tokens))
    for column, (token, (row, table)) in enumerate(zip(read.tokens, got, strict=True)):
        if token.id < 0:
            continue
        with torch.inference_mode():
            own = table(torch.tensor([token.id]), out_dtype=torch.float32)[0]
        assert torch.equal(own, row), (
            f"{model.name}: column {column} of {prompt!r} is not {token.text!r} ({token.id})"
        )


_NETWORKS = ("clip_l", "clip_g", "t5xxl", "llama", "qwen25_7b", "qwen3_4b", "gemma2_2b")


def _sections(model, network, name, prompt):
    """Return the number of chunks, without the empty one that weights add."""
    tokens = model.clip.tokenize(prompt)
    key = {"clip_l": "l", "clip_g": "g"}.get(name, name)
    return len(tokens[key])


def _check_words(model, prompt, read):
    """Each word is found, and its tokens spell it."""
    text = re.sub(r"embedding:[^\s,()]+", " ", prompt)
    known = read.truncated
    for word in re.findall(r"[\u3040-\u30ff\u4e00-\u9fff]|[^\W_\u3040-\u30ff\u4e00-\u9fff]+", text):
        if re.fullmatch(r"[\d.]+", word):
            continue  # a number may be a weight
        owners = [own for own in read.words if word.casefold() in own.text.casefold()]
        assert owners, f"{model.name}: {word!r} of {prompt!r} is no word: {read.words}"
        if all(own in known for own in owners):
            assert model.name == "hidream", f"{model.name}: {word!r} of {prompt!r} has no columns"
            continue
        for own in owners:
            if own in known:
                continue
            tokens = [read.tokens[column] for column in own.columns]
            assert all(token.special == "" for token in tokens), (model.name, prompt, own)
            spelled = "".join(token.text for token in tokens).replace("</w>", "")
            letters = re.sub(r"[^a-z]", "", own.text.casefold())
            if letters and own.text.isascii():
                pure = re.sub(r"[^a-z]", "", spelled.casefold())
                assert letters in pure, (model.name, prompt, own, spelled)
    vectors = {"glow": 1, "twofold": 2} if model.name in ("sd15", "sdxl") else {}
    for name in vectors.keys() & set(re.findall(r"embedding:(\w+)", prompt)):
        own = next(word for word in read.words if word.text == f"embedding:{name}")
        tokens = [read.tokens[column] for column in own.columns]
        assert len(tokens) == vectors[name], (model.name, prompt, own)
        assert all(token.text == "<embedding>" for token in tokens), (model.name, prompt, own)
