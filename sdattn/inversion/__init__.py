"""An image back to its noise, or shown to the model as noised as it likes.

`images` makes an image what a pipeline can take; `schedules` says whether its model removes
noise (`ddim`) or follows a flow (`flow`); `stand_ins` puts schedulers in a pipeline for a run.
`invert` goes up the steps from an image and, under guidance, optimises the unconditional states
(`nulltext`), so that an edit begins where the image came from.
"""
