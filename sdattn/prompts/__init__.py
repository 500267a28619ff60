"""Text to words to token columns."""
