"""Who draws a run: processes that accelerate started, or actors of Ray, and what each of them does.

`local_engine` and `ray_engine` are the two kinds of `engine.Engine`; both have `worker.Worker`s,
which draw with `drawing.BatchDrawer` while a `Writer` writes. `process_group` is how local
processes talk, `sizing` how many items fit, `progress` what is said meanwhile, `raydata` the class
for Ray Data.
"""
