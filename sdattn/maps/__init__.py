"""From captured attention to heatmaps.

`capture` is what users call: `hooks` watches the model, the result is a `MapStore`.

The maps of a store go through `layermaps` (one map per layer, averaged as the preset says; `folded`
for maps of prompt-to-prompt code), `aggregation` (one map per token), `heatmaps` (class `Heatmaps`,
by word) and `heatmap` (one word: values, mask, statistics, overlay). `from_stores.heatmaps()` runs
all of it. `presets` is the table of the methods in the literature; add a preset there. `masks`,
`statistics` and `render` are numpy and torch on plain maps; only `render` chooses colours, and
`sheets` arranges its images. `requirements` lists what `capture()` must keep for a preset.
"""
