"""The example workflows: written as the frontend saves them, and run by the core's executor.

The loaders of checkpoints are stood in for: they give the tiny models. All else is the core's.
"""

import json
import random
import uuid
from pathlib import Path

from . import core
from .models import newer

HOME = core.NODES / "example_workflows"
PROMPT = "a cat left of a pizza"
LOADERS = ("CheckpointLoaderSimple", "UNETLoader", "CLIPLoader", "DualCLIPLoader", "VAELoader")
SHOWN = {"SaveImage": 260, "SdattnWordsAtSpot": 150}  # pixels of what a node shows on the page
SOCKETS = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"}  # types that are widgets, with lists


def _graph(loaders, model, clip, vae, size, sampler, readers, text=PROMPT, between=None):
    """Return a graph: nodes by name, each (class, inputs); ["name", output] is a link."""
    width, height = size
    latent = "EmptyLatentImage" if "checkpoint" in loaders else "EmptySD3LatentImage"
    nodes = {
        **loaders,
        "positive": ("CLIPTextEncode", {"text": text, "clip": clip}),
        "negative": ("CLIPTextEncode", {"text": "", "clip": clip}),
        "latent": (latent, {"width": width, "height": height, "batch_size": 1}),
        **(between or {}),
        "watch": (
            "SdattnWatchAttention",
            {
                "model": model,
                "steps": "second half",
                "keep": "mean",
                "spread": "self attention" in readers,
                "megabytes": 1024,
                "heads": "mean",
            },
        ),
        "sampler": (
            "KSampler",
            {
                "model": ["watch", 0],
                "positive": ["guided", 0] if between and "guided" in between else ["positive", 0],
                "negative": ["negative", 0],
                "latent_image": ["latent", 0],
                "denoise": 1.0,
                **sampler,
            },
        ),
        "decode": ("VAEDecode", {"samples": ["sampler", 0], "vae": vae}),
        "save": ("SaveImage", {"images": ["decode", 0], "filename_prefix": "image"}),
    }
    told = {"attention": ["watch", 1], "clip": clip, "image": ["decode", 0], "prompt": text}
    usual = {"side": "positive", "spread": False, "step": -1, "head": -1}
    for name, (kind, inputs) in readers.items():
        own = {**told, **inputs, **usual} if kind.startswith("Sdattn") else inputs
        nodes[name] = (kind, own)
    return nodes


HEATMAPS = {
    "heatmaps": (
        "SdattnWordHeatmaps",
        {"words": "", "layout": "grid", "colors": "inferno", "steps": "mean", "heads": "mean"},
    ),
    "show": ("SaveImage", {"images": ["heatmaps", 0], "filename_prefix": "heatmaps"}),
}
CUT = {"method": "share of range", "level": 0.5, "grow": 0, "blur": 0.0, "invert": False}
MASK = {
    "mask": ("SdattnWordMask", {"word": "cat", **CUT}),
    "as image": ("MaskToImage", {"mask": ["mask", 0]}),
    "show mask": ("SaveImage", {"images": ["as image", 0], "filename_prefix": "mask"}),
}
SPOT = {
    "spot": ("SdattnWordsAtSpot", {"x": 128, "y": 256, "most": 5}),
    "self attention": ("SdattnSelfAttentionOfSpot", {"x": 128, "y": 256, "colors": "inferno"}),
    "show spot": ("SaveImage", {"images": ["self attention", 0], "filename_prefix": "spot"}),
}
CHECKPOINT = (["checkpoint", 0], ["checkpoint", 1], ["checkpoint", 2])
PARTS = (["unet", 0], ["clip", 0], ["vae", 0])


def _sampler(steps, cfg, name="euler", scheduler="normal"):
    return {"seed": 3, "steps": steps, "cfg": cfg, "sampler_name": name, "scheduler": scheduler}


def graphs():
    """Return the example graphs by the name of their file, each with its tiny model."""
    regions = {
        "regions": (
            "SdattnMasksForRegions",
            {"words": "cat\npizza", "method": "share of range", "level": 0.5, "blur": 0.0},
        ),
        "cat": ("MaskToImage", {"mask": ["regions", 0]}),
        "show cat": ("SaveImage", {"images": ["cat", 0], "filename_prefix": "region-cat"}),
        "pizza": ("MaskToImage", {"mask": ["regions", 1]}),
        "show pizza": ("SaveImage", {"images": ["pizza", 0], "filename_prefix": "region-pizza"}),
    }
    flux = {
        "unet": ("UNETLoader", {"unet_name": "flux1-dev.safetensors", "weight_dtype": "default"}),
        "clip": (
            "DualCLIPLoader",
            {"clip_name1": "clip_l.safetensors", "clip_name2": "t5xxl_fp16.safetensors"}
            | {"type": "flux", "device": "default"},
        ),
        "vae": ("VAELoader", {"vae_name": "ae.safetensors"}),
    }
    z_image = {
        "unet": (
            "UNETLoader",
            {"unet_name": "z_image_turbo_bf16.safetensors", "weight_dtype": "default"},
        ),
        "clip": (
            "CLIPLoader",
            {"clip_name": "qwen_3_4b.safetensors", "type": "lumina2", "device": "default"},
        ),
        "vae": ("VAELoader", {"vae_name": "ae.safetensors"}),
    }
    guided = {"guided": ("FluxGuidance", {"conditioning": ["positive", 0], "guidance": 3.5})}
    shifted = {"shifted": ("ModelSamplingAuraFlow", {"model": ["unet", 0], "shift": 3.0})}

    def checkpoint(name):
        return {"checkpoint": ("CheckpointLoaderSimple", {"ckpt_name": name})}

    sd15 = _graph(
        checkpoint("v1-5-pruned-emaonly.safetensors"),
        *CHECKPOINT,
        (512, 512),
        _sampler(20, 7.0),
        {**HEATMAPS, **MASK, **SPOT},
    )
    sdxl = _graph(
        checkpoint("sd_xl_base_1.0.safetensors"),
        *CHECKPOINT,
        (1216, 832),
        _sampler(25, 7.0),
        {**HEATMAPS, **regions},
    )
    of_flux = _graph(
        flux,
        *PARTS,
        (1024, 768),
        _sampler(20, 1.0, scheduler="simple"),
        {**HEATMAPS, **MASK},
        between=guided,
    )
    of_z_image = _graph(
        z_image,
        ["shifted", 0],
        *PARTS[1:],
        (768, 1024),
        _sampler(9, 1.0, "res_multistep", "simple"),
        {**HEATMAPS, **MASK},
        between=shifted,
    )
    return {"sd15": sd15, "sdxl": sdxl, "flux": of_flux, "z_image": of_z_image}


def saved(graph):
    """Return a graph as the frontend saves it: nodes with places and widgets, and links."""
    import nodes

    ids = {name: number for number, name in enumerate(graph, 1)}
    found = []
    links = []
    outputs = {name: {} for name in graph}
    for name, (kind, inputs) in graph.items():
        made = nodes.NODE_CLASS_MAPPINGS[kind]
        sockets = []
        widgets = []
        for socket, (type_name, told) in inputs_of(made).items():
            value = inputs.get(socket)
            if isinstance(value, list):
                origin, slot = value
                number = len(links) + 1
                links.append([number, ids[origin], slot, ids[name], len(sockets), type_name])
                outputs[origin].setdefault(slot, []).append(number)
                sockets.append({"name": socket, "type": type_name, "link": number})
            elif is_widget(type_name):
                widgets.append(value)
                if socket == "seed" or told.get("control_after_generate"):
                    widgets.append("fixed")
            else:
                sockets.append({"name": socket, "type": type_name, "link": None})
        found.append((name, kind, made, sockets, widgets))
    depth = {}
    for name, (_, inputs) in graph.items():
        origins = [value[0] for value in inputs.values() if isinstance(value, list)]
        depth[name] = 1 + max((depth[origin] for origin in origins), default=-1)
    below = {}
    placed = []
    for name, kind, made, sockets, widgets in found:
        rows = len(sockets) + len(widgets)
        texts = sum(told.get("multiline", False) for _, told in inputs_of(made).values())
        height = 60 + 24 * rows + 60 * texts + SHOWN.get(kind, 0)
        top = below.get(depth[name], 0)
        below[depth[name]] = top + height + 60
        named = getattr(made, "RETURN_NAMES", None) or made.RETURN_TYPES
        placed.append(
            {
                "id": ids[name],
                "type": kind,
                "pos": [380 * depth[name], top],
                "size": [330, height],
                "flags": {},
                "order": depth[name],
                "mode": 0,
                "inputs": sockets,
                "outputs": [
                    {"name": label, "type": type_name, "links": outputs[name].get(slot, [])}
                    for slot, (label, type_name) in enumerate(
                        zip(named, made.RETURN_TYPES, strict=True)
                    )
                ],
                "properties": {"Node name for S&R": kind},
                "widgets_values": widgets,
            }
        )
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(graph))),
        "last_node_id": len(placed),
        "last_link_id": len(links),
        "nodes": placed,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def inputs_of(made):
    """Return a node's inputs in order: name to (type, options)."""
    told = made.INPUT_TYPES()
    every = {**told.get("required", {}), **told.get("optional", {})}
    return {name: (one[0], one[1] if len(one) > 1 else {}) for name, one in every.items()}


def is_widget(type_name):
    return isinstance(type_name, (list, tuple)) or type_name in SOCKETS


def prompt_of(workflow):
    """Return a saved workflow as the frontend sends it to be run."""
    import nodes

    origin = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        linked = {one["name"]: one["link"] for one in node["inputs"]}
        values = list(node["widgets_values"])
        inputs = {}
        for name, (type_name, told) in inputs_of(nodes.NODE_CLASS_MAPPINGS[node["type"]]).items():
            if linked.get(name) is not None:
                inputs[name] = origin[linked[name]]
            elif is_widget(type_name) and name not in linked:
                inputs[name] = values.pop(0)
                if name == "seed" or told.get("control_after_generate"):
                    values.pop(0)
        assert not values, (node["type"], values)
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def write():
    """Write the example workflows as files of the node's folder."""
    HOME.mkdir(exist_ok=True)
    for name, graph in graphs().items():
        _register(None)
        text = json.dumps(saved(graph), indent=1)
        (HOME / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def run(name, model, folder, **changes):
    """Run an example's file by the core's executor; return what its nodes showed.

    ``changes`` are widgets' values by node class and input, ``KSampler={"steps": 4}``.
    """
    import execution
    import folder_paths

    workflow = json.loads((HOME / f"{name}.json").read_text(encoding="utf-8"))
    _register(model)
    prompt = prompt_of(workflow)
    for node in prompt.values():
        node["inputs"] |= changes.get(node["class_type"], {})
    Path(folder).mkdir(parents=True, exist_ok=True)
    folder_paths.set_output_directory(str(folder))
    server = Server()
    options = {"cache_args": {"lru": 0, "ram": 0, "ram_inactive": 0}, "cache_size": 0}
    executor = execution.PromptExecutor(server, **newer(execution.PromptExecutor, **options))
    number = str(random.random())
    ends = [one for one, node in prompt.items() if _is_output(node["class_type"])]
    executor.execute(prompt, number, {}, ends)
    assert executor.success, executor.status_messages[-1:]
    return [told for kind, told in server.told if kind == "executed"]


def draw_demo(folder):
    """Run SD 1.5's example with the weights of sdattn's demo model, of its size."""
    from . import demo

    run(
        "sd15",
        demo.make(),
        folder,
        KSampler={"cfg": 5.0},
        EmptyLatentImage={"width": 192, "height": 128},
        SdattnWordsAtSpot={"x": 45, "y": 60},
        SdattnSelfAttentionOfSpot={"x": 45, "y": 60},
    )


def check(name, model, folder):
    """An example's file runs, small, and saves the image and what it shows of words."""
    model.vae = Pixels()
    size = {"width": 320, "height": 192}
    told = run(
        name,
        model,
        Path(folder) / name,
        KSampler={"steps": 4},
        EmptyLatentImage=size,
        EmptySD3LatentImage=size,
        SdattnWordsAtSpot={"x": 50, "y": 60},
        SdattnSelfAttentionOfSpot={"x": 50, "y": 60},
    )
    files = sorted(path.name for path in (Path(folder) / name).glob("*.png"))
    graph = json.loads((HOME / f"{name}.json").read_text(encoding="utf-8"))
    saves = [node for node in graph["nodes"] if node["type"] == "SaveImage"]
    assert len(files) >= len(saves), (files, told)


def _is_output(kind):
    import nodes

    return getattr(nodes.NODE_CLASS_MAPPINGS[kind], "OUTPUT_NODE", False)


class Server:
    """What the executor tells, kept."""

    client_id = "live"
    last_node_id = None
    last_prompt_id = None

    def __init__(self):
        self.told = []

    def send_sync(self, kind, told, *_):
        self.told.append((kind, told))


def _register(model):
    """Give the core's graph our nodes, and loaders of the tiny model."""
    import asyncio

    import nodes

    if "FluxGuidance" not in nodes.NODE_CLASS_MAPPINGS:
        extras = Path(nodes.__file__).parent / "comfy_extras"
        for name in ("nodes_flux", "nodes_mask", "nodes_model_advanced", "nodes_sd3"):
            asyncio.run(
                nodes.load_custom_node(str(extras / f"{name}.py"), module_parent="comfy_extras")
            )
    nodes.NODE_CLASS_MAPPINGS |= core.nodes().NODE_CLASS_MAPPINGS
    for name in LOADERS:
        nodes.NODE_CLASS_MAPPINGS[name] = _loader(name, nodes.NODE_CLASS_MAPPINGS[name], model)


def _loader(name, original, model):
    parts = {
        "CheckpointLoaderSimple": lambda: (model.patcher, model.clip, model.vae),
        "UNETLoader": lambda: (model.patcher,),
        "CLIPLoader": lambda: (model.clip,),
        "DualCLIPLoader": lambda: (model.clip,),
        "VAELoader": lambda: (model.vae,),
    }

    class Loader:
        RETURN_TYPES = original.RETURN_TYPES
        FUNCTION = "load"
        CATEGORY = "loaders"

        @classmethod
        def INPUT_TYPES(cls):  # noqa: N802
            told = original.INPUT_TYPES()
            every = {**told.get("required", {}), **told.get("optional", {})}
            return {"required": {key: ("STRING", {}) for key in every}}

        def load(self, **_):
            return parts[name]()

        @classmethod
        def IS_CHANGED(cls, **_):  # noqa: N802
            return id(model)

    return Loader


class Pixels:
    """A VAE that decodes a latent to its first channels, for models with random weights."""

    def decode(self, samples):
        import torch

        samples = samples[:, :, 0] if samples.ndim == 5 else samples
        seen = torch.nn.functional.interpolate(samples[:, :3].float(), scale_factor=8)
        low = seen.amin((1, 2, 3), keepdim=True)
        high = seen.amax((1, 2, 3), keepdim=True)
        return ((seen - low) / (high - low)).movedim(1, -1)
