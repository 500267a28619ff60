"""Following a run: which call of the model is running, and for whom.

`installer` puts processors and hooks into a model and takes them out. `pass_reader` tells captures
and controllers which pass of the run each model call is, if any, with the options in
`pass_options`; `passes` names them, and `RunPart` a part of a run. `drawn` and `text_watch` know
the run's texts. `capture_warnings` says at the end what was doubtful.
"""
