"""`see`: the call of a layer, from one of four sources, from certain to worked out.

- `shown`: a processor of sdattn shows its call, as a controller left it.
- `followed`: for diffusers' plain processors, whose formula is known, it follows from query and
  key, which the layer's projections give. `handed_over` is the same with its facts looked at once a
  pass.
- `dispatched`: for diffusers' processors of joint attention it is what they handed to the kernel.
- `witnessed`: for any other processor it is what made the output from the values, see
  :mod:`sdattn.look.makers`. If the kernel cannot be intercepted, it is
  softmax(QK^T), provided it reproduces the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..attention.calls import AttentionCall, LayerCall, ProjectedCall
from ..attention.controlled import ControlledProcessor
from ..errors import RunError
from ..models.denoiser_call import innermost
from .joint import made_for_all
from .joint_checks import check_order, token_count, whole_call
from .key_owners import pairs_of_call, rows_apart
from .layer import Layer, Output
from .makers import (
    IMAGE,
    attends_to_image,
    of_images,
    reproduced,
    used_in,
)
from .projections import (
    ARRIVED,
    INTO,
    Projection,
    by_name,
    named,
    output_projection,
    projected_call,
    query_and_key,
)
from .row_orders import as_one_call, with_every_query
from .sdpa import ProductWatch, SdpaWatch, replacement
from .unknown_processors import GATES, gated, is_plain, kind_of

if TYPE_CHECKING:
    from .observers import ObservingProcessor as Observer

QUERY_KEY = ("to_q", "to_k", "to_kv", "to_qkv")  # projections; the last two are fused ones


def see(
    observer: Observer, attn: Layer, /, *args: object, **kwargs: object
) -> tuple[Output, LayerCall | None]:
    """Run the processor of a layer; return its output and the call that made it, in joint attention
    with its places of text and image, None if these are not known."""
    joint = observer.joint
    inner = innermost(observer)
    kind = kind_of(attn, inner, is_joint=joint is not None)
    if kind == "plain":
        return followed(observer, attn, *args, **kwargs)
    source = {"ours": shown, "dispatching": dispatched, "unknown": witnessed}[kind]
    output, call = source(observer, attn, *args, **kwargs)
    return output, call if joint is None or call is None else joint.placed(call, inner)


def may_hand_over(observer: Observer, attn: Layer) -> bool:
    """Check, before a pass, whether a layer's query and key are known by its projections alone in
    each of its calls that :func:`handed_over` finds usual."""
    if observer.is_self or observer.joint is not None:
        return False
    inner = innermost(observer)
    return (
        not isinstance(inner, (ControlledProcessor, nn.Module))
        and is_plain(attn, inner)
        and not _is_normed(attn)
        and observer.projections.are_seen(named(attn, QUERY_KEY))
    )


def handed_over(
    observer: Observer, attn: Layer, /, *args: object, **kwargs: object
) -> tuple[Output, LayerCall | None]:
    """Do as :func:`see`, in a pass in which the layer :func:`may_hand_over`: what does not change
    in a pass is not asked again for each layer."""
    is_usual = len(args) == 1 and kwargs.get("attention_mask") is None
    if not is_usual or replacement() is not None:
        return see(observer, attn, *args, **kwargs)
    with observer.projections as seen:
        output = observer.inner(attn, *args, **kwargs)
    return output, ProjectedCall(*query_and_key(seen, observer), attn.heads)


def shown(
    observer: Observer, attn: Layer, /, *args: object, **kwargs: object
) -> tuple[Output, AttentionCall]:
    """Run a processor of sdattn; return its output and the call that it shows."""
    inner: ControlledProcessor = innermost(observer)
    calls: list[AttentionCall] = []

    def watcher(call: AttentionCall) -> None:
        if observer.is_open():
            calls.append(call)

    inner.watchers.append(watcher)
    try:
        output = observer.inner(attn, *args, **kwargs)
    finally:
        inner.watchers.remove(watcher)
    if len(calls) != 1:
        raise RunError(
            f"The processor {type(inner).__name__} computed its attention {len(calls)} times in "
            "one call, so what it attended to cannot be known. Leave __call__ to sdattn's class "
            "and edit by a controller, or leave this layer out (layers=…)."
        )
    return output, calls[0]


def followed(
    observer: Observer, attn: Layer, /, *args: object, **kwargs: object
) -> tuple[Output, AttentionCall | ProjectedCall]:
    """Run a plain processor; return its output and the call that follows from its query and key."""
    inner = innermost(observer)
    given = by_name(inner, args, kwargs)
    adapters: list[Projection] = []  # make keys of image prompts, each under a name of its own
    if isinstance(inner, nn.Module):
        for number, projection in enumerate(getattr(inner, "to_k_ip", ())):
            adapters.append((f"to_k_ip.{number}", projection))
    with observer.projections.during([*named(attn, QUERY_KEY), *adapters]) as seen:
        if replacement() is None:
            output = observer.inner(attn, *args, **kwargs)
        else:  # it must be seen at work
            output = observer.watched([], SdpaWatch, attn, *args, **kwargs)
    query, key = query_and_key(seen, inner)
    states = given.get("encoder_hidden_states")
    mask = given.get("attention_mask")
    call: AttentionCall | ProjectedCall
    if adapters:
        call = projected_call(attn, query, key, mask)
        call.beside = of_images(attn, query, states, adapters, seen)
    elif mask is None and not _is_normed(attn):
        call = ProjectedCall(query, key, attn.heads)
    else:
        call = projected_call(attn, query, key, mask)
    if observer.is_self:
        call.rows_apart = rows_apart({"input": (states, given["hidden_states"])})
    return output, call


def dispatched(
    observer: Observer, attn: Layer, /, *args: object, **kwargs: object
) -> tuple[Output, AttentionCall]:
    """Run a diffusers processor; of several calls (SD3.5), the one over all tokens is joint."""
    joint = observer.joint
    assert joint is not None
    inner = innermost(observer)
    name = type(inner).__name__
    calls: list[AttentionCall] = []
    names = () if joint.is_checked else ("add_v_proj", "to_added_qkv")
    with observer.projections.during(named(attn, names)) as projected:
        output = observer.watched(calls, SdpaWatch, attn, *args, **kwargs)
    arguments = by_name(inner, args, kwargs)
    if joint.caches_text and calls:
        calls = [with_every_query(calls[-1])]
    call = whole_call(as_one_call(calls, arguments), token_count(arguments), name)
    rows = joint.spans()
    if not joint.is_checked and rows is not None and len(rows) == 1:
        joint.is_checked = True
        # Once per layer: the text's values must be where its keys are said to be.
        image, text = rows[0]
        check_order(call, image, text, attn=attn, projected=projected, name=name)
    return output, call


def witnessed(
    observer: Observer, attn: Layer, /, *args: object, **kwargs: object
) -> tuple[Output, AttentionCall | None]:
    """Run any other processor; return its output and what made that from the values: a product with
    them, or torch's attention; None if there is none to see, see
    :class:`.replaced_forward.ObservingForward`."""
    joint = observer.joint
    inner = innermost(observer)
    calls: list[AttentionCall] = []
    to_out = output_projection(attn)
    parts: list[Projection] = [(ARRIVED, to_out)]
    if joint is None:
        parts += named(attn, (*QUERY_KEY, "to_v", GATES))
        parts += named(attn, IMAGE if attends_to_image(attn) else ())
    if observer.is_self:
        for name, module in named(attn, ("to_q", "to_v")):
            parts.append((INTO + name, module))
    with observer.projections.during(parts) as seen:
        output = observer.watched(calls, ProductWatch, attn, *args, **kwargs)
    if observer.has_nothing_in(seen, calls):
        return output, None
    arguments = by_name(inner, args, kwargs)
    arrived = seen.pop(ARRIVED, [])
    predicted: Tensor | None
    if joint is not None:
        if to_out is None:  # a layer of one stream leaves the output projection to its block
            arrived = [output[0] if isinstance(output, tuple) else output]
        else:
            # the single blocks of FLUX.2 project their feed-forward part with it
            more = getattr(attn, "mlp_hidden_dim", 0)
            arrived = [states[..., : states.shape[-1] - more] for states in arrived]
        call, predicted = made_for_all(joint, calls, arrived, attn, arguments, inner)
    else:
        query_input, value_input = (seen.pop(INTO + name, [None])[0] for name in ("to_q", "to_v"))
        used = used_in(attn, calls, arrived[-1], seen) if arrived else None
        if used is None:
            used = reproduced(attn, seen, arguments.get("attention_mask"), inner)
        call, made = used
        if observer.is_self:
            pairs = {"input": (value_input, query_input), **pairs_of_call(attn, calls, seen)}
            call.rows_apart = rows_apart(pairs)
        predicted = gated(made, seen.get(GATES, ()))
    if predicted is not None:
        observer.check(predicted, *arrived)
    return output, call


def _is_normed(attn: Layer) -> bool:
    return getattr(attn, "norm_q", None) is not None or getattr(attn, "norm_k", None) is not None
