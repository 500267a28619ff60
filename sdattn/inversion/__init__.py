"""A picture back to its noise.

`invert` goes up the DDIM steps (`ddim`) from a picture (`pictures`) and, under guidance, optimises
the unconditional states (`nulltext`), so that an edit begins where the picture came from.
"""
