"""The maps that are kept of a run.

`watching` (for any pipeline) installs an observer into each layer; `keep` holds its options, read
and checked once; `map_store` has a `Sum` for each layer, whose `layer_part` is fixed at its first
call (`sums`); a plain layer's query and key wait in a `queue` until the pass ends; `budget` refuses
a run that would keep too much. In a compiled UNet `recorders` add up inside the graph.
"""
