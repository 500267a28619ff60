"""Watching attention: what is installed into a model, and what is kept of it.

`capture` (for any pipeline) installs an observer into each layer; `pass_reader` says of each call
of the model which pass of the run it is, if any, to captures and to the controllers of the room
above; `map_store` holds a `RunningSum` for each layer, cut by `keep` and `run_part`. `installer`
puts things in and takes them out.

An observer (`observers`) lets the layer's own processor make the output, and has a source see the
`AttentionCall` behind it (:mod:`sdattn.attention.calls`):

1. Shown: `TorchAttnProcessor` and `TorchJointProcessor` hand on their own call, as a controller
   left it (`sources.shown`).
2. Projected: what diffusers' own processors used follows from what the layer's projections gave
   (`sources.followed`, `projections`).
3. The kernel: what any processor handed to torch's attention, and the logsumexp that came back
   (`sdpa`, `kernel_logsumexp`), or what it multiplied its values with (`unknown_processors`). In
   joint attention that is the only way (`joint`).
4. Recorded: in a compiled UNet one operation a layer inside its graph adds it up (`recorders`).

What part of a call is paid to which keys is an `Attended`, computed when it is asked for
(`attended`): one `Softmax`, and what is made of it (`output_space`, `refined`). To ask what the
image would attend to in another text: `other_text`. What a run was drawn from: `drawn`. To support
a processor of another kind, begin in `sources`.
"""
