"""Attention as public editing repositories compute it by hand.

``FORMS`` has a function for each repository that docs/editing.md names: it makes the layers of a
UNet show their probabilities to ``controller(probs, is_cross, place)``, which edits them in place
and returns them. What their stores keep is in foreign_code.py.
"""

import torch
from diffusers.models.attention_processor import Attention

from helpers.foreign_code import MasaProcessor, Processor, merged


def layers(unet):
    """Return (layer, place) for each attention layer."""
    found = [(n, m) for n, m in unet.named_modules() if isinstance(m, Attention)]
    return [(module, name.split("_")[0]) for name, module in found]


def by_forward(output):
    """Replace each layer's forward, as code that is older than processors does; ``output`` makes
    ``[B*heads, N, d]`` of a controller, folded query, key and value, and the layer."""

    def install(unet, controller):
        for layer, place in layers(unet):

            def forward(x, context=None, mask=None, layer=layer, place=place, **named):
                context = named.get("encoder_hidden_states", context)
                is_cross = context is not None
                text = context if is_cross else x
                q, k, v = layer.to_q(x), layer.to_k(text), layer.to_v(text)
                q, k, v = (folded(one, layer.heads) for one in (q, k, v))
                out = output(controller, layer, q, k, v, is_cross, place)
                return layer.to_out[0](merged(out, layer.heads))

            layer.forward = forward

    return install


def folded(hidden, heads):
    """Return ``[B*heads, N, d]`` of ``[B, N, heads*d]``, einops' "b n (h d) -> (b h) n d"."""
    by_head = torch.stack(hidden.chunk(heads, -1), 1)  # [B, heads, N, d]
    return by_head.flatten(0, 1)


def einsum(controller, layer, q, k, v, is_cross, place):
    sim = torch.einsum("b i d, b j d -> b i j", q, k) * layer.scale
    attn = controller(sim.softmax(dim=-1), is_cross, place)
    return torch.einsum("b i j, b j d -> b i d", attn, v)


def by_processor(kind, controller_of=lambda controller: controller):
    """Set processors, one for each layer with its place."""

    def install(unet, controller):
        names = unet.attn_processors
        shown = controller_of(controller)
        unet.set_attn_processor({name: kind(shown, name.split("_")[0]) for name in names})

    return install


class InfEditProcessor(Processor):
    """InfEdit's, which goes on with the controller's answer; here shown self-attention too."""

    def output(self, attn, q, k, v, is_cross):
        probs = attn.get_attention_scores(q, k)
        probs = self.attnstore(probs, is_cross, self.place_in_unet)
        out = attn.batch_to_head_dim(torch.bmm(probs, v))
        return out / attn.rescale_output_factor


def masa_editor(controller):
    """MasaCtrl's, which makes the output from what a controller leaves."""

    def editor(q, k, v, sim, attn, is_cross, place_in_unet, num_heads, **_):
        attn = controller(attn, is_cross, place_in_unet)
        return merged(torch.einsum("b i j, b j d -> b i d", attn, v), num_heads)

    return editor


FORMS = {
    **dict.fromkeys(("local-prompt-mixing", "PnPInversion", "DDPM_inversion"), by_forward(einsum)),
    "MasaCtrl": by_processor(MasaProcessor, masa_editor),
    "InfEdit": by_processor(InfEditProcessor),
    # which leave the tensor that they showed in place
    **dict.fromkeys(
        ("BoxDiff", "Attend-and-Excite", "SynGen", "LEDITS++", "ConsiStory", "Dataset-Diffusion"),
        by_processor(Processor),
    ),
}
