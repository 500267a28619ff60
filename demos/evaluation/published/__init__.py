"""Segmentation by heatmaps under the protocols that papers have published, on data that you have.

`data` reads the folders, `maps` makes the maps of a sample, `scores` counts, `protocols` puts the
three together as each paper does; `demos.evaluation.evaluate_published` is the command.
"""
