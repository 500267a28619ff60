"""Presets by the models that they are of."""

from sdattn.maps.presets import PRESETS

OF_OUTPUTS = ["output"]
# those of joint attention alone
JOINT = ["output", "seg4diff", "rescaled", "joint", "columns"]
OF_UNETS = [name for name in PRESETS if name not in JOINT]
