"""Presets by the models that they are of."""

from sdattn.maps.presets import PRESETS

JOINT = ["output", "seg4diff", "rescaled", "joint", "columns"]  # those of joint attention alone
OF_UNETS = [name for name in PRESETS if name not in JOINT]
