"""Words that the demo model learnt, for tests that need no more of them than that it knows them."""

import pytest

from sdattn.models.demos import demo_named

SPRITES = "nouns" in demo_named("demo").words
THING, OTHER, THIRD = ("car", "bird", "heart") if SPRITES else ("circle", "square", "ring")
PROMPT = f"a red {THING} left of a blue {OTHER}"  # a token for each word
TOKENS = 77 if SPRITES else 32
needs_sprites = pytest.mark.skipif(not SPRITES, reason="needs the demo of sprites")
