"""What ``evaluate_heatmaps`` measures, and how it tells it."""
