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
    "z_image_omni": (19, 26),
    "lumina2": (12, 23),
    "hidream": (14, 19),
}
PATCH = (4, 6)  # a cell of the latent that is changed
TOLERANCE = 1e-5
OVERRIDE = "optimized_attention_override"


def sample(model, patcher, positive, negative, latent, steps=3, seed=7, cfg=None, **options):
    """Return latents by the core's KSampler."""
    import comfy.sample

    noise = comfy.sample.prepare_noise(latent, seed)
    change = options.pop("change", None)
    if change is not None:
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


def check_maps(model, prompt="a cat left of a pizza", positive=None, **of_oracle):
    """Latents are equal, and maps are the softmax in float64 of what the core's attention got.

    ``positive`` is the prompt's CONDITIONING, if it has more than the text; the oracle is then told
    where its text stands.
    """
    latent = odd_latent(model)
    with torch.inference_mode():
        positive = positive or model.encode(prompt)
        other = model.encode("")
    plain = sample(model, model.patcher, positive, other, latent)
    oracle = Oracle(**of_oracle)
    patched, recorder = watched(model.patcher, oracle, steps="all steps")
    seen = sample(model, patched, positive, other, latent)
    assert torch.equal(plain, seen), f"{model.name}: latents differ by {(plain - seen).abs().max()}"
    assert plain.isfinite().all(), f"{model.name}: latents are not finite"
    run = recorder.runs[None]
    assert not run.problem and not run.notes, f"{model.name}: {run.problem} {run.notes}"
    assert run.most == run.layers > 0, f"{model.name}: {run.most} of {run.layers} layers"
    worst = 0.0
    compared = 0
    for one in run.conditionings.values():
        kind = ("positive", "negative").index(one.name)
        expected = oracle.means(model.name, latent.shape, one.facts.columns, kind)
        found = one.sums.means()
        assert found.keys() == expected.keys(), (model.name, one.name, [*found], [*expected])
        for key, maps in found.items():
            worst = max(worst, float((maps - expected[key]).abs().max()))
            compared += 1
        spread = max(float((maps.std(1) / maps.mean(1)).max()) for maps in found.values())
        assert spread > 0.05, f"{model.name}: maps are flat, so this shows nothing: {spread}"
    assert compared and worst < TOLERANCE, f"{model.name}: maps differ by {worst}"
    return f"{worst:.1e} from float64"


def check_places(model, positive=None):
    """A patch of the latent changes the image's queries, a token's state the text's keys.

    In the first layer that sees it, one alone changes. Layers that see one kind alone (of Z-Image,
    Lumina 2) may mix it with its own kind, but with nothing else before both meet.
    """
    latent = odd_latent(model)
    with torch.inference_mode():
        positive = positive or model.encode("a cat left of a pizza")
    recording = __import__(f"{core.nodes().__name__}.recording", fromlist=["read_layout"])
    layouts = []
    original = recording.read_layout
    recording.read_layout = lambda call: layouts.append(original(call)) or layouts[-1]
    seen = {}
    for what in ("nothing", "patch", "token"):
        oracle = Oracle()
        patched, _ = watched(model.patcher, oracle, steps="all steps")
        given = copy.deepcopy(positive)
        if what == "token":
            given[0][0][:, -1] += 1.0
            if "conditioning_llama3" in given[0][1]:
                given[0][1]["conditioning_llama3"][:, :, -1] += 1.0
        change = PATCH if what == "patch" else None
        sample(model, patched, given, given, latent, steps=1, cfg=1.0, change=change)
        seen[what] = oracle.seen
    recording.read_layout = original
    joint, look = _first_joint(layouts[0], seen["nothing"])
    if model.name not in ("sd15", "sdxl"):  # where convolutions spread a change
        cell = PATCH[0] // _patch(model) * look.grid[1] + PATCH[1] // _patch(model)
        expected = {range(seen["nothing"][joint].query.shape[2])[look.queries][cell]}
        _check_change(model, seen, "patch", "query", joint, expected)
    n_keys = seen["nothing"][joint].key.shape[2]
    expected = {range(n_keys)[part][-1] for part in look.texts}
    if model.name == "hidream":  # whose last columns are T5's and twice Llama's
        expected.add(min(expected) - len(range(n_keys)[look.texts[1]]))
    _check_change(model, seen, "token", "key", joint, expected)


def _check_change(model, seen, what, tensor, joint, expected):
    """Check which tokens of the first joint call a change is at, by the first call that shows it.

    That call may be of the image's or the text's layers: the image's tokens are the last of a joint
    call, and the text's the first.
    """
    moved = {}
    for number, (before, after) in enumerate(zip(seen["nothing"], seen[what], strict=True)):
        differ = (getattr(before, tensor) - getattr(after, tensor)).abs().amax((0, 1, 3)) > 1e-6
        if differ.any():
            moved[number] = len(differ), set(differ.nonzero().flatten().tolist())
        if number == joint:
            break
    assert moved, f"{model.name}: a {what} changed no {tensor}"
    first = min(moved)
    n_first, found = moved[first]
    n_joint, mixed = moved[joint]
    shift = n_joint - n_first if what == "patch" else 0
    found = {token + shift for token in found}
    assert found == expected, f"{model.name}: a {what} changed {found}, not {expected}"
    kind = set(range(shift, shift + n_first))
    assert found <= mixed <= kind, f"{model.name}: a {what} is at {mixed}, outside {kind}"


def _first_joint(layout, calls):
    """Return the number of the first call that shows the text, and its places."""
    for number, seen in enumerate(calls):
        look = layout.look(seen.query.shape[2], seen.key.shape[2], _options(seen))
        if look is not None and look.texts:
            return number, layout.of_row(look, 0)
    raise AssertionError("no call shows the text")


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
    if isinstance(one, int):
        return "number"
    return "nothing" if one is None else "object"


def check_double(model):
    """The double in tests/ calls wrappers as the core does: which, in which order, with what."""
    double = _double()
    with torch.inference_mode():
        positive = model.encode("a cat")
        negative = model.encode("a dog")
    patched = model.patcher.clone()
    ours = Spy()
    ours.install(patched)
    sample(model, patched, positive, negative, odd_latent(model), steps=2, cfg=2.0)
    kind = double.UNetModel if model.name == "sd15" else double.Flux
    other = double.Patcher(double.Base(kind()))
    theirs = Spy()
    theirs.install(other)
    text = [[double.states(seed, 6), {}] for seed in (1, 2)]
    double.Guider(other, text[:1], text[1:]).sample(double.latents(7, 10), steps=2)
    kinds = [[one[0] for one in spy.told] for spy in (ours, theirs)]
    assert kinds[0] == kinds[1], kinds
    for own, made in zip(ours.told, theirs.told, strict=True):
        if own[0] == "outer_sample":  # the double has no sampler and no noise mask
            own = own[:3]
            made = made[:3]
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

    kept = []
    original = comfy.sd1_clip.SDClipModel.process_tokens

    def process(self, tokens, device):
        found = original(self, tokens, device)
        kept.append((self, found[0].clone()))  # networks add to it in place
        return found

    comfy.sd1_clip.SDClipModel.process_tokens = process
    try:
        yield kept
    finally:
        comfy.sd1_clip.SDClipModel.process_tokens = original


def check_columns(model):
    """Columns are those of the encoder's own ids, and every word of each prompt is found."""
    words = columns = number = 0
    for prompt, encode in _encodings(model):
        with encoded(model.clip) as kept, torch.inference_mode():
            positive = encode(prompt)
        read = check_prompt(model, prompt, positive, kept)
        number += 1
        words += len(read.words)
        columns += len(read.tokens)
    return f"{number} prompts, {words} words, {columns} columns"


def _encodings(model):
    """Yield each prompt with what encodes it; for Lumina 2 also with each of its node's texts."""
    for prompt in PROMPTS:
        yield prompt, model.encode
    if model.name == "lumina2":
        from comfy_extras.nodes_lumina2 import CLIPTextEncodeLumina2

        def encode(prompt, system):
            return outputs(
                CLIPTextEncodeLumina2, clip=model.clip, user_prompt=prompt, system_prompt=system
            )[0]

        for system in CLIPTextEncodeLumina2.SYSTEM_PROMPT:
            for prompt in PROMPTS:
                yield prompt, functools.partial(encode, system=system)


def outputs(node, **inputs):
    """Run a node of the core, of its older kind or its newer one."""
    if hasattr(node, "execute"):
        return node.execute(**inputs).result
    return getattr(node(), node.FUNCTION)(**inputs)


def check_prompt(model, prompt, positive, kept, has_images=False):
    """Check one prompt's columns by what its networks embedded; return it as the nodes read it."""
    nodes = core.nodes()
    columns = __import__(f"{nodes.__name__}.columns", fromlist=["read"])
    layouts = __import__(f"{nodes.__name__}.layouts", fromlist=["TextFacts"])
    ((states, extra),) = positive
    n_text = states.shape[1]
    if "conditioning_llama3" in extra:
        n_text += extra["conditioning_llama3"].shape[2]
    skips = ("l", "g") if model.name in ("flux", "hidream") else ()
    has_captions = bool(extra.get("reference_latents_text_embeds"))
    facts = layouts.TextFacts(n_text, skips, has_images=has_images, has_captions=has_captions)
    read = columns.read(model.clip, prompt, facts)
    _check_ids(model, prompt, read, kept)
    _check_words(model, prompt, read)
    return read


def _check_ids(model, prompt, read, kept):
    """Each column's token has the embedding that the network got there."""
    tables = []  # [T, width] by network, with the network's table
    names = {id(getattr(model.clip.cond_stage_model, name, None)): name for name in _NETWORKS}
    for network, embeddings in kept:
        name = names.get(id(network))
        if model.name in ("flux", "hidream") and name in ("clip_l", "clip_g"):
            continue
        table = network.transformer.get_input_embeddings()
        rows = embeddings[: _sections(model, name, prompt)].flatten(0, 1)
        if model.name in ("sdxl", "sd3") and name == "clip_l":
            # beside CLIP-G, whose paddings are other tokens
            content = [token.special == "" for token in read.tokens[: len(rows)]]
            _check_rows(model, prompt, read.tokens[: len(rows)], rows, table, content)
            continue
        tables.append((name, rows, table))
    order = {"clip_g": 0, "clip_l": 0, "t5xxl": 1, "llama": 2}
    tables.sort(key=lambda one: order.get(one[0], 0))
    columns = sum(len(rows) for _, rows, _ in tables)
    cut = columns - len(read.tokens)  # a template's start, which the encoder cuts off
    assert cut >= 0, (model.name, prompt, columns, len(read.tokens))
    first = 0
    for _, rows, table in tables:
        rows = rows[cut:]
        tokens = read.tokens[first : first + len(rows)]
        _check_rows(model, prompt, tokens, rows, table, [True] * len(rows))
        first += len(rows)
        cut = 0


def _check_rows(model, prompt, tokens, rows, table, are_checked):
    for token, row, is_checked in zip(tokens, rows, are_checked, strict=True):
        if token.id < 0 or not is_checked:
            continue
        with torch.inference_mode():
            own = table(torch.tensor([token.id]), out_dtype=torch.float32)[0]
        assert torch.equal(own, row), (
            f"{model.name}: a column of {prompt!r} is not {token.text!r} ({token.id})"
        )


_NETWORKS = ("clip_l", "clip_g", "t5xxl", "llama", "qwen25_7b", "qwen3_4b", "gemma2_2b")


def _sections(model, name, prompt):
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
