"""Text to words to token columns; no torch, and no pipeline."""
