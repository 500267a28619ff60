"""What scripts/evaluate_heatmaps.py measures, and how it tells it."""
