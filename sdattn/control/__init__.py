"""Changing attention: the store and the controllers of prompt-to-prompt, and knockouts.

Processors call `attention_store`, which holds two parts: `steps` keeps the maps, `step_end` counts
calls and passes. `attachment` tells it of each pass. `registration` puts a controller, ours or
another's, into the layers. `controllers` are the edits of Hertz et al.; to add one, subclass
`AttentionControlEdit`. `alignment` maps columns of the source to columns of the target; `blend`
keeps the image outside chosen words. `removal` takes columns out of attention; `knockouts` draws
with and without a word.
"""
