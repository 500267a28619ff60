"""Changing attention: controllers of prompt-to-prompt, and knockouts.

`registration` puts a controller, ours or another's, into the layers, by the processors of
`registered`; `controllers` are the edits of
Hertz et al.; `alignment` says which column of the source stands for which of the target;
`blend` keeps the picture outside of chosen words. `removal` takes columns out of attention for some
rows of a batch, and `knockouts` draws with and without a word. To add an edit, subclass
`AttentionControlEdit`.
"""
