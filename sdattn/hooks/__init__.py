"""Watching attention: what is installed into a model, and what is kept of it."""
