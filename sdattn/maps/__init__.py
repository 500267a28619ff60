"""From captured attention to heatmaps.

`capture` is what users call: `keep.watching` watches the model, the result is a `MapStore`. Its
maps go through `layermaps` (one per layer, from `captured` maps or from `folded` ones of
prompt-to-prompt code),
`aggregation` (one per token), `heatmaps` (by word) and `heatmap` (values, mask, statistics,
overlay); `from_stores.heatmaps()` runs all of it. `presets` is the table of the methods in the
literature; add a preset there.
"""
