"""A picture back to its noise."""
