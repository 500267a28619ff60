"""Following a run: which call of the model is running, and for whom.

`follow()` returns a `Run`, which reads each call of a model once and tells its subscribers:
captures, attached stores, registered controllers and knockouts. `pass_reader` says which pass of
the run a call is, if any, with the options in `pass_options`; `passes` names them, and `RunPart` a
part of a run. `installer` puts processors and hooks into a model and takes them out. `drawn` and
`text_watch` know the run's texts. `doubts` says at the end what was doubtful.
"""
