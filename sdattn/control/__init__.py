"""Changing attention: controllers of prompt-to-prompt, and knockouts."""
