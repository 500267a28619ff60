"""Changing attention: the store and the controllers of prompt-to-prompt, and knockouts.

Processors call `attention_store`, which ends its steps; `step_maps` holds its maps, and
`attachment` tells it of each pass of a model. `held` reads the processors that layers hold,
`foreign_stores` refuses other projects' arguments. `registration` puts a controller, ours or
another's, into the layers, with the processors of `registered`. `controllers` are the edits of
Hertz et al.; `alignment` maps columns of the source to columns of the target; `blend` keeps the
image outside chosen words. `removal` takes columns out of attention for some rows of a batch, and
`knockouts` draws with and without a word. To add an edit, subclass `AttentionControlEdit`.
"""
