"""Turning what was captured into heatmaps.

`capture` is what users call: it has `hooks` watch a model and gives a `MapStore`.

A store's maps -> `layermaps` (one map a layer, averaged as the preset says; `folded` for maps of
prompt-to-prompt code) -> `aggregation` (one map a token) -> `heatmaps` (class `Heatmaps`, by word)
-> `heatmap` (one word: values, mask, statistics, overlay). `from_stores.heatmaps()` is the whole
way. `presets` is the table of what each tool of the field does; to add one, add an entry there.
`masks`, `statistics` and `render` are numpy and torch on plain maps; colours are chosen in
`render` alone, and `sheets` puts its images together. `requirements` says what `capture()` must
keep for a preset.
"""
