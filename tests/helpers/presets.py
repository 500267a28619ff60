"""Presets by what they can be read from."""

from sdattn.maps.presets import PRESETS

OF_ATTENTION = [name for name, preset in PRESETS.items() if preset.space == "attention"]
