"""``python -m sdattn``."""

from .cli import main

main()
