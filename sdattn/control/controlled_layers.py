"""Layers that can call a controller, the processors that they hold, and checks of the controller,
before its run and in it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from ..attention.controlled import ControlledProcessor, Controller
from ..attention.joining import TEXT, check_layer, unknown_layer
from ..errors import InvalidTypeError, InvalidValueError, RunError, warn
from ..follow.drawn import DrawnPrompts
from ..follow.passes import CaptureWarning, Pass
from ..follow.run import Run, follow
from ..models.denoiser import Denoiser, find_denoiser, joint_order
from ..models.denoiser_call import innermost
from ..models.families.unet import is_unet
from ..models.guidance import Branch
from ..models.layers import AttentionLayer, Kind
from ..models.pipeline import Pipeline
from ..prompts.tokens import Prompt


def controlled_layers(target: Pipeline | nn.Module) -> tuple[Denoiser, list[AttentionLayer]]:
    """Return a model whose layers can call a controller, and its layers in execution order: a UNet
    with self- and cross-attention, or a transformer with joint attention (else TypeError)."""
    denoiser = find_denoiser(target)
    layers = denoiser.layers
    kinds = {layer.kind for layer in layers}
    if "joint" in kinds and kinds <= {"joint", "self"}:
        check_joint(denoiser, layers)
    elif not kinds <= {"cross", "self"} or not is_unet(denoiser.model):
        strange = sorted(kinds - {"cross", "self"})
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} has {' and '.join(strange) or 'other'} attention "
            "in places that prompt-to-prompt's controllers do not know: it is neither a UNet of "
            "Stable Diffusion nor a model with joint attention alone. Pass a pipeline of SD 1.x, "
            "2.x, SDXL, Stable Diffusion 3, FLUX or Qwen-Image, or its UNet or transformer."
        )
    return denoiser, layers


def check_joint(denoiser: Denoiser, layers: Sequence[AttentionLayer]) -> None:
    """Raise TypeError for joint attention that our processor cannot compute."""
    joint_order(denoiser)
    if denoiser.family.video:
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} makes videos; controllers and knockouts work "
            "with images only. capture() can watch it."
        )
    if denoiser.family.spans is not None:
        raise InvalidTypeError(
            f"A {type(denoiser.model).__name__} places its text differently in each row of a "
            "batch, or puts extra tokens around it: controllers and knockouts do not support that. "
            "capture() can watch it."
        )
    for layer in layers:
        check_layer(layer.module)
        two = layer.kind == "joint" and layer.place == "double"
        if two and not any(getattr(layer.module, name, None) is not None for name in TEXT):
            raise unknown_layer(layer.module, "has two streams and no projections for the text")


def check_weights(layers: Iterable[AttentionLayer]) -> None:
    """Raise ValueError for processors with weights of their own, which ours would ignore."""
    for layer in layers:
        processor = layer.module.processor
        if isinstance(processor, nn.Module) and list(processor.parameters()):
            raise InvalidValueError(
                f"{layer.name} has a {type(processor).__name__}, whose weights would be left out. "
                "Unload it first (pipe.unload_ip_adapter()), or choose other layers by name."
            )


def check_guidance(run: Run, controller: object) -> None:
    """Raise ValueError if a controller's ``guidance`` contradicts the pipeline's layout."""
    in_turn = run.reader.watch is not None and run.reader.watch.in_turn
    if in_turn and getattr(controller, "guidance", None) == "passes":
        raise InvalidValueError(
            "guidance='passes' needs a model that runs the negative prompt first, and a "
            f"{type(run.reader.pipeline).__name__} runs the prompt first, or both in one batch. "
            "Leave guidance= out: the pipeline says which pass is which."
        )


def run_of(denoiser: Denoiser, controller: Controller | None) -> Run:
    """Return a model's run for a controller."""
    hears_texts = getattr(controller, "prompts", None) is not None
    if is_unet(denoiser.model):
        try:
            return follow(denoiser, hears_texts=hears_texts)
        except ValueError:  # unknown guidance layout: every call counts
            return follow(replace(denoiser, pipeline=None))
    try:
        run = follow(denoiser, hears_texts=hears_texts)
    except ValueError as error:
        raise InvalidValueError(
            f"{error} To register a controller, pass the transformer: every row is then shown."
        ) from None
    check_guidance(run, controller)
    return run


def refuse_broken_step(controller: Controller | None) -> None:
    """Raise RuntimeError if the model begins a pass while a step of ``controller`` is open."""
    begun = getattr(controller, "cur_att_layer", 0)
    if begun not in (0, getattr(controller, "num_uncond_att_layers", 0)):
        raise RunError(
            f"The {type(controller).__name__} is in the middle of a step: {begun} layers have "
            "called, and the model starts a new pass. After a run that stopped early, reset() the "
            "controller."
        )


def check_length(controller: Controller | None, begun: Pass) -> None:
    """Warn, when a run begins, of a controller that was made for a longer one."""
    made = getattr(controller, "num_steps", None)
    steps = len(begun.schedule or ())
    if begun.begins_run and isinstance(made, int) and 0 < steps < made:
        warn(
            f"The {type(controller).__name__} was made for {made} passes of the model and this run "
            f"has {steps}, so its parts of the run are others. Make it with {steps}.",
            CaptureWarning,
        )


def check_batch(controller: Controller | None, begun: Pass, in_unet: bool) -> None:
    """Raise ValueError if a run and its controller differ in guidance or number of prompts."""
    guidance = getattr(controller, "guidance", None)
    batch = begun.batch
    order = begun.order
    # Where the pipeline says that every row is a prompt's, there is no half to leave out.
    in_batch = guidance in ("auto", "batch") and (in_unet or order != ("conditional",))
    prompts = getattr(controller, "prompts", None)
    guided = None if order is None else "unconditional" in order
    attached = getattr(controller, "attachment", None)
    if in_batch and attached is None and (batch % 2 or guided is False):
        raise InvalidValueError(
            "The controller leaves out the first half of the batch as unconditional, and this run, "
            f"in a batch of {batch}, has no guidance. Set `guidance_scale` above 1, or make the "
            "controller with guidance=None."
        )
    if prompts is None or not hasattr(controller, "guidance"):
        return
    if guidance is None and guided:
        raise InvalidValueError(
            "The controller was made with guidance=None and this run is guided. Make it with "
            "guidance='batch', or set guidance_scale to 1."
        )
    images, rest = divmod(batch // 2 if in_batch else batch, len(prompts))
    if rest or not images or (images > 1 and getattr(controller, "local_blend", None)):
        raise InvalidValueError(
            f"The controller was made for {len(prompts)} prompts and the batch has "
            f"{batch // 2 if in_batch else batch} images. Run the pipeline on exactly "
            "those prompts; with a LocalBlend, num_images_per_prompt=1."
        )


def check_prompts(controller: object, drawn: DrawnPrompts | None) -> None:
    """Raise ValueError if a run draws other prompts than its controller was made for, or the same
    in another order: the controller would edit the columns of other words."""
    prompts = getattr(controller, "prompts", None)
    texts = drawn.texts.get("conditional") if drawn is not None else None
    if drawn is None or texts is None or prompts is None or not isinstance(prompts[0], Prompt):
        return
    branches: list[Branch] = ["conditional"] * math.lcm(len(prompts), len(texts))
    try:
        drawn.check(branches, prompts)
        if not all(prompt.encoded for prompt in prompts):  # read in pieces, so only texts compare
            drawn.check_texts(branches, [prompt.text for prompt in prompts])
    except InvalidValueError:
        name = type(controller).__name__
        made = [prompt.text for prompt in prompts]
        if made == list(texts):
            raise InvalidValueError(
                f"The {name} was made for {made}, and this pipeline reads these prompts as other "
                "tokens. Read them with sdattn.read_prompts(pipe, ...) and the options of the run "
                "that change what is read."
            ) from None
        raise InvalidValueError(
            f"The {name} was made for {made}, and this run draws {list(texts)}, so it would edit "
            "the columns of other words. Run the pipeline on its prompts, in their order, or make "
            "a controller for these."
        ) from None


def holds(processor: object, controller: object) -> bool:
    """Check whether a processor has a controller among its attributes, under any name."""
    values = getattr(processor, "__dict__", {}).values()
    return controller is not None and any(one is controller for one in values)


def is_suspended(layers: Iterable[nn.Module], controller: object) -> bool:
    """Check whether the controller's processor is covered by one that will be taken out again."""
    for layer in layers:
        covered = getattr(innermost(layer.processor), "displaced", None)
        while covered is not None:
            processor = innermost(covered)
            if holds(processor, controller):
                return True
            covered = getattr(processor, "displaced", None)
    return False


def is_taken(layers: Iterable[nn.Module]) -> bool:
    """Check whether every layer has a controller."""
    processors = (innermost(layer.processor) for layer in layers)
    return all(getattr(processor, "controller", None) is not None for processor in processors)


def standing(layers: Iterable[nn.Module], controller: object) -> str:
    """Describe the processors that the layers hold now: ``32 x AttnProcessor2_0``."""
    kinds = Counter(_described(innermost(layer.processor), controller) for layer in layers)
    return ", ".join(f"{number} x {kind}" for kind, number in kinds.items())


def calls_in_a_pass(processor: object, kind: Kind, controller: object) -> int:
    """Return how often one of our processors calls a controller in a layer of this kind: twice if
    it shows image-to-image attention too; 0 for other code's, which may call or not."""
    if not isinstance(processor, ControlledProcessor) or processor.controller is not controller:
        return 0
    return 2 if kind == "joint" and getattr(processor, "shows_image", False) else 1


def _described(processor: object, controller: object) -> str:
    name = type(processor).__name__
    if holds(processor, controller):
        return f"{name} with this store"
    if not hasattr(processor, "controller"):
        return name
    if processor.controller is None:
        return f"{name} with no controller"
    return f"{name} with another {type(processor.controller).__name__}"
