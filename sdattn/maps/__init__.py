"""What was captured, made heatmaps."""
