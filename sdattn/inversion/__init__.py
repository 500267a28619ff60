"""Inversion of a real image to its noise, and showing the model an image at any noise level.

`images` fits an image to a pipeline; `schedules` says whether its model removes noise (`ddim`) or
follows a flow (`flow`); `stand_ins` replaces a pipeline's scheduler for one run. `invert` goes up
the steps from an image and, under guidance, optimises the unconditional states (`nulltext`), so
that an edit starts from that image.
"""
