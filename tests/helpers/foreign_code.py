"""Stores, processors and loops as nine public editing repositories have them.

Each is written from its signature, as docs/editing.md, "Your code, our store", lists them. The
stores are the independent answer: they hold what those of the repositories hold.
"""

from collections import defaultdict

import torch

from helpers.chain_runs import make_pipe

GUIDANCE = 4.0
FROM_WHERE = ("up", "down", "mid")


class ForkStore:
    """Prompt-to-prompt's: the prompts' half of the rows, sums over steps of so many calls."""

    def __init__(self, low_resource=False):
        self.low_resource = low_resource
        self.num_att_layers, self.cur_step, self.cur_att_layer = -1, 0, 0
        self.step_store, self.attention_store = defaultdict(list), {}

    @property
    def num_uncond_att_layers(self):
        return self.num_att_layers if self.low_resource else 0

    def kept(self, attn):
        return attn if self.low_resource else attn[len(attn) // 2 :]

    def __call__(self, attn, is_cross, place_in_unet):
        if self.cur_att_layer >= self.num_uncond_att_layers:
            self.forward(self.kept(attn), is_cross, place_in_unet)
        self.cur_att_layer += 1
        if self.cur_att_layer == self.calls_in_a_step():
            self.cur_att_layer = 0
            self.cur_step += 1
            self.between_steps()
        return attn

    def calls_in_a_step(self):
        return self.num_att_layers + self.num_uncond_att_layers

    def forward(self, attn, is_cross, place_in_unet):
        if attn.shape[1] <= 32**2:
            self.step_store[f"{place_in_unet}_{'cross' if is_cross else 'self'}"].append(attn)

    def between_steps(self):
        before, step = self.attention_store, self.step_store
        self.attention_store = {
            key: [a + b for a, b in zip(before[key], maps, strict=True)] if before else maps
            for key, maps in step.items()
        }
        self.step_store = defaultdict(list)

    def get_average_attention(self):
        return {k: [m / self.cur_step for m in maps] for k, maps in self.attention_store.items()}


class ExciteStore(ForkStore):
    """Attend-and-Excite's and BoxDiff's: every row, the last step with its graph."""

    def __init__(self, save_global_store=False):
        super().__init__(low_resource=False)
        self.save_global_store, self.global_store = save_global_store, {}

    def kept(self, attn):
        return attn

    def between_steps(self):
        self.attention_store, self.step_store = self.step_store, defaultdict(list)
        if self.save_global_store:
            before = self.global_store
            self.global_store = {
                key: [m.detach() + (before[key][i] if before else 0) for i, m in enumerate(maps)]
                for key, maps in self.attention_store.items()
            }

    def get_average_attention(self):
        return self.attention_store


class InfEditStore(ForkStore):
    """InfEdit's: asked before the scores of self-attention, and shown cross-attention alone."""

    def calls_in_a_step(self):
        return self.num_att_layers // 2

    def self_attn_forward(self, q, k, v, num_heads):
        return q, k, v


class MasaEditor:
    """MasaCtrl's: makes the output itself, and keeps the maps of a step by kind."""

    def __init__(self):
        self.self_attns, self.cross_attns = [], []

    def __call__(self, q, k, v, sim, attn, is_cross, place_in_unet, num_heads, **kwargs):
        (self.cross_attns if is_cross else self.self_attns).append(attn)
        return merged(attn @ v, num_heads)


class ConsiStoryStore:
    """Takes the heads last."""

    def __init__(self):
        self.maps = []

    def __call__(self, attn, is_cross, place_in_unet, attn_heads):
        self.maps.append((place_in_unet, is_cross, attn.unflatten(0, (-1, attn_heads))))


class DatasetDiffusionStore:
    """Takes the heads second, and a dictionary of options."""

    def __init__(self, options=None):
        self.options, self.maps = options, []

    def __call__(self, attn, heads, is_cross, place_in_unet):
        self.maps.append((place_in_unet, is_cross, attn.unflatten(0, (-1, heads))))


def merged(folded, heads):
    """Return ``[B, N, heads*d]`` of ``[B*heads, N, d]``, by einops' words "b n (h d)"."""
    return torch.cat([folded[head::heads] for head in range(heads)], -1)


class Processor:
    """A processor that shows a controller its probabilities; the attribute's name differs."""

    def __init__(self, controller, place_in_unet):
        self.attnstore, self.place_in_unet = controller, place_in_unet

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
        is_cross = encoder_hidden_states is not None
        text = encoder_hidden_states if is_cross else hidden_states
        q, k, v = attn.to_q(hidden_states), attn.to_k(text), attn.to_v(text)
        q, k, v = map(attn.head_to_batch_dim, (q, k, v))
        out = self.output(attn, q, k, v, is_cross)
        return attn.to_out[1](attn.to_out[0](out))

    def output(self, attn, q, k, v, is_cross):
        probs = attn.get_attention_scores(q, k)
        self.attnstore(probs, is_cross, self.place_in_unet)
        return attn.batch_to_head_dim(probs @ v)


class InfEditProcessor(Processor):
    def output(self, attn, q, k, v, is_cross):
        if not is_cross:
            q, k, v = self.attnstore.self_attn_forward(q, k, v, attn.heads)
        probs = attn.get_attention_scores(q, k)
        if is_cross:
            self.attnstore(probs, is_cross, self.place_in_unet)
        return attn.batch_to_head_dim(probs @ v)


class MasaProcessor(Processor):
    def output(self, attn, q, k, v, is_cross):
        sim = q @ k.transpose(1, 2) * attn.scale
        probs, place = sim.softmax(-1), self.place_in_unet
        return self.attnstore(q, k, v, sim, probs, is_cross, place, attn.heads, scale=attn.scale)


class SeedProcessor(Processor):
    """A class that a reader wrote, which shows cross-attention and names its arguments."""

    def output(self, attn, q, k, v, is_cross):
        probs = attn.get_attention_scores(q, k)
        if is_cross:
            self.attnstore(probs, is_cross=True, place_in_unet=self.place_in_unet)
        return attn.batch_to_head_dim(probs @ v)


class Both:
    """Two controllers, the second of which is shown the tensor of the first."""

    def __init__(self, *controllers):
        self.controllers = controllers

    def __call__(self, *args, **kwargs):
        answers = [controller(*args, **kwargs) for controller in self.controllers]
        return answers[0]


def register(unet, controller, processor=Processor):
    """Put a processor of theirs into each layer and tell each store their number."""
    names = unet.attn_processors
    unet.set_attn_processor({name: processor(controller, name.split("_")[0]) for name in names})
    for store in getattr(controller, "controllers", [controller]):
        if hasattr(store, "num_att_layers"):
            store.num_att_layers = len(names)


def aggregate_attention(attention_store, res, from_where, is_cross, select, prompts):
    """The mean of the layers of res x res queries over all heads, as their functions compute it."""
    average, chosen = attention_store.get_average_attention(), []
    for place in from_where:
        for one in average[f"{place}_{'cross' if is_cross else 'self'}"]:
            if one.shape[1] == res**2:
                chosen.append(one.reshape(len(prompts), -1, res, res, one.shape[-1])[select])
    every = torch.cat(chosen)
    return every.sum(0) / len(every)


def states(n=1, seed=3):
    """Text states of the negative prompts and of the prompts, and latents."""
    generator = torch.Generator().manual_seed(seed)
    negative, text = (3 * torch.randn(n, 77, 32, generator=generator) for _ in range(2))
    return negative, text, torch.randn(n, 4, 16, 16, generator=generator)


@torch.no_grad()
def two_passes_a_step(pipe, call, n=1, steps=2):
    """DDPM_inversion's loop: the negative prompt's pass, then the prompt's."""
    negative, text, latents = states(n)
    pipe.scheduler.set_timesteps(steps)
    for t in pipe.scheduler.timesteps:
        without = call(latents, timestep=t, encoder_hidden_states=negative).sample
        noise = call(latents, timestep=t, encoder_hidden_states=text).sample
        latents = pipe.scheduler.step(
            without + GUIDANCE * (noise - without), t, latents
        ).prev_sample
    return latents


def drawn(pipe, prompts, **options):
    """A guided call of the pipeline, at 16x16 cells; their loops do the same."""
    given = {"height": 128, "width": 128, "num_inference_steps": 2, "guidance_scale": GUIDANCE}
    given |= {"generator": [torch.Generator().manual_seed(i) for i in range(len(prompts))]}
    return pipe(prompts, output_type="latent", **{**given, **options}).images


def plain(prompts):
    """The same, with the processors of the model."""
    return drawn(make_pipe(), prompts)
