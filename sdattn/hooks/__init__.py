"""Watching attention: what is installed into a model, and what is kept of it.

`capture` (for any pipeline) installs an observer into each layer; `pass_reader` says of each call
of the model which pass of the run it is, if any, to captures and to the controllers of the room
above; `map_store` holds a `RunningSum` for each layer, cut by `keep` and `run_part`. `installer`
puts things in and takes them out.

How a layer can be seen, each as an `Attended` of its own (`attended`), which `observers` chooses:

1. `TorchAttnProcessor` and `TorchJointProcessor` hand on their own probabilities, as a controller
   left them.
2. Diffusers' own processors: the softmax of their query and key, read off `projections`.
3. The same in large layers on the CPU, and on CUDA: by the logsumexp that the kernel of the output
   gives beside it (`sdpa`, `kernel_logsumexp`).
4. Joint attention: the image's queries against the text's keys (`joint`), or the outputs of both
   (`output_space`), spread along the image's own if that is asked (`refined`).
5. IP-Adapters: the image prompts' columns behind those of the text (`image_prompts`).
6. Processors that are not known: what they multiplied their values with (`unknown_processors`).
7. A compiled UNet: one operation a layer inside its graph (`recorders`).

To ask what the image would attend to in another text: `other_text`, and for joint attention
`text_stream`. What a run was drawn from: `drawn`. To support a processor of another kind, begin in
`observers`.
"""
