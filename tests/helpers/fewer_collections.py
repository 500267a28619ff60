"""Once imported, Python looks for garbage less often.

What libraries are made of is none, and every model is thousands of objects: as often as Python
looks by itself, that is a fifth of an import of diffusers and a tenth of the time of the tests.
"""

import gc

gc.set_threshold(50_000, 5, 4)
