"""The attention of one layer, seen while it runs.

An observer (`observers`) lets the layer's own processor make the output, and has a source see its
`AttentionCall` (:mod:`sdattn.attention.calls`):

1. Shown: our processors hand on their own call, as a controller left it (`sources.shown`).
2. Projected: what diffusers' own processors used follows from the layer's projections
   (`sources.followed`, `projections`).
3. The kernel: what any processor handed to torch's attention, and the logsumexp that came back
   (`sdpa`, `kernel_logsumexp`), or what it multiplied its values with (`unknown_processors`). In
   joint attention that is the only way (`joint`).
4. Recorded: in a compiled UNet one operation per layer inside its graph adds it up
   (:mod:`sdattn.keep.recorders`).

An `Attended` is a part of a call, computed on demand (`attended`): one `Softmax`, and what is made
of it (`output_space`, `refined`). `queries` says who attends to what; `other_text` and
`text_stream` ask about another text. To support another kind of processor, begin in `sources`.
"""
