"""The maps that are kept of a run.

`capture` (for any pipeline) installs an observer into each layer; `keep` holds its options, read
and checked once; `map_store` has a `RunningSum` for each layer; a plain layer's query and key wait
in `queue` until the pass ends; `budget` refuses a run that would
keep too much (`expected`). In a compiled UNet `recorders` add up inside the graph.
"""
