"""The attention of one layer, seen while it runs.

An observer (`observers`) lets the layer's own processor make the output, and has `sources.see`
return its call (:mod:`sdattn.attention.calls`), from one of five sources:

1. Shown: our processors hand on their own call, as a controller left it.
2. Followed, or handed over: what diffusers' plain processors used follows from the layer's
   projections (`projections`).
3. Dispatched: what diffusers' processors of joint attention handed to the kernel, and the logsumexp
   that came back (`sdpa`, `kernel_logsumexp`); `joint` says where text and image are in it.
4. Witnessed: what any other processor handed to torch's attention, or multiplied its values with
   (`makers`, `unknown_processors`).
5. Recorded: in a compiled UNet one operation per layer inside its graph adds it up
   (:mod:`sdattn.keep.recorders`).

`view` chooses the kept rows of a call and the part that is shown. That is an `Attended`, computed
on demand (`attended`): one `Softmax`, and what is made of it (`output_space`, `refined`). `queries`
says who attends to what; `other_text` and `text_stream` ask about another text. To support another
kind of processor, begin in `sources`.
"""
