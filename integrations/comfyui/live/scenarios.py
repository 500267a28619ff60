"""What graphs do with conditionings, samplers and models, each with and without the node."""

import contextlib

import torch

from . import core, references
from .checks import (
    OVERRIDE,
    SIZES,
    check_maps,
    check_places,
    check_prompt,
    encoded,
    images_for,
    sample,
    watched,
)
from .oracle import Oracle
from .prompts import PROMPTS

TOLERANCE = 1e-5


def both(model, positive, negative, latent, patcher=None, settings=None, **options):
    """Sample with and without the node; latents are equal. Return the recorder."""
    options.setdefault("cfg", max(model.cfg, 2.0))
    patcher = patcher or model.patcher
    plain = sample(model, patcher, positive, negative, latent, **options)
    patched, recorder = watched(patcher, **{"steps": "all steps", **(settings or {})})
    seen = sample(model, patched, positive, negative, latent, **options)
    assert torch.equal(plain, seen), f"latents differ by {(plain - seen).abs().max()}"
    return recorder


def asked(model, latent, prompt, **options):
    reading = __import__(f"{core.nodes().__name__}.reading", fromlist=["Asked"])
    return reading.Asked(model.clip, prompt, images_for(latent), **options)


def maps_of(recorder, model, latent, prompt, **options):
    reading = __import__(f"{core.nodes().__name__}.reading", fromlist=["heatmaps"])
    return reading.heatmaps(recorder, asked(model, latent, prompt, **options))


def refused(recorder, model, latent, prompt, says, **options):
    found = None
    try:
        maps_of(recorder, model, latent, prompt, **options)
    except (ValueError, RuntimeError, KeyError) as error:
        found = str(error)
    assert found is not None, f"not refused: {says}"
    assert says in found, found


def texts(model, *prompts):
    with torch.inference_mode():
        return [model.encode(prompt) for prompt in prompts]


def odd(model, images=1):
    return model.latent(*SIZES[model.name], images)


def close(first, second):
    worst = max(float((a.maps - b.maps).abs().max()) for a, b in zip(first, second, strict=True))
    assert worst < TOLERANCE, worst


def cond_and_uncond_in_turn(model):
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    together = both(model, positive, negative, odd(model))
    with no_memory(model):
        apart = both(model, positive, negative, odd(model))
    for side, prompt in (("positive", "a cat left of a pizza"), ("negative", "blurry")):
        maps = [maps_of(one, model, odd(model), prompt, name=side) for one in (together, apart)]
        close(*maps)


def no_guidance(model):
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    recorder = both(model, positive, negative, odd(model), cfg=1.0)
    assert maps_of(recorder, model, odd(model), "a cat left of a pizza")[0]["cat"].peak > 0
    refused(recorder, model, odd(model), "blurry", "negative", name="negative")


def several_images(model):
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    latent = odd(model, 3)
    recorder = both(model, positive, negative, latent)
    maps = maps_of(recorder, model, latent, "a cat left of a pizza")
    assert len(maps) == 3 and not torch.equal(maps[0].maps, maps[1].maps)
    refused(recorder, model, odd(model), "a cat left of a pizza", "image(s)")


def a_longer_negative(model):
    long = ", ".join(["blurry, ugly, deformed, watermark"] * 12)
    positive, negative = texts(model, "a cat left of a pizza", long)
    recorder = both(model, positive, negative, odd(model))
    with no_memory(model):
        apart = both(model, positive, negative, odd(model))
    for side, prompt in (("positive", "a cat left of a pizza"), ("negative", long)):
        close(*(maps_of(one, model, odd(model), prompt, name=side) for one in (recorder, apart)))


def areas_masks_and_times(model):
    import nodes

    cat, pizza, negative = texts(model, "a cat", "a pizza", "blurry")
    rows, cols = SIZES[model.name]
    (left,) = nodes.ConditioningSetArea().append(cat, 8 * (cols // 2), 8 * rows, 0, 0, 1.0)
    mask = torch.zeros(1, rows * 8, cols * 8)
    mask[:, :, cols * 4 :] = 1
    (right,) = nodes.ConditioningSetMask().append(pizza, mask, "default", 1.0)
    (early,) = nodes.ConditioningSetTimestepRange().set_range(right, 0.0, 0.4)
    (first,) = nodes.ConditioningCombine().combine(left, early)
    recorder = both(model, first, negative, odd(model), steps=4)
    refused(recorder, model, odd(model), "a cat", "Connect the conditioning")
    of_cat = maps_of(recorder, model, odd(model), "a cat", conditioning=cat)[0]
    of_pizza = maps_of(recorder, model, odd(model), "a pizza", conditioning=pizza)[0]
    assert of_cat["cat"].values.shape == (rows, cols), of_cat
    assert (of_cat["cat"].values[:, cols // 2 :] == 0).all()
    assert (of_cat["cat"].values[:, : cols // 2] > 0).all()
    assert (of_pizza["pizza"].values > 0).all()
    (run,) = recorder.runs.values()
    kept = [one for one in run.conditionings.values() if one.name == "positive"]
    assert sorted(len(one.steps) for one in kept) == [2, 4], [one.steps for one in kept]
    patched, recorder = watched(model.patcher)
    sample(model, patched, first, negative, odd(model), steps=4)
    refused(recorder, model, odd(model), "a pizza", "all steps", conditioning=pizza)


def an_area_beyond_the_latent(model):
    """The core cuts an area at the latent's edges."""
    import nodes

    cat, negative = texts(model, "a cat", "blurry")
    rows, cols = SIZES[model.name]
    top, left = 4, 6
    (area,) = nodes.ConditioningSetArea().append(cat, 8 * cols, 8 * rows, 8 * left, 8 * top, 1.0)
    (whole,) = nodes.ConditioningCombine().combine(area, cat)
    settings = {"spread": True}
    recorder = both(model, area, negative, odd(model), settings=settings)
    values = maps_of(recorder, model, odd(model), "a cat", conditioning=cat)[0]["cat"].values
    assert values.shape == (rows, cols) and (values[top:, left:] > 0).all()
    assert (values[:top] == 0).all() and (values[:, :left] == 0).all()
    reading = __import__(f"{core.nodes().__name__}.reading", fromlist=["cell_maps"])
    asks = asked(model, odd(model), "")
    assert (reading.cell_maps(recorder, asks, 0.99, 0.99)[0][:top] == 0).all()
    told = ""
    try:
        reading.cell_maps(recorder, asks, 0.01, 0.99)
    except ValueError as error:
        told = str(error)
    assert "outside the area" in told, told
    recorder = both(model, whole, negative, odd(model))
    refused(recorder, model, odd(model), "a cat", "drew from 2", conditioning=cat)


def concatenated_texts(model):
    import nodes

    cat, pizza, negative = texts(model, "a cat", "a pizza", "blurry")
    (whole,) = nodes.ConditioningConcat().concat(cat, pizza)
    recorder = both(model, whole, negative, odd(model))
    if model.name == "hidream":  # the core concatenates T5's states, and keeps the first's Llama's
        refused(recorder, model, odd(model), "a cat\n---\na pizza", "cannot be told")
        return
    maps = maps_of(recorder, model, odd(model), "a cat\n---\na pizza")[0]
    n_text = cat[0][0].shape[1]
    first = maps["cat"].columns[0]
    second = maps["pizza"].columns[0]
    assert second == first + n_text, (first, second, n_text)
    refused(recorder, model, odd(model), "a cat", "cannot be told")


def a_line_of_dashes(model):
    """One prompt that has such a line, short and as long as two concatenated ones."""
    import nodes

    (positive, negative) = texts(model, "a cat\n---\na pizza", "blurry")
    recorder = both(model, positive, negative, odd(model))
    maps = maps_of(recorder, model, odd(model), "a cat\n---\na pizza")[0]
    for word in ("cat", "pizza"):
        tokens = [maps.prompt.tokens[column].text for column in maps[word].columns]
        assert all(word[:2] in token for token in tokens[:1]), (word, tokens)
    if model.name not in ("sd15", "sdxl"):  # whose chunks have as many columns either way
        return
    parts = " ".join(["cat"] * 50), " ".join(["pizza"] * 40)
    whole, *apart = texts(model, "\n---\n".join(parts), *parts)
    (concatenated,) = nodes.ConditioningConcat().concat(*apart)
    for drawn, column in ((whole, 52), (concatenated, 78)):
        recorder = both(model, drawn, negative, odd(model))
        maps = maps_of(recorder, model, odd(model), "\n---\n".join(parts))[0]
        assert maps.prompt.find("pizza")[0] == (column,), maps.prompt.find("pizza")[0]


def a_second_sampler(model):
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    rows, cols = SIZES[model.name]
    patched, recorder = watched(model.patcher, steps="all steps")
    small = odd(model)
    first = sample(model, patched, positive, negative, small)
    large = model.latent(2 * rows, 2 * cols)
    with executing("3"):
        sample(model, patched, positive, negative, small)
    with executing("8"):
        sample(model, patched, positive, negative, large, denoise=0.5)
    assert torch.equal(first, sample(model, model.patcher, positive, negative, small))
    assert list(recorder.runs) == [None, "3", "8"]
    del recorder.runs[None]
    refused(recorder, model, small, "a cat left of a pizza", "Samplers 3, 8")
    alone = watched(model.patcher, steps="all steps")
    sample(model, alone[0], positive, negative, large, denoise=0.5)
    with_size = maps_of(alone[1], model, large, "a cat left of a pizza")[0]
    assert with_size["cat"].values.numel() > 0
    refused(alone[1], model, model.latent(rows, 3 * cols), "a cat left of a pizza", "pixels")


def overrides_before_and_after(model):
    positive, negative = texts(model, "a cat left of a pizza", "blurry")

    def scaled(func, *args, **kwargs):
        return func(*args, **kwargs) * 0.5

    def set_on(patcher):
        model = patcher.clone()
        options = model.model_options["transformer_options"]
        model.model_options["transformer_options"] = {**options, OVERRIDE: scaled}
        return model

    before = set_on(model.patcher)
    recorder = both(model, positive, negative, odd(model), before)
    node = core.nodes().NODE_CLASS_MAPPINGS["SdattnWatchAttention"]
    patched, after = node().watch(model.patcher, "all steps")
    guided = {"cfg": max(model.cfg, 2.0)}
    seen = sample(model, set_on(patched), positive, negative, odd(model), **guided)
    assert torch.equal(seen, sample(model, before, positive, negative, odd(model), **guided))
    close(*(maps_of(one, model, odd(model), "a cat left of a pizza") for one in (recorder, after)))


def model_attention_backend(model):
    """The core's node, before ours and after; versions before it have none."""
    import comfy_extras.nodes_model_advanced as advanced

    if not hasattr(advanced, "ModelAttentionBackend"):
        return "left out"
    backend = advanced.ModelAttentionBackend()
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    (before,) = backend.patch(model.patcher, "pytorch attention")
    recorder = both(model, positive, negative, odd(model), before)
    patched, after = watched(model.patcher, steps="all steps")
    (patched,) = backend.patch(patched, "pytorch attention")
    guided = {"cfg": max(model.cfg, 2.0)}
    seen = sample(model, patched, positive, negative, odd(model), **guided)
    assert torch.equal(seen, sample(model, before, positive, negative, odd(model), **guided))
    close(*(maps_of(one, model, odd(model), "a cat left of a pizza") for one in (recorder, after)))


def clones_and_originals(model):
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    patched, recorder = watched(model.patcher, steps="all steps")
    sample(model, patched.clone().clone(), positive, negative, odd(model))
    assert len(recorder.runs) == 1
    (run,) = recorder.runs.values()
    sample(model, model.patcher, positive, negative, odd(model))
    assert list(recorder.runs.values()) == [run], "the original model is watched too"
    assert not model.patcher.wrappers.get("apply_model"), model.patcher.wrappers
    latents = sample(model, model.patcher, positive, negative, odd(model))
    patched.detach()  # as the core does to unload it
    assert torch.equal(latents, sample(model, model.patcher, positive, negative, odd(model)))
    assert torch.equal(latents, sample(model, patched, positive, negative, odd(model)))
    assert [*recorder.runs.values()] != [run], "a model that was unloaded is watched no more"


def previews_and_interrupts(model):
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    shown = []

    def preview(step, denoised, x, total):
        shown.append((step, denoised.shape, total))

    both(model, positive, negative, odd(model), callback=preview)
    assert [step for step, _, _ in shown] == [0, 1, 2] * 2 and shown[0][2] == 3, shown

    class InterruptedError(Exception):
        pass

    def stop(step, *_):
        if step == 1:
            raise InterruptedError

    patched, recorder = watched(model.patcher, steps="all steps")
    with contextlib.suppress(InterruptedError):
        sample(model, patched, positive, negative, odd(model), steps=4, callback=stop)
    (run,) = recorder.runs.values()
    assert not run.is_whole and recorder._run is None
    maps = maps_of(recorder, model, odd(model), "a cat left of a pizza")
    assert maps[0]["cat"].peak > 0
    sample(model, patched, positive, negative, odd(model), steps=4)
    (run,) = recorder.runs.values()
    assert run.is_whole


def samplers_of_all_kinds(model):
    if model.name not in ("sd15", "flux", "z_image"):
        return
    import comfy.samplers

    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    names = ("heun", "dpmpp_2m", "dpm_2_ancestral", "uni_pc", "ddim", "lcm", "dpmpp_sde")
    for name in names:
        assert name in comfy.samplers.SAMPLER_NAMES
        recorder = both(model, positive, negative, odd(model), sampler=name)
        (run,) = recorder.runs.values()
        assert not run.problem and run.step == 3, (name, run.problem, run.step)
        assert maps_of(recorder, model, odd(model), "a cat left of a pizza")[0]["cat"].peak > 0


def every_step(model):
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    mean = both(model, positive, negative, odd(model))
    each = both(model, positive, negative, odd(model), settings={"keep": "every step"})
    prompt = "a cat left of a pizza"
    close(*(maps_of(one, model, odd(model), prompt) for one in (mean, each)))
    single = [maps_of(each, model, odd(model), prompt, step=i)[0].maps for i in range(3)]
    whole = maps_of(each, model, odd(model), prompt)[0].maps
    assert (torch.stack(single).mean(0) - whole).abs().max() < TOLERANCE
    recorder = watched(model.patcher, steps="all steps", keep="every step", megabytes=1)
    object.__setattr__(recorder[1].settings, "max_bytes", each.runs[None].kept_apart // 2)
    sample(model, recorder[0], positive, negative, odd(model), cfg=max(model.cfg, 2.0))
    close(maps_of(recorder[1], model, odd(model), prompt), maps_of(mean, model, odd(model), prompt))
    (run,) = recorder[1].runs.values()
    assert run.over_budget and run.kept_apart <= recorder[1].settings.max_bytes
    kept = {step for one in run.conditionings.values() for step in one.by_step}
    assert kept and not kept & run.over_budget, (kept, run.over_budget)


def every_head(model):
    """Each head's maps are the softmax in float64, of a step too, within the bytes allowed."""
    prompt = "a cat left of a pizza"
    (positive,) = texts(model, prompt)
    latent = odd(model)
    oracle = Oracle()
    kept = {"steps": "all steps", "heads": "every head"}
    patched, recorder = watched(model.patcher, oracle, **kept)
    plain = sample(model, model.patcher, positive, positive, latent, cfg=1.0)
    assert torch.equal(plain, sample(model, patched, positive, positive, latent, cfg=1.0))
    (run,) = recorder.runs.values()
    (text,) = run.conditionings.values()
    expected = oracle.by_head(model.name, latent.shape, text.facts.columns)
    by_head = text.sums.by_head()
    assert by_head.keys() == expected.keys(), (by_head.keys(), expected.keys())
    for key, maps in by_head.items():
        worst = (maps - expected[key]).abs().max()
        assert maps.shape == expected[key].shape and worst < TOLERANCE, (key, maps.shape, worst)
    heads = [maps_of(recorder, model, latent, prompt, head=head)[0].maps for head in range(2)]
    assert not torch.equal(*heads)
    refused(recorder, model, latent, prompt, "counted from 0", head=99)
    steps = both(
        model, positive, positive, latent, settings={**kept, "keep": "every step"}, cfg=1.0
    )
    single = [maps_of(steps, model, latent, prompt, head=0, step=i)[0].maps for i in range(3)]
    assert (torch.stack(single).mean(0) - heads[0]).abs().max() < TOLERANCE
    limited, few = watched(model.patcher, **kept)
    object.__setattr__(few.settings, "max_bytes", run.kept_apart // 2)
    sample(model, limited, positive, positive, latent, cfg=1.0)
    (run,) = few.runs.values()
    assert run.kept_apart <= few.settings.max_bytes and "did not fit" in "".join(run.notes)
    close(*(maps_of(one, model, latent, prompt) for one in (recorder, few)))
    mean = both(model, positive, positive, latent, cfg=1.0)
    refused(mean, model, latent, prompt, "every head", head=0)


def self_attention(model):
    """What the image attends to in itself is the softmax in float64, and maps are spread along."""
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    oracle = Oracle()
    patched, recorder = watched(model.patcher, oracle, steps="all steps", spread=True)
    seen = sample(model, patched, positive, negative, odd(model))
    assert torch.equal(seen, sample(model, model.patcher, positive, negative, odd(model)))
    (run,) = recorder.runs.values()
    one = next(one for one in run.conditionings.values() if one.name == "positive")
    found = one.affinity.means()
    expected = oracle.self_attention(model.name, odd(model).shape, one.facts.columns)
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    for key, means in found.items():
        worst = (means - expected[key]).abs().max()
        assert worst < TOLERANCE, (key, worst)
    spread = maps_of(recorder, model, odd(model), "a cat left of a pizza", spread=True)[0]
    plain = maps_of(recorder, model, odd(model), "a cat left of a pizza")[0]
    assert spread["cat"].values.std() < plain["cat"].values.std()
    node = core.nodes().NODE_CLASS_MAPPINGS["SdattnSelfAttentionOfSpot"]
    images = images_for(odd(model))
    drawn, mask = node().show(recorder, 17, 30, image=images)
    assert drawn.shape == images.shape and mask.shape == images.shape[:3] and mask.max() == 1
    key = max(found, key=lambda key: key[1][0] * key[1][1])
    rows, cols = key[1]
    cell = 30 * rows // images.shape[1] * cols + 17 * cols // images.shape[2]
    of_cell = torch.stack([found[other][0, cell] for other in found if other[1] == key[1]]).mean(0)
    reading = __import__(f"{core.nodes().__name__}.reading", fromlist=["cell_maps"])
    spot = 17 / images.shape[2], 30 / images.shape[1]
    shown = reading.cell_maps(recorder, asked(model, odd(model), ""), *spot)[0].flatten()
    assert (shown * of_cell.sum() - of_cell).abs().max() < TOLERANCE


def patches_of_other_nodes(model):
    """An IP-Adapter's way (its own attention, not shown), and one that shows its calls."""
    if model.name not in ("sd15", "sdxl"):
        return
    from comfy.ldm.modules.attention import optimized_attention

    positive, negative = texts(model, "a cat left of a pizza", "blurry")

    def adapter(query, key, value, options):
        image = torch.ones(len(key), 4, key.shape[2])
        of_text = optimized_attention(query, key, value, options["n_heads"])
        return of_text + 0.5 * optimized_attention(query, image, image, options["n_heads"])

    def open_adapter(query, key, value, options):
        image = torch.ones(len(key), 4, key.shape[2])
        told = {"transformer_options": options}
        of_text = optimized_attention(query, key, value, options["n_heads"], **told)
        more = optimized_attention(query, image, image, options["n_heads"], **told)
        return of_text + 0.5 * more

    found = []
    for patch in (adapter, open_adapter):
        patcher = model.patcher.clone()
        for block in (("input", 1), ("middle", 0), ("output", 0), ("output", 1)):
            patcher.set_model_attn2_replace(patch, *block)
        recorder = both(model, positive, negative, odd(model), patcher)
        (run,) = recorder.runs.values()
        assert not run.problem, run.problem
        assert bool(run.notes) == (patch is adapter), run.notes
        found.append(maps_of(recorder, model, odd(model), "a cat left of a pizza"))
    close(*found)

    def merged(query, context, value, options):
        return query, context * 0.9, value

    patcher = model.patcher.clone()
    patcher.set_model_attn2_patch(merged)
    recorder = both(model, positive, negative, odd(model), patcher)
    (run,) = recorder.runs.values()
    assert "attn2_patch" in "".join(run.notes), run.notes


def blocks_of_other_nodes(model):
    """A block that shows no attention is named; one that knows the override stays as it is."""
    if model.name not in ("flux", "chroma", "qwen_image", "sd3"):
        return
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    seen = []

    def leaves_out(args, extra):
        return {name: args[name] for name in ("img", "txt")}

    def scales(args, extra):
        override = args["transformer_options"].get(OVERRIDE)
        closure = getattr(override, "__closure__", None) or ()
        known = [cell.cell_contents.__module__ for cell in closure]
        seen.append(override is None or "comfy.ldm.modules.attention" in known)
        made = extra["original_block"](args)
        return {**made, "img": 0.5 * made["img"]} if seen[-1] else made

    for patch in (leaves_out, scales):
        is_newer = hasattr(model.patcher, "set_model_optimized_attention")
        if patch is scales and not is_newer:
            continue
        patcher = model.patcher.clone()
        patcher.set_model_patch_replace(patch, "dit", "double_block", 0)
        recorder = both(model, positive, negative, odd(model), patcher)
        (run,) = recorder.runs.values()
        assert not run.problem, run.problem
        assert any(patch.__name__ in note for note in run.notes) == (patch is leaves_out)
        assert (run.most < run.layers) == (patch is leaves_out), (run.most, run.layers)


def perturbed_guidance(model):
    """The core's node: the prompt is drawn a second time in each step, with other attention."""
    if model.name not in ("sd15", "sdxl"):
        return
    import comfy_extras.nodes_pag as pag

    node = pag.PerturbedAttentionGuidance
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    if hasattr(node, "execute"):
        patcher = node.execute(model.patcher, 3.0).result[0]
    else:
        (patcher,) = node().patch(model.patcher, 3.0)
    recorder = both(model, positive, negative, odd(model), patcher)
    (run,) = recorder.runs.values()
    assert "drawn again" in "".join(run.notes), run.notes
    assert maps_of(recorder, model, odd(model), "a cat left of a pizza")[0]["cat"].peak > 0


def control_net(model):
    """ControlNet's own network is not watched, and its additions are in the maps."""
    if model.name != "sd15":
        return
    import comfy.cldm.cldm
    import comfy.controlnet
    import comfy.ops

    from . import models

    config = {**models.UNET, "context_dim": 32, "num_heads": 2, "hint_channels": 3}
    del config["out_channels"], config["transformer_depth_output"]
    config["dtype"] = torch.float32
    network = comfy.cldm.cldm.ControlNet(**config, operations=comfy.ops.manual_cast)
    models.fill(network, 5, scale=0.5)
    control = comfy.controlnet.ControlNet(
        network, load_device=torch.device("cpu"), manual_cast_dtype=torch.float32
    )
    import nodes

    rows, cols = SIZES[model.name]
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    hint = torch.rand(1, rows * 8, cols * 8, 3)
    with_hint, without = nodes.ControlNetApplyAdvanced().apply_controlnet(
        positive, negative, control, hint, 1.0, 0.0, 1.0
    )
    recorder = both(model, with_hint, without, odd(model))
    other = both(model, positive, negative, odd(model))
    (run,) = recorder.runs.values()
    (plain,) = other.runs.values()
    assert run.attended == plain.attended, (run.attended, plain.attended)
    prompt = "a cat left of a pizza"
    maps = maps_of(recorder, model, odd(model), prompt, conditioning=positive)[0]
    assert not torch.equal(maps.maps, maps_of(other, model, odd(model), prompt)[0].maps)


def reference_images(model):
    """Images that the model is shown, by the core's own nodes: columns, places and maps."""
    if model.name not in references.REFERENCES:
        return "left out"
    told = []
    for images in (1, 2):
        for prompt in PROMPTS:
            _read_with_images(model, prompt, images)
        prompt = "a cat left of a pizza"
        read, positive = _read_with_images(model, prompt, images)
        check_places(model, positive)
        told.append(check_maps(model, prompt, positive, **references.places(model, positive)))
        recorder = both(model, positive, texts(model, "blurry")[0], odd(model))
        maps = maps_of(recorder, model, odd(model), prompt)[0]
        assert maps["cat"].columns == read.find("cat")[0], (maps["cat"].columns, read)
    return f"{len(PROMPTS)} prompts; {', '.join(told)}"


def _read_with_images(model, prompt, images):
    with encoded(model.clip) as kept, torch.inference_mode():
        positive = references.encode(model, prompt, images)
    if model.name.startswith("z_image"):
        kept = kept[:1]  # then come the captions of the images
    return check_prompt(model, prompt, positive, kept, has_images=True), positive


def a_model_that_is_not_known(model):
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    kind = type(model.patcher.model.diffusion_model)
    name = kind.__name__
    kind.__name__ = "SomethingNew"
    try:
        recorder = both(model, positive, negative, odd(model))
    finally:
        kind.__name__ = name
    refused(recorder, model, odd(model), "a cat left of a pizza", "SomethingNew")


def nothing_raises(model):
    """A fault in the recorder itself is told when maps are read."""
    positive, negative = texts(model, "a cat left of a pizza", "blurry")
    summing = __import__(f"{core.nodes().__name__}.summing", fromlist=["add_attention"])
    original = summing.add_attention

    def broken(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    summing.add_attention = broken
    try:
        recorder = both(model, positive, negative, odd(model))
    finally:
        summing.add_attention = original
    refused(recorder, model, odd(model), "a cat left of a pizza", "out of memory")


@contextlib.contextmanager
def no_memory(model):
    """Make the core believe that one text alone fits into memory."""
    base = model.patcher.model
    base.memory_required = lambda *_, **__: float("inf")
    try:
        yield base
    finally:
        del base.memory_required


@contextlib.contextmanager
def executing(node):
    """Run as a node of a graph does."""
    from comfy_execution.utils import CurrentNodeContext

    with CurrentNodeContext("prompt", node):
        yield


SCENARIOS = (
    cond_and_uncond_in_turn,
    no_guidance,
    several_images,
    a_longer_negative,
    areas_masks_and_times,
    an_area_beyond_the_latent,
    concatenated_texts,
    a_line_of_dashes,
    a_second_sampler,
    overrides_before_and_after,
    model_attention_backend,
    clones_and_originals,
    previews_and_interrupts,
    samplers_of_all_kinds,
    every_step,
    every_head,
    self_attention,
    patches_of_other_nodes,
    blocks_of_other_nodes,
    perturbed_guidance,
    control_net,
    reference_images,
    a_model_that_is_not_known,
    nothing_raises,
)
