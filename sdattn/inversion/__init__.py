"""Inversion of a real image to its noise, and showing the model an image at any noise level.

`invert` goes up the steps from an image (by `schedules`) and, under guidance, optimises the
unconditional states (`nulltext`); `stand_ins` replaces the scheduler for one run.
"""
