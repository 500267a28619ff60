"""Changing attention: the store and the controllers of prompt-to-prompt, and knockouts.

`attention_store` is called by processors and ends its steps, `step_maps` holds what it keeps, and
`attachment` tells it of each pass of a model; `held` knows what the layers hold, `foreign_stores`
what other projects' arguments mean. `registration` puts a controller, ours or another's, into the
layers, with the processors of `registered`. `controllers` are the edits of Hertz et al.;
`alignment` maps columns of the source to columns of the target; `blend` keeps the image outside of
chosen words. `removal` takes columns out of attention for some rows of a batch, and `knockouts`
draws with and without a word. To add an edit, subclass `AttentionControlEdit`.
"""
